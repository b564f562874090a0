"""Seed, read and restore the global random state of all libraries that training uses.

Sampling seeds of rollouts and the order of the data do not depend on this state.

    torch on the CPU and on every GPU -> tensors      Python's `random` and numpy -> JSON values
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

TORCH_KEY = "rng/torch"
CUDA_KEY = "rng/cuda/"


@dataclass(frozen=True, slots=True)
class RandomState:
    """The random state of all libraries at one moment."""

    tensors: Mapping[str, Tensor]
    values: Mapping[str, Any]  # Any: JSON


_remembered = threading.local()


@contextmanager
def remembered(state: RandomState) -> Iterator[None]:
    """Inside the `with` block, make `get_random_tensors` and `get_random_values` return `state` in this thread.

    A checkpoint that a thread saves then contains the random state of an earlier moment. The libraries' own state stays
    unchanged, because other threads may be drawing random numbers.
    """
    _remembered.state = state
    try:
        yield
    finally:
        del _remembered.state


def get_random_state() -> RandomState:
    return RandomState(get_random_tensors(), get_random_values())


def seed_everything(seed: int) -> None:
    """Seed the random state of all libraries."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def get_random_tensors(*, own_gpu_only: bool = False) -> dict[str, Tensor]:
    """Return torch's random state for the CPU and every GPU, by name.

    Args:
        own_gpu_only: include only the current GPU, under the name of the first GPU. Reading the state of another GPU
            would allocate memory on that GPU.
    """
    if (state := _read_remembered()) is not None:
        return dict(state.tensors)
    states = {TORCH_KEY: torch.get_rng_state()}
    if torch.cuda.is_available():
        of_gpus = [torch.cuda.get_rng_state()] if own_gpu_only else torch.cuda.get_rng_state_all()
        states |= {f"{CUDA_KEY}{i}": state for i, state in enumerate(of_gpus)}
    return states


def get_random_values() -> dict[str, Any]:  # Any: JSON
    """Return the random state of Python and numpy."""
    if (state := _read_remembered()) is not None:
        return dict(state.values)
    version, words, gauss = random.getstate()
    kind, keys, place, has_gauss, cached_gauss = np.random.get_state(legacy=True)
    return {
        "python": [version, list(words), gauss],
        "numpy": [kind, [int(key) for key in keys], int(place), int(has_gauss), float(cached_gauss)],
    }


def _read_remembered() -> RandomState | None:
    state: RandomState | None = getattr(_remembered, "state", None)
    return state


def set_random_state(tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:  # Any: JSON
    """Restore the state from `get_random_tensors` and `get_random_values`. States of missing GPUs are skipped."""
    torch.set_rng_state(tensors[TORCH_KEY])
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            if (name := f"{CUDA_KEY}{i}") in tensors:
                torch.cuda.set_rng_state(tensors[name], i)
    version, words, gauss = values["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, place, has_gauss, cached_gauss = values["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), place, has_gauss, cached_gauss))


def is_random_state(name: str) -> bool:
    """True if a tensor's name is one that `get_random_tensors` uses."""
    return name == TORCH_KEY or name.startswith(CUDA_KEY)
