"""Compute how strongly training reinforces each token: shaped rewards, KL penalties, and advantages.

    rewards - overlong penalty -+- KL penalty -> one reward per trajectory -> advantages among its group -+-> whitened
                                +- values and KL penalties, token by token -> GAE: advantages, returns ----+

The estimators are in `advantages.py`. T: positions of one sample; position t predicts token t + 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from rollouts_core.algorithms.advantages import batch_advantages, gae_advantages, whiten
from rollouts_core.algorithms.loss import estimate_kl
from rollouts_core.config import AdvantageConfig, RewardShapingConfig, RLTrainingConfig
from rollouts_core.types import Sample, Status, trajectory_places


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutScores:
    """Log-probs and values of a batch before its first update: sample index in the batch -> one number per position."""

    old_logprobs: Mapping[int, Tensor] = field(default_factory=dict)
    """Log-probs of the sampled tokens by the trainer, nats."""
    ref_logprobs: Mapping[int, Tensor] = field(default_factory=dict)
    """Log-probs of the sampled tokens by the start model of the training (reference model), nats."""
    values: Mapping[int, Tensor] = field(default_factory=dict)
    """Returns that the value head predicts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Credit:
    """How strongly training reinforces each sample of a batch."""

    advantages: list[Tensor | float]
    """Per sample: a tensor with one advantage per position, or one advantage for all positions."""
    returns: Mapping[int, Tensor] = field(default_factory=dict)
    """Targets of the value head by sample index, or empty without a value head."""


def trained_samples(samples: Sequence[Sample], shaping: RewardShapingConfig) -> list[Sample]:
    """The samples with the loss masks that training uses.

    The mask is 0 for all tokens of invalid samples, and with `mask_truncated` also of truncated samples.
    """
    untrained = (Status.INVALID, Status.TRUNCATED) if shaping.mask_truncated else (Status.INVALID,)
    return [
        replace(sample, loss_mask=[0.0] * len(sample.tokens)) if sample.status in untrained else sample
        for sample in samples
    ]


def shape_reward(reward: float, *, num_response_tokens: int, shaping: RewardShapingConfig) -> float:
    """Subtract the penalty for a response close to the length limit.

    Source: soft overlong punishment, arXiv:2503.14476 eq. 13; the variant without the cap is from verl.
    """
    if not shaping.overlong_buffer_tokens:
        return reward
    start = shaping.max_response_tokens - shaping.overlong_buffer_tokens
    excess = max(0.0, (num_response_tokens - start) / shaping.overlong_buffer_tokens)
    return reward - shaping.overlong_penalty * (min(1.0, excess) if shaping.overlong_capped else excess)


def assign_credit(
    samples: Sequence[Sample], rewards: Sequence[float], config: RLTrainingConfig, scores: RolloutScores
) -> Credit:
    """Compute the advantages of every sample, and the returns if there is a value head.

    Args:
        samples: samples before `trained_samples` changes their loss masks, which count the sampled tokens here.
        rewards: one reward per sample.
        scores: log-probs and values before the first update.
    """
    shaping = config.reward_shaping
    trajectories = trajectory_places(samples)
    shaped = _shape_rewards(samples, rewards, trajectories, shaping)
    masks = _trained_tokens(samples, rewards, config)
    penalties = _kl_penalties(scores, shaping)
    if config.with_values:
        return _credit_tokens(masks, shaped, penalties, scores.values, config.advantage)
    if shaping.kl_credit == "completion":
        shaped = _penalize_completions(shaped, penalties, trajectories, masks)
    estimation = config.advantage
    # invalid samples have no reward, so they are excluded
    if any(sample.status is Status.INVALID for sample in samples):
        estimation = estimation.model_copy(update={"unscored": "exclude"})
    advantages: list[Tensor | float] = [*_estimate_advantages(samples, shaped, trajectories, estimation)]
    if shaping.kl_credit == "token":
        for place, penalty_T in penalties.items():
            on_T = penalty_T * (masks[place] != 0)
            advantages[place] = advantages[place] - on_T.flip(0).cumsum(0).flip(0)
    return Credit(advantages=whiten_tokens(advantages, masks, config.advantage))


def _shape_rewards(
    samples: Sequence[Sample], rewards: Sequence[float], trajectories: Sequence[list[int]], shaping: RewardShapingConfig
) -> list[float]:
    """Apply `shape_reward` to each sample, with the number of sampled tokens in its whole trajectory."""
    shaped = [0.0] * len(samples)
    for trajectory in trajectories:
        num_tokens = sum(sum(map(bool, samples[place].loss_mask)) for place in trajectory)
        for place in trajectory:
            shaped[place] = shape_reward(rewards[place], num_response_tokens=num_tokens, shaping=shaping)
    return shaped


def _kl_penalties(scores: RolloutScores, shaping: RewardShapingConfig) -> dict[int, Tensor]:
    """Sample index -> each token's penalty for its distance from the reference model, or empty if `kl_coef` is 0."""
    if not shaping.kl_coef:
        return {}
    return {
        place: shaping.kl_coef * estimate_kl(old - scores.ref_logprobs[place], shaping.kl_estimator)
        for place, old in scores.old_logprobs.items()
    }


def _trained_tokens(samples: Sequence[Sample], rewards: Sequence[float], config: RLTrainingConfig) -> list[Tensor]:
    """Per sample, the loss mask of each position, or an empty list if no configured term needs the masks."""
    if not (config.with_values or config.reward_shaping.kl_coef or config.advantage.whiten):
        return []  # building unneeded masks would take most of the time
    leaves_out = config.advantage.unscored == "exclude"
    return [
        torch.tensor(sample.loss_mask[1:]) * (not (leaves_out and math.isnan(reward)))
        for sample, reward in zip(trained_samples(samples, config.reward_shaping), rewards, strict=True)
    ]


def _penalize_completions(
    shaped: Sequence[float],
    penalties: Mapping[int, Tensor],
    trajectories: Sequence[list[int]],
    masks: Sequence[Tensor],
) -> list[float]:
    """Subtract from each reward the sum of the KL penalties over all trained tokens of its trajectory."""
    penalized = list(shaped)
    for trajectory in trajectories:
        of_samples = (penalties[place] * (masks[place] != 0) for place in trajectory if place in penalties)
        penalty = sum(float(penalty_T.sum()) for penalty_T in of_samples)
        for place in trajectory:
            penalized[place] -= penalty
    return penalized


def _estimate_advantages(
    samples: Sequence[Sample], shaped: Sequence[float], trajectories: Sequence[list[int]], config: AdvantageConfig
) -> list[float]:
    """Per sample, the advantage of its trajectory compared with the other trajectories of its group."""
    groups: dict[int, list[list[int]]] = {}
    for trajectory in trajectories:
        groups.setdefault(samples[trajectory[0]].group_index, []).append(trajectory)
    estimates = batch_advantages([[shaped[trajectory[0]] for trajectory in group] for group in groups.values()], config)
    advantages = [0.0] * len(samples)
    for group, of_group in zip(groups.values(), estimates, strict=True):
        for trajectory, advantage in zip(group, of_group, strict=True):
            for place in trajectory:
                advantages[place] = advantage
    return advantages


def whiten_tokens(
    advantages: Sequence[Tensor | float], masks: Sequence[Tensor], config: AdvantageConfig
) -> list[Tensor | float]:
    """Whiten the advantages over all trained tokens, if configured. Samples without trained tokens get 0."""
    if not config.whiten:
        return list(advantages)
    numbers = [advantage for advantage in advantages if not isinstance(advantage, Tensor)]
    whitened: Sequence[Tensor | float]
    if len(numbers) == len(advantages):
        whitened = whiten(numbers, [float(mask_T.sum()) for mask_T in masks], config.std)
    else:
        by_token = [torch.as_tensor(a).expand(len(mask_T)) for a, mask_T in zip(advantages, masks, strict=True)]
        joined = torch.tensor(whiten(torch.cat(by_token).tolist(), torch.cat(list(masks)).tolist(), config.std))
        whitened = list(torch.split(joined, [len(mask_T) for mask_T in masks]))
    return [advantage * bool(mask_T.any()) for advantage, mask_T in zip(whitened, masks, strict=True)]


def _credit_tokens(
    masks: Sequence[Tensor],
    rewards: Sequence[float],
    kl_penalties: Mapping[int, Tensor],
    values: Mapping[int, Tensor],
    config: AdvantageConfig,
) -> Credit:
    """Compute advantages and returns per token with GAE. Only the last trained token of a sample gets the reward.

    Tokens of observations are left out of the computation and get advantage 0.
    """
    advantages, returns = [torch.zeros(len(mask_T)) for mask_T in masks], {}
    for place, values_T in values.items():
        is_trained_T = masks[place] != 0
        returns[place] = values_T
        if not is_trained_T.any():
            continue
        if not math.isfinite(rewards[place]):
            raise ValueError(f"a sample has the reward {rewards[place]}: rewards must be finite numbers")
        rewards_T = -kl_penalties.get(place, torch.zeros(len(values_T)))[is_trained_T]
        rewards_T[-1] += rewards[place]
        of_tokens = gae_advantages(
            rewards_T.tolist(), values_T[is_trained_T].tolist(), gamma=config.gamma, gae_lambda=config.gae_lambda
        )
        advantages[place][is_trained_T] = torch.tensor(of_tokens[0])
        returns[place] = values_T.masked_scatter(is_trained_T, torch.tensor(of_tokens[1]))
    return Credit(advantages=whiten_tokens(advantages, masks, config), returns=returns)
