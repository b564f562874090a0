"""Pins that packing keeps every sample whole and once, fills rows well, and depends on the samples alone.

Without it samples would be lost or seen twice, rows would outgrow the model's positions, or a fifth of the compute
would go into padding.
"""

import itertools
import math
import random
from collections import Counter
from collections.abc import Sequence

import pytest

from rollouts_core.data.packing import pack_lengths, pack_rows
from rollouts_core.types import Sample
from tests.rollouts_core.make import make_random_samples, make_sample

NUM_SEEDS = 20


def draw_lengths(num: int, *, mean: float = 79, sigma: float = 0.6, seed: int = 0) -> list[int]:
    """Log-normal lengths between 12 and 256."""
    rng = random.Random(seed)
    mu = math.log(mean) - sigma**2 / 2
    return [min(256, max(12, round(rng.lognormvariate(mu, sigma)))) for _ in range(num)]


def pack_in_order(lengths: Sequence[int], max_length: int) -> list[list[int]]:
    """What packing without looking ahead gives: the row is closed by the first sample that does not fit."""
    rows: list[list[int]] = []
    for i, length in enumerate(lengths):
        if not rows or sum(lengths[j] for j in rows[-1]) + length > max_length:
            rows.append([])
        rows[-1].append(i)
    return rows


def pack_slowly(lengths: Sequence[int], max_length: int) -> list[list[int]]:
    """Best-fit decreasing as its definition says it, by looking at every row."""
    rows: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        spaces = [max_length - sum(lengths[j] for j in row) for row in rows]
        fitting = [r for r, space in enumerate(spaces) if space >= max(lengths[i], 1)]
        if fitting:
            rows[min(fitting, key=lambda r: (spaces[r], r))].append(i)
        else:
            rows.append([i])
    return [sorted(row) for row in rows]


def test_the_worked_example() -> None:
    assert sorted(pack_lengths([4, 6, 1, 10, 3], 10)) == [[0, 1], [2, 4], [3]]


def test_a_sample_goes_to_the_tightest_row_that_takes_it() -> None:
    # Rows of 7, 6 and 5 are open when 4 comes: only 5 and 6 take it, and 6 is the tighter one.
    assert sorted(pack_lengths([7, 6, 5, 4], 10)) == [[0], [1, 3], [2]]


def test_of_rows_with_equal_space_the_earlier_one_is_filled() -> None:
    assert sorted(pack_lengths([6, 6, 3], 10)) == [[0, 2], [1]]


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_rows_are_those_of_the_definition(seed: int) -> None:
    rng = random.Random(seed)
    lengths = [rng.randint(1, 14) for _ in range(rng.randint(0, 60))]
    assert sorted(pack_lengths(lengths, 12)) == sorted(pack_slowly(lengths, 12))


@pytest.mark.parametrize("window", [1, 7, 40, 1024])
def test_packing_keeps_every_sample_once_and_whole(window: int) -> None:
    samples = make_random_samples(40)
    packed = [sample for row in pack_rows(samples, max_length=30, window=window) for sample in row]
    assert Counter(map(id, packed)) == Counter(map(id, samples))


@pytest.mark.parametrize("window", [1, 7, 40])
def test_packed_rows_are_no_longer_than_the_limit(window: int) -> None:
    rows = pack_rows(make_random_samples(40), max_length=30, window=window)
    assert max(sum(len(sample.tokens) for sample in row) for row in rows) <= 30


def test_samples_of_a_row_stay_in_order() -> None:
    for row in pack_lengths(draw_lengths(500), 256):
        assert row == sorted(row)


def test_a_sample_longer_than_the_limit_gets_a_row_of_its_own() -> None:
    samples = [make_sample(range(n)) for n in (2, 50, 2)]
    assert sorted([len(s.tokens) for s in row] for row in pack_rows(samples, max_length=10)) == [[2, 2], [50]]


def test_nothing_packs_into_no_rows() -> None:
    no_samples: list[Sample] = []
    assert list(pack_rows(no_samples, max_length=10)) == []


def test_windows_are_packed_apart() -> None:
    samples = make_random_samples(30)
    together = list(pack_rows(samples, max_length=30, window=10))
    apart = [row for i in (0, 10, 20) for row in pack_rows(samples[i : i + 10], max_length=30)]
    assert together == apart


def test_a_stream_is_read_one_window_ahead() -> None:
    stream = iter(make_random_samples(30))
    next(iter(pack_rows(stream, max_length=30, window=10)))
    assert len(list(stream)) == 20


def test_rows_are_well_filled_where_packing_in_order_wastes_a_fifth() -> None:
    lengths = draw_lengths(20_000)
    windows = [lengths[i : i + 1024] for i in range(0, len(lengths), 1024)]
    num_rows = sum(len(pack_lengths(window, 256)) for window in windows)
    assert sum(lengths) / (256 * num_rows) > 0.99
    assert sum(lengths) / (256 * len(pack_in_order(lengths, 256))) < 0.82


def test_no_length_comes_early_or_late() -> None:
    # The mean length of the samples in the first half of a window's rows, over many windows, is that of all.
    # Rows in the order in which they are begun would put the long samples first and differ by more than 20.
    first_halves: list[int] = []
    for seed in range(NUM_SEEDS):
        lengths = draw_lengths(512, seed=seed)
        rows = pack_lengths(lengths, 256)
        first_halves += [lengths[i] for i in itertools.chain(*rows[: len(rows) // 2])]
    assert sum(first_halves) / len(first_halves) == pytest.approx(78.3, abs=2)


def test_packing_again_gives_the_same_rows_in_the_same_order() -> None:
    lengths = draw_lengths(500)
    assert pack_lengths(lengths, 256) == pack_lengths(list(lengths), 256)


def test_an_empty_window_is_a_mistake_of_the_caller() -> None:
    with pytest.raises(AssertionError, match="at least one sample"):
        list(pack_rows(make_random_samples(1), max_length=10, window=0))
