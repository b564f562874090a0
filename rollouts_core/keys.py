"""Read the API keys of services and engines.

Settings contain only the name of an environment variable with the key. Only a process that needs the key reads the
variable.

`tasks/stage.py` passes the variables to a job. This file must not import torch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from rollouts_core.errors import ConfigError

if TYPE_CHECKING:
    from rollouts_core.config import RolloutConfig

HUB_TOKEN = "HF_TOKEN"
"""Variable from which Hugging Face's libraries read a token."""
OWN_KEY_VARIABLE = "ROLLOUTS_OWN_UNIT_KEY"
"""Environment variable with a generated API key. The nodes of a run use this key if the settings name no key."""
API_KEY_VARIABLE = "ROLLOUTS_API_KEY"
"""Environment variable with the API key of an engine or page that this project serves. The key is required if other
machines can reach the server."""
SENDABLE = re.compile(r"[!-~]+")
"""Matches the keys that an HTTP header can carry."""


def read_key(
    variable: str,
    setting: str,
    known: Mapping[str, str] = MappingProxyType({}),
    *,
    name: str = "api_key_variable",
) -> str:
    """Return the API key in an environment variable; "" if `variable` is empty.

    Args:
        setting: section of the settings that names the variable, for the error's text.
        known: keys by variable; they take precedence over the environment.
        name: setting within the section, for the error's text.

    Raises:
        ConfigError: the variable is unset or its value cannot be a key.
    """
    if not variable:
        return ""
    # A value from a file of variables may end with a line break, on Windows also with a carriage return.
    if not (key := (known.get(variable) or os.environ.get(variable, "")).strip()):
        raise ConfigError(
            f"{setting}: {name} {variable} is not set: export it where the run is started, or save it in the "
            "credentials that the setting run.credentials selects"
        )
    if not SENDABLE.fullmatch(key):
        raise ConfigError(
            f"{setting}: the value of {name} {variable} is not a valid key: keys have no spaces, no accents "
            "and no … of a shortened display. Copy the key again"
        )
    return key


def key_header(key: str) -> dict[str, str]:
    """Return the HTTP header with the API key; no header for an empty key."""
    return {"Authorization": f"Bearer {key}"} if key else {}


def engine_key_variable(job: Mapping[str, Any]) -> str:  # Any: JSON
    """The environment variable with the API key of a job's engine; "" if the job names no variable."""
    engine = job.get("engine", job.get("rollout", {}).get("engine", {}))
    return str(engine.get("api_key_variable", ""))


def read_named_keys(
    job: Mapping[str, Any],  # Any: JSON
    known: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, str]:
    """Read the API keys of a job: for its engine, for its rewards, and for its nodes if it has several nodes.

    The result has the keys by environment variable.

    Args:
        job: content of job.json.
        known: keys by variable; they take precedence over the environment.

    Raises:
        ConfigError: a variable is not set.
    """
    unit = {OWN_KEY_VARIABLE: "node.trainer_nodes"} if job.get("further_trainers") else {}
    if job.get("node_rank"):  # only the leader calls engines and rewards
        return {variable: read_key(variable, setting, known) for variable, setting in unit.items()}
    rewards = job.get("rollout", {}).get("rewards", ())
    named = {engine_key_variable(job): "rollout.engine", **unit}
    named |= dict.fromkeys((reward["api_key_variable"] for reward in rewards), "rollout.rewards")
    return {variable: read_key(variable, setting, known) for variable, setting in named.items() if variable}


def key_variables(rollout: RolloutConfig) -> set[str]:
    """The variables that the settings of the engine and the rewards name for their keys."""
    return {rollout.engine.api_key_variable, *(reward.api_key_variable for reward in rollout.rewards)} - {""}


def read_hub_token(job: Mapping[str, Any]) -> dict[str, str]:  # Any: JSON
    """Return the hub's token by its variable if the job reads from the hub and the token is set; otherwise an empty
    dict.

    Args:
        job: content of job.json.
    """
    data = job.get("data")  # data are a file, or datasets that only the leader reads
    datasets = data if isinstance(data, list | tuple) and not job.get("node_rank") else ()
    models = [model["model"] for model in (*job.get("checkpoints", ()), *([job["model"]] if "model" in job else ()))]
    reads_hub = any(not Path(each["path"]).is_absolute() for each in (*datasets, *models))
    token = os.environ.get(HUB_TOKEN, "")
    return {HUB_TOKEN: token} if reads_hub and token else {}
