"""Segments: immutable sets of tensors that a trainer publishes, in its own memory or in a file.

Not here: writing segments (engines/transfer/shared_memory.py), copying their tensors into the model (decoder.py).

    trainer, pid 12: a safetensors file in memory, open as file descriptor 9
    engine: maps /proc/12/fd/9; the mapped memory stays valid, even if the trainer ends
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
    """The address of a segment, and the names of tensors in it."""

    id: str
    """Unique id of the segment. The same id always means the same tensors."""
    path: str
    """Path of the segment's file, or path in /proc of the memory of a process on this machine."""
    names: tuple[str, ...]
    """Names of the tensors to read. The segment may contain further tensors."""


def memory_scope() -> str:
    """Return a text that is equal in processes that can open each other's memory through /proc; "" without /proc.

    Processes can open each other's memory if they have the same kernel, namespace of process ids, and user.
    """
    try:
        boot, namespace = BOOT_ID.read_text(encoding="utf-8").strip(), PROCESS_NAMESPACE.readlink()
    except OSError:
        return ""
    return f"{boot}/{namespace}/{os.getuid()}" if hasattr(os, "memfd_create") else ""


def read_segment(segment: SegmentAddress, names: Collection[str]) -> dict[str, Tensor]:
    """Read tensors of a segment. The tensors are memory-mapped, not copied.

    Raises:
        CheckpointError: the segment does not exist any more, is damaged, or lacks one of the tensors.
    """
    try:
        with open_tensors(segment.path) as file:
            return {name: file.get_tensor(name) for name in names}
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{segment.path} cannot be read as published weights ({error}): the trainer has ended, or replaced them "
            "with newer weights. Publish the weights again"
        ) from error
