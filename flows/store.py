"""The default folder of the store, and the numbers that `rollouts up` saves: concurrent runs, days to keep folders.

Not here: the files in a store (docs/run_directory.md), and the assignment of GPUs to jobs
(infra/supervisor/gpu_slots.py). This module must not import prefect, because it runs before Prefect's environment
variables are set.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollouts_core.errors import ConfigError
from rollouts_core.system.files import write_atomically

STORE_VARIABLE = "ROLLOUTS_STORE"
"""Environment variable with the default store, for commands and for runs without `run.store`."""


def with_store(settings: Any) -> Any:  # Any: unchecked input
    """The settings with ROLLOUTS_STORE in place of a missing or empty `store`. A leading ~ in `store` is expanded."""
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
    """Replace a leading ~ of the path by the home folder. Shells do not expand --store=~/runs."""
    try:
        return path and path.expanduser()
    except RuntimeError:  # the named user does not exist on this machine
        return path


DEFAULT_GPU_SLOTS = 5
FILE = "gpu_slots"
KEEP_FILE = "keep_days"


def save_gpu_slots(home: Path, number: int) -> None:
    """Save the number of GPU slots, for the running serving process and for later serving processes."""
    write_atomically(home / FILE, f"{number}\n")


def load_gpu_slots(home: Path) -> int:
    """The saved number of GPU slots, or the default.

    Raises:
        ConfigError: the file does not contain a positive number.
    """
    path = home / FILE
    if not path.is_file():
        return DEFAULT_GPU_SLOTS
    text = path.read_text().strip()
    if not text.isdigit() or int(text) == 0:
        raise ConfigError(
            f"{path} does not contain a number of slots: delete it, or set one by rollouts up --gpu-slots"
        )
    return int(text)


def save_keep_days(home: Path, days: int) -> None:
    """Save after how many days without use the serving process removes folders. 0: it removes none."""
    write_atomically(home / KEEP_FILE, f"{days}\n")


def load_keep_days(home: Path) -> int:
    """The saved number of days, or 0 if folders are not removed.

    Raises:
        ConfigError: the file does not contain a number.
    """
    path = home / KEEP_FILE
    text = path.read_text().strip() if path.is_file() else "0"
    if not text.isdigit():
        raise ConfigError(f"{path} does not contain a number of days: delete it, or set one by rollouts up --keep-days")
    return int(text)
