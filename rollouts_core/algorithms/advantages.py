r"""Convert rewards to advantages, which weight the tokens of a completion in the loss.

Plain Python numbers are used instead of tensors, because groups are small and GAE visits tokens one after another.

    rewards by group             -> batch_advantages -> one number per completion \
                                                                                   -> whiten, if configured
    rewards and values per token -> gae_advantages   -> one number per token      /
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

from rollouts_core.config import AdvantageConfig

WHITEN_EPS = 1e-8
"""Added to the variance of the advantages before taking its square root, as in verl."""


def compute_advantages(rewards: Sequence[float], baseline: float = 0.0) -> list[float]:
    """Each reward minus the constant `baseline`."""
    return [reward - baseline for reward in rewards]


def group_advantages(rewards: Sequence[float], config: AdvantageConfig | str = "group_mean_std") -> list[float]:
    """The advantages of one group's rewards.

    Args:
        config: settings, or only the name of an estimator. An estimator over the batch treats this one group as the
            whole batch.

    Raises:
        ValueError: a reward is infinite, or is NaN and the settings do not exclude samples without a reward.
    """
    [advantages] = batch_advantages([rewards], config)
    return advantages


def batch_advantages(
    groups: Sequence[Sequence[float]], config: AdvantageConfig | str = "group_mean_std"
) -> list[list[float]]:
    """The advantages of all groups in a batch, in the shape of `groups`.

    If all rewards that an estimator compares are equal, their advantages are exactly 0. Exceptions are the estimator
    `constant`, and `singleton = "reward"` for groups of one sample.

    Args:
        groups: the rewards of each group.
        config: settings, or only the name of an estimator.

    Raises:
        ValueError: a reward is infinite, or is NaN and the settings do not exclude samples without a reward.
    """
    settings = AdvantageConfig.model_validate({"estimator": config}) if isinstance(config, str) else config
    assert settings.estimator != "gae", "the estimator gae needs values: call gae_advantages"
    scored = [_scored(rewards, settings) for rewards in groups]
    in_batch = [reward for rewards in scored for reward in rewards]
    batch_mean = statistics.fmean(in_batch) if in_batch else 0.0
    batch_scale = _deviation(in_batch, settings.std) + settings.eps or 1.0  # 1 if rewards are equal and eps is 0
    estimates: list[list[float]]
    if settings.estimator == "constant":
        estimates = [compute_advantages(rewards, settings.baseline) for rewards in scored]
    elif settings.estimator == "batch_mean_std":
        estimates = [_divided(compute_advantages(rewards, batch_mean), batch_scale) for rewards in scored]
        if not in_batch or max(in_batch) == min(in_batch):
            estimates = [[0.0] * len(rewards) for rewards in scored]
    elif settings.estimator == "group_mean_batch_std":
        centred = [_group_estimate(rewards, group_mean, settings) for rewards in scored]
        estimates = [_divided(advantages, batch_scale) for advantages in centred]
    else:
        estimates = [_group_estimate(rewards, GROUP_ESTIMATORS[settings.estimator], settings) for rewards in scored]
    return [_fill_unscored(rewards, values) for rewards, values in zip(groups, estimates, strict=True)]


def group_mean_std(rewards: Sequence[float], config: AdvantageConfig) -> list[float]:
    """(r - mean) / (std + eps). Source: GRPO, arXiv:2402.03300."""
    return _divided(group_mean(rewards, config), _deviation(rewards, config.std) + config.eps)


def group_mean(rewards: Sequence[float], config: AdvantageConfig) -> list[float]:
    """r - mean. Source: Dr. GRPO, arXiv:2503.20783."""
    return compute_advantages(rewards, statistics.fmean(rewards))


def leave_one_out(rewards: Sequence[float], config: AdvantageConfig) -> list[float]:
    """r minus the mean of the other rewards. Source: RLOO, arXiv:2402.14740."""
    total = sum(rewards)
    return [reward - (total - reward) / (len(rewards) - 1) for reward in rewards]


def leave_one_out_std(rewards: Sequence[float], config: AdvantageConfig) -> list[float]:
    """r minus the mean of the other rewards, divided by (std of the other rewards + eps). Not divided if that std is
    0."""
    advantages = []
    for i, advantage in enumerate(leave_one_out(rewards, config)):
        others = [*rewards[:i], *rewards[i + 1 :]]
        std = _deviation(others, config.std)
        advantages.append(advantage / (std + config.eps) if std > 0 else advantage)
    return advantages


def max_rl(rewards: Sequence[float], config: AdvantageConfig) -> list[float]:
    """(r - mean) / (mean + eps) for rewards >= 0. All advantages are 0 if the mean is not positive.

    Source: arXiv:2602.02710.
    """
    mean = statistics.fmean(rewards)
    if mean <= 0:
        return [0.0] * len(rewards)
    return _divided(group_mean(rewards, config), mean + config.eps)


def gae_advantages(
    rewards: Sequence[float], values: Sequence[float], *, gamma: float = 1.0, gae_lambda: float = 1.0
) -> tuple[list[float], list[float]]:
    """Generalized advantage estimation (GAE): advantages and returns of the sampled tokens of one completion, in order.

    delta_t = r_t + gamma * v_{t+1} - v_t;  A_t = delta_t + gamma * lambda * A_{t+1};  return_t = A_t + v_t

    The caller leaves tokens of an environment's reply out of both lists. In the formula, t + 1 is therefore the next
    sampled token, even if a reply comes between.

    Args:
        rewards: reward of each sampled token.
        values: the value head's prediction before each sampled token.

    Source: arXiv:1506.02438 eq. 16; replies as in verl's multi-turn estimator.
    """
    assert len(rewards) == len(values), f"{len(rewards)} rewards for {len(values)} values"
    advantages = [0.0] * len(rewards)
    next_value = next_advantage = 0.0
    for t in range(len(rewards) - 1, -1, -1):
        delta = rewards[t] + gamma * next_value - values[t]
        next_advantage = delta + gamma * gae_lambda * next_advantage
        next_value = values[t]
        advantages[t] = next_advantage
    return advantages, [advantage + value for advantage, value in zip(advantages, values, strict=True)]


def whiten(values: Sequence[float], weights: Sequence[float], std: str = "sample") -> list[float]:
    """Shift and scale `values` to mean 0 and standard deviation 1 under `weights`. Values of weight 0 are shifted and
    scaled too.

    Args:
        weights: number of tokens that have each value.
        std: "sample" divides the sum of squares by (sum of weights - 1), "population" by the sum of weights.
    """
    total = math.fsum(weights)
    degrees = total - 1 if std == "sample" else total
    if degrees <= 0:
        return [0.0] * len(values)
    mean = math.fsum(value * weight for value, weight in zip(values, weights, strict=True)) / total
    squares = math.fsum(weight * (value - mean) ** 2 for value, weight in zip(values, weights, strict=True))
    return _divided([value - mean for value in values], math.sqrt(squares / degrees + WHITEN_EPS))


GroupEstimator = Callable[[Sequence[float], AdvantageConfig], list[float]]

GROUP_ESTIMATORS: dict[str, GroupEstimator] = {
    "group_mean_std": group_mean_std,
    "group_mean": group_mean,
    "leave_one_out": leave_one_out,
    "leave_one_out_std": leave_one_out_std,
    "max_rl": max_rl,
}
"""Estimators over one group. The caller gives each at least two rewards that are not all equal."""


def _group_estimate(rewards: Sequence[float], estimate: GroupEstimator, config: AdvantageConfig) -> list[float]:
    if len(rewards) == 1 and config.singleton == "reward":
        # Systems in which the advantage of a single sample is its reward compute it with mean 0 and deviation 1.
        return _divided(rewards, 1 + config.eps if estimate is group_mean_std else 1.0)
    if not rewards or max(rewards) == min(rewards):
        # exactly 0, because rounding errors divided by a tiny deviation would look like a signal
        return [0.0] * len(rewards)
    return estimate(rewards, config)


def _scored(rewards: Sequence[float], config: AdvantageConfig) -> list[float]:
    """The rewards that are not NaN.

    Raises:
        ValueError: a reward is infinite, or is NaN and `config.unscored` is "error".
    """
    for reward in rewards:
        if math.isinf(reward) or (math.isnan(reward) and config.unscored == "error"):
            raise ValueError(f"a group has the reward {reward}: rewards must be finite numbers")
    return [reward for reward in rewards if not math.isnan(reward)]


def _fill_unscored(rewards: Sequence[float], advantages: Sequence[float]) -> list[float]:
    """The advantages of a group, with 0 for each reward that is NaN."""
    remaining = iter(advantages)
    return [0.0 if math.isnan(reward) else next(remaining) for reward in rewards]


def _deviation(rewards: Sequence[float], std: str) -> float:
    """The standard deviation of the rewards, or 0 for fewer than two rewards."""
    if len(rewards) < 2:
        return 0.0
    return statistics.stdev(rewards) if std == "sample" else statistics.pstdev(rewards)


def _divided(values: Sequence[float], divisor: float) -> list[float]:
    return [value / divisor for value in values]
