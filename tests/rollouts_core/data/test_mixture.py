"""Pins how often an epoch visits the rows of each dataset of a mixture, and that seed and sizes alone decide the order.

Without it a small dataset would drown or dominate, or a resumed run would see another order than the one that stopped.
"""

import itertools
from collections import Counter

import pytest

from rollouts_core.data.mixture import epoch_order


def test_one_dataset_is_visited_once_per_epoch_in_an_order_of_its_own() -> None:
    epochs = [list(epoch_order([20], [1.0], seed=0, epoch=e)) for e in range(3)]
    assert all(sorted(epoch) == list(range(20)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_repeats_weigh_the_datasets() -> None:
    visits = Counter(epoch_order([4, 3, 8], [1.0, 3.0, 0.5], seed=1, epoch=0))
    assert [visits[i] for i in range(7)] == [1, 1, 1, 1, 3, 3, 3]
    assert sum(visits[i] for i in range(7, 15)) == 4
    assert max(visits[i] for i in range(7, 15)) == 1


@pytest.mark.parametrize(("repeat", "num_epochs", "visits"), [(0.25, 4, 1), (0.25, 12, 3), (1.5, 2, 3), (0.4, 5, 2)])
def test_epochs_of_a_fraction_visit_all_rows_equally_often(repeat: float, num_epochs: int, visits: int) -> None:
    counts = Counter(
        itertools.chain.from_iterable(epoch_order([8], [repeat], seed=3, epoch=e) for e in range(num_epochs))
    )
    assert counts == dict.fromkeys(range(8), visits)


def test_a_fraction_takes_other_rows_in_the_next_epoch() -> None:
    first, second = (set(epoch_order([10], [0.5], seed=0, epoch=e)) for e in (0, 1))
    assert first.isdisjoint(second)
    assert first != set(range(5))


def test_a_fraction_that_does_not_divide_the_rows_is_spread_over_epochs() -> None:
    sizes = [len(epoch_order([10], [0.33], seed=0, epoch=e)) for e in range(100)]
    assert set(sizes) == {3, 4}
    assert sum(sizes) == 330


def test_datasets_are_mixed_within_an_epoch() -> None:
    order = epoch_order([500, 500], [1.0, 1.0], seed=0, epoch=0)
    from_first = sum(row < 500 for row in order[:500])
    assert 200 < from_first < 300  # hypergeometric: 250 with a standard deviation of 8


@pytest.mark.parametrize("change", [{"seed": 1}, {"epoch": 1}])
def test_the_order_depends_on_seed_and_epoch(change: dict[str, int]) -> None:
    base = {"seed": 0, "epoch": 0}
    assert epoch_order([30], [1.0], **base) == epoch_order([30], [1.0], **base)
    assert epoch_order([30], [1.0], **base) != epoch_order([30], [1.0], **(base | change))
