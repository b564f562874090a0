"""Derive independent seeds from one seed."""

from __future__ import annotations

import hashlib


def derive_seed(seed: int, *place: int | str) -> int:
    """A seed below 2**31 that depends only on `seed` and `place`. Different places give independent seeds."""
    digest = hashlib.sha256("/".join(map(str, (seed, *place))).encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


def replicate_seed(seed: int, replicate: int) -> int:
    """The seed of a repetition of a training with the same settings. Replicate 0 uses `seed` itself."""
    return derive_seed(seed, "replicate", replicate) if replicate else seed
