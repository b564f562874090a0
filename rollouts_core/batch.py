"""Turn samples into the tensors of one forward pass. The one place that shifts and pads.

Not here: which samples form a batch (sft.py, rl.py), the loss (algorithms/loss.py).

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

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from rollouts_core.types import Sample

Row = Sequence[Sample]
"""Samples that share one row of a batch, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch:
    """Tensors of one forward and backward pass, all of shape (B, T); index t speaks about `targets_BT[:, t]`.

    A step here is one optimizer update: its totals count all batches whose gradients are added up for it.
    """

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
    """Advantage of each target, or of the sample that it belongs to; 0 in SFT."""
    rollout_logprobs_BT: Tensor
    """log p(target) when it was sampled, nats, by the engine; 0 in SFT."""
    old_logprobs_BT: Tensor | None = None
    """log p(target) before the step's first update, nats, by the trainer; None where this pass is that update."""
    ref_logprobs_BT: Tensor | None = None
    """log p(target) by the model that training started from, nats; None where nothing compares with it."""
    old_values_BT: Tensor | None = None
    """The value head's prediction before the step's first update; None without a value head."""
    returns_BT: Tensor | None = None
    """What the value head should predict; None without a value head."""
    group_tokens_BT: Tensor | None = None
    """Sum of the loss mask over the step's samples of the same prompt; only where the loss averages by prompt."""
    num_loss_tokens: float
    """Sum of the loss mask over every micro-batch and rank of the step: the divisor of token means."""
    num_scored_tokens: float
    """Sum of the loss mask over the rows of the step's batches only: the divisor of metrics."""
    num_samples: int
    """Samples with a trained token over every micro-batch and rank of the step: the divisor of sample means."""
    num_groups: int = 1
    """Groups with a trained token over every micro-batch and rank of the step: the divisor of prompt means."""
    is_packed: bool
    """Whether some row holds more than one sample."""
    sample_ids: tuple[str, ...] = ()
    """The samples in it by prompt and place, for messages."""

    def to(self, device: torch.device) -> TrainBatch:
        """The batch with its tensors on `device`."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        moved: dict[str, Any] = {name: v.to(device) for name, v in values.items() if isinstance(v, Tensor)}
        return replace(self, **moved)


def build_batch(
    rows: Sequence[Row], *, pad_id: int, advantages: Sequence[Sequence[Tensor | float]] | None = None
) -> TrainBatch:
    """The tensors of `rows`, shifted once and padded on the right.

    Args:
        advantages: in the shape of `rows`, one number per sample or a tensor with one for each of its positions.

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
    rollout_logprobs_BT = torch.zeros(shape)
    for b, row in enumerate(rows):
        for s, (span, sample) in enumerate(zip(row_spans(row), row, strict=True)):
            tokens = torch.tensor(sample.tokens)
            inputs_BT[b, span] = tokens[:-1]
            targets_BT[b, span] = tokens[1:]
            position_ids_BT[b, span] = torch.arange(len(tokens) - 1)
            segment_ids_BT[b, span] = s + 1
            loss_mask_BT[b, span] = torch.tensor(sample.loss_mask[1:])
            if sample.rollout_log_probs is not None:
                rollout_logprobs_BT[b, span] = torch.tensor(sample.rollout_log_probs[1:])
        position_ids_BT[b, num_positions[b] :] = torch.arange(shape[1] - num_positions[b])
    return TrainBatch(
        inputs_BT=inputs_BT,
        targets_BT=targets_BT,
        position_ids_BT=position_ids_BT,
        segment_ids_BT=segment_ids_BT,
        loss_mask_BT=loss_mask_BT,
        advantages_BT=(
            torch.zeros(shape) if advantages is None else spread_over_rows(advantages, rows, num_positions=shape[1])
        ),
        rollout_logprobs_BT=rollout_logprobs_BT,
        num_loss_tokens=float(loss_mask_BT.sum()),
        num_scored_tokens=float(loss_mask_BT.sum()),
        num_samples=sum(any(sample.loss_mask[1:]) for row in rows for sample in row),
        num_groups=len({sample.group_index for row in rows for sample in row if any(sample.loss_mask[1:])}),
        is_packed=any(len(row) > 1 for row in rows),
        sample_ids=tuple(_name_sample(sample) for row in rows for sample in row),
    )


def _name_sample(sample: Sample) -> str:
    if "row" in sample.metadata and "prompt_id" not in sample.metadata:
        return f"row {sample.metadata['row']}"
    return f"{sample.metadata.get('prompt_id', sample.group_index)}/{sample.index}"


def with_step_totals(
    batches: Sequence[TrainBatch], samples: Iterable[Sample], *, count_untrained: bool = False
) -> list[TrainBatch]:
    """The micro-batches of one step with the totals of all its samples, so that their losses add up to the step's.

    Args:
        samples: every sample of the step, also those that no batch holds because they give no gradient.
        count_untrained: samples and groups without a trained token count, too.
    """
    trained = [sample for sample in samples if count_untrained or any(sample.loss_mask[1:])]
    num_scored_tokens = sum(batch.num_scored_tokens for batch in batches)
    return [
        replace(
            batch,
            num_loss_tokens=sum(sum(sample.loss_mask[1:]) for sample in trained),
            num_scored_tokens=num_scored_tokens,
            num_samples=len(trained),
            num_groups=len({sample.group_index for sample in trained}),
        )
        for batch in batches
    ]


def row_spans(row: Row) -> list[slice]:
    """Where each sample's positions lie in its row."""
    ends = list(itertools.accumulate(len(sample.tokens) - 1 for sample in row))
    return [slice(end - len(sample.tokens) + 1, end) for end, sample in zip(ends, row, strict=True)]


def spread_over_rows(values: Sequence[Sequence[Tensor | float]], rows: Sequence[Row], *, num_positions: int) -> Tensor:
    """(B, T) with each sample's values at its positions and 0 elsewhere.

    Args:
        values: per sample, in the shape of `rows`: one number, or a tensor with one for each of its positions.
    """
    spread_BT = torch.zeros(len(rows), num_positions)
    for b, row in enumerate(rows):
        for span, value in zip(row_spans(row), values[b], strict=True):
            spread_BT[b, span] = value
    return spread_BT


def split_by_sample(values_BT: Tensor, rows: Sequence[Row]) -> list[list[Tensor]]:
    """Each sample's values, in the shape of `rows`: the inverse of `spread_over_rows`."""
    return [[values_BT[b, span] for span in row_spans(row)] for b, row in enumerate(rows)]


def block_causal_mask(
    segment_ids_BT: Tensor, dtype: torch.dtype = torch.float32, *, window: int | None = None
) -> Tensor:
    """(B, 1, T, T) to add to attention scores: 0 where query t may read key u, -inf elsewhere.

    It may where u <= t lies in the same sample, and with a `window` no further back than t - u < window. Padding
    reads padding, so that no query is left with nothing.
    """
    may_read_BTT = torch.tril(segment_ids_BT[:, :, None] == segment_ids_BT[:, None, :])
    if window is not None:
        may_read_BTT = torch.triu(may_read_BTT, diagonal=1 - window)
    # Not booleans: a model without fused attention would add them to its scores as 0 and 1.
    mask_BTT = torch.zeros_like(may_read_BTT, dtype=dtype)
    return mask_BTT.masked_fill_(~may_read_BTT, -math.inf)[:, None]
