"""Loss functions: from the log-probs of the targets and the batch to the loss of a micro-batch.

Losses are divided by totals of the whole step, so the losses of a step's micro-batches add up to the step's mean loss.
Metrics of micro-batches add up to means of the step.

B rows of a micro-batch, T token positions, V vocabulary.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rollouts_core.algorithms.mismatch import describe_mismatch, mean_per_sample, mismatch_weights, sum_per_sample
from rollouts_core.algorithms.objectives import ALL_OBJECTIVES
from rollouts_core.batch import TrainBatch
from rollouts_core.config import FunctionName, LossConfig, name_of_function
from rollouts_core.errors import ConfigError
from rollouts_core.user_code.functions import resolve_function

Metrics = dict[str, float]
LossMetrics = Mapping[str, float | Tensor]
"""Metrics of a loss function by name. A tensor of one element may still be in computation on a GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenScores:
    """The policy's results for the target of each position, or 0 at positions outside the loss mask."""

    logprobs_BT: Tensor
    """Log-prob of each target, nats."""
    entropies_BT: Tensor | None = None
    """Entropy of the policy's distribution at each position, nats, or None if the policy does not compute it."""
    values_BT: Tensor | None = None
    """Return that the value head predicts before the target is sampled, or None without a value head."""

    def to(self, device: torch.device) -> TokenScores:
        return TokenScores(
            logprobs_BT=self.logprobs_BT.to(device),
            entropies_BT=None if self.entropies_BT is None else self.entropies_BT.to(device),
            values_BT=None if self.values_BT is None else self.values_BT.to(device),
        )


ObjectiveFn = Callable[[Tensor, Tensor, TrainBatch, LossConfig], tuple[Tensor, Tensor]]
"""(logprobs_BT, log_ratio_BT, batch, config) -> (B, T) loss of each token, (B, T) whether the token's gradient was
limited."""
LossFn = Callable[[TokenScores, TrainBatch], tuple[Tensor, LossMetrics]]
"""(scores, batch) -> the micro-batch's share of the step's loss, and metrics.

The share is a tensor of one element with a gradient. Metrics by name are numbers or tensors of one element. Metrics as
tensors avoid waiting for the GPU. Metrics include `"loss"`, the share, and have the same names in every micro-batch.
A step's metric is the sum over its micro-batches, or the maximum if the name ends in `_max`. `call_loss` checks these
rules."""

MAX_LOG_RATIO = 20.0
"""Limit of |log ratio| before exp, so that outliers do not become infinite."""


def call_loss(loss_fn: LossFn, scores: TokenScores, batch: TrainBatch) -> tuple[Tensor, LossMetrics]:
    """Call a loss function and check the types and shapes of its result, without waiting for tensor values.

    Raises:
        ConfigError: the result does not follow `LossFn`. The message describes the result.
    """
    returned: object = loss_fn(scores, batch)  # object: a user's function may return anything
    name = name_of_function(loss_fn.func if isinstance(loss_fn, partial) else loss_fn)
    expected = 'expected a tensor of one element and a dict of numbers with "loss", the tensor as a number'
    if not (isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], Mapping)):
        raise ConfigError(f"the loss function {name} returned {_describe(returned)}: {expected}")
    loss, metrics = returned
    if not (isinstance(loss, Tensor) and loss.numel() == 1):
        raise ConfigError(f"the loss function {name} returned {_describe(loss)} as the loss: {expected}")
    if "loss" not in metrics:
        found = ", ".join(map(str, metrics)) or "none"
        raise ConfigError(f'the loss function {name} returned metrics without "loss" ({found}): {expected}')
    numbers: dict[str, float | Tensor] = {}
    for key, value in metrics.items():
        try:
            numbers[str(key)] = _as_metric(value)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f'the loss function {name} returned {_describe(value)} as the metric "{key}": {expected}'
            ) from error
    return loss.reshape(()), numbers


def _as_metric(value: Any) -> float | Tensor:  # Any: from a user's function
    if not isinstance(value, Tensor):
        return float(value)
    if value.numel() != 1 or value.is_complex():
        raise ValueError("a tensor of one real number was expected")
    return value.detach().reshape(())


def read_metrics(metrics: Sequence[LossMetrics]) -> list[Metrics]:
    """Convert metrics to numbers. All tensors of a device are read in one transfer, which waits for the device."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for value in (value for each in metrics for value in each.values() if isinstance(value, Tensor)):
        by_device.setdefault(value.device, []).append(value)
    numbers = {device: iter(stack_scalars(values).tolist()) for device, values in by_device.items()}
    return [
        {name: next(numbers[value.device]) if isinstance(value, Tensor) else value for name, value in each.items()}
        for each in metrics
    ]


def stack_scalars(scalars: Sequence[Tensor]) -> Tensor:
    """Stack scalar tensors into one tensor: float32 if all are float32, otherwise float64."""
    is_plain = all(scalar.dtype == torch.float32 for scalar in scalars)
    return torch.stack([scalar if is_plain else scalar.double() for scalar in scalars])


def _describe(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"{type(value).__name__} of {len(value)}" if isinstance(value, tuple) else type(value).__name__


def token_logprobs(logits_BTV: Tensor, targets_BT: Tensor, *, temperature: float = 1.0) -> Tensor:
    """(B, T) log p(target) under softmax(logits / temperature), in float32.

    The logits at index t belong to the target at index t: the function does not shift them.
    """
    assert logits_BTV.shape[:-1] == targets_BT.shape, f"{logits_BTV.shape} against {targets_BT.shape}"
    scaled = logits_BTV.float() if temperature == 1.0 else logits_BTV.float() / temperature
    return -F.cross_entropy(scaled.flatten(0, 1), targets_BT.flatten(), reduction="none").view(targets_BT.shape)


def create_cross_entropy_loss() -> LossFn:
    """The SFT loss: mean negative log-likelihood over all loss tokens of the step, in nats."""
    return cross_entropy_loss


def create_policy_loss(config: LossConfig, loss_fn: FunctionName = "") -> LossFn:
    """The RL loss function with the settings `config`.

    Args:
        loss_fn: name of a user's function that replaces `policy_loss`. If the function has a parameter `config`, it
            gets the settings.

    Raises:
        ConfigError: the user's function does not exist.
    """
    if loss_fn == "":
        return partial(policy_loss, config=config)
    own: Callable[..., Any] = resolve_function(loss_fn, {}, setting="training.rl.loss_fn")  # Any: a user's function
    return partial(own, config=config) if takes_config(own) else own


def takes_config(loss_fn: Callable[..., Any]) -> bool:  # Any: a user's function
    """True if a user's loss function has a parameter `config`, which gets the settings of `training.rl.loss`."""
    try:
        parameter = inspect.signature(loss_fn).parameters.get("config")
    except (TypeError, ValueError):  # a compiled function without a signature
        return False
    return parameter is not None and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)


def cross_entropy_loss(scores: TokenScores, batch: TrainBatch) -> tuple[Tensor, LossMetrics]:
    """Mean negative log-likelihood of the trained targets, weighted by the loss mask."""
    assert batch.num_loss_tokens > 0, "the caller drops empty steps"
    # Masked positions may have the log-prob -inf, and 0 * -inf would be NaN.
    scored_BT = torch.where(batch.loss_mask_BT > 0, scores.logprobs_BT, 0.0)
    loss = -(scored_BT * batch.loss_mask_BT).sum() / batch.num_loss_tokens
    return loss, {"loss": loss.detach()}


def policy_loss(scores: TokenScores, batch: TrainBatch, config: LossConfig) -> tuple[Tensor, LossMetrics]:
    """The policy-gradient loss with all configured terms.

    A trained token contributes mismatch weight x objective + kl_coef x KL - entropy_coef x entropy.
    `config.aggregation` selects how tokens are averaged. If the batch has returns, the value head's loss is added.

    Args:
        scores: results of the current weights at the rollout's temperature, with entropies and values if terms need
            them.

    Returns:
        The micro-batch's share of the step's loss, and metrics for `sum_metrics`. Metrics are means over the scored
            tokens, as tensors of one element.
    """
    assert scores.logprobs_BT.shape == batch.loss_mask_BT.shape, (
        f"{scores.logprobs_BT.shape} != {batch.loss_mask_BT.shape}"
    )
    assert batch.num_loss_tokens > 0, "the caller drops empty steps"
    logprobs_BT = _trained(scores.logprobs_BT, batch)
    old_BT = logprobs_BT.detach() if batch.old_logprobs_BT is None else _trained(batch.old_logprobs_BT, batch)
    rollout_BT = _trained(batch.rollout_logprobs_BT, batch)
    log_ratio_BT = logprobs_BT - (rollout_BT if config.ratio_base == "rollout" else old_BT)
    objective_BT, is_clipped_BT = policy_objective(logprobs_BT, log_ratio_BT, batch, config)
    weights_BT = mismatch_weights(old_BT - rollout_BT, batch, config.mismatch)
    per_token_BT = objective_BT * weights_BT
    if config.drift_mask:
        per_token_BT = per_token_BT * drift_mask(log_ratio_BT, batch, config.drift_mask)
    shares = {
        "clip_share": is_clipped_BT,
        "kl_rollout_policy": estimate_kl(_limited(rollout_BT - logprobs_BT, MAX_LOG_RATIO), "k3"),
        "policy_logprob": logprobs_BT,
        **describe_mismatch(old_BT - rollout_BT, weights_BT, batch, config.mismatch),
    }
    if config.ratio_penalty:
        per_token_BT = per_token_BT + config.ratio_penalty * log_ratio_BT.square()
    if config.kl_coef:
        kl_BT = reference_kl(logprobs_BT, log_ratio_BT, batch, config)
        per_token_BT = per_token_BT + config.kl_coef * kl_BT
        shares["kl_reference"] = kl_BT
    if scores.entropies_BT is not None:
        shares["entropy"] = _trained(scores.entropies_BT, batch)
        if config.entropy_coef:  # even with the factor 0, the product would cost a backward pass
            per_token_BT = per_token_BT - config.entropy_coef * shares["entropy"]
    counts_BT = token_weights(batch, config)
    loss = (per_token_BT * counts_BT).sum()
    if batch.returns_BT is not None:
        value_loss = (clipped_value_loss(scores, batch, config.value_clip) * counts_BT).sum()
        loss = loss + config.value_coef * value_loss
        return loss, _to_scalars(shares, batch, loss=loss, value_loss=value_loss)
    return loss, _to_scalars(shares, batch, loss=loss)


def policy_objective(
    logprobs_BT: Tensor, log_ratio_BT: Tensor, batch: TrainBatch, config: LossConfig
) -> tuple[Tensor, Tensor]:
    """(B, T) loss of each token by `config.objective`, and (B, T) whether the token's gradient was limited."""
    objective: ObjectiveFn = resolve_function(
        ALL_OBJECTIVES[config.objective].loss, {}, setting="training.rl.loss.objective"
    )
    return objective(logprobs_BT, log_ratio_BT, batch, config)


def ppo_objective(
    logprobs_BT: Tensor, log_ratio_BT: Tensor, batch: TrainBatch, config: LossConfig
) -> tuple[Tensor, Tensor]:
    """PPO: -min(ratio x A, clip(ratio) x A), and at most dual_clip x |A| for tokens with A < 0.

    Source: arXiv:1707.06347 eq. 7, asymmetric clip arXiv:2503.14476, dual clip arXiv:1912.09729 eq. 5.
    """
    advantages_BT, ratio_BT = batch.advantages_BT, ratio_of(log_ratio_BT)
    free_BT, bound_BT = -advantages_BT * ratio_BT, -advantages_BT * _clipped(ratio_BT, config)
    objective_BT, is_clipped_BT = torch.maximum(free_BT, bound_BT), bound_BT > free_BT
    if config.dual_clip:
        limit_BT = torch.where(advantages_BT < 0, -advantages_BT * config.dual_clip, math.inf)
        is_clipped_BT = is_clipped_BT | (objective_BT > limit_BT)
        objective_BT = torch.minimum(objective_BT, limit_BT)
    return objective_BT, is_clipped_BT


def gspo_objective(
    logprobs_BT: Tensor, log_ratio_BT: Tensor, batch: TrainBatch, config: LossConfig
) -> tuple[Tensor, Tensor]:
    """GSPO: `ppo_objective` with the geometric mean of the ratio over the completion. Source: arXiv:2507.18071 eq.
    5."""
    return ppo_objective(logprobs_BT, mean_per_sample(log_ratio_BT, batch), batch, config)


def cispo_objective(
    logprobs_BT: Tensor, log_ratio_BT: Tensor, batch: TrainBatch, config: LossConfig
) -> tuple[Tensor, Tensor]:
    """CISPO: -clip(ratio) x A x logprob, without a gradient through the ratio. Source: arXiv:2506.13585 eq. 4."""
    ratio_BT = ratio_of(log_ratio_BT)
    clipped_BT = _clipped(ratio_BT, config)
    return -clipped_BT.detach() * batch.advantages_BT * logprobs_BT, clipped_BT != ratio_BT


def dppo_objective(
    logprobs_BT: Tensor, log_ratio_BT: Tensor, batch: TrainBatch, config: LossConfig
) -> tuple[Tensor, Tensor]:
    """DPPO: -ratio x A, but 0 for tokens whose probability moved too far in the direction of the advantage.

    Too far: p rose by more than clip_high (A > 0), or fell by more than clip_low (A <= 0). Source: arXiv:2602.04879, as
    in prime-rl.
    """
    moved_BT = logprobs_BT.detach().exp() - (logprobs_BT - log_ratio_BT).detach().exp()
    is_far_BT = torch.where(batch.advantages_BT > 0, moved_BT > config.clip_high, moved_BT < -config.clip_low)
    return -batch.advantages_BT * ratio_of(log_ratio_BT) * ~is_far_BT, is_far_BT


def reinforce_objective(
    logprobs_BT: Tensor, log_ratio_BT: Tensor, batch: TrainBatch, config: LossConfig
) -> tuple[Tensor, Tensor]:
    """REINFORCE: -A x logprob."""
    return -batch.advantages_BT * logprobs_BT, torch.zeros_like(logprobs_BT)


def ratio_of(log_ratio_BT: Tensor) -> Tensor:
    """(B, T) exp of log-ratios that are clamped to +-`MAX_LOG_RATIO`."""
    return log_ratio_BT.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _clipped(ratio_BT: Tensor, config: LossConfig) -> Tensor:
    return ratio_BT.clamp(1 - config.clip_low, 1 + config.clip_high)


@torch.no_grad()
def drift_mask(log_ratio_BT: Tensor, batch: TrainBatch, limit: float) -> Tensor:
    """(B, T) 0 for tokens with negative advantage in completions whose mean log-prob fell by more than `limit`, and 1
    for other tokens.

    Source: off-policy sequence masking, arXiv:2512.02556 sec. 3.1.
    """
    has_drifted_BT = -mean_per_sample(log_ratio_BT, batch) > limit
    return 1.0 - (has_drifted_BT & (batch.advantages_BT < 0)).to(log_ratio_BT.dtype)


def reference_kl(logprobs_BT: Tensor, log_ratio_BT: Tensor, batch: TrainBatch, config: LossConfig) -> Tensor:
    """(B, T) estimates of KL(policy || reference model), with the limits and weights of the settings.

    Source: estimators joschu.net/blog/kl-approx.html; weights arXiv:2512.02556 sec. 3.1, arXiv:2506.09477.
    """
    assert batch.ref_logprobs_BT is not None, "a KL term needs ref_logprobs_BT: score the batch with reference=True"
    free_BT = logprobs_BT - _trained(batch.ref_logprobs_BT, batch)
    difference_BT = _limited(free_BT, config.kl_input_clamp)
    kl_BT = estimate_kl(difference_BT, config.kl_estimator)
    if config.kl_weight == "ratio":
        kl_BT = kl_BT * ratio_of(log_ratio_BT)
    elif config.kl_weight == "on_policy":
        one_BT = (logprobs_BT - logprobs_BT.detach()).exp()
        kl_BT = kl_BT * torch.where(difference_BT == free_BT, one_BT, one_BT.detach())
    return _limited(kl_BT, config.kl_output_clamp)


def estimate_kl(difference: Tensor, estimator: str) -> Tensor:
    """Estimate KL(p || q) at each token sampled by p.

    Args:
        difference: log p - log q of the token.
        estimator: "k1", "k2", "k3" or "abs".

    Source: see `reference_kl`.
    """
    if estimator == "k1":
        return difference
    if estimator == "abs":
        return difference.abs()
    if estimator == "k2":
        return difference.square() / 2
    assert estimator == "k3", f"unknown estimator {estimator}"
    return torch.expm1(-difference) + difference


def clipped_value_loss(scores: TokenScores, batch: TrainBatch, value_clip: float) -> Tensor:
    """(B, T) half the squared error of the value head's predictions.

    The larger of two errors counts: the error of the prediction, and the error of the prediction after clipping it to
    at most `value_clip` from the old prediction.

    Source: arXiv:1811.02553 sec. 3; as in verl, OpenRLHF and SkyRL.
    """
    assert batch.returns_BT is not None and batch.old_values_BT is not None, (
        "a value loss needs returns_BT and old_values_BT"
    )
    assert scores.values_BT is not None, "the estimator gae needs a policy with a value head: with_values=True"
    values_BT, returns_BT = _trained(scores.values_BT, batch), _trained(batch.returns_BT, batch)
    old_BT = _trained(batch.old_values_BT, batch)
    held_BT = old_BT + _limited(values_BT - old_BT, value_clip)
    return 0.5 * torch.maximum((values_BT - returns_BT).square(), (held_BT - returns_BT).square())


def token_weights(batch: TrainBatch, config: LossConfig) -> Tensor:
    """(B, T) weight of each token in the loss. Over all micro-batches and ranks of a step, the weights sum to 1.

    Exception: with `constant_length` they sum to the samples' mean length divided by `constant_length`.

    Source: token_mean arXiv:2503.14476; sequence_mean arXiv:2402.03300; constant_length arXiv:2503.20783.
    """
    if config.aggregation == "token_mean":
        return batch.loss_mask_BT / batch.num_loss_tokens
    if config.aggregation == "sequence_mean":
        tokens_BT = sum_per_sample(batch.loss_mask_BT, batch)
        return batch.loss_mask_BT / (tokens_BT.clamp(min=1e-9) * batch.num_samples)
    if config.aggregation == "constant_length":
        return batch.loss_mask_BT / (config.constant_length * batch.num_samples)
    assert batch.group_tokens_BT is not None, "prompt_mean needs group_tokens_BT: prepare_grpo_batch fills it"
    return batch.loss_mask_BT / (batch.group_tokens_BT.clamp(min=1e-9) * batch.num_groups)


def grpo_loss(
    logits: Tensor,
    labels: Tensor,
    loss_mask: Tensor,
    advantages: Tensor,
    *,
    old_log_probs: Tensor | None = None,
    clip_range: float = 0.2,
) -> Tensor:
    """The GRPO loss from full logits: a scalar, the mean over all tokens of the loss mask.

    Args:
        logits: (B, T, V); index t belongs to `labels[:, t]`, so the batch must already be shifted.
        labels: (B, T) token ids.
        loss_mask: (B, T), 1 for trained tokens.
        advantages: (B,) one per row, or (B, T) one per token.
        old_log_probs: (B, T) log-probs at sampling time. None uses the current log-probs, so that the ratio is 1.

    Source: arXiv:2402.03300 sec. 4.1, without the KL term.
    """
    policy_logprobs_BT = token_logprobs(logits, labels)
    behaviour_BT = policy_logprobs_BT.detach() if old_log_probs is None else old_log_probs
    advantages_BT = advantages[:, None].expand(labels.shape) if advantages.ndim == 1 else advantages
    batch = TrainBatch(
        inputs_BT=labels,
        targets_BT=labels,
        position_ids_BT=torch.zeros_like(labels),
        segment_ids_BT=torch.ones_like(labels),
        prompt_ids_BT=torch.ones_like(labels),
        loss_mask_BT=loss_mask.float(),
        advantages_BT=advantages_BT.float(),
        rollout_logprobs_BT=behaviour_BT,
        num_loss_tokens=float(loss_mask.sum()),
        num_scored_tokens=float(loss_mask.sum()),
        num_samples=int((loss_mask.sum(dim=1) > 0).sum()),
        is_packed=False,
    )
    config = LossConfig(clip_low=clip_range, clip_high=clip_range)
    loss, _ = policy_loss(TokenScores(logprobs_BT=policy_logprobs_BT), batch, config)
    return loss


def ppo_loss(
    logits: Tensor,
    labels: Tensor,
    loss_mask: Tensor,
    advantages: Tensor,
    old_log_probs: Tensor | None = None,
    clip_range: float = 0.2,
) -> Tensor:
    """PPO's clipped surrogate over full logits: `grpo_loss` with advantages that may differ per token.

    Source: arXiv:1707.06347 eq. 7.
    """
    return grpo_loss(logits, labels, loss_mask, advantages, old_log_probs=old_log_probs, clip_range=clip_range)


def _trained(values_BT: Tensor, batch: TrainBatch) -> Tensor:
    """`values_BT` at trained tokens, 0 elsewhere: other positions may be infinite, and 0 x inf would be NaN."""
    return torch.where(batch.loss_mask_BT != 0, values_BT, 0.0)


def _limited(values: Tensor, limit: float) -> Tensor:
    return values.clamp(-limit, limit) if limit else values


def _to_scalars(shares: Mapping[str, Tensor], batch: TrainBatch, **totals: Tensor) -> LossMetrics:
    """Convert metrics to scalars on the device. A (B, T) metric becomes its mean over the scored tokens."""
    share_BT = batch.loss_mask_BT / batch.num_scored_tokens
    metrics = {name: value.detach().float() for name, value in {**totals, **shares}.items()}
    return {name: value if value.ndim == 0 else (value * share_BT).sum() for name, value in metrics.items()}
