"""Pins that weights are read by what the oldest safetensors has that the package may be installed with.

Without it the embedded engine and the JAX backend fail there on every model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from rollouts_core.embedded import weights
from rollouts_core.embedded.weights import read_tensors


class _OldestFile:
    """What safetensors 0.5 knows of a file that is open, as far as it is asked here."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def keys(self) -> list[str]:
        """The names of the tensors."""
        return list(self._file.keys())

    def get_tensor(self, name: str) -> Tensor:
        """One of them."""
        tensor: Tensor = self._file.get_tensor(name)
        return tensor


def test_weights_are_read_one_by_one(quickstart_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_tensors, folder = weights.open_tensors, quickstart_dir / "base_model"

    @contextmanager
    def open_in_oldest(path: Path) -> Iterator[_OldestFile]:
        with open_tensors(path) as file:
            yield _OldestFile(file)

    monkeypatch.setattr(weights, "open_tensors", open_in_oldest)
    found, expected = read_tensors(folder), load_file(folder / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
