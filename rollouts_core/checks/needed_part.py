"""A part of what a run takes of memory or disk, with the name that people are told.

Not here: which parts there are (resource_needs.py, activation_needs.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

GIB = 1 << 30


class Part(NamedTuple):
    """So many bytes for one purpose."""

    name: str
    num_bytes: int
    is_certain: bool = True
    """Whether it takes no less, whatever is installed there; else it is about so much."""


def sum_bytes(parts: Iterable[Part]) -> int:
    """The bytes of all parts together."""
    return sum(part.num_bytes for part in parts)


def describe_parts(parts: Iterable[Part]) -> str:
    """The parts in words, in GiB: `weights 5.7, gradients 5.7`; what is too small to show is left out."""
    return ", ".join(f"{part.name} {part.num_bytes / GIB:.1f}" for part in parts if part.num_bytes >= 0.05 * GIB)
