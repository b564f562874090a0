"""Pins the numbers of the losses: by hand, against a plain loop, and what must not reach the gradient.

Without it a wrong sign, a wrong divisor or a swapped clip bound would still train, only worse.
"""

import math
from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

from rollouts_core.algorithms.loss import (
    TokenScores,
    create_cross_entropy_loss,
    create_policy_loss,
    cross_entropy_loss,
    drift_mask,
    estimate_kl,
    grpo_loss,
    policy_loss,
    ppo_loss,
    token_logprobs,
    token_weights,
)
from rollouts_core.batch import TrainBatch, build_batch, with_step_totals
from rollouts_core.config import LossConfig, MismatchConfig
from rollouts_core.metrics import sum_metrics
from tests.rollouts_core.make import make_random_samples, make_sample

WIDE_CLIP = LossConfig(clip_low=0.2, clip_high=0.4)


def make_one_token_batch(advantage: float) -> TrainBatch:
    """One trained token that was sampled with log-prob 0."""
    return build_batch([[make_sample([1, 2])]], advantages=[[advantage]], pad_id=0)


def make_random_batch(num_per_row: int = 1) -> TrainBatch:
    """Six samples with advantages of both signs."""
    samples = make_random_samples(6)
    advantages = [1.0, -2.0, 0.5, -0.25, 3.0, 0.0]
    starts = range(0, 6, num_per_row)
    return build_batch(
        [samples[i : i + num_per_row] for i in starts],
        advantages=[advantages[i : i + num_per_row] for i in starts],
        pad_id=0,
    )


def draw_logprobs(batch: TrainBatch, seed: int = 0) -> Tensor:
    """Log-probs near those of the rollouts: most ratios are inside the clip range, some outside."""
    noise = 0.4 * torch.randn(batch.rollout_logprobs_BT.shape, generator=torch.Generator().manual_seed(seed))
    return (batch.rollout_logprobs_BT + noise).requires_grad_()


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
    results = [
        loss_fn(TokenScores(logprobs_BT=logprobs_BT[i : i + 1, : part.inputs_BT.shape[1]]), part)[1]
        for i, part in enumerate(with_step_totals(parts, samples))
    ]
    _, expected = loss_fn(TokenScores(logprobs_BT=logprobs_BT), whole)
    for name, value in expected.items():
        assert sum_metrics(results)[name] == pytest.approx(value, abs=1e-5), name


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_zero_advantages_give_zero_gradient(aggregation: str) -> None:
    samples = make_random_samples(4)
    batch = build_batch([samples], advantages=[[0.0] * 4], pad_id=0)
    logprobs_BT = draw_logprobs(batch)
    policy_loss(TokenScores(logprobs_BT=logprobs_BT), batch, LossConfig(aggregation=aggregation))[0].backward()
    assert torch.count_nonzero(logprobs_BT.grad) == 0


@pytest.mark.parametrize("garbage", [math.inf, -math.inf, math.nan, 1e30])
@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_garbage_at_masked_positions_reaches_neither_loss_nor_gradient(garbage: float, aggregation: str) -> None:
    batch = build_batch([[make_sample([1, 2, 3], [0, 0, 1])]], advantages=[[2.0]], pad_id=0)
    logprobs_BT = torch.tensor([[garbage, -0.1]], requires_grad=True)
    loss, metrics = policy_loss(TokenScores(logprobs_BT=logprobs_BT), batch, LossConfig(aggregation=aggregation))
    loss.backward()
    assert all(math.isfinite(value) for value in metrics.values())
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


def make_batch_of_ratios(log_ratios: list[list[float]], advantages: list[float], **columns: Tensor) -> TrainBatch:
    """Rows of trained tokens whose log-prob now is `log_ratios` and was 0 before."""
    rows = [[make_sample(range(len(row) + 1))] for row in log_ratios]
    batch = build_batch(rows, advantages=[[advantage] for advantage in advantages], pad_id=0)
    return replace(batch, **columns)


def score(log_ratios: list[list[float]]) -> TokenScores:
    width = max(map(len, log_ratios))
    return TokenScores(logprobs_BT=torch.tensor([[*row, *[0.0] * (width - len(row))] for row in log_ratios]))


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
    assert float(logprobs_BT.grad) == pytest.approx(-weight * 2, abs=1e-6)


def test_a_lower_clip_of_one_has_no_lower_bound() -> None:
    logprobs_BT = torch.tensor([[math.log(0.01)]], requires_grad=True)
    config = LossConfig(objective="cispo", clip_low=1.0)
    policy_loss(TokenScores(logprobs_BT=logprobs_BT), make_one_token_batch(1.0), config)[0].backward()
    assert float(logprobs_BT.grad) == pytest.approx(-0.01, abs=1e-6)


def test_reinforce_has_the_gradient_of_the_log_prob_whatever_the_ratio() -> None:
    logprobs_BT = torch.tensor([[-4.0]], requires_grad=True)
    config = LossConfig(objective="reinforce")
    loss, _ = policy_loss(TokenScores(logprobs_BT=logprobs_BT), make_one_token_batch(1.5), config)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(6.0)
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
    assert float(logprobs_BT.grad[0, 0]) > 0 > float(logprobs_BT.grad[0, 1])


def test_limits_of_the_kl_divergence_hold_and_take_the_gradient() -> None:
    logprobs_BT = torch.tensor([[30.0, 0.0]], requires_grad=True)
    batch = make_batch_of_ratios([[30.0, 0.0]], [0.0], ref_logprobs_BT=torch.tensor([[0.0, 5.0]]))
    config = LossConfig(kl_coef=1.0, kl_input_clamp=20.0, kl_output_clamp=10.0)
    loss, _ = policy_loss(TokenScores(logprobs_BT=logprobs_BT), batch, config)
    loss.backward()
    assert float(loss.detach()) == pytest.approx((10.0 + 10.0) / 2)
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


def test_a_completion_that_drifted_the_way_it_was_pushed_is_masked() -> None:
    # mean log-ratio -0.5: beyond 0.4 for a negative advantage; a positive one, and a small drift, stay
    log_ratios = [[-0.8, -0.2], [-0.8, -0.2], [-0.1, -0.1]]
    batch = make_batch_of_ratios(log_ratios, [-1.0, 1.0, -1.0])
    keep_BT = drift_mask(score(log_ratios).logprobs_BT, batch, 0.4)
    assert keep_BT.tolist() == [[0.0, 0.0], [1.0, 1.0], [1.0, 1.0]]


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
    columns = {
        name: whole.rollout_logprobs_BT + 0.3 * torch.randn(shape, generator=generator)
        for name in ("old_logprobs_BT", "ref_logprobs_BT")
    }
    columns |= {name: torch.randn(shape, generator=generator) for name in ("old_values_BT", "returns_BT")}
    whole = replace(whole, **columns)
    scores = TokenScores(
        logprobs_BT=draw_logprobs(whole).detach(),
        entropies_BT=torch.rand(shape, generator=generator),
        values_BT=torch.randn(shape, generator=generator),
    )
    _, expected = policy_loss(scores, whole, config)
    results = [policy_loss(slice_scores(scores, i), slice_batch(whole, i), config)[1] for i in range(3)]
    found = sum_metrics(results)
    assert found == pytest.approx(expected, abs=1e-5)
    assert {"value_loss", "entropy", "kl_reference", "mismatch_kl", "mismatch_ratio_max"} <= found.keys()


def slice_batch(batch: TrainBatch, part: int) -> TrainBatch:
    """Two of the rows, with the totals of the whole."""
    tensors = {f.name: getattr(batch, f.name) for f in fields(batch)}
    return replace(batch, **{n: v[2 * part : 2 * part + 2] for n, v in tensors.items() if isinstance(v, Tensor)})


def slice_scores(scores: TokenScores, part: int) -> TokenScores:
    tensors = {f.name: getattr(scores, f.name) for f in fields(scores)}
    return TokenScores(**{name: value[2 * part : 2 * part + 2] for name, value in tensors.items()})


@pytest.mark.parametrize("garbage", [math.inf, -math.inf, math.nan])
def test_garbage_at_masked_positions_of_any_column_reaches_nothing(garbage: float) -> None:
    batch = build_batch([[make_sample([1, 2, 3], [0, 0, 1])]], advantages=[[2.0]], pad_id=0)
    dirty_BT = torch.tensor([[garbage, -0.2]])
    columns = dict.fromkeys(
        ("rollout_logprobs_BT", "old_logprobs_BT", "ref_logprobs_BT", "old_values_BT", "returns_BT"), dirty_BT
    )
    logprobs_BT = torch.tensor([[garbage, -0.1]], requires_grad=True)
    scores = TokenScores(logprobs_BT=logprobs_BT, entropies_BT=dirty_BT, values_BT=dirty_BT)
    loss, metrics = policy_loss(scores, replace(batch, **columns), EVERYTHING)
    loss.backward()
    assert all(math.isfinite(value) for value in metrics.values())
    assert logprobs_BT.grad[0, 0] == 0
    assert math.isfinite(float(logprobs_BT.grad[0, 1]))
