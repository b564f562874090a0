"""Read the safetensors files of a model directory, check their tensors, and compute digests of tensors.

Not here: the weights in memory while decoding (decoder.py).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rollouts_core.errors import CheckpointError, DivergedError
from rollouts_core.system.concurrency import read_each
from rollouts_core.system.regular_files import found_file, read_file

MAX_NAMES_SHOWN = 3
MAX_HEADER_BYTES = 16 * 2**20
"""Limit of the header of a safetensors file, bytes; enough for 100,000 tensors. Larger headers would parse slowly."""
MAX_INDEX_BYTES = 64 * 2**20
"""Limit of the size of a model.safetensors.index.json, bytes."""
SUMMED = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""Permitted dtypes of weights, which torch can sum (`is_finite`). Packed and eight-bit formats are not supported."""
ROTARY_FREQUENCIES = ".rotary_emb.inv_freq"
"""Name ending of tensors in old Llama checkpoints that are ignored, because config.json determines their values."""


@contextmanager
def open_tensors(path: Path | str) -> Iterator[Any]:  # Any: safe_open has no types
    """Open a safetensors file. The file's tensors are memory-mapped, not copied, and stay valid after the `with` block.

    Raises:
        OSError: the file cannot be read, is not a regular file, or has a header over `MAX_HEADER_BYTES`.
        SafetensorError: the file is truncated or damaged.
    """
    with found_file(path) as found:
        with open(found, "rb") as file:  # noqa: PTH123 - a Path would be normalised
            num_header_bytes = int.from_bytes(file.read(8), "little")
        if num_header_bytes > MAX_HEADER_BYTES:
            raise OSError(f"its header has {num_header_bytes:,} bytes, more than the limit of {MAX_HEADER_BYTES:,}")
        try:
            tensors = safe_open(found, framework="pt")
        except RuntimeError as error:  # torch raises RuntimeError if it cannot map the file
            raise OSError(str(error)) from error
        with tensors as opened:
            yield opened


def read_tensors(model_dir: Path) -> dict[str, Tensor]:
    """Read all weights from model.safetensors, or from the shards that model.safetensors.index.json names.

    Raises:
        CheckpointError: a file is missing, truncated or damaged.
    """
    tensors: dict[str, Tensor] = {}
    for path in _weight_files(model_dir):
        try:
            with open_tensors(path) as file:
                tensors.update({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118 - no mapping
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path} cannot be read as safetensors ({error}): publish it again") from error
    return {name: tensor for name, tensor in tensors.items() if not name.endswith(ROTARY_FREQUENCIES)}


def check_tensors(tensors: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], *, source: str) -> None:
    """Raise `CheckpointError` if a tensor is missing, unexpected, not finite, or has a wrong shape or dtype."""
    if missing := [name for name in shapes if name not in tensors]:
        raise CheckpointError(f"{source} lacks {_show_names(missing)}, which the loaded model has")
    if unexpected := [name for name in tensors if name not in shapes]:
        raise CheckpointError(f"{source} has {_show_names(unexpected)}, which the loaded model lacks")
    for name, shape in shapes.items():
        found = tensors[name]
        if tuple(found.shape) != shape:
            raise CheckpointError(f"{source}: {name} has shape {tuple(found.shape)}, the loaded model expects {shape}")
        if found.dtype not in SUMMED:
            raise CheckpointError(
                f"{source}: {name} has dtype {found.dtype}, expected float64, float32, float16 or bfloat16"
            )
        if not is_finite(found):
            raise DivergedError(f"{source}: {name} has values that are not finite numbers")


def find_not_finite(model_dir: Path) -> str:
    """The name of the first tensor with NaN or infinity in a model's safetensors files; "" without such a tensor."""
    try:
        paths = _weight_files(model_dir)
    except CheckpointError:  # loading the model reports unreadable files
        return ""
    for path in paths:
        with open_tensors(path) as tensors:
            for name in tensors.keys():  # noqa: SIM118 - it is no mapping
                tensor = tensors.get_tensor(name)
                if tensor.dtype in SUMMED and not is_finite(tensor):
                    return str(name)
    return ""


def is_finite(tensor: Tensor) -> bool:
    """True if the tensor has neither NaN nor infinity.

    A NaN or infinity makes the sum of all numbers not finite. The sum takes a tenth of the time of testing each number.
    """
    return math.isfinite(float(tensor.sum())) or bool(torch.isfinite(tensor).all())


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The tensor's bytes as in a safetensors file: row-major, little-endian. The bytes are copied only if the tensor
    has another layout."""
    data: memoryview = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
    return data


def tensor_digest(tensor: Tensor) -> str:
    """blake3 of the tensor's bytes. As secure as sha256 and much faster, above all on CPUs without SHA instructions."""
    return blake3(tensor_bytes(tensor)).hexdigest()


def tensor_sha256(tensor: Tensor) -> str:
    """sha256 of the tensor's bytes. SGLang and vLLM report this checksum for weights on a CPU."""
    return hashlib.sha256(tensor_bytes(tensor)).hexdigest()


def digest_tensors(tensors: Mapping[str, Tensor], digest: Callable[[Tensor], str] = tensor_digest) -> dict[str, str]:
    digests = read_each(digest, tensors.values(), num_bytes=sum(tensor.nbytes for tensor in tensors.values()))
    return dict(zip(tensors, digests, strict=True))


def _weight_files(model_dir: Path) -> list[Path]:
    single, index = model_dir / "model.safetensors", model_dir / "model.safetensors.index.json"
    if _leads_to_a_file(single):
        return [single]
    if not _leads_to_a_file(index):
        raise CheckpointError(
            f"{model_dir} has neither {single.name} nor {index.name}: give a directory with safetensors weights"
        )
    try:
        weight_map = json.loads(read_file(index, max_bytes=MAX_INDEX_BYTES))["weight_map"]
        shards = [model_dir / name for name in sorted(set(weight_map.values()))]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{index} has no readable weight_map ({error!r}): publish it again") from error
    if missing := [path.name for path in shards if not _leads_to_a_file(path)]:
        raise CheckpointError(f"{index} names {_show_names(missing)}, which does not exist: copy the whole checkpoint")
    return shards


def _leads_to_a_file(path: Path) -> bool:
    """True if the path is an existing file, or a link to one.

    Raises:
        CheckpointError: the path is a link to a missing file.
    """
    if path.is_symlink() and not path.exists():
        raise CheckpointError(
            f"{path} is a link to {path.readlink()}, which is missing: restore that file, or copy the checkpoint"
        )
    return path.exists()


def _show_names(names: list[str]) -> str:
    more = f" and {len(names) - MAX_NAMES_SHOWN} more" if len(names) > MAX_NAMES_SHOWN else ""
    return ", ".join(names[:MAX_NAMES_SHOWN]) + more
