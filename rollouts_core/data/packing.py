"""Pack several samples into each row of a batch, to reduce padding.

The samples of a window are packed by best-fit decreasing: longest sample first, each into the fullest row with enough
space. The rows of a window are then shuffled, so that training does not see long samples first.

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
"""Number of samples that are packed together. A larger window fills rows less than 1 % better (with log-normal
lengths), and needs more memory."""


def pack_rows(samples: Iterable[Sample], *, max_length: int, window: int = PACKING_WINDOW) -> Iterator[list[Sample]]:
    """Yield rows of whole samples, with at most `max_length` tokens in each row. Every sample is in exactly one row.

    A sample longer than `max_length` gets its own row. The rows of a window depend only on the window's samples. The
    function reads `window` samples ahead.
    """
    assert window >= 1, f"a window holds at least one sample, found {window}"
    stream = iter(samples)
    while chunk := list(itertools.islice(stream, window)):
        yield from ([chunk[i] for i in row] for row in pack_lengths([len(s.tokens) for s in chunk], max_length))


def pack_lengths(lengths: Sequence[int], max_length: int) -> list[list[int]]:
    """Assign samples, given by their lengths, to rows. A row is a sorted list of sample indices with a total length of
    at most `max_length`.

    The rows have a pseudo-random order that depends only on the lengths. n lengths take O(n log n) comparisons. Source:
    best-fit decreasing, Johnson 1973; for token sequences arXiv:2404.10830.
    """
    num = len(lengths)
    rows: list[list[int]] = []
    # Each open row is encoded as one integer from its free space and its number. The smallest integer >= `length * num`
    # is the row with the tightest fit, and the oldest row if several fit equally.
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
    # The last rows are short and contain later samples of the window, so shuffle the rows.
    random.Random(",".join(map(str, lengths))).shuffle(rows)
    return [sorted(row) for row in rows]
