"""The default folder of the store, and the number of runs of its deployments that may be under way at once.

Not here: what lies in a store (docs/run_directory.md), and the GPUs that jobs take (infra/supervisor/gpu_slots.py).
This module does not import prefect, because it runs before Prefect's environment is set.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollouts_core.errors import ConfigError
from rollouts_core.system.files import write_atomically

STORE_VARIABLE = "ROLLOUTS_STORE"
"""Environment variable with the default store: for commands, and in a serving process for runs that name no store."""


def with_store(settings: Any) -> Any:  # Any: what a form, a request or a program gives
    """The settings, with the store of this process if the settings name no store or an empty one."""
    if not isinstance(settings, Mapping):
        return settings
    store = settings.get("store")
    if store in (None, ""):
        store = os.environ.get(STORE_VARIABLE)
    others = {name: value for name, value in settings.items() if name != "store"}
    if isinstance(store, str) and store.startswith("~"):
        store = str(from_home(Path(store)))
    return {**others, "store": store} if store else others


def from_home(path: Path | None) -> Path | None:
    """The path with a leading ~ replaced by the home folder, because shells do not replace it in --store=~/runs."""
    try:
        return path and path.expanduser()
    except RuntimeError:  # the named user does not exist on this machine
        return path


DEFAULT_GPU_SLOTS = 5
FILE = "gpu_slots"


def save_gpu_slots(home: Path, number: int) -> None:
    """Save the number of GPU slots for the present serving process and for later ones."""
    write_atomically(home / FILE, f"{number}\n")


def load_gpu_slots(home: Path) -> int:
    """The saved number of GPU slots, or the default.

    Raises:
        ConfigError: the file does not hold a number of slots.
    """
    path = home / FILE
    if not path.is_file():
        return DEFAULT_GPU_SLOTS
    text = path.read_text().strip()
    if not text.isdigit() or int(text) == 0:
        raise ConfigError(f"{path} is not a number of slots: delete it, or give one to rollouts up --gpu-slots")
    return int(text)
