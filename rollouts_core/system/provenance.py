"""Describe the machine and the software versions of a process, for the record of a run.

Not here: the load of GPUs (gpu_use.py), the inputs of a stage (job.py).
"""

from __future__ import annotations

import platform
import shutil
import socket
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rollouts_core.system.processors import count_processors

PACKAGES = ("rollouts", "torch", "transformers", "tokenizers", "safetensors", "numpy", "sglang", "vllm", "jax")
TIMEOUT_S = 30.0
REPOSITORY = Path(__file__).resolve().parents[2]


def describe_process() -> dict[str, Any]:  # Any: JSON
    """Host, processors, GPUs, package versions, and the git commit if this project runs from a checkout."""
    facts = {
        "host": socket.gethostname(),
        "system": platform.platform(aliased=True, terse=True),
        "processors": count_processors(),
        "gpus": list_gpus(),
        "versions": {"python": platform.python_version(), **_installed_versions()},
        "commit": find_commit(REPOSITORY),
    }
    return {name: value for name, value in facts.items() if value}


def list_gpus() -> list[str]:
    """The name of each GPU of this machine, from nvidia-smi. Empty without nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in listed.splitlines() if line.strip()]


def find_commit(repository: Path) -> str:
    """The git commit of a checkout, read from its files without git. Empty if the folder is not a checkout."""
    git = repository / ".git"
    try:
        if git.is_file():  # another worktree of a repository
            git = (repository / git.read_text(encoding="utf-8").removeprefix("gitdir:").strip()).resolve()
        head = (git / "HEAD").read_text(encoding="utf-8").strip()
        if not head.startswith("ref: "):
            return head
        common = git / "commondir"
        shared = (git / common.read_text(encoding="utf-8").strip()).resolve() if common.is_file() else git
        name = head.removeprefix("ref: ")
        if (shared / name).is_file():
            return (shared / name).read_text(encoding="utf-8").strip()
        packed = (shared / "packed-refs").read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return ""
    return next((line.split()[0] for line in packed if line.endswith(f" {name}")), "")


def _installed_versions() -> dict[str, str]:
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions
