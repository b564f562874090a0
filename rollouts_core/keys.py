"""Keys of services and engines: settings name an environment variable; only processes that need the key read it.

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
"""Variable in which Hugging Face's libraries look for a token."""
OWN_KEY_VARIABLE = "ROLLOUTS_OWN_UNIT_KEY"
"""Variable with the generated key of a run on several nodes, used between nodes if the settings name no key."""
SENDABLE = re.compile(r"[!-~]+")
"""The characters that an HTTP header can carry in a key."""


def read_key(
    variable: str,
    setting: str,
    known: Mapping[str, str] = MappingProxyType({}),
    *,
    name: str = "api_key_variable",
) -> str:
    """The key in an environment variable; "" if `variable` is empty.

    Args:
        setting: section that names the variable, for the message.
        known: values to use instead of the environment.
        name: setting within the section, for the message.

    Raises:
        ConfigError: the variable is unset or its value cannot be a key.
    """
    if not variable:
        return ""
    # Files of variables may leave line ends, on Windows also a carriage return.
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
    """The HTTP header with the key; empty for an empty key."""
    return {"Authorization": f"Bearer {key}"} if key else {}


def engine_key_variable(job: Mapping[str, Any]) -> str:  # Any: JSON
    """The variable that a job names for its engine's key; "" if the job names no variable."""
    engine = job.get("engine", job.get("rollout", {}).get("engine", {}))
    return str(engine.get("api_key_variable", ""))


def read_named_keys(
    job: Mapping[str, Any],  # Any: JSON
    known: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, str]:
    """The variables that a job's engine, rewards and several nodes need, with their keys.

    Args:
        job: content of job.json.
        known: values to use instead of the environment.

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
    """The variables that the settings of the engine and the rewards name."""
    return {rollout.engine.api_key_variable, *(reward.api_key_variable for reward in rollout.rewards)} - {""}


def read_hub_token(job: Mapping[str, Any]) -> dict[str, str]:  # Any: JSON
    """The hub's token and its variable, if the job reads from the hub and the token is set.

    Args:
        job: content of job.json.
    """
    data = job.get("data")  # a file, or datasets; only the leader reads them
    datasets = data if isinstance(data, list | tuple) and not job.get("node_rank") else ()
    models = [model["model"] for model in (*job.get("checkpoints", ()), *([job["model"]] if "model" in job else ()))]
    reads_hub = any(not Path(each["path"]).is_absolute() for each in (*datasets, *models))
    token = os.environ.get(HUB_TOKEN, "")
    return {HUB_TOKEN: token} if reads_hub and token else {}
