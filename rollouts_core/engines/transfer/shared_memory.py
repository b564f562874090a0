"""Publish weights as segments in this machine's memory or in files. An engine loads only the segments that it lacks.

Engines read segments by embedded/segments.py.

    version 1   segment A: every tensor
    version 2   segment A: embedding      segment B: changed tensors   only B is written, and only B is loaded
    version 3   segment A: embedding      segment C: changed tensors   B is removed

A segment has the form of a safetensors file and never changes, so an engine that restarts later finds the published
weights. A segment in memory has no name in any file system: the kernel frees it with the last process that maps it,
even if the trainer is killed. Segment files of a killed trainer are removed by the next trainer.
"""

from __future__ import annotations

import asyncio
import json
import os
import weakref
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from safetensors.torch import load_file
from torch import Tensor

from rollouts_core.embedded.weights import digest_tensors, tensor_bytes
from rollouts_core.system.concurrency import in_short_thread, start_short_thread

MAX_STALE_SHARE = 0.5
"""A segment with replaced tensors is kept for its other tensors. If replaced tensors exceed this share of the weights,
the other tensors are moved to a new segment."""
FILE_PREFIX = "segment-"
DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.bool: "BOOL",
}
"""Names of number formats in safetensors files."""


class Segment:
    """Tensors that other processes can map as long as this object lives.

    Args:
        folder: folder for a segment file, or None to put the segment into memory.
    """

    def __init__(self, tensors: Mapping[str, Tensor], folder: Path | None = None) -> None:
        self.id = uuid4().hex
        self.path: str
        """The path at which other processes open the segment."""
        if folder is None:
            descriptor = os.memfd_create("rollouts-weights")
            weakref.finalize(self, os.close, descriptor)
            self.path = f"/proc/{os.getpid()}/fd/{descriptor}"
        else:
            file = folder / f"{FILE_PREFIX}{self.id}.safetensors"
            weakref.finalize(self, file.unlink, missing_ok=True)
            self.path = str(file)
        with Path(self.path).open("wb") as opened:
            for part in render_safetensors(tensors):
                opened.write(part)
        self.tensors = load_file(self.path)
        """The segment's tensors, mapped into this process."""


@dataclass(frozen=True, slots=True)
class PlacedTensor:
    """One published tensor and its segment."""

    segment: Segment
    digests: Future[dict[str, str]]
    """`tensor_digest` of this tensor and of the tensors published with it, computed by a thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentedWeights:
    """One published version of the weights, as segments."""

    version: str
    model_dir: Path
    """Directory with the model's config.json."""
    placed: Mapping[str, PlacedTensor]
    """The segment of each tensor."""

    def addresses(self) -> list[dict[str, Any]]:  # Any: JSON
        """The path of each segment with the names of its tensors, for engines."""
        segments = {tensor.segment.id: tensor.segment for tensor in self.placed.values()}
        return [
            {
                "id": segment.id,
                "path": segment.path,
                "names": [name for name, tensor in self.placed.items() if tensor.segment is segment],
            }
            for segment in segments.values()
        ]

    async def digests(self) -> dict[str, str]:
        """`tensor_digest` of every tensor."""
        futures = {tensor.digests for tensor in self.placed.values()}
        digests = {future: await asyncio.shield(asyncio.wrap_future(future)) for future in futures}
        return {name: digests[tensor.digests][name] for name, tensor in self.placed.items()}


class SegmentStore:
    """Publishes a trainer's versions as segments, and keeps the newest version's segments alive."""

    def __init__(self) -> None:
        self._newest: Mapping[str, PlacedTensor] = {}
        self._folder: Path | None = None

    async def publish(
        self,
        weights: Mapping[str, Tensor],
        *,
        version: str,
        model_dir: Path,
        folder: Path | None = None,
        keeps_others: bool = False,
    ) -> SegmentedWeights:
        """Publish a new version. Changed tensors are written to a new segment, and other tensors stay in their
        segments.

        Args:
            weights: tensors by name, which must not change before the version's digests are computed.
            folder: folder for segment files, or None to use memory. If the folder changed, all tensors are written.
            keeps_others: add the previous version's tensors that are not in `weights` to the new version.
        """
        if folder != self._folder:
            self._newest, self._folder = {}, folder
            if folder is not None:
                remove_segment_files(folder)
        on_host = {name: tensor.detach().contiguous().cpu() for name, tensor in weights.items()}
        placed = await in_short_thread(partial(self._place, on_host))
        self._newest = {**self._newest, **placed} if keeps_others else placed
        return SegmentedWeights(version=version, model_dir=model_dir, placed=self._newest)

    def _place(self, on_host: Mapping[str, Tensor]) -> dict[str, PlacedTensor]:
        """Write the changed tensors to a new segment, and return the segment of each tensor."""
        changed = find_changed(on_host, self._newest)
        same = {name: tensor for name, tensor in on_host.items() if name not in changed}
        kept = {name: self._newest[name] for name in same}
        written = [changed]
        if count_stale_bytes(kept) > MAX_STALE_SHARE * count_bytes(on_host.values()):
            kept, written = {}, [changed, same]
        for tensors in filter(None, written):
            segment = Segment(tensors, self._folder)
            digests = start_short_thread(partial(digest_tensors, tensors))  # runs while engines load
            kept |= dict.fromkeys(tensors, PlacedTensor(segment, digests))
        return {name: kept[name] for name in on_host}


def remove_segment_files(folder: Path) -> None:
    """Delete the segment files that a killed trainer left behind."""
    for leftover in folder.glob(f"{FILE_PREFIX}*.safetensors"):
        leftover.unlink(missing_ok=True)


def find_changed(weights: Mapping[str, Tensor], placed: Mapping[str, PlacedTensor]) -> dict[str, Tensor]:
    """The weights whose bytes differ from the published tensors of the same name."""
    return {
        name: tensor
        for name, tensor in weights.items()
        if name not in placed or not is_same(tensor, placed[name].segment.tensors[name])
    }


def is_same(first: Tensor, second: Tensor) -> bool:
    """True if both tensors have the same type, shape and bytes. NaN equals NaN, and 0 differs from -0."""
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    unit = torch.int64 if first.nbytes % 8 == 0 else torch.uint8
    return torch.equal(first.reshape(-1).view(unit), second.reshape(-1).view(unit))


def count_stale_bytes(kept: Mapping[str, PlacedTensor]) -> int:
    """Bytes of replaced tensors in segments that are kept."""
    segments = {placed.segment for placed in kept.values()}
    held = sum(count_bytes(segment.tensors.values()) for segment in segments)
    return held - count_bytes(placed.segment.tensors[name] for name, placed in kept.items())


def count_bytes(tensors: Iterable[Tensor]) -> int:
    """Number of bytes of all tensors."""
    return sum(tensor.nbytes for tensor in tensors)


def render_safetensors(tensors: Mapping[str, Tensor]) -> list[memoryview | bytes]:
    """The parts of a safetensors file: the header, and the memory of each tensor without a copy."""
    by_alignment = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    header: dict[str, Any] = {}  # Any: JSON
    end = 0
    for name, tensor in by_alignment:
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return [len(text).to_bytes(8, "little"), text, *(tensor_bytes(tensor) for _, tensor in by_alignment)]
