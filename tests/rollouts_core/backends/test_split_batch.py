"""Pins which rows a rank computes. Without it rows could be computed twice or not at all."""

from __future__ import annotations

import pytest
import torch

from rollouts_core.algorithms.loss import TokenScores
from rollouts_core.backends.split_batch import join_scores, split_batch
from rollouts_core.batch import TrainBatch, build_batch
from tests.rollouts_core.make import make_random_samples, make_sample


def make_batch(num_rows: int) -> TrainBatch:
    """Rows of two samples each."""
    samples = make_random_samples(2 * num_rows)
    return build_batch([samples[2 * i : 2 * i + 2] for i in range(num_rows)], pad_id=0)


def test_rows_are_dealt_in_turn() -> None:
    batch = build_batch([[make_sample([i, 7, 8])] for i in range(5)], pad_id=0)
    shares = split_batch(batch, 2)
    assert [share.batch.inputs_BT[:, 0].tolist() for share in shares] == [[0, 2, 4], [1, 3]]


def test_a_share_has_no_column_of_padding_alone() -> None:
    batch = build_batch([[make_sample([1, 2, 3, 4])], [make_sample([5, 6])]], pad_id=0)
    assert [share.batch.inputs_BT.shape for share in split_batch(batch, 2)] == [(1, 3), (1, 1)]


def test_a_rank_without_a_row_computes_one_position_that_counts_nothing() -> None:
    shares = split_batch(make_batch(2), 3)
    assert [share.is_idle for share in shares] == [False, False, True]
    assert shares[2].batch.inputs_BT.shape == (1, 1)
    assert shares[2].batch.loss_mask_BT.sum() == 0


def test_shares_keep_the_totals_of_the_step() -> None:
    batch = make_batch(4)
    assert {share.batch.num_loss_tokens for share in split_batch(batch, 3)} == {batch.num_loss_tokens}


@pytest.mark.parametrize("num_rows", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_joined_scores_are_those_of_the_whole_batch(num_rows: int, num_ranks: int) -> None:
    batch = make_batch(num_rows)
    values_BT = torch.rand(batch.inputs_BT.shape) * (batch.segment_ids_BT > 0)
    marked = [
        TokenScores(logprobs_BT=share.batch.rollout_logprobs_BT, values_BT=2 * share.batch.rollout_logprobs_BT)
        for share in split_batch(_with_logprobs(batch, values_BT), num_ranks)
    ]
    joined = join_scores(marked, batch)
    assert torch.equal(joined.logprobs_BT, values_BT)
    assert joined.values_BT is not None and torch.equal(joined.values_BT, 2 * values_BT)
    assert joined.entropies_BT is None


def _with_logprobs(batch: TrainBatch, values_BT: torch.Tensor) -> TrainBatch:
    from dataclasses import replace

    return replace(batch, rollout_logprobs_BT=values_BT)
