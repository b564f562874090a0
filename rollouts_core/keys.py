"""Keys of services and engines: settings name an environment variable, and only processes that need the key read it.

Not here: sending them (engines/http.py, system/http_service.py), asking for them (embedded/server.py,
engines/launch.py), how the variables reach a job (tasks/stage.py). Nothing here imports torch.
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
"""The variable in which Hugging Face's libraries look for a token."""
OWN_KEY_VARIABLE = "ROLLOUTS_OWN_UNIT_KEY"
"""Holds the key that nodes of one unit ask each other for, where the settings name none: the run has made it."""
SENDABLE = re.compile(r"[!-~]+")
"""What a header can carry of a key."""


def read_key(
    variable: str,
    setting: str,
    known: Mapping[str, str] = MappingProxyType({}),
    *,
    name: str = "api_key_variable",
) -> str:
    """The key that an environment variable holds; empty where none is named.

    Args:
        setting: the section that names the variable, for the message.
        known: variables that are not looked up.
        name: the setting within the section, for the message.

    Raises:
        ConfigError: the variable is not set, or holds what cannot be a key.
    """
    if not variable:
        return ""
    # Files in which variables are kept leave ends of lines, those of Windows a part of one.
    if not (key := (known.get(variable) or os.environ.get(variable, "")).strip()):
        raise ConfigError(
            f"{setting}: {name} {variable} is not set: export it where the run is started, or save it in the "
            "credentials that run.credentials names"
        )
    if not SENDABLE.fullmatch(key):
        raise ConfigError(
            f"{setting}: what {name} {variable} holds is no key: keys have neither spaces nor accents, nor "
            "the … of those that are shown shortened: copy it again"
        )
    return key


def key_header(key: str) -> dict[str, str]:
    """The header that carries a key; none for no key."""
    return {"Authorization": f"Bearer {key}"} if key else {}


def engine_key_variable(job: Mapping[str, Any]) -> str:  # Any: JSON
    """The variable that a job names for its engine's key; empty where it names none."""
    engine = job.get("engine", job.get("rollout", {}).get("engine", {}))
    return str(engine.get("api_key_variable", ""))


def read_named_keys(
    job: Mapping[str, Any],  # Any: JSON
    known: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, str]:
    """The variables that a job's engine and rewards name, and that of its unit, with their keys.

    Args:
        job: the content of its job.json.
        known: variables that are not looked up.

    Raises:
        ConfigError: one of them is not set.
    """
    unit = {OWN_KEY_VARIABLE: "node.trainer_nodes"} if job.get("further_trainers") else {}
    if job.get("node_rank"):  # the leader asks engines and rewards
        return {variable: read_key(variable, setting, known) for variable, setting in unit.items()}
    rewards = job.get("rollout", {}).get("rewards", ())
    named = {engine_key_variable(job): "rollout.engine", **unit}
    named |= dict.fromkeys((reward["api_key_variable"] for reward in rewards), "rollout.rewards")
    return {variable: read_key(variable, setting, known) for variable, setting in named.items() if variable}


def key_variables(rollout: RolloutConfig) -> set[str]:
    """The variables that the engine and the rewards of a run name."""
    return {rollout.engine.api_key_variable, *(reward.api_key_variable for reward in rollout.rewards)} - {""}


def read_hub_token(job: Mapping[str, Any]) -> dict[str, str]:  # Any: JSON
    """The variable with the hub's token, for a job that reads a dataset or a model of the hub and where there is one.

    Args:
        job: the content of its job.json.
    """
    data = job.get("data")  # a file, or datasets, which the leader reads
    datasets = data if isinstance(data, list | tuple) and not job.get("node_rank") else ()
    models = [model["model"] for model in (*job.get("checkpoints", ()), *([job["model"]] if "model" in job else ()))]
    reads_hub = any(not Path(each["path"]).is_absolute() for each in (*datasets, *models))
    token = os.environ.get(HUB_TOKEN, "")
    return {HUB_TOKEN: token} if reads_hub and token else {}
