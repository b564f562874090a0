"""Derive independent seeds from one seed."""

from __future__ import annotations

import hashlib


def derive_seed(seed: int, *place: int | str) -> int:
    """A seed below 2**31 that depends only on `seed` and the place, and differs between places."""
    digest = hashlib.sha256("/".join(map(str, (seed, *place))).encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


def replicate_seed(seed: int, replicate: int) -> int:
    """The seed of a repeated training of the same run; replicate 0 is the run itself."""
    return derive_seed(seed, "replicate", replicate) if replicate else seed
