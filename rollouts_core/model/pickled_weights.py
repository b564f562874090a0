"""Refuse weights that are read by unpickling, which can run code: whatever loads a model's folder asks here first.

Not here: loading (loading.py, reward_services.py, engines/launch.py). Nothing here imports torch.
"""

from __future__ import annotations

import json
from pathlib import Path

from rollouts_core.errors import CheckpointError
from rollouts_core.model.model_size import INDEX

PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
ADAPTER_SETTINGS, ADAPTER, PICKLED_ADAPTER = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
"""transformers puts an adapter that lies in a model's folder into the model."""


def refuse_pickled_weights(
    path: Path, *, instead: str = "convert them to safetensors, or set model.allow_pickle"
) -> None:
    """Raise CheckpointError for a folder of which pickled files would be read, which can hold code.

    They are the only weights, or the index or an adapter, which transformers puts into the model, names them.

    Args:
        instead: what to do about it.
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
    """The files that the index of a folder's safetensors names; [] if it cannot be read, which loading explains."""
    try:
        index = json.loads((path / INDEX).read_text(encoding="utf-8"))
        return sorted({str(name) for name in index["weight_map"].values()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return []
