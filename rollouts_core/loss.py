"""The losses: functions of the log-probs of the targets and of the batch, normalised by the step's totals.

Not here: how log-probs come from a model (model.py), how advantages come from rewards (advantages.py).

Each loss of a micro-batch is a summand: the losses of all micro-batches of a step add up to the step's mean, because
the divisor counts the whole step. Metrics are summands too.

B rows of a micro-batch, T token positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from rollouts_core.batch import TrainBatch
from rollouts_core.config import LossConfig

Metrics = dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenScores:
    """What a policy says about the targets of a batch; 0 where the loss mask is 0."""

    logprobs_BT: Tensor
    """log p(target), nats."""
    entropies_BT: Tensor | None = None
    """Entropy of the distribution that the target was drawn from, nats; only from policies asked for it."""
    values_BT: Tensor | None = None
    """The return that the value head expects before the target is drawn; only from policies that have one."""

    def to(self, device: torch.device) -> TokenScores:
        """The scores on `device`."""
        return TokenScores(
            logprobs_BT=self.logprobs_BT.to(device),
            entropies_BT=None if self.entropies_BT is None else self.entropies_BT.to(device),
            values_BT=None if self.values_BT is None else self.values_BT.to(device),
        )


LossFn = Callable[[TokenScores, TrainBatch], tuple[Tensor, Metrics]]
"""(scores, batch) -> the micro-batch's share of the step's loss, and metrics that add up."""

MAX_LOG_RATIO = 20.0
"""|log ratio| is clamped to this before exp, so that a stray token gives a large number instead of infinity."""


def token_logprobs(logits_BTV: Tensor, targets_BT: Tensor, *, temperature: float = 1.0) -> Tensor:
    """(B, T) log p(target) under softmax(logits / temperature), in float32.

    Index t of the logits scores index t of the targets: nothing is shifted here.
    """
    assert logits_BTV.shape[:-1] == targets_BT.shape, f"{logits_BTV.shape} against {targets_BT.shape}"
    scaled = logits_BTV.float() if temperature == 1.0 else logits_BTV.float() / temperature
    return -F.cross_entropy(scaled.flatten(0, 1), targets_BT.flatten(), reduction="none").view(targets_BT.shape)


def create_cross_entropy_loss() -> LossFn:
    """The SFT loss: mean negative log-likelihood over all loss tokens of the step, in nats."""
    return cross_entropy_loss


def create_policy_loss(config: LossConfig) -> LossFn:
    """The RL loss with these settings."""
    return partial(policy_loss, config=config)


def cross_entropy_loss(scores: TokenScores, batch: TrainBatch) -> tuple[Tensor, Metrics]:
    """Mean negative log-likelihood of the trained targets, weighted by the loss mask."""
    assert batch.num_loss_tokens > 0, "the caller drops empty steps"
    # Masked positions may hold anything: 0 * -inf would be NaN.
    scored_BT = torch.where(batch.loss_mask_BT > 0, scores.logprobs_BT, 0.0)
    loss = -(scored_BT * batch.loss_mask_BT).sum() / batch.num_loss_tokens
    return loss, {"loss": float(loss.detach())}


def policy_loss(scores: TokenScores, batch: TrainBatch, config: LossConfig) -> tuple[Tensor, Metrics]:
    """The clipped policy-gradient loss, averaged over the step's loss tokens or samples.

    Token t contributes -min(ratio * A, clip(ratio) * A), ratio = exp(policy - rollout logprob).

    Args:
        scores: under the current weights, at the rollout's temperature.

    Returns:
        The micro-batch's share of the loss, and metrics that add up over micro-batches: the share of clipped
        tokens, the mean k3 estimate of KL(rollout || policy), and the policy's mean log-prob.

    Source: arXiv:1707.06347 eq. 7; group advantages arXiv:2402.03300; asymmetric clip arXiv:2503.14476.
    """
    loss_mask_BT, policy_logprobs_BT = batch.loss_mask_BT, scores.logprobs_BT
    assert policy_logprobs_BT.shape == loss_mask_BT.shape, f"{policy_logprobs_BT.shape} != {loss_mask_BT.shape}"
    assert batch.num_loss_tokens > 0, "the caller drops empty steps"
    log_ratio_BT = (policy_logprobs_BT - batch.rollout_logprobs_BT).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    # Masked positions hold garbage; without this their infinities would reach the gradient as 0 * inf.
    log_ratio_BT = torch.where(loss_mask_BT > 0, log_ratio_BT, 0.0)
    ratio_BT = log_ratio_BT.exp()
    unclipped_BT = ratio_BT * batch.advantages_BT
    clipped_BT = ratio_BT.clamp(1 - config.clip_low, 1 + config.clip_high) * batch.advantages_BT
    per_token_BT = -torch.minimum(unclipped_BT, clipped_BT)
    if config.aggregation == "token_mean":
        loss = (per_token_BT * loss_mask_BT).sum() / batch.num_loss_tokens
    else:
        loss = (per_token_BT * _sequence_mean_weights(batch)).sum() / batch.num_samples
    with torch.no_grad():
        share_BT = loss_mask_BT / batch.num_scored_tokens
        metrics = {
            "loss": float(loss),
            "clip_share": float(((clipped_BT < unclipped_BT) * share_BT).sum()),
            "kl_rollout_policy": float(((ratio_BT - 1 - log_ratio_BT) * share_BT).sum()),
            "policy_logprob": float((torch.where(loss_mask_BT > 0, policy_logprobs_BT, 0.0) * share_BT).sum()),
        }
    return loss, metrics


def grpo_loss(
    logits: Tensor,
    labels: Tensor,
    loss_mask: Tensor,
    advantages: Tensor,
    *,
    old_log_probs: Tensor | None = None,
    clip_range: float = 0.2,
) -> Tensor:
    """The policy loss over full logits: scalar mean over all tokens of the mask.

    Args:
        logits: (B, T, V); index t scores `labels[:, t]`, which was shifted once, where the batch was made.
        labels: (B, T) token ids.
        loss_mask: (B, T), 1 where a token is trained on.
        advantages: (B,) one per row, or (B, T) one per token.
        old_log_probs: (B, T) log-probs when sampled; None takes the current ones, so that the ratio is 1.

    Source: arXiv:2402.03300 sec. 4.1, without its KL term.
    """
    policy_logprobs_BT = token_logprobs(logits, labels)
    behaviour_BT = policy_logprobs_BT.detach() if old_log_probs is None else old_log_probs
    advantages_BT = advantages[:, None].expand(labels.shape) if advantages.ndim == 1 else advantages
    batch = TrainBatch(
        inputs_BT=labels,
        targets_BT=labels,
        position_ids_BT=torch.zeros_like(labels),
        segment_ids_BT=torch.ones_like(labels),
        loss_mask_BT=loss_mask.float(),
        advantages_BT=advantages_BT.float(),
        rollout_logprobs_BT=behaviour_BT,
        num_loss_tokens=float(loss_mask.sum()),
        num_scored_tokens=float(loss_mask.sum()),
        num_samples=int((loss_mask.sum(dim=1) > 0).sum()),
        is_packed=False,
    )
    loss, _ = policy_loss(
        TokenScores(logprobs_BT=policy_logprobs_BT), batch, LossConfig(clip_low=clip_range, clip_high=clip_range)
    )
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


def _sequence_mean_weights(batch: TrainBatch) -> Tensor:
    """(B, T) loss mask divided by its own sum within each sample, so that every sample weighs 1."""
    num_segments = int(batch.segment_ids_BT.max()) + 1
    sums_BS = torch.zeros(len(batch.segment_ids_BT), num_segments, device=batch.loss_mask_BT.device)
    sums_BS.scatter_add_(1, batch.segment_ids_BT, batch.loss_mask_BT)
    return batch.loss_mask_BT / sums_BS.gather(1, batch.segment_ids_BT).clamp(min=1e-9)
