"""How many runs of a store's deployments go at the same time: as many as it has slots on GPUs; the others are queued.

Not here: GPUs themselves, of which a job takes hold when it starts, whatever this number says
(infra/supervisor/gpu_slots.py). This module does not import prefect: it runs before Prefect's environment is set.
"""

from __future__ import annotations

from pathlib import Path

from rollouts_core.errors import ConfigError
from rollouts_core.system.files import write_atomically

DEFAULT_GPU_SLOTS = 5
FILE = "gpu_slots"


def save_gpu_slots(home: Path, number: int) -> None:
    """Have it so from now on, and from the next `rollouts up` on."""
    write_atomically(home / FILE, f"{number}\n")


def load_gpu_slots(home: Path) -> int:
    """The number that was asked for last.

    Raises:
        ConfigError: the file is not one that `save_gpu_slots` wrote.
    """
    path = home / FILE
    if not path.is_file():
        return DEFAULT_GPU_SLOTS
    text = path.read_text().strip()
    if not text.isdigit() or int(text) == 0:
        raise ConfigError(f"{path} is not a number of slots: delete it, or give one to rollouts up --gpu-slots")
    return int(text)
