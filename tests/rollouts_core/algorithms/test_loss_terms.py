"""Pins by hand the terms that are added to the policy loss: entropy, KL and value; and all pieces at once.

Without it a penalty with the wrong sign, or a micro-batch that averages for itself, would still train, only worse.

Not here: the policy loss itself (test_loss.py, test_loss_objectives.py).
"""

import math
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rollouts_core.algorithms.loss import (
    TokenScores,
    estimate_kl,
    policy_loss,
    read_metrics,
)
from rollouts_core.batch import TrainBatch, build_batch
from rollouts_core.config import LossConfig, MismatchConfig
from rollouts_core.metrics import sum_metrics
from tests.rollouts_core.algorithms.batches import (
    draw_logprobs,
    make_batch_of_ratios,
    make_one_token_batch,
    score,
)
from tests.rollouts_core.make import make_random_samples, make_sample


def test_the_entropy_bonus_is_the_mean_entropy_of_trained_tokens() -> None:
    batch = build_batch([[make_sample([1, 2, 3, 4], [0, 0, 1, 1])]], advantages=[[0.0]], pad_id=0)
    scores = TokenScores(logprobs_BT=torch.zeros(1, 3), entropies_BT=torch.tensor([[math.nan, 1.0, 3.0]]))
    loss, metrics = policy_loss(scores, batch, LossConfig(entropy_coef=0.1))
    assert float(loss) == pytest.approx(-0.1 * 2.0)
    assert metrics["entropy"] == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [("k1", 0.5), ("abs", 0.5), ("k2", 0.125), ("k3", math.exp(-0.5) - 1 + 0.5)],
)
def test_kl_estimators_by_hand(estimator: str, expected: float) -> None:
    assert float(estimate_kl(torch.tensor(0.5, dtype=torch.float64), estimator)) == pytest.approx(expected)


def test_kl_estimators_but_k1_are_never_negative_and_zero_only_without_a_difference() -> None:
    difference = torch.linspace(-3, 3, 61, dtype=torch.float64)
    for estimator in ("abs", "k2", "k3"):
        kl = estimate_kl(difference, estimator)
        assert float(kl.min()) >= 0.0
        assert (kl < 1e-9).tolist() == [i == 30 for i in range(61)]


def test_k1_and_k3_agree_in_expectation() -> None:
    # p = (0.7, 0.3), q = (0.4, 0.6): KL(p || q) = 0.7 ln(7/4) + 0.3 ln(1/2)
    p, q = torch.tensor([0.7, 0.3], dtype=torch.float64), torch.tensor([0.4, 0.6], dtype=torch.float64)
    expected = 0.7 * math.log(7 / 4) + 0.3 * math.log(1 / 2)
    for estimator in ("k1", "k3"):
        assert float((p * estimate_kl(p.log() - q.log(), estimator)).sum()) == pytest.approx(expected)


def test_the_kl_penalty_is_added_with_its_coefficient() -> None:
    log_ratios = [[0.0, 0.0]]
    batch = make_batch_of_ratios(log_ratios, [0.0], ref_logprobs_BT=torch.tensor([[-1.0, 0.5]]))
    config = LossConfig(kl_coef=0.2, kl_estimator="k2")
    loss, metrics = policy_loss(score(log_ratios), batch, config)
    assert metrics["kl_reference"] == pytest.approx((0.5 + 0.125) / 2)
    assert float(loss) == pytest.approx(0.2 * (0.5 + 0.125) / 2)


def test_the_kl_penalty_pulls_towards_the_reference() -> None:
    logprobs_BT = torch.tensor([[0.0, 0.0]], requires_grad=True)
    batch = make_batch_of_ratios([[0.0, 0.0]], [0.0], ref_logprobs_BT=torch.tensor([[-1.0, 1.0]]))
    policy_loss(TokenScores(logprobs_BT=logprobs_BT), batch, LossConfig(kl_coef=1.0))[0].backward()
    assert logprobs_BT.grad is not None
    assert float(logprobs_BT.grad[0, 0]) > 0 > float(logprobs_BT.grad[0, 1])


def test_limits_of_the_kl_divergence_hold_and_take_the_gradient() -> None:
    logprobs_BT = torch.tensor([[30.0, 0.0]], requires_grad=True)
    batch = make_batch_of_ratios([[30.0, 0.0]], [0.0], ref_logprobs_BT=torch.tensor([[0.0, 5.0]]))
    config = LossConfig(kl_coef=1.0, kl_input_clamp=20.0, kl_output_clamp=10.0)
    loss, _ = policy_loss(TokenScores(logprobs_BT=logprobs_BT), batch, config)
    loss.backward()
    assert float(loss.detach()) == pytest.approx((10.0 + 10.0) / 2)
    assert logprobs_BT.grad is not None
    assert logprobs_BT.grad.tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("kl_weight", ["ratio", "on_policy"])
def test_a_weighted_kl_has_the_gradient_of_the_true_divergence(kl_weight: str) -> None:
    # Sampled from the policy itself, the expected gradient of w * k3 is that of sum p log(p / q).
    logits = torch.tensor([0.3, -0.2, 0.5], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.1, 0.6, 0.3], dtype=torch.float64)
    logprobs = torch.log_softmax(logits, dim=0)
    (expected,) = torch.autograd.grad((logprobs.exp() * (logprobs - reference.log())).sum(), logits, retain_graph=True)
    batch = replace(
        make_batch_of_ratios([[0.0] * 3], [0.0], ref_logprobs_BT=reference.log()[None]),
        old_logprobs_BT=logprobs.detach()[None],
        loss_mask_BT=logprobs.exp().detach()[None],
        num_loss_tokens=1.0,
    )
    config = LossConfig(kl_coef=1.0, kl_weight=kl_weight, ratio_base="old")
    loss, _ = policy_loss(TokenScores(logprobs_BT=logprobs[None]), batch, config)
    (found,) = torch.autograd.grad(loss, logits)
    assert torch.allclose(found, expected)


def test_a_kl_penalty_without_reference_scores_is_refused() -> None:
    with pytest.raises(AssertionError, match="reference=True"):
        policy_loss(score([[0.0]]), make_one_token_batch(1.0), LossConfig(kl_coef=0.1))


def test_the_value_loss_takes_the_larger_of_the_free_and_the_clipped_error() -> None:
    # old 0, return 1: prediction 0.5 held at 0.2 has the error 0.64 > 0.25; prediction -1 has 4 > (1 + 0.2)^2
    batch = make_batch_of_ratios([[0.0, 0.0]], [0.0], old_values_BT=torch.zeros(1, 2), returns_BT=torch.ones(1, 2))
    scores = TokenScores(logprobs_BT=torch.zeros(1, 2), values_BT=torch.tensor([[0.5, -1.0]]))
    loss, metrics = policy_loss(scores, batch, LossConfig(value_coef=0.5, value_clip=0.2))
    assert metrics["value_loss"] == pytest.approx(0.5 * (0.64 + 4.0) / 2)
    assert float(loss) == pytest.approx(0.5 * metrics["value_loss"])


def test_returns_without_a_value_head_are_refused() -> None:
    batch = make_batch_of_ratios([[0.0]], [0.0], old_values_BT=torch.zeros(1, 1), returns_BT=torch.ones(1, 1))
    with pytest.raises(AssertionError, match="with_values"):
        policy_loss(score([[0.0]]), batch, LossConfig())


EVERYTHING = LossConfig(
    ratio_base="old",
    dual_clip=3.0,
    kl_coef=0.1,
    entropy_coef=0.01,
    mismatch=MismatchConfig(weight="token", mask="geometric", mask_low=0.5, mask_high=2.0),
)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant_length"])
def test_everything_at_once_adds_up_over_micro_batches(aggregation: str) -> None:
    config = EVERYTHING.model_copy(update={"aggregation": aggregation, "constant_length": 9})
    generator = torch.Generator().manual_seed(3)
    samples = make_random_samples(6)
    whole = build_batch([[s] for s in samples], advantages=[[a] for a in (1.0, -1.0, 2.0, -0.5, 0.5, 1.5)], pad_id=0)
    shape = whole.loss_mask_BT.shape
    whole = replace(
        whole,
        old_logprobs_BT=whole.rollout_logprobs_BT + 0.3 * torch.randn(shape, generator=generator),
        ref_logprobs_BT=whole.rollout_logprobs_BT + 0.3 * torch.randn(shape, generator=generator),
        old_values_BT=torch.randn(shape, generator=generator),
        returns_BT=torch.randn(shape, generator=generator),
    )
    scores = TokenScores(
        logprobs_BT=draw_logprobs(whole).detach(),
        entropies_BT=torch.rand(shape, generator=generator),
        values_BT=torch.randn(shape, generator=generator),
    )
    of_parts = [policy_loss(slice_scores(scores, i), slice_batch(whole, i), config)[1] for i in range(3)]
    expected, *results = read_metrics([policy_loss(scores, whole, config)[1], *of_parts])
    found = sum_metrics(results)
    assert found.pop("mismatch_p99_max") >= expected.pop("mismatch_p99_max")  # that of the micro-batch with the largest
    assert found == pytest.approx(expected, abs=1e-5)
    assert {"value_loss", "entropy", "kl_reference", "mismatch_kl", "mismatch_ratio_max"} <= found.keys()


def slice_batch(batch: TrainBatch, part: int) -> TrainBatch:
    """Two of the rows, with the totals of the whole."""
    columns = {f.name: getattr(batch, f.name) for f in fields(batch)}
    rows: dict[str, Any] = {n: v[2 * part : 2 * part + 2] for n, v in columns.items() if isinstance(v, Tensor)}
    return replace(batch, **rows)


def slice_scores(scores: TokenScores, part: int) -> TokenScores:
    tensors = {f.name: getattr(scores, f.name) for f in fields(scores)}
    return TokenScores(**{name: value[2 * part : 2 * part + 2] for name, value in tensors.items()})


@pytest.mark.parametrize("garbage", [math.inf, -math.inf, math.nan])
def test_garbage_at_masked_positions_of_any_column_reaches_nothing(garbage: float) -> None:
    dirty_BT = torch.tensor([[garbage, -0.2]])
    batch = replace(
        build_batch([[make_sample([1, 2, 3], [0, 0, 1])]], advantages=[[2.0]], pad_id=0),
        rollout_logprobs_BT=dirty_BT,
        old_logprobs_BT=dirty_BT,
        ref_logprobs_BT=dirty_BT,
        old_values_BT=dirty_BT,
        returns_BT=dirty_BT,
    )
    logprobs_BT = torch.tensor([[garbage, -0.1]], requires_grad=True)
    scores = TokenScores(logprobs_BT=logprobs_BT, entropies_BT=dirty_BT, values_BT=dirty_BT)
    loss, metrics = policy_loss(scores, batch, EVERYTHING)
    loss.backward()
    assert all(math.isfinite(value) for value in metrics.values())
    assert logprobs_BT.grad is not None
    assert logprobs_BT.grad[0, 0] == 0
    assert math.isfinite(float(logprobs_BT.grad[0, 1]))
