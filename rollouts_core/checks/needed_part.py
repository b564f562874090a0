"""A part of the memory or disk that a run needs, with its name for messages."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

GIB = 1 << 30


class Part(NamedTuple):
    """A number of bytes for one purpose."""

    name: str
    num_bytes: int
    is_certain: bool = True
    """True if at least this much is needed on every machine; False for an estimate."""


def sum_bytes(parts: Iterable[Part]) -> int:
    """The sum over all parts."""
    return sum(part.num_bytes for part in parts)


def describe_parts(parts: Iterable[Part]) -> str:
    """The parts in words, in GiB: `weights 5.7, gradients 5.7`; parts that would show as 0 are left out."""
    return ", ".join(f"{part.name} {part.num_bytes / GIB:.1f}" for part in parts if part.num_bytes >= 0.05 * GIB)
