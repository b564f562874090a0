"""Segments: tensors that a trainer publishes once and never changes, in memory of its own or in a file.

Not here: writing them (engines/segments.py), where they go (decoder.py).

    trainer, pid 12: memory of descriptor 9, in the form of a safetensors file
    engine:          /proc/12/fd/9, mapped; whatever becomes of the trainer, the kernel keeps it as long as it is mapped
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
    """Where some tensors lie."""

    id: str
    """Names the content: a segment never changes, and no other has its id."""
    path: str
    """A file, or the memory of a process of this machine."""
    names: tuple[str, ...]
    """The tensors that are taken from it; it may hold others."""


def memory_scope() -> str:
    """Names those processes that can open each other's memory by its path in /proc; empty if there is no such thing.

    The same kernel, the same numbers of processes, the same user.
    """
    try:
        boot, namespace = BOOT_ID.read_text(encoding="utf-8").strip(), PROCESS_NAMESPACE.readlink()
    except OSError:
        return ""
    return f"{boot}/{namespace}/{os.getuid()}" if hasattr(os, "memfd_create") else ""


def read_segment(segment: SegmentAddress, names: Collection[str]) -> dict[str, Tensor]:
    """Some tensors of a segment, mapped, not copied.

    Raises:
        CheckpointError: it is gone, or holds something else.
    """
    try:
        with open_tensors(segment.path) as file:
            return {name: file.get_tensor(name) for name in names}
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{segment.path} cannot be read as published weights ({error}): the trainer that published them has ended "
            "or gone on, publish them again"
        ) from error
