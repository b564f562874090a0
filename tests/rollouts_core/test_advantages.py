"""Pins the advantages of every kind by hand, and that a group without signal has none.

Without it another convention (population standard deviation, no epsilon, own reward in the baseline) would slip in and
change the size of every RL gradient.
"""

import math

import pytest

from rollouts_core.advantages import GROUP_ADVANTAGES, STD_EPS, compute_advantages, group_advantages
from rollouts_core.config import RLTrainingConfig

ALL_KINDS = ["group_mean_std", "group_mean", "leave_one_out"]


def test_a_constant_baseline_is_subtracted() -> None:
    assert compute_advantages([1.0, 0.0, -0.5], baseline=0.25) == [0.75, -0.25, -0.75]


def test_without_a_baseline_rewards_are_advantages() -> None:
    assert compute_advantages([1.0, 0.0]) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        # rewards 1, 0, 0, 1: mean 1/2, sample variance 4 * (1/4) / 3 = 1/3
        ("group_mean_std", [0.5 / (math.sqrt(1 / 3) + 1e-6), -0.5 / (math.sqrt(1 / 3) + 1e-6)] * 2),
        ("group_mean", [0.5, -0.5] * 2),
        # others of a 1 have mean 1/3, others of a 0 have mean 2/3
        ("leave_one_out", [2 / 3, -2 / 3] * 2),
        ("constant", [0.9, -0.1] * 2),
    ],
)
def test_advantages_by_hand(kind: str, expected: list[float]) -> None:
    config = RLTrainingConfig(advantage=kind, baseline=0.1)
    found = group_advantages([1.0, 0.0, 1.0, 0.0], config)
    assert found == pytest.approx(expected, abs=1e-12)


def test_leave_one_out_is_the_centred_reward_times_n_over_n_minus_one() -> None:
    rewards = [0.3, 1.7, -2.0, 0.0, 0.9]
    mean = sum(rewards) / 5
    expected = [5 / 4 * (reward - mean) for reward in rewards]
    assert group_advantages(rewards, RLTrainingConfig(advantage="leave_one_out")) == pytest.approx(expected)


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_advantages_of_a_group_add_up_to_zero(kind: str) -> None:
    advantages = group_advantages([0.3, 1.7, -2.0, 0.0], RLTrainingConfig(advantage=kind))
    assert sum(advantages) == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_a_group_of_one_has_no_signal(kind: str) -> None:
    assert group_advantages([0.7], RLTrainingConfig(advantage=kind)) == [0.0]


@pytest.mark.parametrize("kind", ALL_KINDS)
@pytest.mark.parametrize("reward", [0.0, 1.0, -1.0, 0.5])
def test_a_group_of_equal_rewards_has_no_signal(kind: str, reward: float) -> None:
    assert group_advantages([reward] * 8, RLTrainingConfig(advantage=kind)) == [0.0] * 8


def test_a_constant_baseline_gives_signal_to_equal_rewards() -> None:
    assert group_advantages([1.0, 1.0], RLTrainingConfig(advantage="constant", baseline=0.5)) == [0.5, 0.5]


def test_rewards_that_hardly_differ_are_not_blown_up() -> None:
    # std 7e-9 is far below the epsilon, so the advantage stays near (1e-8 / 2) / 1e-6
    advantages = group_advantages([0.0, 1e-8], RLTrainingConfig(advantage="group_mean_std"))
    assert max(map(abs, advantages)) < 1e-8 / STD_EPS


@pytest.mark.parametrize("kind", [*ALL_KINDS, "constant"])
@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_no_finite_number_is_refused(kind: str, reward: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        group_advantages([0.0, reward], RLTrainingConfig(advantage=kind))


def test_every_kind_of_the_settings_exists() -> None:
    kinds = RLTrainingConfig.model_json_schema()["properties"]["advantage"]["enum"]
    assert set(kinds) == {*GROUP_ADVANTAGES, "constant"}
