"""Pins which groups each filter keeps, and the reason under which a drop is counted.

Without it groups that carry the signal would be dropped and the counters would not say so.
"""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from rollouts_core.filters import (
    FILTERS,
    FilterDecision,
    check_any_success,
    check_min_reward,
    check_reasonable_length,
    check_response_diversity,
    compose_filters,
)
from rollouts_core.types import Sample
from tests.rollouts_core.make import make_group


@pytest.mark.parametrize(
    ("name", "rewards", "keep", "reason"),
    [
        ("reward_nonzero_std", [0.0, 1.0], True, ""),
        ("reward_nonzero_std", [1.0, 1.0], False, "zero_std_1"),
        ("reward_nonzero_std", [0.5], False, "zero_std_0.5"),
        ("reward_nonzero_std", [0.3, 0.1 + 0.2], False, "zero_std_0.3"),
        ("reward_nonzero_std", [1 / 3, 1 / 3], False, "zero_std_0.3"),
        ("min_reward", [0.0, 0.5], True, ""),
        ("min_reward", [0.0, 0.0], False, "low_reward"),
        ("min_reward", [-1.0, 1.0], False, "low_reward"),
        ("any_success", [0.0, 1.0], True, ""),
        ("any_success", [0.9, 0.9], False, "no_success"),
        ("quality_and_diversity", [0.0, 1.0], True, ""),
        ("quality_and_diversity", [0.0, 0.5], False, "no_success"),
        ("quality_and_diversity", [1.0, 1.0], False, "zero_std_1"),
    ],
)
def test_a_filter_decides_on_rewards(name: str, rewards: list[float], keep: bool, reason: str) -> None:
    assert FILTERS[name](make_group(rewards)) == FilterDecision(keep, reason)


@pytest.mark.parametrize(
    ("responses", "keep"), [("abcd", True), ("aabb", True), ("aaab", True), ("aaaa", False), ("aaaaab", False)]
)
def test_half_of_the_responses_must_be_different_texts(responses: str, keep: bool) -> None:
    decision = check_response_diversity(make_group([0.0] * len(responses), list(responses)))
    assert decision == FilterDecision(keep, "" if keep else "low_diversity")


def test_a_group_that_says_one_thing_fails_quality_and_diversity() -> None:
    decision = FILTERS["quality_and_diversity"](make_group([0.0, 0.0, 1.0, 1.0], ["a"] * 4))
    assert decision == FilterDecision(False, "low_diversity")


@pytest.mark.parametrize(("limits", "keep"), [((1, 2), True), ((2, 2), True), ((3, 9), False), ((0, 1), False)])
def test_lengths_count_sampled_tokens_only(limits: tuple[int, int], keep: bool) -> None:
    # three tokens, of which two were sampled
    decision = check_reasonable_length(make_group([0.0, 1.0]), min_tokens=limits[0], max_tokens=limits[1])
    assert decision == FilterDecision(keep, "" if keep else "unreasonable_length")


def test_one_sample_without_a_response_spoils_the_lengths_of_its_group() -> None:
    group = [*make_group([0.0]), Sample(tokens=[1], loss_mask=[0.0], reward=0.0)]
    assert not FILTERS["reasonable_length"](group)


def test_thresholds_can_be_set() -> None:
    assert check_any_success(make_group([0.4]), success_reward=0.3)
    assert not check_min_reward(make_group([0.4]), min_reward=0.4)


def reject_without_a_word(group: Sequence[Sample]) -> bool:
    """A user's filter that returns a plain bool."""
    return False


def test_composed_filters_keep_what_all_keep() -> None:
    assert compose_filters(check_any_success, check_min_reward)(make_group([0.0, 1.0])) == FilterDecision(True)


def test_composed_filters_give_the_reason_of_the_first_that_drops() -> None:
    composed = compose_filters(check_min_reward, check_any_success)
    assert composed(make_group([0.0])).reason == "low_reward"
    assert composed(make_group([0.5])).reason == "no_success"


def test_a_plain_bool_is_counted_as_filtered() -> None:
    assert compose_filters(reject_without_a_word)(make_group([1.0])) == FilterDecision(False, "filtered")


def test_no_filters_keep_everything() -> None:
    assert compose_filters()(make_group([0.0]))


def test_a_decision_is_true_when_it_keeps() -> None:
    assert FilterDecision(True)
    assert not FilterDecision(False, "reason")


@pytest.mark.parametrize(
    ("name", "rewards", "keep", "reason"),
    [
        ("reward_nonzero_std", [None, 0.0, 1.0], True, ""),
        ("reward_nonzero_std", [None, 1.0, 1.0], False, "zero_std_1"),
        ("reward_nonzero_std", [None, None], False, "unscored"),
        ("min_reward", [None, 0.5], True, ""),
        ("min_reward", [None, 0.0], False, "low_reward"),
        ("min_reward", [None], False, "unscored"),
        ("any_success", [None, 1.0], True, ""),
        ("any_success", [None, 0.5], False, "no_success"),
        ("any_success", [None], False, "unscored"),
        ("quality_and_diversity", [None, 0.0, 1.0], True, ""),
        ("quality_and_diversity", [None, None], False, "unscored"),
        ("response_diversity", [None, None], True, ""),
    ],
)
def test_a_filter_looks_at_the_samples_that_were_scored(
    name: str, rewards: list[float | None], keep: bool, reason: str
) -> None:
    assert FILTERS[name](make_group(rewards)) == FilterDecision(keep, reason)


def make_trajectories(rewards: Sequence[float], num_turns: Sequence[int]) -> list[Sample]:
    """A group whose trajectories gave one sample per turn; those of a trajectory share its last response and reward."""
    return [
        replace(sample, turn=turn)
        for sample, turns in zip(make_group(rewards), num_turns, strict=True)
        for turn in range(turns)
    ]


def test_a_trajectory_of_several_samples_counts_once_among_the_responses() -> None:
    assert check_response_diversity(make_trajectories([0.0, 0.0], [5, 5]), min_unique_share=1.0)


def test_a_trajectory_of_several_samples_counts_once_among_the_rewards() -> None:
    assert check_min_reward(make_trajectories([1.0, 0.0], [1, 9]), min_reward=0.4)
    assert not check_min_reward(make_trajectories([1.0, 0.0], [9, 1]), min_reward=0.6)


@pytest.mark.parametrize(("max_tokens", "keep"), [(6, True), (5, False)])
def test_the_length_of_a_trajectory_is_that_of_its_samples_together(max_tokens: int, keep: bool) -> None:
    # two sampled tokens per turn
    assert bool(check_reasonable_length(make_trajectories([0.0, 1.0], [1, 3]), max_tokens=max_tokens)) is keep
