"""Segments: tensors that a trainer publishes once and never changes, in the trainer's memory or in a file.

Not here: writing segments (engines/segments.py), copying them into the model (decoder.py).

    trainer, pid 12: memory of descriptor 9, in the form of a safetensors file
    engine:          /proc/12/fd/9, mapped; the kernel keeps the memory as long as it is mapped, even after the trainer
"""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError
from torch import Tensor

from rollouts_core.embedded.weights import open_tensors
from rollouts_core.errors import CheckpointError

BOOT_ID, PROCESS_NAMESPACE = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentAddress:
    """The address of some published tensors."""

    id: str
    """Unique id of the segment. The content of a segment never changes."""
    path: str
    """Path of a file, or of the memory of a process on this machine."""
    names: tuple[str, ...]
    """Names of the tensors to read. The segment may contain further tensors."""


def memory_scope() -> str:
    """Text that is equal for processes that can open each other's memory by paths in /proc; "" if the system cannot.

    Such processes have the same kernel, the same namespace of process ids, and the same user.
    """
    try:
        boot, namespace = BOOT_ID.read_text(encoding="utf-8").strip(), PROCESS_NAMESPACE.readlink()
    except OSError:
        return ""
    return f"{boot}/{namespace}/{os.getuid()}" if hasattr(os, "memfd_create") else ""


def read_segment(segment: SegmentAddress, names: Collection[str]) -> dict[str, Tensor]:
    """Some tensors of a segment, mapped instead of copied.

    Raises:
        CheckpointError: the segment is gone, or has other content.
    """
    try:
        with open_tensors(segment.path) as file:
            return {name: file.get_tensor(name) for name in names}
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{segment.path} cannot be read as published weights ({error}): their trainer has ended, or has published "
            "newer weights. Publish the weights again"
        ) from error
