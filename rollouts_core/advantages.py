"""From the rewards of a group to the advantages that multiply its log-ratios.

Not here: rewards (rewards.py), the loss (loss.py). No tensors: groups are small.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

from rollouts_core.config import RLTrainingConfig

STD_EPS = 1e-6
"""Added to the standard deviation before dividing, as in verl and slime."""


def compute_advantages(rewards: Sequence[float], baseline: float = 0.0) -> list[float]:
    """Each reward minus a constant baseline."""
    return [reward - baseline for reward in rewards]


def group_advantages(rewards: Sequence[float], config: RLTrainingConfig) -> list[float]:
    """The advantages of one group's rewards by `config.advantage`.

    A group of one, or of equal rewards, carries no signal: its advantages are 0 (but for a constant baseline).

    Raises:
        ValueError: a reward that is not a finite number.
    """
    for reward in rewards:
        if not math.isfinite(reward):
            raise ValueError(f"a group has the reward {reward}: rewards must be finite numbers")
    if config.advantage == "constant":
        return compute_advantages(rewards, config.baseline)
    if max(rewards) == min(rewards):
        return [0.0] * len(rewards)  # exactly: rounding must not make a signal
    return GROUP_ADVANTAGES[config.advantage](rewards)


def group_mean_std(rewards: Sequence[float]) -> list[float]:
    """(r - mean) / (std + eps) with the sample standard deviation. Source: arXiv:2402.03300."""
    if len(rewards) == 1:
        return [0.0]
    mean, std = statistics.fmean(rewards), statistics.stdev(rewards)
    return [(reward - mean) / (std + STD_EPS) for reward in rewards]


def group_mean(rewards: Sequence[float]) -> list[float]:
    """r - mean. Source: Dr. GRPO, arXiv:2503.20783."""
    mean = statistics.fmean(rewards)
    return [reward - mean for reward in rewards]


def leave_one_out(rewards: Sequence[float]) -> list[float]:
    """r minus the mean of the others. Source: RLOO, arXiv:2402.14740."""
    if len(rewards) == 1:
        return [0.0]
    total = sum(rewards)
    return [reward - (total - reward) / (len(rewards) - 1) for reward in rewards]


GROUP_ADVANTAGES: dict[str, Callable[[Sequence[float]], list[float]]] = {
    "group_mean_std": group_mean_std,
    "group_mean": group_mean,
    "leave_one_out": leave_one_out,
}
