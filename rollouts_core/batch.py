"""Turn samples into the tensors of one forward pass. No other module shifts or pads.

A sample of n tokens gives n - 1 positions: position i reads token i and is scored on token i + 1. Every per-token
array of the sample is cut to its last n - 1 entries, so that index i describes `targets[i]`:

    sample.tokens      5 7 9          inputs     5 7
    sample.loss_mask   0 1 1          targets    7 9
                                      loss_mask  1 1

A row holds one sample, or several packed end to end. `position_ids` restart with each sample. `segment_ids` separate
samples so that attention does not cross between them; padding has segment 0. Samples of a group can share their
prompt: the prompt is stored once, as its own segment, and the samples also attend to it (`prompt_ids`).

    two samples of prompt 5 6 7    inputs      5 6 | 7 1 1 | 7 2        the prompt's last token predicts a different
    share it                       segments    1 1 | 2 2 2 | 3 3        token in each sample, so each sample has it
                                   prompts     1 1 | 1 1 1 | 1 1

B rows of a micro-batch, T token positions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from rollouts_core.types import Sample

Row = Sequence[Sample]
"""Samples that share one row of a batch, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLayout:
    """Indices into the rows of a batch, laid end to end. Computed on the host, so that no caller waits for a GPU."""

    scored_N: Tensor
    """Indices of the N positions with a weight in the loss."""
    tokens_M: Tensor
    """Indices of the M positions that are not padding."""
    bounds: Tensor
    """Start of each sample among the M positions, then M; int32. Valid for rows that share no prompts."""
    longest: int
    """Number of positions of the longest sample."""
    num_segments: int
    """The largest segment id, plus 1 for padding."""
    largest_target: int
    """The largest scored token id; -1 if nothing is scored."""
    shares_prompts: bool
    """Whether some samples of a row share a prompt."""

    def to(self, device: torch.device) -> RowLayout:
        """The layout with its tensors on `device`."""
        return replace(
            self,
            scored_N=to_device(self.scored_N, device),
            tokens_M=to_device(self.tokens_M, device),
            bounds=to_device(self.bounds, device),
        )


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Move a tensor. A copy to a GPU uses pinned memory, so the caller does not wait for the copy."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch:
    """Tensors of one forward and backward pass, all of shape (B, T); index t describes `targets_BT[:, t]`.

    A step here is one optimizer update: its totals count all batches whose gradients are added for it.
    """

    inputs_BT: Tensor
    """Token ids that the model reads."""
    targets_BT: Tensor
    """Token ids to predict."""
    position_ids_BT: Tensor
    """Positions within each sample, from 0; 0 for padding, since a packed row can exceed a model's longest position."""
    segment_ids_BT: Tensor
    """1, 2, ... for the samples and shared prompts of a row, 0 for padding."""
    prompt_ids_BT: Tensor
    """Segment of the shared prompt that a position also attends to; its own segment if the prompt is not shared."""
    loss_mask_BT: Tensor
    """Weight of each target in the loss."""
    advantages_BT: Tensor
    """Advantage of each target (equal within a sample unless per token); 0 in SFT."""
    rollout_logprobs_BT: Tensor
    """log p(target) by the engine when sampling, nats; 0 in SFT."""
    old_logprobs_BT: Tensor | None = None
    """log p(target) by the trainer before the step's first update, nats; None if this pass is the first update."""
    ref_logprobs_BT: Tensor | None = None
    """log p(target) by the model that training started from, nats; None if the loss does not use it."""
    old_values_BT: Tensor | None = None
    """The value head's prediction before the step's first update; None without a value head."""
    returns_BT: Tensor | None = None
    """Target of the value head; None without a value head."""
    group_tokens_BT: Tensor | None = None
    """Sum of the loss mask over the step's samples of the same prompt; set only if the loss averages by prompt."""
    num_loss_tokens: float
    """Sum of the loss mask over every micro-batch and rank of the step: the divisor of token means."""
    num_scored_tokens: float
    """Sum of the loss mask over the rows of the step's batches: the divisor of metrics."""
    num_samples: int
    """Samples with a trained token over every micro-batch and rank of the step: the divisor of sample means."""
    num_groups: int = 1
    """Groups with a trained token over every micro-batch and rank of the step: the divisor of prompt means."""
    is_packed: bool
    """Whether some row holds more than one segment."""
    sample_ids: tuple[str, ...] = ()
    """Names of the samples (prompt and place), for messages."""
    _layout: RowLayout | None = field(default=None, init=False, repr=False, compare=False)
    """Computed at first use. `replace` resets it, because the new batch may have other rows."""

    @property
    def layout(self) -> RowLayout:
        """The layout of the rows. A batch that `to` moved has a copy of the layout computed on the host."""
        if self._layout is None:
            object.__setattr__(self, "_layout", find_layout(self))
        assert self._layout is not None, "it was just set"
        return self._layout

    def to(self, device: torch.device) -> TrainBatch:
        """The batch with its tensors on `device`; copies to a GPU are asynchronous."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        moved: dict[str, Any] = {name: to_device(v, device) for name, v in values.items() if isinstance(v, Tensor)}
        batch = replace(self, **moved)
        object.__setattr__(batch, "_layout", self.layout.to(device))
        return batch


def find_layout(batch: TrainBatch) -> RowLayout:
    """Compute the layout of a batch. On a GPU this waits for the batch to arrive."""
    scored_N = torch.nonzero(batch.loss_mask_BT.flatten()).squeeze(1)
    tokens_M = torch.nonzero(batch.segment_ids_BT.flatten()).squeeze(1)
    starts = torch.nonzero(batch.position_ids_BT.flatten()[tokens_M] == 0).squeeze(1)
    bounds = torch.cat([starts, starts.new_tensor([len(tokens_M)])]).to(torch.int32)
    targets_N = batch.targets_BT.flatten()[scored_N]
    return RowLayout(
        scored_N=scored_N,
        tokens_M=tokens_M,
        bounds=bounds,
        longest=int(bounds.diff().max()) if len(starts) else 0,
        num_segments=int(batch.segment_ids_BT.max()) + 1,
        largest_target=int(targets_N.max()) if len(targets_N) else -1,
        shares_prompts=not torch.equal(batch.prompt_ids_BT, batch.segment_ids_BT),
    )


@dataclass(frozen=True, slots=True)
class Placement:
    """The n - 1 positions of one sample in its row. Other samples may share the first ones, the prompt."""

    shared: slice
    """Positions of the shared prompt; empty if nothing is shared."""
    own: slice
    """The positions after the shared positions."""
    prompt_segment: int
    """Segment of the shared prompt; the sample's own segment if nothing is shared."""
    segment: int
    """Segment of the sample's own positions."""

    @property
    def num_shared(self) -> int:
        return int(self.shared.stop - self.shared.start)


def place_samples(row: Row, *, share_prompts: bool = False) -> list[Placement]:
    """Lay samples end to end; with `share_prompts`, neighbours of one group share their prompt."""
    placements: list[Placement] = []
    end = segment = 0
    for samples, num_shared in group_sharers(row) if share_prompts else [([sample], 0) for sample in row]:
        shared = slice(end, end + num_shared)
        end = shared.stop
        prompt_segment = segment = segment + bool(num_shared)
        for sample in samples:
            segment += 1
            own = slice(end, end + len(sample.tokens) - 1 - num_shared)
            placements.append(Placement(shared, own, prompt_segment if num_shared else segment, segment))
            end = own.stop
    return placements


def group_sharers(row: Row) -> list[tuple[list[Sample], int]]:
    """Split a row into sets of samples that share a prompt, each with its number of shared positions.

    The shared positions are the leading ones with equal tokens on which no sample is scored. A neighbour of the same
    group joins a set unless this would shorten the shared part.
    """
    found: list[tuple[list[Sample], int]] = []
    for sample in row:
        num_unscored = _count_unscored_positions(sample)
        if found and found[-1][0][0].group_index == sample.group_index:
            samples, limit = found[-1]
            num_shared = min(limit, num_unscored)
            is_alike = num_shared > 0 and samples[0].tokens[:num_shared] == sample.tokens[:num_shared]
            if is_alike and (len(samples) == 1 or num_shared == limit):
                found[-1] = ([*samples, sample], num_shared)
                continue
        found.append(([sample], num_unscored))
    return [(samples, num_shared if len(samples) > 1 else 0) for samples, num_shared in found]


def _count_unscored_positions(sample: Sample) -> int:
    """Number of positions before the first scored position; all positions but one if nothing is scored."""
    scored = (place for place, weight in enumerate(sample.loss_mask) if weight and place)
    return next(scored, len(sample.tokens) - 1) - 1


def build_batch(
    rows: Sequence[Row],
    *,
    pad_id: int,
    advantages: Sequence[Sequence[Tensor | float]] | None = None,
    share_prompts: bool = False,
) -> TrainBatch:
    """The tensors of `rows`, shifted once and padded on the right.

    Args:
        advantages: in the shape of `rows`: one number per sample, or a tensor with one value per position.
        share_prompts: let neighbours of one group share their prompt. The loss is the same, with less computation.

    The totals count this batch only; `with_step_totals` replaces them if a step has several batches.
    """
    layouts = [place_samples(row, share_prompts=share_prompts) for row in rows]
    laid_out = [_lay_out(row, layout) for row, layout in zip(rows, layouts, strict=True)]
    num_positions = max(len(row.inputs) for row in laid_out)
    assert num_positions > 0, "a batch needs at least one sample of two tokens"
    loss_mask_BT = _pad([row.loss_mask for row in laid_out], num_positions, 0.0)
    spread_advantages = advantages or [[0.0] * len(row) for row in rows]
    return TrainBatch(
        inputs_BT=_pad([row.inputs for row in laid_out], num_positions, pad_id),
        targets_BT=_pad([row.targets for row in laid_out], num_positions, pad_id),
        position_ids_BT=torch.tensor(
            [row.position_ids + [0] * (num_positions - len(row.position_ids)) for row in laid_out]
        ),
        segment_ids_BT=_pad([row.segment_ids for row in laid_out], num_positions, 0),
        prompt_ids_BT=_pad([row.prompt_ids for row in laid_out], num_positions, 0),
        loss_mask_BT=loss_mask_BT,
        advantages_BT=spread_over_rows(spread_advantages, layouts, num_positions=num_positions),
        rollout_logprobs_BT=_pad([row.rollout_logprobs for row in laid_out], num_positions, 0.0),
        num_loss_tokens=float(loss_mask_BT.sum()),
        num_scored_tokens=float(loss_mask_BT.sum()),
        num_samples=sum(any(sample.loss_mask[1:]) for row in rows for sample in row),
        num_groups=len({sample.group_index for row in rows for sample in row if any(sample.loss_mask[1:])}),
        is_packed=any(len(row) > 1 for row in rows),
        sample_ids=tuple(_name_sample(sample) for row in rows for sample in row),
    )


@dataclass(slots=True)
class _RowOfBatch:
    """One row of a batch without padding, as lists: building a tensor per sample would dominate the run time."""

    inputs: list[int] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)
    position_ids: list[int] = field(default_factory=list)
    segment_ids: list[int] = field(default_factory=list)
    prompt_ids: list[int] = field(default_factory=list)
    loss_mask: list[float] = field(default_factory=list)
    rollout_logprobs: list[float] = field(default_factory=list)


def _lay_out(row: Row, layout: Sequence[Placement]) -> _RowOfBatch:
    filled = _RowOfBatch()
    for sample, place in zip(row, layout, strict=True):
        is_prompt_there = place.shared.stop <= len(filled.inputs)
        first, last = place.num_shared if is_prompt_there else 0, len(sample.tokens) - 1
        filled.inputs += sample.tokens[first:-1]
        filled.targets += sample.tokens[first + 1 :]
        filled.position_ids += range(first, last)
        filled.segment_ids += [place.prompt_segment] * (place.num_shared - first)
        filled.segment_ids += [place.segment] * (last - place.num_shared)
        filled.prompt_ids += [place.prompt_segment] * (last - first)
        filled.loss_mask += sample.loss_mask[first + 1 :]
        logprobs = sample.rollout_log_probs
        filled.rollout_logprobs += [0.0] * (last - first) if logprobs is None else logprobs[first + 1 :]
    return filled


def _pad(rows: Sequence[list[Any]], length: int, value: float) -> Tensor:  # Any: int or float
    """A (B, T) tensor of the rows, padded with `value` on the right, in the number type of `value`."""
    dtype = torch.long if isinstance(value, int) else torch.float32
    return torch.tensor([row + [value] * (length - len(row)) for row in rows], dtype=dtype)


def _name_sample(sample: Sample) -> str:
    if "row" in sample.metadata and "prompt_id" not in sample.metadata:
        return f"row {sample.metadata['row']}"
    return f"{sample.metadata.get('prompt_id', sample.group_index)}/{sample.index}"


def with_step_totals(
    batches: Sequence[TrainBatch], samples: Iterable[Sample], *, count_untrained: bool = False
) -> list[TrainBatch]:
    """The micro-batches of one step with the totals of all its samples, so that their losses sum to the step's loss.

    Args:
        samples: every sample of the step, also samples without a gradient, which no batch holds.
        count_untrained: also count samples and groups without a trained token.
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


def spread_over_rows(
    values: Sequence[Sequence[Tensor | float]], layouts: Sequence[Sequence[Placement]], *, num_positions: int
) -> Tensor:
    """(B, T) with each sample's values at its own positions and 0 elsewhere.

    Args:
        values: per sample, in the shape of `layouts`: one number, or a tensor with one value per position.
    """
    spread_BT = torch.zeros(len(layouts), num_positions)
    for b, layout in enumerate(layouts):
        for place, value in zip(layout, values[b], strict=True):
            of_each = isinstance(value, Tensor) and value.ndim == 1
            spread_BT[b, place.own] = value[place.num_shared :] if of_each else value  # type: ignore[index]
    return spread_BT


def split_by_sample(values_BT: Tensor, layouts: Sequence[Sequence[Placement]]) -> list[list[Tensor]]:
    """Each sample's values, in the shape of `layouts`; 0 at shared positions. The inverse of `spread_over_rows`."""
    return [
        [torch.nn.functional.pad(values_BT[b, place.own], (place.num_shared, 0)) for place in layout]
        for b, layout in enumerate(layouts)
    ]


def block_causal_mask(batch: TrainBatch, dtype: torch.dtype = torch.float32, *, window: int | None = None) -> Tensor:
    """(B, 1, T, T) to add to attention scores: 0 if query t may read key u, -inf elsewhere.

    Query t reads key u <= t of the same sample or its shared prompt; with a `window`, only if u is fewer than `window`
    positions back. Padding reads padding, so that every query reads something.
    """
    keys_B1T = batch.segment_ids_BT[:, None, :]
    may_read_BTT = torch.tril(
        (batch.segment_ids_BT[:, :, None] == keys_B1T) | (batch.prompt_ids_BT[:, :, None] == keys_B1T)
    )
    if window is not None:
        may_read_BTT &= batch.position_ids_BT[:, :, None] - batch.position_ids_BT[:, None, :] < window
    # Numbers, because a model without fused attention would add booleans to its scores as 0 and 1.
    mask_BTT = torch.zeros_like(may_read_BTT, dtype=dtype)
    return mask_BTT.masked_fill_(~may_read_BTT, -math.inf)[:, None]
