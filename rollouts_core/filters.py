"""Decide which groups of samples are worth training on. A group has the samples of one prompt.

A sample whose reward could not be computed has the reward None. Filters that compare rewards ignore a sample without a
reward. A trajectory counts once, even if it has several samples.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rollouts_core.types import Sample, trajectory_places

MIN_REWARD_STD = 1e-6


@dataclass(frozen=True, slots=True)
class FilterDecision:
    """Whether a group is kept. If the group is dropped, `reason` is the name under which the drop is counted."""

    keep: bool
    reason: str = ""

    def __bool__(self) -> bool:
        return self.keep


UNSCORED = FilterDecision(False, "unscored")
"""Reason of a drop: no sample of the group has a reward."""

FilterFn = Callable[[Sequence[Sample]], FilterDecision | bool]
"""A group filter: takes the graded samples of one group; True keeps the group."""

BufferFilterFn = Callable[[Sequence[Sequence[Sample]], int], Sequence[Sequence[Sample]]]
"""A buffer filter: takes the interrupted groups, in order, and the number of groups wanted; returns the groups to
generate now."""


def check_reward_nonzero_std(group: Sequence[Sample]) -> FilterDecision:
    """Keep a group whose rewards differ, because equal rewards give advantages of 0. Source: DAPO, arXiv:2503.14476."""
    rewards = scored_rewards(group)
    if not rewards:
        return UNSCORED
    is_constant = statistics.pstdev(rewards) <= MIN_REWARD_STD
    # The reason has the rounded reward, so that continuous rewards give few distinct reasons.
    return FilterDecision(not is_constant, f"zero_std_{round(rewards[0], 1):g}" if is_constant else "")


def check_min_reward(group: Sequence[Sample], *, min_reward: float = 0.0) -> FilterDecision:
    """Keep a group whose mean reward is above `min_reward`."""
    rewards = scored_rewards(group)
    if not rewards:
        return UNSCORED
    keep = statistics.fmean(rewards) > min_reward
    return FilterDecision(keep, "" if keep else "low_reward")


def check_any_success(group: Sequence[Sample], *, success_reward: float = 1.0) -> FilterDecision:
    """Keep a group in which at least one sample has a reward of `success_reward` or more."""
    rewards = scored_rewards(group)
    if not rewards:
        return UNSCORED
    keep = max(rewards) >= success_reward
    return FilterDecision(keep, "" if keep else "no_success")


def check_response_diversity(group: Sequence[Sample], *, min_unique_share: float = 0.5) -> FilterDecision:
    """Keep a group if at least this share of its responses are distinct texts."""
    responses = [sample.response for sample in _last_samples(group)]
    keep = len(set(responses)) >= min_unique_share * len(responses)
    return FilterDecision(keep, "" if keep else "low_diversity")


def check_reasonable_length(
    group: Sequence[Sample], *, min_tokens: int = 1, max_tokens: int = 1 << 20
) -> FilterDecision:
    """Keep a group if each trajectory has between `min_tokens` and `max_tokens` sampled tokens over all its turns."""
    lengths = [
        sum(1 for place in places for weight in group[place].loss_mask if weight) for places in trajectory_places(group)
    ]
    keep = all(min_tokens <= length <= max_tokens for length in lengths)
    return FilterDecision(keep, "" if keep else "unreasonable_length")


def check_quality_and_diversity(group: Sequence[Sample]) -> FilterDecision:
    """Keep a group that passes `check_any_success`, `check_reward_nonzero_std` and `check_response_diversity`."""
    return compose_filters(check_any_success, check_reward_nonzero_std, check_response_diversity)(group)


def compose_filters(*filters: FilterFn) -> Callable[[Sequence[Sample]], FilterDecision]:
    """Return a filter that keeps a group if all `filters` keep it.

    For a dropped group, the decision has the reason of the first filter that drops the group.
    """

    def check_all(group: Sequence[Sample]) -> FilterDecision:
        for check in filters:
            outcome = check(group)
            decision = outcome if isinstance(outcome, FilterDecision) else FilterDecision(outcome, "filtered")
            if not decision.keep:
                return decision
        return FilterDecision(True)

    return check_all


def scored_rewards(group: Sequence[Sample]) -> list[float]:
    """The rewards of the group's trajectories; missing rewards are left out."""
    return [sample.reward for sample in _last_samples(group) if sample.reward is not None]


def _last_samples(group: Sequence[Sample]) -> list[Sample]:
    return [group[places[-1]] for places in trajectory_places(group)]


FILTERS: dict[str, FilterFn] = {
    "reward_nonzero_std": check_reward_nonzero_std,
    "min_reward": check_min_reward,
    "any_success": check_any_success,
    "response_diversity": check_response_diversity,
    "reasonable_length": check_reasonable_length,
    "quality_and_diversity": check_quality_and_diversity,
}
