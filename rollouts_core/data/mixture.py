"""Compute which rows of several datasets an epoch visits, and in which order, from the datasets' sizes and repeats.

dataset   rows   repeat   visits per epoch
a         100    1        each row once
b          10    3        each row three times
c         100    0.25     25 rows; four epochs visit each row once
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence


def epoch_order(sizes: Sequence[int], repeats: Sequence[float], *, seed: int, epoch: int) -> array[int]:
    """Numbers of the rows that an epoch visits, in shuffled order. Numbering continues through all datasets.

    Each row of a dataset is visited once before any of its rows is visited again. An epoch continues after the rows of
    the previous epoch. The result needs 8 bytes per visit.

    Args:
        sizes: number of rows of each dataset.
        repeats: visits per row and epoch of each dataset; may be a fraction.
    """
    assert len(sizes) == len(repeats), f"{len(sizes)} sizes, {len(repeats)} repeats"
    order = array("q")
    first_row = 0
    for part, (size, repeat) in enumerate(zip(sizes, repeats, strict=True)):
        begin, end = int(epoch * size * repeat), int((epoch + 1) * size * repeat)
        for number in range(begin // size, -(-end // size)):
            rounds = array("q", range(first_row, first_row + size))
            low, high = max(begin - number * size, 0), min(end - number * size, size)
            if (low, high) != (0, size):
                random.Random(f"{seed}-{part}-{number}").shuffle(rounds)
            order += rounds[low:high]
        first_row += size
    random.Random(f"{seed}-{epoch}").shuffle(order)
    return order
