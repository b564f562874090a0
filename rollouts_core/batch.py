"""Turn samples into the tensors of one forward pass. Only this module shifts targets and pads rows.

A sample of n tokens has n - 1 positions. At position i, the model reads token i and is scored on its prediction of
token i + 1. Each per-token array of the sample is cut to its last n - 1 entries, so entry i describes `targets[i]`:

    sample.tokens      5 7 9          inputs     5 7
    sample.loss_mask   0 1 1          targets    7 9
                                      loss_mask  1 1

A row holds one sample, or several samples packed end to end. `position_ids` restart at 0 with each sample.
`segment_ids` number the samples of a row, so that attention does not cross from one sample to another; padding has
segment 0. Samples of the same prompt can share its tokens: the prompt is stored once, as its own segment, and each of
these samples also attends to that segment (`prompt_ids`).

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
    """Indices into the positions of a batch whose rows are laid end to end.

    The indices are computed on the CPU, so that no caller waits for a GPU.
    """

    scored_N: Tensor
    """Indices of the N positions whose targets have a weight in the loss."""
    tokens_M: Tensor
    """Indices of the M positions that are not padding."""
    bounds: Tensor
    """Index, among the M positions, at which each sample starts, followed by M itself; int32. The indices are valid
    only if no samples of a row share a prompt."""
    longest: int
    """Number of positions of the longest sample."""
    num_segments: int
    """The largest segment id of the batch plus 1; padding (id 0) counts as a segment."""
    largest_target: int
    """The largest target token id with a weight in the loss; -1 if no target has a weight."""
    shares_prompts: bool
    """Whether some samples of a row share a prompt."""

    def to(self, device: torch.device) -> RowLayout:
        return replace(
            self,
            scored_N=to_device(self.scored_N, device),
            tokens_M=to_device(self.tokens_M, device),
            bounds=to_device(self.bounds, device),
        )


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on `device`.

    A transfer to a GPU goes through pinned memory, so that the caller does not wait for the transfer.
    """
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch:
    """Tensors of one forward and backward pass, all of shape (B, T).

    Index t of each tensor describes `targets_BT[:, t]`.

    In this class, a step is one optimizer update. Fields with totals of a step count all batches whose gradients are
    added for that update.
    """

    inputs_BT: Tensor
    """Token ids that the model reads."""
    targets_BT: Tensor
    """Token ids to predict."""
    position_ids_BT: Tensor
    """Positions within each sample, from 0. Padding has position 0, because a packed row can be longer than the model's
    position limit."""
    segment_ids_BT: Tensor
    """1, 2, ... for the samples and shared prompts of a row, 0 for padding."""
    prompt_ids_BT: Tensor
    """Id of the shared prompt's segment, to which the position also attends. A position without a shared prompt has its
    own segment id."""
    loss_mask_BT: Tensor
    """Weight of each target in the loss."""
    advantages_BT: Tensor
    """Advantage of each target; 0 in SFT. All targets of a sample have the same advantage unless advantages are per
    token."""
    rollout_logprobs_BT: Tensor
    """log p(target) that the engine reported when it sampled the target, nats; 0 in SFT."""
    old_logprobs_BT: Tensor | None = None
    """log p(target) under the trainer's weights before the step's first update, nats; None in the first update
    itself."""
    ref_logprobs_BT: Tensor | None = None
    """log p(target) under the initial model of the training, nats; None if the loss does not use it."""
    old_values_BT: Tensor | None = None
    """The value head's prediction before the step's first update; None without a value head."""
    returns_BT: Tensor | None = None
    """Target value for the value head; None without a value head."""
    group_tokens_BT: Tensor | None = None
    """For each position: sum of the loss mask over all samples of the same prompt in the step; None unless the loss
    averages per prompt."""
    num_loss_tokens: float
    """Sum of the loss mask over all micro-batches and ranks of the step: the divisor of means per token."""
    num_scored_tokens: float
    """Sum of the loss mask over the rows of the step's batches: the divisor of metrics."""
    num_samples: int
    """Number of samples with a trained token, over all micro-batches and ranks of the step: the divisor of means per
    sample."""
    num_groups: int = 1
    """Number of groups with a trained token, over all micro-batches and ranks of the step: the divisor of means per
    prompt."""
    is_packed: bool
    """Whether some row holds more than one segment."""
    sample_ids: tuple[str, ...] = ()
    """Names of the samples for errors: prompt id and index in the group, or the row of the data."""
    _layout: RowLayout | None = field(default=None, init=False, repr=False, compare=False)
    """The layout, computed at first use. `dataclasses.replace` resets the layout, because the new batch may have other
    rows."""

    @property
    def layout(self) -> RowLayout:
        """The layout of the rows. If `to` moved the batch to a GPU, the layout was computed on the CPU and copied."""
        if self._layout is None:
            object.__setattr__(self, "_layout", find_layout(self))
        assert self._layout is not None, "it was just set"
        return self._layout

    def to(self, device: torch.device) -> TrainBatch:
        """Return the batch with its tensors on `device`. Copies to a GPU are asynchronous."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        moved: dict[str, Any] = {name: to_device(v, device) for name, v in values.items() if isinstance(v, Tensor)}
        batch = replace(self, **moved)
        object.__setattr__(batch, "_layout", self.layout.to(device))
        return batch


def find_layout(batch: TrainBatch) -> RowLayout:
    """Compute the layout of a batch. For a batch on a GPU, the function blocks until the batch has arrived on the
    GPU."""
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
    """Positions of one sample in its row, n - 1 for n tokens.

    Other samples may share the leading positions (the prompt).
    """

    shared: slice
    """Positions of the shared prompt; empty if the sample shares no prompt."""
    own: slice
    """The sample's positions after the shared prompt."""
    prompt_segment: int
    """Segment id of the shared prompt; the sample's own segment id if the sample shares no prompt."""
    segment: int
    """Segment of the sample's own positions."""

    @property
    def num_shared(self) -> int:
        return int(self.shared.stop - self.shared.start)


def place_samples(row: Row, *, share_prompts: bool = False) -> list[Placement]:
    """Lay the samples of a row end to end.

    With `share_prompts`, neighbouring samples of one group share their prompt.
    """
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
    """Split a row into runs of samples that share a prompt. Each result is a run and its number of shared positions.

    The shared positions are the leading positions at which all samples of the run have equal tokens and no target is
    scored. The next sample of the same group joins a run if their leading tokens are equal, and if the run has only one
    sample or keeps its number of shared positions.
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
    """Number of positions before the first scored position. If no position is scored, all positions but the last
    count."""
    scored = (place for place, weight in enumerate(sample.loss_mask) if weight and place)
    return next(scored, len(sample.tokens) - 1) - 1


def build_batch(
    rows: Sequence[Row],
    *,
    pad_id: int,
    advantages: Sequence[Sequence[Tensor | float]] | None = None,
    share_prompts: bool = False,
) -> TrainBatch:
    """Build the tensors of `rows`: targets are shifted by one position, and rows are padded on the right.

    Args:
        advantages: in the shape of `rows`: for each sample one number, or a tensor with one value per position.
        share_prompts: neighbouring samples of one group share their prompt. The loss stays the same, and the forward
            pass needs less computation.

    The totals count only this batch. If a step has several batches, `with_step_totals` sets the totals of the step.
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
    """One row of a batch without padding.

    The row is built from lists, because building a tensor per sample would dominate the run time.
    """

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
    """Return a (B, T) tensor of the rows, padded with `value` on the right.

    The type of `value` (int or float) sets the dtype.
    """
    dtype = torch.long if isinstance(value, int) else torch.float32
    return torch.tensor([row + [value] * (length - len(row)) for row in rows], dtype=dtype)


def _name_sample(sample: Sample) -> str:
    if "row" in sample.metadata and "prompt_id" not in sample.metadata:
        return f"row {sample.metadata['row']}"
    return f"{sample.metadata.get('prompt_id', sample.group_index)}/{sample.index}"


def with_step_totals(
    batches: Sequence[TrainBatch], samples: Iterable[Sample], *, count_untrained: bool = False
) -> list[TrainBatch]:
    """Return the micro-batches of one step with the totals of the whole step, so that their losses sum to the step's
    loss.

    Args:
        samples: all samples of the step, including samples without a gradient, which are in no micro-batch.
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
    """Return a (B, T) tensor with each sample's values at its own positions, and 0 at all other positions.

    Args:
        values: in the shape of `layouts`: for each sample one number, or a tensor with one value per position.
    """
    spread_BT = torch.zeros(len(layouts), num_positions)
    for b, layout in enumerate(layouts):
        for place, value in zip(layout, values[b], strict=True):
            of_each = isinstance(value, Tensor) and value.ndim == 1
            spread_BT[b, place.own] = value[place.num_shared :] if of_each else value  # type: ignore[index]
    return spread_BT


def split_by_sample(values_BT: Tensor, layouts: Sequence[Sequence[Placement]]) -> list[list[Tensor]]:
    """Return each sample's values in the shape of `layouts`; shared positions have 0.

    The inverse of `spread_over_rows`.
    """
    return [
        [torch.nn.functional.pad(values_BT[b, place.own], (place.num_shared, 0)) for place in layout]
        for b, layout in enumerate(layouts)
    ]


def block_causal_mask(batch: TrainBatch, dtype: torch.dtype = torch.float32, *, window: int | None = None) -> Tensor:
    """Return a (B, 1, T, T) mask to add to attention scores: 0 if query t may read key u, otherwise -inf.

    Query t may read key u <= t of the same sample or of its shared prompt. With a `window`, u must also be fewer than
    `window` positions back. Padding may read padding, because a query without any key would give NaN.
    """
    keys_B1T = batch.segment_ids_BT[:, None, :]
    may_read_BTT = torch.tril(
        (batch.segment_ids_BT[:, :, None] == keys_B1T) | (batch.prompt_ids_BT[:, :, None] == keys_B1T)
    )
    if window is not None:
        may_read_BTT &= batch.position_ids_BT[:, :, None] - batch.position_ids_BT[:, None, :] < window
    # A float mask, because a model without fused attention would add a boolean mask to its scores as 0 and 1.
    mask_BTT = torch.zeros_like(may_read_BTT, dtype=dtype)
    return mask_BTT.masked_fill_(~may_read_BTT, -math.inf)[:, None]
