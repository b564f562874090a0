"""`Part`: an amount of memory or disk space that a run needs for one purpose, with a name for messages."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

GIB = 1 << 30


class Part(NamedTuple):
    """An amount of memory or disk space for one purpose, for example the weights."""

    name: str
    num_bytes: int
    is_certain: bool = True
    """True if at least this many bytes are needed on every machine; False for an estimate."""


def sum_bytes(parts: Iterable[Part]) -> int:
    return sum(part.num_bytes for part in parts)


def describe_parts(parts: Iterable[Part]) -> str:
    """Text such as "weights 5.7, gradients 5.7", in GiB. Parts that round to 0.0 are left out."""
    return ", ".join(f"{part.name} {part.num_bytes / GIB:.1f}" for part in parts if part.num_bytes >= 0.05 * GIB)
