"""Turn samples into the tensors of one forward pass. The one place that shifts and pads.

Not here: which samples form a batch (sft.py, rl.py), the loss (loss.py).

A sample of n tokens gives n - 1 positions: position i reads token i and is scored on token i + 1. Every per-token
array of the sample is cut to its last n - 1 entries, so that index i speaks about `targets[i]`:

    sample.tokens      5 7 9          inputs     5 7
    sample.loss_mask   0 1 1          targets    7 9
                                      loss_mask  1 1

A row holds one sample, or several packed end to end; `position_ids` start again with each, and `segment_ids` tell
them apart, so that attention does not cross from one to the next. Padding has segment 0.

B rows of a micro-batch, T token positions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rollouts_core.types import Sample

Row = Sequence[Sample]
"""Samples that share one row of a batch, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch:
    """Tensors of one forward and backward pass, all of shape (B, T); index t speaks about `targets_BT[:, t]`."""

    inputs_BT: Tensor
    """Token ids that the model reads."""
    targets_BT: Tensor
    """Token ids that it is scored on."""
    position_ids_BT: Tensor
    """Positions within each sample, from 0."""
    segment_ids_BT: Tensor
    """1, 2, ... for the samples of a row, 0 for padding."""
    loss_mask_BT: Tensor
    """Weight of each target in the loss."""
    advantages_BT: Tensor
    """Advantage of the sample that a target belongs to; 0 in SFT."""
    rollout_logprobs_BT: Tensor
    """log p(target) when it was sampled, nats; 0 in SFT."""
    num_loss_tokens: float
    """Sum of the loss mask over every micro-batch and rank of the step: the divisor of token means."""
    num_scored_tokens: float
    """Sum of the loss mask over the rows of the step's batches only: the divisor of metrics."""
    num_samples: int
    """Samples with a trained token over every micro-batch and rank of the step: the divisor of sample means."""
    is_packed: bool
    """Whether some row holds more than one sample."""

    def to(self, device: torch.device) -> TrainBatch:
        """The batch with its tensors on `device`."""
        return replace(
            self,
            inputs_BT=self.inputs_BT.to(device),
            targets_BT=self.targets_BT.to(device),
            position_ids_BT=self.position_ids_BT.to(device),
            segment_ids_BT=self.segment_ids_BT.to(device),
            loss_mask_BT=self.loss_mask_BT.to(device),
            advantages_BT=self.advantages_BT.to(device),
            rollout_logprobs_BT=self.rollout_logprobs_BT.to(device),
        )


def build_batch(rows: Sequence[Row], *, pad_id: int, advantages: Sequence[Sequence[float]] | None = None) -> TrainBatch:
    """The tensors of `rows`, shifted once and padded on the right.

    Args:
        advantages: one number per sample, in the shape of `rows`.

    The totals of the batch are its own; `with_step_totals` replaces them where a step has several batches.
    """
    num_positions = [sum(len(sample.tokens) - 1 for sample in row) for row in rows]
    shape = (len(rows), max(num_positions))
    assert shape[1] > 0, "a batch needs at least one sample of two tokens"
    inputs_BT = torch.full(shape, pad_id, dtype=torch.long)
    targets_BT = torch.full(shape, pad_id, dtype=torch.long)
    position_ids_BT = torch.zeros(shape, dtype=torch.long)
    segment_ids_BT = torch.zeros(shape, dtype=torch.long)
    loss_mask_BT = torch.zeros(shape)
    advantages_BT = torch.zeros(shape)
    rollout_logprobs_BT = torch.zeros(shape)
    for b, row in enumerate(rows):
        start = 0
        for s, sample in enumerate(row):
            end = start + len(sample.tokens) - 1
            tokens = torch.tensor(sample.tokens)
            inputs_BT[b, start:end] = tokens[:-1]
            targets_BT[b, start:end] = tokens[1:]
            position_ids_BT[b, start:end] = torch.arange(end - start)
            segment_ids_BT[b, start:end] = s + 1
            loss_mask_BT[b, start:end] = torch.tensor(sample.loss_mask[1:])
            if sample.rollout_log_probs is not None:
                rollout_logprobs_BT[b, start:end] = torch.tensor(sample.rollout_log_probs[1:])
            if advantages is not None:
                advantages_BT[b, start:end] = advantages[b][s]
            start = end
        position_ids_BT[b, start:] = torch.arange(shape[1] - start)
    return TrainBatch(
        inputs_BT=inputs_BT,
        targets_BT=targets_BT,
        position_ids_BT=position_ids_BT,
        segment_ids_BT=segment_ids_BT,
        loss_mask_BT=loss_mask_BT,
        advantages_BT=advantages_BT,
        rollout_logprobs_BT=rollout_logprobs_BT,
        num_loss_tokens=float(loss_mask_BT.sum()),
        num_scored_tokens=float(loss_mask_BT.sum()),
        num_samples=sum(any(sample.loss_mask[1:]) for row in rows for sample in row),
        is_packed=any(len(row) > 1 for row in rows),
    )


def with_step_totals(batches: Sequence[TrainBatch], samples: Iterable[Sample]) -> list[TrainBatch]:
    """The micro-batches of one step with the totals of all its samples, so that their losses add up to the step's.

    Args:
        samples: every sample of the step, also those that no batch holds because they give no gradient.
    """
    masks = [sample.loss_mask[1:] for sample in samples]
    num_loss_tokens = sum(sum(mask) for mask in masks)
    num_samples = sum(any(mask) for mask in masks)
    num_scored_tokens = sum(batch.num_scored_tokens for batch in batches)
    return [
        replace(batch, num_loss_tokens=num_loss_tokens, num_scored_tokens=num_scored_tokens, num_samples=num_samples)
        for batch in batches
    ]


def block_causal_mask(segment_ids_BT: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """(B, 1, T, T) to add to attention scores: 0 where query t may read key u, -inf elsewhere.

    It may where u <= t lies in the same sample. Padding reads padding, so that no query is left with nothing.
    """
    same_segment_BTT = segment_ids_BT[:, :, None] == segment_ids_BT[:, None, :]
    # Not booleans: a model without fused attention would add them to its scores as 0 and 1.
    mask_BTT = torch.zeros_like(same_segment_BTT, dtype=dtype)
    return mask_BTT.masked_fill_(~torch.tril(same_segment_BTT), -math.inf)[:, None]
