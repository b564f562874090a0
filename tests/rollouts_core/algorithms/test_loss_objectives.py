"""Pins by hand what each objective does with a ratio, and what each average divides by.

Without it a GSPO whose ratio is that of the token, or a mean over the wrong count, would still train, only worse.

Not here: PPO's clipping itself (test_loss.py), the terms that are added (test_loss_terms.py).
"""

import math
from dataclasses import replace

import pytest
import torch

from rollouts_core.algorithms.loss import (
    TokenScores,
    drift_mask,
    policy_loss,
    token_weights,
)
from rollouts_core.batch import build_batch
from rollouts_core.config import LossConfig, MismatchConfig
from tests.rollouts_core.algorithms.batches import (
    make_batch_of_ratios,
    make_one_token_batch,
    make_random_batch,
    score,
)
from tests.rollouts_core.make import make_sample

WIDE_CLIP = LossConfig(clip_low=0.2, clip_high=0.4)


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"),
    [
        (5.0, -2.0, 6.0),  # at most 3 * 2, not 5 * 2
        (2.5, -2.0, 5.0),  # below the limit
        (5.0, 2.0, -2.8),  # a positive advantage is clipped at 1.4 as before
    ],
)
def test_dual_clip_by_hand(ratio: float, advantage: float, expected: float) -> None:
    config = WIDE_CLIP.model_copy(update={"dual_clip": 3.0})
    logprobs_BT = torch.tensor([[math.log(ratio)]])
    loss, _ = policy_loss(TokenScores(logprobs_BT=logprobs_BT), make_one_token_batch(advantage), config)
    assert float(loss) == pytest.approx(expected, abs=1e-5)


def test_a_dual_clipped_token_has_no_gradient_and_counts_as_clipped() -> None:
    logprobs_BT = torch.tensor([[math.log(5.0)]], requires_grad=True)
    config = LossConfig(dual_clip=3.0)
    loss, metrics = policy_loss(TokenScores(logprobs_BT=logprobs_BT), make_one_token_batch(-2.0), config)
    loss.backward()
    assert logprobs_BT.grad is not None
    assert float(logprobs_BT.grad) == 0.0
    assert metrics["clip_share"] == 1.0


def test_gspo_uses_the_geometric_mean_ratio_of_the_completion() -> None:
    # log-ratios 0.3 and -0.1: mean 0.1 for both tokens; the other row is 0.4
    log_ratios = [[0.3, -0.1], [0.4]]
    config = LossConfig(objective="gspo", clip_high=9.0, aggregation="sequence_mean")
    loss, _ = policy_loss(score(log_ratios), make_batch_of_ratios(log_ratios, [2.0, 1.0]), config)
    assert float(loss) == pytest.approx(-(2 * math.exp(0.1) + math.exp(0.4)) / 2, abs=1e-6)


def test_gspo_over_several_trained_spans_is_one_mean_without_the_observation_between_them() -> None:
    sample = make_sample([1, 2, 3, 4], [0, 1, 0, 1])
    batch = build_batch([[sample]], advantages=[[1.0]], pad_id=0)
    config = LossConfig(objective="gspo", clip_high=9.0)
    loss, _ = policy_loss(TokenScores(logprobs_BT=torch.tensor([[0.3, 7.0, 0.1]])), batch, config)
    assert float(loss) == pytest.approx(-math.exp(0.2), abs=1e-6)


@pytest.mark.parametrize(
    ("ratio", "weight"),
    [(1.1, 1.1), (3.0, 1.4), (0.5, 0.8)],
)
def test_cispo_keeps_the_gradient_of_a_clipped_token(ratio: float, weight: float) -> None:
    logprobs_BT = torch.tensor([[math.log(ratio)]], requires_grad=True)
    config = WIDE_CLIP.model_copy(update={"objective": "cispo"})
    loss, _ = policy_loss(TokenScores(logprobs_BT=logprobs_BT), make_one_token_batch(2.0), config)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(-weight * 2 * math.log(ratio), abs=1e-6)
    assert logprobs_BT.grad is not None
    assert float(logprobs_BT.grad) == pytest.approx(-weight * 2, abs=1e-6)


def test_a_lower_clip_of_one_has_no_lower_bound() -> None:
    logprobs_BT = torch.tensor([[math.log(0.01)]], requires_grad=True)
    config = LossConfig(objective="cispo", clip_low=1.0)
    policy_loss(TokenScores(logprobs_BT=logprobs_BT), make_one_token_batch(1.0), config)[0].backward()
    assert logprobs_BT.grad is not None
    assert float(logprobs_BT.grad) == pytest.approx(-0.01, abs=1e-6)


def test_reinforce_has_the_gradient_of_the_log_prob_whatever_the_ratio() -> None:
    logprobs_BT = torch.tensor([[-4.0]], requires_grad=True)
    config = LossConfig(objective="reinforce")
    loss, _ = policy_loss(TokenScores(logprobs_BT=logprobs_BT), make_one_token_batch(1.5), config)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(6.0)
    assert logprobs_BT.grad is not None
    assert float(logprobs_BT.grad) == pytest.approx(-1.5)


@pytest.mark.parametrize(
    ("old", "now", "advantage", "expected"),
    [
        (0.5, 0.6, 1.0, -1.2),  # rose by 0.1: the free ratio
        (0.5, 0.8, 1.0, 0.0),  # rose by 0.3 > 0.2 although it was to rise
        (0.5, 0.8, -1.0, 1.6),  # was to fall, and rose
        (0.5, 0.2, -1.0, 0.0),  # fell by 0.3
    ],
)
def test_dppo_leaves_out_what_moved_too_far(old: float, now: float, advantage: float, expected: float) -> None:
    sample = make_sample([1, 2], log_probs=[0.0, math.log(old)])
    batch = build_batch([[sample]], advantages=[[advantage]], pad_id=0)
    scores = TokenScores(logprobs_BT=torch.tensor([[math.log(now)]]))
    loss, _ = policy_loss(scores, batch, LossConfig(objective="dppo"))
    assert float(loss) == pytest.approx(expected, abs=1e-6)


def test_the_ratio_penalty_adds_the_mean_square_of_the_log_ratio() -> None:
    log_ratios = [[0.5, -1.0]]
    batch = make_batch_of_ratios(log_ratios, [0.0])
    loss, _ = policy_loss(score(log_ratios), batch, LossConfig(ratio_penalty=0.1))
    assert float(loss) == pytest.approx(0.1 * (0.25 + 1.0) / 2)


def test_the_ratio_may_be_taken_to_the_trainers_own_old_log_probs() -> None:
    batch = replace(make_one_token_batch(1.0), old_logprobs_BT=torch.tensor([[-0.1]]))
    config = LossConfig(ratio_base="old", clip_high=9.0)
    loss, _ = policy_loss(TokenScores(logprobs_BT=torch.tensor([[0.2]])), batch, config)
    assert float(loss) == pytest.approx(-math.exp(0.3), abs=1e-6)


def test_without_old_log_probs_the_ratio_to_them_is_one_with_its_gradient() -> None:
    logprobs_BT = torch.tensor([[-0.7]], requires_grad=True)
    config = LossConfig(ratio_base="old")
    loss, _ = policy_loss(TokenScores(logprobs_BT=logprobs_BT), make_one_token_batch(2.0), config)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(-2.0)
    assert logprobs_BT.grad is not None
    assert float(logprobs_BT.grad) == pytest.approx(-2.0)


def test_constant_length_divides_by_samples_and_the_constant() -> None:
    log_ratios = [[0.0, 0.0, 0.0], [0.0]]
    config = LossConfig(aggregation="constant_length", constant_length=10)
    loss, _ = policy_loss(score(log_ratios), make_batch_of_ratios(log_ratios, [1.0, 2.0]), config)
    assert float(loss) == pytest.approx(-(3 * 1 + 2) / (2 * 10))


def test_prompt_mean_averages_the_tokens_of_each_prompt() -> None:
    # prompt 0: three tokens of -1 and one of -2; prompt 1: one token of -4
    log_ratios = [[0.0, 0.0, 0.0], [0.0], [0.0]]
    batch = make_batch_of_ratios(
        log_ratios,
        [1.0, 2.0, 4.0],
        group_tokens_BT=torch.tensor([[4.0] * 3, [4.0] * 3, [1.0] * 3]),
    )
    loss, _ = policy_loss(score(log_ratios), replace(batch, num_groups=2), LossConfig(aggregation="prompt_mean"))
    assert float(loss) == pytest.approx(-((3 * 1 + 2) / 4 + 4) / 2)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "prompt_mean"])
def test_the_weights_of_all_tokens_add_up_to_one(aggregation: str) -> None:
    batch = make_random_batch(2)
    tokens_BT = torch.full_like(batch.loss_mask_BT, batch.num_loss_tokens)
    weights_BT = token_weights(replace(batch, group_tokens_BT=tokens_BT), LossConfig(aggregation=aggregation))
    assert float(weights_BT.sum()) == pytest.approx(1.0, abs=1e-6)


def test_a_completion_that_drifted_the_way_it_was_pushed_is_masked() -> None:
    # mean log-ratio -0.5: beyond 0.4 for a negative advantage; a positive one, and a small drift, stay
    log_ratios = [[-0.8, -0.2], [-0.8, -0.2], [-0.1, -0.1]]
    batch = make_batch_of_ratios(log_ratios, [-1.0, 1.0, -1.0])
    keep_BT = drift_mask(score(log_ratios).logprobs_BT, batch, 0.4)
    assert keep_BT.tolist() == [[0.0, 0.0], [1.0, 1.0], [1.0, 1.0]]


def test_what_drifted_is_not_counted_as_a_mismatch_with_the_engine() -> None:
    log_ratios = [[-0.8, -0.2], [-0.8, -0.2], [-0.1, -0.1]]
    batch = make_batch_of_ratios(log_ratios, [-1.0, 1.0, -1.0])
    mismatch = MismatchConfig(mask="token", mask_low=0.5, mask_high=2.0)  # exp(-0.8) is outside
    config = LossConfig(drift_mask=0.4, mismatch=mismatch)
    logprobs_BT = score(log_ratios).logprobs_BT.requires_grad_()
    loss, metrics = policy_loss(TokenScores(logprobs_BT=logprobs_BT), batch, config)
    loss.backward()
    assert metrics["mismatch_masked_share"] == pytest.approx(2 / 6)
    assert logprobs_BT.grad is not None
    assert (logprobs_BT.grad != 0).tolist() == [[False, False], [False, True], [True, True]]
