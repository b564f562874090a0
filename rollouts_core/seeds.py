"""Make seeds out of a seed: one for each thing that must draw random numbers of its own.

Not here: the random state of libraries (backends/random_state.py).
"""

from __future__ import annotations

import hashlib


def derive_seed(seed: int, *place: int | str) -> int:
    """A seed below 2**31 that depends on nothing but `seed` and the place, and is another one at another place."""
    digest = hashlib.sha256("/".join(map(str, (seed, *place))).encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


def replicate_seed(seed: int, replicate: int) -> int:
    """The seed of the same run trained once more; replicate 0 is the run itself."""
    return derive_seed(seed, "replicate", replicate) if replicate else seed
