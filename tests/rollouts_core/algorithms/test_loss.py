"""Pins the numbers of the losses: by hand, against a plain loop, and what must not reach the gradient.

Without it a wrong sign, a wrong divisor or a swapped clip bound would still train, only worse.

Not here: the objectives besides PPO and ways to average (test_loss_objectives.py), the terms that are added
(test_loss_terms.py).
"""

import math

import pytest
import torch
from torch import Tensor

from rollouts_core.algorithms.loss import (
    TokenScores,
    create_cross_entropy_loss,
    create_policy_loss,
    cross_entropy_loss,
    grpo_loss,
    policy_loss,
    ppo_loss,
    read_metrics,
    token_logprobs,
)
from rollouts_core.batch import TrainBatch, build_batch, with_step_totals
from rollouts_core.config import LossConfig
from rollouts_core.metrics import sum_metrics
from tests.rollouts_core.algorithms.batches import (
    draw_logprobs,
    make_one_token_batch,
    make_random_batch,
)
from tests.rollouts_core.make import make_random_samples, make_sample

WIDE_CLIP = LossConfig(clip_low=0.2, clip_high=0.4)


def loop_policy_loss(logprobs_BT: Tensor, batch: TrainBatch, config: LossConfig) -> float:
    """The policy loss token by token in Python floats."""
    by_sample: dict[tuple[int, int], list[float]] = {}
    for b in range(logprobs_BT.shape[0]):
        for t in range(logprobs_BT.shape[1]):
            if batch.loss_mask_BT[b, t] == 0:
                continue
            advantage = float(batch.advantages_BT[b, t])
            ratio = math.exp(float(logprobs_BT[b, t].detach()) - float(batch.rollout_logprobs_BT[b, t]))
            clipped = min(max(ratio, 1 - config.clip_low), 1 + config.clip_high)
            segment = int(batch.segment_ids_BT[b, t])
            by_sample.setdefault((b, segment), []).append(-min(ratio * advantage, clipped * advantage))
    if config.aggregation == "token_mean":
        tokens = [value for values in by_sample.values() for value in values]
        return sum(tokens) / len(tokens)
    return sum(sum(values) / len(values) for values in by_sample.values()) / len(by_sample)


def test_token_logprobs_score_the_logits_at_the_same_index() -> None:
    # softmax([0, ln 3]) = [1/4, 3/4]
    logits_BTV = torch.tensor([[[0.0, math.log(3)], [math.log(3), 0.0]]])
    found = token_logprobs(logits_BTV, torch.tensor([[1, 1]]))
    assert found.tolist()[0] == pytest.approx([math.log(0.75), math.log(0.25)], abs=1e-6)


def test_temperature_divides_the_logits() -> None:
    # ln 9 / 2 = ln 3, so the more likely token has 3/4
    logits_BTV = torch.tensor([[[0.0, math.log(9)]]])
    found = token_logprobs(logits_BTV, torch.tensor([[1]]), temperature=2.0)
    assert float(found) == pytest.approx(math.log(0.75), abs=1e-6)


def test_token_logprobs_of_bfloat16_logits_are_computed_in_float32() -> None:
    logits_BTV = torch.randn(1, 4, 50, generator=torch.Generator().manual_seed(0)).bfloat16()
    targets_BT = torch.tensor([[1, 2, 3, 4]])
    found = token_logprobs(logits_BTV, targets_BT)
    assert found.dtype == torch.float32
    assert torch.equal(found, token_logprobs(logits_BTV.float(), targets_BT))


def test_logits_of_another_length_than_the_targets_are_refused() -> None:
    with pytest.raises(AssertionError):
        token_logprobs(torch.zeros(1, 3, 5), torch.zeros(1, 2, dtype=torch.long))


def test_cross_entropy_is_the_weighted_mean_over_trained_tokens() -> None:
    # weights 1, 0, 0.5 and log-probs -1, -7, -3: (1 + 1.5) / 1.5
    batch = build_batch([[make_sample([1, 2, 3, 4], [0, 1, 0, 0.5])]], pad_id=0)
    loss, metrics = create_cross_entropy_loss()(TokenScores(logprobs_BT=torch.tensor([[-1.0, -7.0, -3.0]])), batch)
    assert float(loss) == pytest.approx(2.5 / 1.5)
    assert metrics == {"loss": float(loss)}


def test_cross_entropy_refuses_a_step_without_trained_tokens() -> None:
    with pytest.raises(AssertionError, match="empty"):
        cross_entropy_loss(
            TokenScores(logprobs_BT=torch.zeros(1, 1)), build_batch([[make_sample([1, 2], [0, 0])]], pad_id=0)
        )


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"),
    [
        (1.0, 2.0, -2.0),  # nothing has changed: -A
        (1.1, 2.0, -2.2),  # inside the range: -1.1 * 2
        (1.3, 2.0, -2.6),  # inside the wide upper bound 1.4: -1.3 * 2
        (1.5, 2.0, -2.8),  # above it: -(1 + 0.4) * 2
        (0.5, 2.0, -1.0),  # min(0.5 * 2, 0.8 * 2) = 1: a good token that became unlikely is not clipped
        (0.5, -2.0, 1.6),  # min(0.5 * -2, 0.8 * -2) = -1.6: below 1 - 0.2
        (0.9, -2.0, 1.8),  # inside: -(0.9 * -2)
        (1.5, -2.0, 3.0),  # min(1.5 * -2, 1.4 * -2) = -3: a bad token that became likely is not clipped
    ],
)
def test_policy_loss_by_hand(ratio: float, advantage: float, expected: float) -> None:
    loss, _ = policy_loss(
        TokenScores(logprobs_BT=torch.tensor([[math.log(ratio)]])), make_one_token_batch(advantage), WIDE_CLIP
    )
    assert float(loss) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("ratio", "advantage", "has_gradient"),
    [(1.3, 1.0, True), (1.5, 1.0, False), (0.7, 1.0, True), (0.7, -1.0, False), (1.5, -1.0, True)],
)
def test_only_a_clipped_token_loses_its_gradient(ratio: float, advantage: float, has_gradient: bool) -> None:
    logprobs_BT = torch.tensor([[math.log(ratio)]], requires_grad=True)
    loss, metrics = policy_loss(TokenScores(logprobs_BT=logprobs_BT), make_one_token_batch(advantage), WIDE_CLIP)
    loss.backward()
    # d/dlogp of -exp(logp) * A is -ratio * A
    expected = -ratio * advantage if has_gradient else 0.0
    assert logprobs_BT.grad is not None
    assert float(logprobs_BT.grad) == pytest.approx(expected, abs=1e-6)
    assert metrics["clip_share"] == (0.0 if has_gradient else 1.0)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
@pytest.mark.parametrize("num_per_row", [1, 3])
@pytest.mark.parametrize("seed", [0, 1])
def test_policy_loss_equals_a_plain_loop(aggregation: str, num_per_row: int, seed: int) -> None:
    config = LossConfig(clip_low=0.2, clip_high=0.28, aggregation=aggregation)
    batch = make_random_batch(num_per_row)
    logprobs_BT = draw_logprobs(batch, seed)
    loss, _ = policy_loss(TokenScores(logprobs_BT=logprobs_BT), batch, config)
    assert float(loss.detach()) == pytest.approx(loop_policy_loss(logprobs_BT, batch, config), abs=1e-5)


def test_token_mean_weighs_long_samples_more_and_sequence_mean_does_not() -> None:
    # ratio 1 everywhere: one token with A = 3, three tokens with A = -1
    samples = [make_sample([1, 2]), make_sample([1, 2, 3, 4])]
    batch = build_batch([samples], advantages=[[3.0, -1.0]], pad_id=0)
    token_mean, _ = policy_loss(TokenScores(logprobs_BT=torch.zeros(1, 4)), batch, LossConfig(aggregation="token_mean"))
    sequence_mean, _ = policy_loss(
        TokenScores(logprobs_BT=torch.zeros(1, 4)), batch, LossConfig(aggregation="sequence_mean")
    )
    assert float(token_mean) == pytest.approx(0.0)  # -(3 - 1 - 1 - 1) / 4
    assert float(sequence_mean) == pytest.approx(-1.0)  # -(3 + (-1)) / 2


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_packing_does_not_change_the_policy_loss(aggregation: str) -> None:
    config = LossConfig(aggregation=aggregation)
    unpacked, packed = make_random_batch(1), make_random_batch(6)
    logprobs_BT = draw_logprobs(unpacked)
    in_one_row = logprobs_BT[unpacked.segment_ids_BT > 0][None]
    found, _ = policy_loss(TokenScores(logprobs_BT=in_one_row), packed, config)
    expected, _ = policy_loss(TokenScores(logprobs_BT=logprobs_BT), unpacked, config)
    assert float(found.detach()) == pytest.approx(float(expected.detach()), abs=1e-6)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_losses_and_metrics_of_micro_batches_add_up_to_those_of_the_step(aggregation: str) -> None:
    loss_fn = create_policy_loss(LossConfig(clip_low=0.1, clip_high=0.1, aggregation=aggregation))
    samples, advantages = make_random_samples(8), [1.0, -1.0, 2.0, -0.5, 0.5, 1.5, -2.0, 1.0]
    whole = build_batch([[s] for s in samples], advantages=[[a] for a in advantages], pad_id=0)
    logprobs_BT = draw_logprobs(whole)
    parts = [build_batch([[s]], advantages=[[a]], pad_id=0) for s, a in zip(samples, advantages, strict=True)]
    of_parts = [
        loss_fn(TokenScores(logprobs_BT=logprobs_BT[i : i + 1, : part.inputs_BT.shape[1]]), part)[1]
        for i, part in enumerate(with_step_totals(parts, samples))
    ]
    expected, *results = read_metrics([loss_fn(TokenScores(logprobs_BT=logprobs_BT), whole)[1], *of_parts])
    for name, value in expected.items():
        assert sum_metrics(results)[name] == pytest.approx(value, abs=1e-5), name


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_zero_advantages_give_zero_gradient(aggregation: str) -> None:
    samples = make_random_samples(4)
    batch = build_batch([samples], advantages=[[0.0] * 4], pad_id=0)
    logprobs_BT = draw_logprobs(batch)
    policy_loss(TokenScores(logprobs_BT=logprobs_BT), batch, LossConfig(aggregation=aggregation))[0].backward()
    assert logprobs_BT.grad is not None
    assert torch.count_nonzero(logprobs_BT.grad) == 0


@pytest.mark.parametrize("garbage", [math.inf, -math.inf, math.nan, 1e30])
@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_garbage_at_masked_positions_reaches_neither_loss_nor_gradient(garbage: float, aggregation: str) -> None:
    batch = build_batch([[make_sample([1, 2, 3], [0, 0, 1])]], advantages=[[2.0]], pad_id=0)
    logprobs_BT = torch.tensor([[garbage, -0.1]], requires_grad=True)
    loss, metrics = policy_loss(TokenScores(logprobs_BT=logprobs_BT), batch, LossConfig(aggregation=aggregation))
    loss.backward()
    assert all(math.isfinite(value) for value in metrics.values())
    assert logprobs_BT.grad is not None
    assert logprobs_BT.grad[0, 0] == 0
    assert float(logprobs_BT.grad[0, 1]) == pytest.approx(-2.0 * math.exp(-0.1))


def test_a_token_that_became_impossibly_likely_gives_a_finite_loss() -> None:
    loss, _ = policy_loss(TokenScores(logprobs_BT=torch.tensor([[500.0]])), make_one_token_batch(-1.0), LossConfig())
    assert float(loss) == pytest.approx(math.exp(20), rel=1e-5)


def test_the_kl_metric_is_the_mean_k3_estimate() -> None:
    # ratios 2 and 1: k3 = (2 - 1 - ln 2 + 0) / 2
    batch = build_batch([[make_sample([1, 2, 3])]], advantages=[[1.0]], pad_id=0)
    _, metrics = policy_loss(TokenScores(logprobs_BT=torch.tensor([[math.log(2), 0.0]])), batch, LossConfig())
    assert metrics["kl_rollout_policy"] == pytest.approx((1 - math.log(2)) / 2, abs=1e-6)


def test_the_log_prob_metric_is_the_mean_over_trained_tokens() -> None:
    batch = build_batch([[make_sample([1, 2, 3, 4], [0, 0, 1, 1])]], advantages=[[1.0]], pad_id=0)
    _, metrics = policy_loss(TokenScores(logprobs_BT=torch.tensor([[-9.0, -1.0, -2.0]])), batch, LossConfig())
    assert metrics["policy_logprob"] == pytest.approx(-1.5)


def test_policy_loss_refuses_log_probs_of_another_shape() -> None:
    with pytest.raises(AssertionError):
        policy_loss(TokenScores(logprobs_BT=torch.zeros(1, 2)), make_one_token_batch(1.0), LossConfig())


def draw_logits() -> tuple[Tensor, Tensor, Tensor]:
    """Logits, labels and a mask of two rows of four tokens over five words."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 4, 5, generator=generator, requires_grad=True)
    labels = torch.randint(5, (2, 4), generator=generator)
    return logits, labels, torch.tensor([[0, 1, 1, 1], [0, 0, 1, 1]])


def test_without_old_log_probs_the_grpo_gradient_is_plain_policy_gradient() -> None:
    logits, labels, loss_mask = draw_logits()
    advantages = torch.tensor([1.0, -2.0])
    grpo_loss(logits, labels, loss_mask, advantages).backward()
    copy = logits.detach().clone().requires_grad_()
    logprobs = torch.log_softmax(copy, dim=-1).gather(-1, labels[..., None])[..., 0]
    (-(logprobs * advantages[:, None] * loss_mask).sum() / 5).backward()
    torch.testing.assert_close(logits.grad, copy.grad, atol=1e-6, rtol=1e-5)


def test_without_old_log_probs_the_ratio_is_one() -> None:
    logits, labels, loss_mask = draw_logits()
    loss = grpo_loss(logits, labels, loss_mask, torch.tensor([1.0, -2.0]))
    assert float(loss.detach()) == pytest.approx(-(3 * 1.0 + 2 * -2.0) / 5, abs=1e-6)


def test_the_sign_of_the_advantage_says_whether_a_token_becomes_more_likely() -> None:
    logits, labels, loss_mask = draw_logits()
    grpo_loss(logits, labels, loss_mask, torch.tensor([1.0, -1.0])).backward()
    assert logits.grad is not None
    at_labels = logits.grad.gather(-1, labels[..., None])[..., 0]
    assert bool((at_labels[0, 1:] < 0).all()) and bool((at_labels[1, 2:] > 0).all())


def test_ppo_takes_an_advantage_per_token() -> None:
    # ratio 1: the loss is minus the mean of the trained advantages
    logits, labels, loss_mask = draw_logits()
    advantages = torch.tensor([[9.0, 1.0, 2.0, 3.0], [9.0, 9.0, -4.0, 0.0]])
    assert float(ppo_loss(logits, labels, loss_mask, advantages).detach()) == pytest.approx(-2 / 5, abs=1e-6)


@pytest.mark.parametrize("clip_range", [0.1, 0.3])
def test_the_wrappers_clip_against_old_log_probs(clip_range: float) -> None:
    logits, labels, loss_mask = draw_logits()
    old_log_probs = token_logprobs(logits, labels).detach() - math.log(2)  # every ratio is 2
    advantages = torch.tensor([1.0, 1.0])
    for loss_fn in (grpo_loss, ppo_loss):
        loss = loss_fn(logits, labels, loss_mask, advantages, old_log_probs=old_log_probs, clip_range=clip_range)
        assert float(loss.detach()) == pytest.approx(-(1 + clip_range), abs=1e-6)


def test_a_row_without_trained_tokens_changes_nothing() -> None:
    logits, labels, loss_mask = draw_logits()
    loss_mask[1] = 0
    both = grpo_loss(logits, labels, loss_mask, torch.tensor([1.0, 5.0]))
    one = grpo_loss(logits[:1], labels[:1], loss_mask[:1], torch.tensor([1.0]))
    assert float(both.detach()) == pytest.approx(float(one.detach()))
