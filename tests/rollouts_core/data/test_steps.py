"""Pins the order of demonstrations over steps and epochs, and that a cursor goes on exactly where it was taken.

Without it a resumed run would repeat or skip rows, or read everything again that came before.
"""

import itertools
from collections import Counter
from collections.abc import Iterator

import pytest

from rollouts_core.config import SFTTrainingConfig
from rollouts_core.data.packing import PACKING_WINDOW
from rollouts_core.data.steps import Cursor, Samples, iterate_epochs, iterate_sft_steps
from rollouts_core.errors import DataError
from rollouts_core.types import Sample
from tests.rollouts_core.make import make_random_samples, make_sample

CONFIG = SFTTrainingConfig(batch_size=4, max_length=64)


class CountingSource:
    """Samples of which every third is left out, and which counts how many were asked for."""

    def __init__(self, samples: list[Sample]) -> None:
        self.samples = samples
        self.num_read = 0

    def iterate_epoch(self, epoch: int, *, seed: int, start: int = 0) -> Iterator[Sample | None]:
        for i in range(start, len(self.samples)):
            self.num_read += 1
            yield None if i % 3 == 2 else self.samples[(i + epoch) % len(self.samples)]


def take(samples: Samples, num_steps: int, cursor: Cursor | None = None, **changes: object) -> list[list[list[Sample]]]:
    """The rows of some steps."""
    return list(itertools.islice(iterate_sft_steps(samples, CONFIG.model_copy(update=changes), cursor), num_steps))


def test_each_epoch_visits_every_demonstration_once_in_its_own_order() -> None:
    samples = make_random_samples(10)
    drawn = [sample.tokens for sample in itertools.islice(iterate_epochs(samples, seed=0), 30)]
    epochs = [drawn[10 * e : 10 * (e + 1)] for e in range(3)]
    assert all(sorted(epoch) == sorted(s.tokens for s in samples) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_no_demonstrations_are_an_error() -> None:
    with pytest.raises(DataError, match="no sample"):
        next(iterate_epochs([], seed=0))


def test_packing_leaves_no_demonstration_out() -> None:
    samples = [make_sample(range(i, i + 5)) for i in range(12)]
    config = CONFIG.model_copy(update={"max_length": 15, "batch_size": 2})
    steps = itertools.islice(iterate_sft_steps(samples, config), 4)  # 4 steps of 2 rows of 3 samples are 2 epochs
    visits = Counter(sample.tokens[0] for step in steps for row in step for sample in row)
    assert visits == dict.fromkeys(range(12), 2)


def test_without_packing_a_row_holds_one_demonstration() -> None:
    config = CONFIG.model_copy(update={"packing": False})
    step = next(iterate_sft_steps(make_random_samples(10), config))
    assert [len(row) for row in step] == [1, 1, 1, 1]


def test_a_stream_is_taken_as_it_comes() -> None:
    samples = make_random_samples(8)
    config = CONFIG.model_copy(update={"packing": False})
    steps = iterate_sft_steps(iter(samples), config)
    assert [row[0] for step in steps for row in step] == samples


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("num_samples", [50, PACKING_WINDOW + 300])
def test_every_cursor_goes_on_where_it_was_taken(num_samples: int, packing: bool) -> None:
    samples, config = make_random_samples(num_samples), CONFIG.model_copy(update={"packing": packing})
    num_steps = 1 + num_samples // 8
    straight = take(samples, 2 * num_steps, packing=packing)
    steps = iterate_sft_steps(samples, config)
    for step in range(1, num_steps + 1):
        next(steps)
        if step in (1, num_steps // 2, num_steps):
            assert take(samples, num_steps, steps.cursor, packing=packing) == straight[step : step + num_steps]


def test_a_cursor_behind_the_first_epoch_goes_on_there() -> None:
    samples = make_random_samples(10)
    straight = take(samples, 20)
    steps = iterate_sft_steps(samples, CONFIG)
    for _ in range(10):
        next(steps)
    assert steps.cursor.epoch >= 5
    assert take(samples, 10, steps.cursor) == straight[10:]


def test_to_go_on_one_window_is_read_again_and_not_what_came_before_it() -> None:
    source = CountingSource(make_random_samples(3 * PACKING_WINDOW))
    steps = iterate_sft_steps(source, CONFIG)
    while steps.cursor.position < 2 * PACKING_WINDOW:
        next(steps)
    expected = next(steps)
    resumed = CountingSource(source.samples)
    # The cursor of the step before: taken again from a fresh iteration over the same source.
    again = iterate_sft_steps(resumed, CONFIG)
    while again.cursor.position < 2 * PACKING_WINDOW:
        next(again)
    resumed.num_read = 0
    assert next(iterate_sft_steps(resumed, CONFIG, again.cursor)) == expected
    assert resumed.num_read == PACKING_WINDOW


@pytest.mark.parametrize("packing", [True, False])
def test_what_is_left_out_is_in_no_row(packing: bool) -> None:
    samples = [make_sample(range(i, i + 5)) for i in range(12)]
    config = CONFIG.model_copy(update={"packing": packing, "max_length": 20, "batch_size": 2 if packing else 8})
    [step] = itertools.islice(iterate_sft_steps(CountingSource(samples), config), 1)
    assert sorted(sample.tokens[0] for row in step for sample in row) == [0, 1, 3, 4, 6, 7, 9, 10]


def test_an_epoch_of_which_everything_is_left_out_is_an_error() -> None:
    class Nothing:
        def iterate_epoch(self, epoch: int, *, seed: int, start: int = 0) -> Iterator[Sample | None]:
            return iter([None, None])

    with pytest.raises(DataError, match="every row of an epoch is too long"):
        take(Nothing(), 1)


def test_a_step_larger_than_an_epoch_takes_rows_of_several() -> None:
    [step] = take(make_random_samples(3), 1, packing=False, batch_size=9)
    assert Counter(len(sample.tokens) for row in step for sample in row).total() == 9
    epochs = [[row[0].tokens for row in step[i : i + 3]] for i in (0, 3, 6)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(epochs[2])


def test_a_stream_goes_on_behind_its_cursor() -> None:
    samples = make_random_samples(60)
    straight = take(iter(samples), 5, packing=False)
    steps = iterate_sft_steps(iter(samples), CONFIG.model_copy(update={"packing": False}))
    next(steps)
    assert take(iter(samples), 4, steps.cursor, packing=False) == straight[1:]
