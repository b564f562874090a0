"""Settings and checks that let NCCL connect a trainer and an engine, two programs with different torch versions."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping

import torch
from torch import distributed as dist

from rollouts_core.config import EngineConfig
from rollouts_core.errors import ConfigError

ASK_TIMEOUT_S = 120.0
_ASK = (
    "import torch; from torch import distributed as d; "
    "print('.'.join(map(str, torch.cuda.nccl.version())) if d.is_available() and d.is_nccl_available() else '')"
)


def share_memory_as(engine: EngineConfig) -> None:
    """Make NCCL in this process share memory in the engine's way, because NCCL exchanges memory handles unchanged.

    Call this before the first group: NCCL reads the variables only once.
    """
    if engine.weight_transfer == "nccl":
        for name, value in engine.spec.nccl_variables.items():
            os.environ.setdefault(name, value)


def nccl_version() -> str:
    """The version of this process's NCCL, for example 2.27.5, or empty if its torch has no NCCL."""
    if not dist.is_nccl_available():
        return ""
    return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]


def check_version(python: str, environment: Mapping[str, str], *, own: str) -> None:
    """Raise ConfigError if the torch of an engine's interpreter has another NCCL: only equal versions connect.

    `check_version` accepts an interpreter that lacks NCCL or fails, because the engine's start reports the error.
    """
    try:
        asked = subprocess.run(
            [python, "-c", _ASK], env=environment, capture_output=True, text=True, timeout=ASK_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return
    if (theirs := asked.stdout.strip()) and own and theirs != own:
        raise ConfigError(
            f"rollout.engine.weight_transfer = \"nccl\": the engine's torch has NCCL {theirs} and the trainer's {own}, "
            f"but NCCL connects only equal versions: install the same torch for {python} and for the trainer, or set "
            'weight_transfer = "gloo"'
        )
