"""Group demonstrations into SFT steps, with a cursor that checkpoints save for resuming.

    epoch 0   visits  |----- window -----|----- window -----|--|     epoch 1   ...
              rows     packed, shuffled
    Cursor(epoch, position of the window's first visit, rows of the window that were taken)

A visit reads one row of a dataset. A cursor contains everything needed to resume. A resumed training reads only the
visits of one window again.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from rollouts_core.config import SFTTrainingConfig
from rollouts_core.data.packing import PACKING_WINDOW, pack_rows
from rollouts_core.errors import DataError
from rollouts_core.types import Sample


class Cursor(NamedTuple):
    """Position of training in its data."""

    epoch: int = 0
    position: int = 0
    """Number of visits of the epoch before the current window."""
    num_rows: int = 0
    """Number of batch rows already taken from the current window."""


Visit = Sample | Sequence[Sample] | None
"""Samples of one dataset row: one sample, or a sequence of samples. A dropped row has None or an empty sequence."""


@runtime_checkable
class EpochSource(Protocol):
    """Demonstrations that can be visited from any position of any epoch."""

    def iterate_epoch(self, epoch: int, *, seed: int, start: int = 0) -> Iterator[Visit]:
        """Yield the samples of each visit of an epoch, starting at visit number `start`."""
        ...


Samples = EpochSource | Sequence[Sample] | Iterable[Sample]
"""Demonstrations to train on. A sequence is shuffled in each epoch. A stream is read once, in its own order."""


class SFTSteps:
    """Iterator over steps. A step is a list of batch rows; `cursor` is the position after the last step.

    The steps depend only on samples, settings and the initial cursor. An incomplete step at the end of a stream is
    dropped.

    Raises:
        DataError: an epoch has no samples.
    """

    def __init__(self, samples: Samples, config: SFTTrainingConfig, cursor: Cursor | None = None) -> None:
        self.cursor = cursor or Cursor()
        self._batch_size = config.batch_size
        self._rows = _iterate_rows(samples, config, self.cursor)

    def __iter__(self) -> Iterator[list[list[Sample]]]:
        return self

    def __next__(self) -> list[list[Sample]]:
        step = list(itertools.islice(self._rows, self._batch_size))
        if len(step) < self._batch_size:
            raise StopIteration
        self.cursor = step[-1][1]
        return [row for row, _ in step]


def iterate_sft_steps(samples: Samples, config: SFTTrainingConfig, cursor: Cursor | None = None) -> SFTSteps:
    """The batch rows of each step. The rows depend only on samples and settings, so a resumed run gets the same
    rows."""
    return SFTSteps(samples, config, cursor)


def iterate_epochs(samples: Sequence[Sample], *, seed: int) -> Iterator[Sample]:
    """Yield all samples again and again, in a new seeded order in each epoch."""
    source = _ShuffledSequence(samples)
    return itertools.chain.from_iterable(source.iterate_epoch(epoch, seed=seed) for epoch in itertools.count())


class _ShuffledSequence:
    def __init__(self, samples: Sequence[Sample]) -> None:
        if not samples:
            raise DataError("there is no sample to train on")
        self._samples = samples

    def iterate_epoch(self, epoch: int, *, seed: int, start: int = 0) -> Iterator[Sample]:
        order = list(range(len(self._samples)))
        random.Random(f"{seed}-{epoch}").shuffle(order)
        return (self._samples[i] for i in order[start:])


def _iterate_rows(samples: Samples, config: SFTTrainingConfig, start: Cursor) -> Iterator[tuple[list[Sample], Cursor]]:
    if not isinstance(samples, EpochSource | Sequence):
        assert start.epoch == 0, f"a stream has only one epoch, but the cursor is in epoch {start.epoch}"
        yield from _pack_epoch(itertools.islice(samples, start.position, None), config, start)
        return
    source = samples if isinstance(samples, EpochSource) else _ShuffledSequence(samples)
    cursor = start
    while True:
        is_empty = cursor == Cursor(cursor.epoch)
        for row in _pack_epoch(
            source.iterate_epoch(cursor.epoch, seed=config.seed, start=cursor.position), config, cursor
        ):
            is_empty = False
            yield row
        if is_empty:
            raise DataError("there is no sample to train on, because every row of an epoch is too long")
        cursor = Cursor(cursor.epoch + 1)


def _pack_epoch(
    visits: Iterator[Visit], config: SFTTrainingConfig, start: Cursor
) -> Iterator[tuple[list[Sample], Cursor]]:
    """Yield the batch rows of an epoch from a cursor on, each with the cursor that follows the row. A row has samples
    of one window only."""
    position, num_taken = start.position, start.num_rows
    while window := list(itertools.islice(visits, PACKING_WINDOW)):
        kept = [sample for visit in window for sample in _samples_of(visit)]
        rows = pack_rows(kept, max_length=config.max_length) if config.packing else ([sample] for sample in kept)
        for number, row in enumerate(itertools.islice(rows, num_taken, None), start=num_taken + 1):
            yield row, Cursor(start.epoch, position, number)
        position += len(window)
        num_taken = 0


def _samples_of(visit: Visit) -> Sequence[Sample]:
    if visit is None:
        return ()
    return (visit,) if isinstance(visit, Sample) else visit
