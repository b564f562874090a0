"""Refuse pickled weight files, because a pickle can run code when it is loaded.

Every loader of a model folder calls this check first. This file must not import torch.
"""

from __future__ import annotations

import json
from pathlib import Path

from rollouts_core.errors import CheckpointError
from rollouts_core.model.model_size import INDEX

PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
ADAPTER_SETTINGS, ADAPTER, PICKLED_ADAPTER = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
"""Files of an adapter. transformers applies an adapter that is in the folder of a model."""


def refuse_pickled_weights(
    path: Path, *, instead: str = "convert them to safetensors, or set model.allow_pickle"
) -> None:
    """Raise CheckpointError if a loader would read pickled files in the folder.

    A loader reads pickled files if the folder has no safetensors files, or if the index or an adapter names pickled
    files.

    Args:
        instead: remedy that the error message names.
    """
    pickled = sorted(file.name for pattern in PICKLED for file in path.glob(pattern))
    has_adapter = (path / ADAPTER_SETTINGS).exists() and not (path / ADAPTER).exists()
    read = [name for name in pickled if has_adapter and name == PICKLED_ADAPTER]
    read += [name for name in _indexed_files(path) if not name.endswith(".safetensors")]
    if not any(path.glob("*.safetensors")):
        read += pickled
    if read:
        raise CheckpointError(
            f"the weights at {path} are pickled ({read[0]}), and a pickle can run code when it is loaded: {instead}"
        )


def _indexed_files(path: Path) -> list[str]:
    """Weight files that the folder's safetensors index names. [] if the index is unreadable: loading reports this
    error."""
    try:
        index = json.loads((path / INDEX).read_text(encoding="utf-8"))
        return sorted({str(name) for name in index["weight_map"].values()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return []
