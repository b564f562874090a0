"""Fill the rows of a batch with several samples each, so that little of a row is padding.

Not here: tensors (batch.py), which rows form a step (sft.py).

Best-fit decreasing: the samples of a window, longest first, each go to the row with the least space that still takes
them. The rows of a window are then shuffled, so that long samples do not come first.

    lengths in order    4 6 1 10 3      max_length 10
    longest first       10 | 6 4 | 3 1
"""

from __future__ import annotations

import itertools
import random
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence

from rollouts_core.types import Sample

PACKING_WINDOW = 1024
"""Samples that are packed together. On log-normal lengths larger windows fill less than 1 % more and hold more samples
in memory."""


def pack_rows(samples: Iterable[Sample], *, max_length: int, window: int = PACKING_WINDOW) -> Iterator[list[Sample]]:
    """Rows of at most `max_length` tokens that hold every sample once, undivided; `window` samples are read ahead.

    A sample longer than `max_length` gets a row of its own. The rows are a function of the samples alone, and those
    of a window of its samples alone.
    """
    assert window >= 1, f"a window holds at least one sample, found {window}"
    stream = iter(samples)
    while chunk := list(itertools.islice(stream, window)):
        yield from ([chunk[i] for i in row] for row in pack_lengths([len(s.tokens) for s in chunk], max_length))


def pack_lengths(lengths: Sequence[int], max_length: int) -> list[list[int]]:
    """Which of the lengths share a row: lists of their indices, each in order and at most `max_length` in sum.

    The rows come in an order that looks random and is a function of the lengths.
    n lengths take O(n log n) comparisons. Source: best-fit decreasing, Johnson 1973; its use on token sequences
    arXiv:2404.10830.
    """
    num = len(lengths)
    rows: list[list[int]] = []
    # Space left and number of each row that is not full, as one integer: the smallest that is not below
    # `length * num` is the tightest fit, and of several the row that was begun first.
    open_rows: list[int] = []
    for i in sorted(range(num), key=lambda i: -lengths[i]):
        place = bisect_left(open_rows, lengths[i] * num)
        if place < len(open_rows):
            space, row = divmod(open_rows.pop(place), num)
            rows[row].append(i)
        else:
            space, row = max_length, len(rows)
            rows.append([i])
        if space > lengths[i]:
            insort(open_rows, (space - lengths[i]) * num + row)
    # The order of the stream cannot serve: of equal samples the later ones begin the last, short rows.
    random.Random(",".join(map(str, lengths))).shuffle(rows)
    return [sorted(row) for row in rows]
