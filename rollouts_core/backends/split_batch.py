"""Split a batch into one share of rows per rank, and join the ranks' scores again.

    rows 0 1 2 3 4 over two ranks  ->  0 2 4 | 1 3      rows are sorted by length, so this balances the work
    row  0         over two ranks  ->  0 | idle         an idle rank computes one position with loss mask 0, because
                                                        every rank must take part in each gather of weights

B rows of a batch, T token positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from rollouts_core.algorithms.loss import TokenScores
from rollouts_core.batch import TrainBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The part of a batch that one rank computes."""

    batch: TrainBatch
    """The rows of this rank, with the totals of the whole step, so that losses and metrics of all shares add up."""
    is_idle: bool
    """True if the rank has no rows. The share then has one position with loss mask 0."""


def split_batch(batch: TrainBatch, num_ranks: int) -> list[Share]:
    """Split a batch into shares: every rank gets every `num_ranks`-th row, without columns that have only padding."""
    num_rows = len(batch.inputs_BT)
    return [
        _take_rows(batch, range(rank, num_rows, num_ranks)) if rank < num_rows else _idle_share(batch)
        for rank in range(num_ranks)
    ]


def join_scores(parts: Sequence[TokenScores], batch: TrainBatch) -> TokenScores:
    """Join the scores of all shares to scores of the batch. `parts` has the order of the ranks."""
    return TokenScores(
        logprobs_BT=_join([part.logprobs_BT for part in parts], batch),
        entropies_BT=_join_optional([part.entropies_BT for part in parts], batch),
        values_BT=_join_optional([part.values_BT for part in parts], batch),
    )


def _take_rows(batch: TrainBatch, rows: range) -> Share:
    at = list(rows)
    is_used_T = (batch.segment_ids_BT[at] > 0).any(dim=0)
    width = int(torch.nonzero(is_used_T).max()) + 1
    return Share(batch=_cut(batch, at, width), is_idle=False)


def _idle_share(batch: TrainBatch) -> Share:
    """A share of only the first position of the batch, with loss mask 0."""
    cut = _cut(batch, [0], 1)
    return Share(batch=replace(cut, loss_mask_BT=torch.zeros_like(cut.loss_mask_BT)), is_idle=True)


def _cut(batch: TrainBatch, rows: list[int], width: int) -> TrainBatch:
    values = {f.name: getattr(batch, f.name) for f in fields(batch)}
    tensors: dict[str, Any] = {
        name: value[rows, :width].contiguous() for name, value in values.items() if isinstance(value, Tensor)
    }
    return replace(batch, **tensors, is_packed=bool((tensors["segment_ids_BT"] > 1).any()))


def _join_optional(parts: Sequence[Tensor | None], batch: TrainBatch) -> Tensor | None:
    given = [part for part in parts if part is not None]
    return _join(given, batch) if given else None


def _join(parts: Sequence[Tensor], batch: TrainBatch) -> Tensor:
    joined_BT = torch.zeros(batch.inputs_BT.shape)
    for rank, part in enumerate(parts[: len(joined_BT)]):
        joined_BT[rank :: len(parts), : part.shape[1]] = part
    return joined_BT
