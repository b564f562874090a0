"""Pins the one shift: index t of every tensor of a batch speaks about target t, and samples of a row stay apart.

Without it the loss would be taken on the wrong token, or a packed neighbour would leak into a sample, and training
would only look a little worse.
"""

from dataclasses import replace

import pytest
import torch

from rollouts_core.algorithms.loss import TokenScores, cross_entropy_loss, token_logprobs
from rollouts_core.batch import (
    block_causal_mask,
    build_batch,
    place_samples,
    split_by_sample,
    spread_over_rows,
    with_step_totals,
)
from rollouts_core.types import Sample
from tests.rollouts_core.make import make_random_samples, make_sample


def test_shift_scores_the_next_token() -> None:
    sample = make_sample([5, 7, 9], [0, 1, 1], [0.0, -0.5, -0.25])
    batch = build_batch([[sample]], advantages=[[1.0]], pad_id=0)
    assert batch.inputs_BT.tolist() == [[5, 7]]
    assert batch.targets_BT.tolist() == [[7, 9]]
    assert batch.loss_mask_BT.tolist() == [[1, 1]]
    assert batch.rollout_logprobs_BT.tolist() == [[-0.5, -0.25]]
    assert batch.advantages_BT.tolist() == [[1, 1]]


@pytest.mark.parametrize("num_per_row", [1, 3])
def test_a_perfect_next_token_model_has_loss_zero(num_per_row: int) -> None:
    samples = make_random_samples(6)
    rows = [samples[i : i + num_per_row] for i in range(0, 6, num_per_row)]
    batch = build_batch(rows, pad_id=0)
    logits_BTV = torch.zeros(*batch.inputs_BT.shape, 25)
    for b, row in enumerate(rows):
        next_tokens = [token for sample in row for token in sample.tokens[1:]]
        for t, token in enumerate(next_tokens):
            logits_BTV[b, t, token] = 100.0
    loss, _ = cross_entropy_loss(TokenScores(logprobs_BT=token_logprobs(logits_BTV, batch.targets_BT)), batch)
    assert float(loss) == 0.0


def test_a_model_that_repeats_its_input_is_not_perfect() -> None:
    batch = build_batch([[make_sample([5, 7, 9])]], pad_id=0)
    logits_BTV = 100.0 * torch.nn.functional.one_hot(batch.inputs_BT, 25).float()
    loss, _ = cross_entropy_loss(TokenScores(logprobs_BT=token_logprobs(logits_BTV, batch.targets_BT)), batch)
    assert float(loss) == 100.0


def test_packed_samples_keep_their_own_positions_segments_and_advantages() -> None:
    batch = build_batch([[make_sample([1, 2, 3]), make_sample([4, 5])]], advantages=[[0.5, -2.0]], pad_id=0)
    assert batch.inputs_BT.tolist() == [[1, 2, 4]]
    assert batch.targets_BT.tolist() == [[2, 3, 5]]
    assert batch.position_ids_BT.tolist() == [[0, 1, 0]]
    assert batch.segment_ids_BT.tolist() == [[1, 1, 2]]
    assert batch.advantages_BT.tolist() == [[0.5, 0.5, -2.0]]


def test_the_last_token_of_a_sample_never_predicts_its_packed_neighbour() -> None:
    batch = build_batch([[make_sample([1, 2, 3]), make_sample([4, 5, 6])]], pad_id=0)
    pairs = list(zip(batch.inputs_BT[0].tolist(), batch.targets_BT[0].tolist(), strict=True))
    assert pairs == [(1, 2), (2, 3), (4, 5), (5, 6)]


def test_padding_has_segment_zero_and_no_weight() -> None:
    batch = build_batch([[make_sample([1, 2, 3, 4])], [make_sample([5, 6])]], advantages=[[1.0], [1.0]], pad_id=9)
    assert batch.inputs_BT[1].tolist() == [5, 9, 9]
    assert batch.segment_ids_BT[1].tolist() == [1, 0, 0]
    assert batch.loss_mask_BT[1].tolist() == [1, 0, 0]
    assert batch.advantages_BT[1].tolist() == [1, 0, 0]


def test_a_mask_on_the_first_token_is_dropped_because_nothing_predicts_it() -> None:
    batch = build_batch([[make_sample([1, 2, 3], [1, 1, 0])]], pad_id=0)
    assert batch.loss_mask_BT.tolist() == [[1, 0]]
    assert batch.num_loss_tokens == 1


def test_a_sample_trained_only_on_its_first_token_does_not_count_as_a_sample() -> None:
    batch = build_batch([[make_sample([1, 2], [1, 0]), make_sample([3, 4])]], pad_id=0)
    assert batch.num_samples == 1


def test_weights_of_the_loss_mask_are_kept() -> None:
    batch = build_batch([[make_sample([1, 2, 3], [0, 0.5, 0.25])]], pad_id=0)
    assert batch.loss_mask_BT.tolist() == [[0.5, 0.25]]
    assert batch.num_loss_tokens == 0.75


@pytest.mark.parametrize(("rows", "is_packed"), [([[0], [1]], False), ([[0, 1]], True), ([[0], [1, 2]], True)])
def test_a_batch_knows_whether_it_is_packed(rows: list[list[int]], is_packed: bool) -> None:
    samples = make_random_samples(3)
    assert build_batch([[samples[i] for i in row] for row in rows], pad_id=0).is_packed is is_packed


def test_step_totals_count_every_sample_also_those_in_no_batch() -> None:
    held, left_out = make_sample([1, 2, 3]), make_sample([1, 2, 3, 4], [0, 1, 1, 0.5])
    [batch] = with_step_totals([build_batch([[held]], pad_id=0)], [held, left_out])
    assert batch.num_loss_tokens == 4.5
    assert batch.num_samples == 2


def test_a_query_reads_its_own_past_and_nothing_of_its_neighbours() -> None:
    batch = build_batch([[make_sample([1, 2, 3]), make_sample([4, 5, 6])], [make_sample([1, 2, 3, 4, 5, 6])]], pad_id=0)
    allowed = (block_causal_mask(batch)[0, 0] == 0).int().tolist()
    assert allowed == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [0, 0, 1, 0, 0],
        [0, 0, 1, 1, 0],
        [0, 0, 0, 0, 1],
    ]


def test_every_query_has_something_to_read() -> None:
    batch = build_batch([make_random_samples(3), make_random_samples(1, seed=1)], pad_id=0)
    assert bool((block_causal_mask(batch) == 0).any(dim=-1).all())


def shared_row() -> list[Sample]:
    """Two completions of the prompt 5 6 7, and a sample of another group."""
    prompt = [5, 6, 7]
    samples = [make_sample([*prompt, 1, 2, 3], [0, 0, 0, 1, 1, 1], [0, 0, 0, -0.1, -0.2, -0.3])]
    samples += [make_sample([*prompt, 4, 9], [0, 0, 0, 1, 0.5], [0, 0, 0, -0.4, -0.5])]
    return [*samples, replace(make_sample([8, 8]), group_index=1)]


def test_a_shared_prompt_stands_once() -> None:
    batch = build_batch([shared_row()], advantages=[[2.0, -1.0, 0.5]], pad_id=0, share_prompts=True)
    assert batch.inputs_BT.tolist() == [[5, 6, 7, 1, 2, 7, 4, 8]]
    assert batch.targets_BT.tolist() == [[6, 7, 1, 2, 3, 4, 9, 8]]
    assert batch.position_ids_BT.tolist() == [[0, 1, 2, 3, 4, 2, 3, 0]]
    assert batch.segment_ids_BT.tolist() == [[1, 1, 2, 2, 2, 3, 3, 4]]
    assert batch.prompt_ids_BT.tolist() == [[1, 1, 1, 1, 1, 1, 1, 4]]
    assert batch.loss_mask_BT.tolist() == [[0, 0, 1, 1, 1, 1, 0.5, 1]]
    assert batch.advantages_BT.tolist() == [[0, 0, 2, 2, 2, -1, -1, 0.5]]
    assert batch.rollout_logprobs_BT[0, 2:7].tolist() == pytest.approx([-0.1, -0.2, -0.3, -0.4, -0.5])
    assert (batch.num_samples, batch.num_loss_tokens, batch.is_packed) == (3, 5.5, True)


def test_completions_read_their_shared_prompt_and_not_each_other() -> None:
    batch = build_batch([shared_row()], pad_id=0, share_prompts=True)
    allowed = (block_causal_mask(batch)[0, 0] == 0).int().tolist()
    assert allowed == [
        [1, 0, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0, 0],
        [1, 1, 1, 1, 0, 0, 0, 0],
        [1, 1, 1, 1, 1, 0, 0, 0],
        [1, 1, 0, 0, 0, 1, 0, 0],
        [1, 1, 0, 0, 0, 1, 1, 0],
        [0, 0, 0, 0, 0, 0, 0, 1],
    ]


@pytest.mark.parametrize(
    ("others", "num_shared"),
    [
        ([], 0),
        ([make_sample([5, 6, 7, 2], [0, 0, 0, 1])], 2),
        ([make_sample([5, 6, 9, 2], [0, 0, 0, 1])], 2),
        ([make_sample([5, 9, 7, 2], [0, 0, 0, 1])], 0),
        ([make_sample([5, 6, 7, 2], [0, 0, 1, 1])], 1),
        ([make_sample([5, 6, 7, 2], [0, 1, 1, 1])], 0),
        ([make_sample([5, 6], [0, 0])], 0),
    ],
)
def test_only_tokens_that_are_read_alike_and_scored_in_no_sample_are_shared(
    others: list[Sample], num_shared: int
) -> None:
    samples = [make_sample([5, 6, 7, 1], [0, 0, 0, 1]), *others]
    layout = place_samples(samples, share_prompts=True)
    assert [place.num_shared for place in layout] == [num_shared] * len(samples)
    assert layout[-1].own.stop == sum(len(s.tokens) - 1 for s in samples) - num_shared * (len(samples) - 1)


def test_splitting_by_sample_undoes_the_rows() -> None:
    row = shared_row()
    values = [torch.tensor([0.0, 0, 1, 2, 3]), torch.tensor([0.0, 0, 4, 5]), torch.tensor([6.0])]
    layouts = [place_samples(row, share_prompts=True), place_samples(row[::-1])]
    spread_BT = spread_over_rows([values, values[::-1]], layouts, num_positions=10)
    assert spread_BT.tolist() == [[0, 0, 1, 2, 3, 4, 5, 6, 0, 0], [6, 0, 0, 4, 5, 0, 0, 1, 2, 3]]
    found = split_by_sample(spread_BT, layouts)
    assert [v.tolist() for v in found[0]] == [v.tolist() for v in values]
    assert [v.tolist() for v in found[1]] == [v.tolist() for v in values[::-1]]
