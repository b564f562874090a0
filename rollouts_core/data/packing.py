"""Pack several samples into each row of a batch, to reduce padding.

Best-fit decreasing: the samples of a window are placed longest first, each into the fullest row with enough space. The
rows of a window are then shuffled, so that long samples do not come first.

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
"""Number of samples packed together. With log-normal lengths, larger windows fill less than 1 % more and need more
memory."""


def pack_rows(samples: Iterable[Sample], *, max_length: int, window: int = PACKING_WINDOW) -> Iterator[list[Sample]]:
    """Rows of at most `max_length` tokens with every sample once, undivided; reads `window` samples ahead.

    A sample longer than `max_length` gets its own row. The rows of a window depend only on its samples.
    """
    assert window >= 1, f"a window holds at least one sample, found {window}"
    stream = iter(samples)
    while chunk := list(itertools.islice(stream, window)):
        yield from ([chunk[i] for i in row] for row in pack_lengths([len(s.tokens) for s in chunk], max_length))


def pack_lengths(lengths: Sequence[int], max_length: int) -> list[list[int]]:
    """Assign lengths to rows: lists of indices, each in order and with a sum of at most `max_length`.

    The rows come in a pseudo-random order that depends only on the lengths. n lengths take O(n log n) comparisons.
    Source: best-fit decreasing, Johnson 1973; on token sequences arXiv:2404.10830.
    """
    num = len(lengths)
    rows: list[list[int]] = []
    # Space and number of each open row as one integer: the smallest value >= `length * num` is the tightest fit, and
    # the oldest row if several rows fit equally.
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
    # Shuffle, because the last rows are short and contain the later samples of the stream.
    random.Random(",".join(map(str, lengths))).shuffle(rows)
    return [sorted(row) for row in rows]
