"""Pins how graded samples become updates: shaping, credit, minibatches of whole groups, rows and totals.

Without it a sample could be trained on with another one's advantage, or an update could be averaged over the wrong
number of tokens.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from rollouts_core.algorithms.credit import Credit, RolloutScores, assign_credit, shape_reward
from rollouts_core.algorithms.loss import TokenScores, policy_loss
from rollouts_core.batch import TrainBatch, build_batch, group_sharers
from rollouts_core.config import AdvantageConfig, LossConfig, PolicyConfig, RewardShapingConfig, RLTrainingConfig
from rollouts_core.rl_batch import (
    is_reinforced,
    places_to_score,
    plan_rows,
    prepare_grpo_batch,
    prepare_updates,
    share_groups,
    split_groups,
)
from rollouts_core.rollout.rollout_batch import convert_to_batch
from rollouts_core.types import RolloutBatch, Sample, Status
from tests.rollouts_core.make import make_groups, make_random_samples, make_sample

MEAN_ONLY = AdvantageConfig(estimator="group_mean")


def graded_samples(num_groups: int = 5, size: int = 4) -> list[Sample]:
    """Groups whose rewards differ within each group."""
    return [
        replace(sample, group_index=i // size, index=i % size, reward=float(i % size == 0) + 0.1 * (i // size))
        for i, sample in enumerate(make_random_samples(num_groups * size))
    ]


def advantages_of(batch: TrainBatch) -> dict[str, float]:
    """The advantage of each sample of a batch without packing, by its id."""
    return {name: float(row_T[0]) for name, row_T in zip(batch.sample_ids, batch.advantages_BT, strict=True)}


def token_advantages(credit: Credit, number: int) -> list[float]:
    """Those of a sample to whose tokens they are assigned one by one."""
    advantages = credit.advantages[number]
    assert isinstance(advantages, Tensor)
    return advantages.tolist()


def gradient_of(batches: Sequence[TrainBatch], config: LossConfig) -> dict[str, Tensor]:
    """Per sample, the gradient of the loss with respect to its log-probs, which are the rollouts' plus 0.1."""
    gradients: dict[str, Tensor] = {}
    for batch in batches:
        logprobs_BT = (batch.rollout_logprobs_BT + 0.1).requires_grad_()
        policy_loss(TokenScores(logprobs_BT=logprobs_BT), batch, config)[0].backward()
        assert logprobs_BT.grad is not None
        names = iter(batch.sample_ids)
        for b in range(len(batch.inputs_BT)):
            for segment in range(1, int(batch.segment_ids_BT[b].max()) + 1):
                at_T = batch.segment_ids_BT[b] == segment
                if batch.loss_mask_BT[b][at_T].any():  # else it is a shared prompt
                    gradients[next(names)] = logprobs_BT.grad[b][at_T & (batch.loss_mask_BT[b] != 0)]
    return gradients


def test_every_sample_gets_its_own_advantage() -> None:
    batch = convert_to_batch(graded_samples())
    config = RLTrainingConfig(advantage=MEAN_ONLY, packing=False)
    [micro_batch] = prepare_grpo_batch(batch, batch.rewards, config)
    found = advantages_of(micro_batch)
    assert found == pytest.approx({f"{i // 4}/{i % 4}": 0.75 if i % 4 == 0 else -0.25 for i in range(20)})


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "prompt_mean", "constant_length"])
@pytest.mark.parametrize("max_tokens", [12, 40, 10_000])
@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("samples", [graded_samples(), make_groups(5, 6)], ids=["own prompts", "shared prompts"])
def test_rows_and_micro_batches_do_not_change_the_gradient(
    aggregation: str, max_tokens: int, packing: bool, samples: list[Sample]
) -> None:
    batch = convert_to_batch(samples)
    loss = LossConfig(aggregation=aggregation, constant_length=20)
    whole = RLTrainingConfig(loss=loss, packing=False, max_micro_batch_tokens=10_000)
    cut = whole.model_copy(update={"packing": packing, "max_micro_batch_tokens": max_tokens})
    expected = gradient_of(prepare_grpo_batch(batch, batch.rewards, whole), loss)
    found = gradient_of(prepare_grpo_batch(batch, batch.rewards, cut), loss)
    assert found.keys() == expected.keys()
    assert all(torch.allclose(found[name], expected[name], atol=1e-7) for name in expected)


@pytest.mark.parametrize("packing", [True, False])
def test_micro_batches_keep_to_their_token_budget(packing: bool) -> None:
    samples = make_random_samples(60)
    config = RLTrainingConfig(max_micro_batch_tokens=50, packing=packing)
    micro_batches = plan_rows(range(60), samples, config)
    for rows in micro_batches:
        longest = max(sum(len(samples[place].tokens) for place in row) for row in rows)
        assert len(rows) * longest <= 50
    assert sorted(place for rows in micro_batches for row in rows for place in row) == list(range(60))


@pytest.mark.parametrize("packing", [True, False])
def test_the_token_budget_is_that_of_each_rank(packing: bool) -> None:
    samples = make_random_samples(60)
    config = RLTrainingConfig(max_micro_batch_tokens=50, packing=packing)
    micro_batches = plan_rows(range(60), samples, config, num_ranks=3)
    for rows in micro_batches:
        lengths = [sum(len(samples[place].tokens) for place in row) for row in rows]
        assert all(len(lengths[rank::3]) * max(lengths) <= 50 for rank in range(3))
    assert sorted(place for rows in micro_batches for row in rows for place in row) == list(range(60))
    assert len(micro_batches) < len(plan_rows(range(60), samples, config)) / 2


@pytest.mark.parametrize("packing", [True, False])
def test_rows_of_like_length_share_a_micro_batch(packing: bool) -> None:
    samples = make_random_samples(60)
    config = RLTrainingConfig(max_micro_batch_tokens=50, packing=packing)
    shapes = [
        [sum(len(samples[place].tokens) for place in row) for row in rows]
        for rows in plan_rows(range(60), samples, config)
    ]
    lengths = [length for shape in shapes for length in shape]
    assert lengths == sorted(lengths, reverse=True)


def test_packing_needs_fewer_rows() -> None:
    samples = make_random_samples(60)
    num_rows = [
        sum(map(len, plan_rows(range(60), samples, RLTrainingConfig(packing=packing)))) for packing in (True, False)
    ]
    assert num_rows[0] < 0.8 * num_rows[1] == 48


def test_minibatches_hold_whole_groups_in_order_and_each_sample_once() -> None:
    samples = graded_samples(num_groups=5)
    parts = split_groups(samples, 2)
    assert [sorted({samples[place].group_index for place in part}) for part in parts] == [[0, 1], [2, 3, 4]]
    assert [place for part in parts for place in part] == list(range(20))


def test_more_minibatches_than_groups_leave_some_empty() -> None:
    assert [len(part) for part in split_groups(graded_samples(num_groups=2), 4)] == [0, 4, 0, 4]


def test_an_update_counts_its_own_tokens_and_has_advantages_of_the_whole_batch() -> None:
    samples = graded_samples(num_groups=4)
    batch = convert_to_batch(samples)
    config = RLTrainingConfig(advantage=AdvantageConfig(estimator="batch_mean_std"), packing=False)
    updates = prepare_updates(batch, batch.rewards, config, num_updates=2)
    [whole] = prepare_grpo_batch(batch, batch.rewards, config)
    expected = advantages_of(whole)
    for part, [micro_batch] in enumerate(updates):
        held = samples[8 * part : 8 * part + 8]
        assert micro_batch.num_loss_tokens == sum(sum(s.loss_mask[1:]) for s in held)
        assert micro_batch.num_samples == 8
        assert micro_batch.num_groups == 2
        assert advantages_of(micro_batch) == {
            f"{s.group_index}/{s.index}": expected[f"{s.group_index}/{s.index}"] for s in held
        }


def constant_group() -> RolloutBatch:
    """Two groups, of which the first has equal rewards."""
    return convert_to_batch([s if s.group_index else replace(s, reward=1.0) for s in graded_samples(num_groups=2)])


@pytest.mark.parametrize(
    ("loss", "num_held"),
    [
        (LossConfig(), 4),
        (LossConfig(kl_coef=0.1), 8),
        (LossConfig(entropy_coef=0.1), 8),
        (LossConfig(ratio_penalty=0.1), 8),
    ],
)
def test_a_sample_without_advantage_is_left_out_only_where_nothing_else_trains_it(
    loss: LossConfig, num_held: int
) -> None:
    batch = constant_group()
    config = RLTrainingConfig(loss=loss)
    scores = RolloutScores(ref_logprobs={i: torch.zeros(len(s.tokens) - 1) for i, s in enumerate(batch.samples)})
    micro_batches = prepare_grpo_batch(batch, batch.rewards, config, scores=scores)
    assert sum(len(m.sample_ids) for m in micro_batches) == num_held
    assert {m.num_samples for m in micro_batches} == {8}


def test_an_update_without_any_signal_has_no_micro_batch() -> None:
    batch = constant_group()
    first, second = prepare_updates(batch, batch.rewards, RLTrainingConfig(), num_updates=2)
    assert first == []
    assert len(second) == 1


@pytest.mark.parametrize(
    ("settings", "places"),
    [
        ({}, []),
        ({"loss": {"ratio_base": "old"}}, []),
        ({"loss": {"ratio_base": "old"}, "num_minibatches": 2}, [4, 5, 6, 7]),
        ({"num_minibatches": 2}, []),
        ({"num_epochs": 2, "loss": {"mismatch": {"mask": "token", "mask_low": 0.5}}}, [4, 5, 6, 7]),
        ({"loss": {"kl_coef": 0.1}}, list(range(8))),
        ({"reward_shaping": {"kl_coef": 0.1}}, list(range(8))),
        ({"advantage": {"estimator": "gae"}}, list(range(8))),
    ],
)
def test_only_what_the_settings_need_is_scored_before_the_first_update(
    settings: dict[str, object], places: list[int]
) -> None:
    batch = constant_group()
    config = RLTrainingConfig.model_validate(settings)
    assert places_to_score(batch.samples, batch.rewards, config) == places


def test_scores_reach_the_positions_that_they_were_taken_at() -> None:
    batch = convert_to_batch(graded_samples())
    numbered = {i: 100.0 * i + torch.arange(len(s.tokens) - 1.0) for i, s in enumerate(batch.samples)}
    config = RLTrainingConfig(loss=LossConfig(ratio_base="old", kl_coef=0.1), max_micro_batch_tokens=60)
    scores = RolloutScores(old_logprobs=numbered, ref_logprobs=numbered)
    for micro_batch in prepare_grpo_batch(batch, batch.rewards, config, scores=scores):
        of_id = {f"{s.group_index}/{s.index}": i for i, s in enumerate(batch.samples)}
        assert micro_batch.old_logprobs_BT is not None and micro_batch.ref_logprobs_BT is not None
        names = iter(micro_batch.sample_ids)
        for b in range(len(micro_batch.inputs_BT)):
            for segment in range(1, int(micro_batch.segment_ids_BT[b].max()) + 1):
                at_T = micro_batch.segment_ids_BT[b] == segment
                expected = numbered[of_id[next(names)]]
                assert torch.equal(micro_batch.old_logprobs_BT[b][at_T], expected)
                assert torch.equal(micro_batch.ref_logprobs_BT[b][at_T], expected)


def test_scores_reach_completions_that_share_their_prompt() -> None:
    batch = convert_to_batch(make_groups(3, 8))
    scores = {i: 100.0 * i + torch.arange(len(s.tokens) - 1.0) for i, s in enumerate(batch.samples)}
    config = RLTrainingConfig(loss=LossConfig(ratio_base="old"))
    [micro_batch] = prepare_grpo_batch(batch, batch.rewards, config, scores=RolloutScores(old_logprobs=scores))
    assert micro_batch.old_logprobs_BT is not None
    is_scored_BT = micro_batch.loss_mask_BT != 0
    found = sorted(micro_batch.old_logprobs_BT[is_scored_BT].tolist())
    assert found == sorted(
        float(scores[i][t - 1]) for i, s in enumerate(batch.samples) for t, weight in enumerate(s.loss_mask) if weight
    )
    places = (micro_batch.old_logprobs_BT[is_scored_BT] % 100).long()
    assert torch.equal(places, micro_batch.position_ids_BT[is_scored_BT])


def test_completions_of_a_prompt_share_it_in_units_of_like_lengths() -> None:
    samples = make_groups(2, 8)
    units = share_groups(range(16), samples, max_tokens=10_000)
    assert [len(unit) for unit in units] == [4, 4, 4, 4]
    assert sorted(place for unit in units for place in unit) == list(range(16))
    sums = [sum(len(samples[place].tokens) for place in unit) for unit in units]
    assert abs(sums[0] - sums[1]) <= 4


def test_units_that_exceed_the_token_budget_are_taken_apart() -> None:
    assert sorted(share_groups(range(8), make_groups(1, 8), max_tokens=6)) == [[place] for place in range(8)]


def test_samples_of_different_prompts_form_no_units() -> None:
    samples = [replace(sample, group_index=0) for sample in make_groups(4, 1)]
    assert share_groups(range(4), samples, max_tokens=10_000) == [[0], [1], [2], [3]]


def test_rows_keep_to_the_token_budget_whatever_their_samples_share() -> None:
    rng = random.Random(0)
    for seed in range(30):
        turns: list[Sample] = []
        for trajectory in make_groups(1, 8, seed=seed):
            tokens = list(trajectory.tokens)
            for _ in range(rng.randint(1, 4)):  # each turn a sample, which reads all turns before it
                length = rng.randint(1, 8)
                tokens += [rng.randrange(25) for _ in range(length)]
                mask = [0.0] * (len(tokens) - length) + [1.0] * length
                turns.append(replace(make_sample(tokens, mask), group_index=0, index=trajectory.index))
        for rows in plan_rows(range(len(turns)), turns, RLTrainingConfig(max_micro_batch_tokens=120)):
            batch = build_batch([[turns[place] for place in row] for row in rows], pad_id=0, share_prompts=True)
            assert batch.inputs_BT.numel() <= 120


def test_a_sample_that_would_shorten_what_others_share_shares_nothing_with_them() -> None:
    first, second = make_sample([1, 2, 3, 4, 5], [0, 0, 0, 0, 1]), make_sample([1, 2, 3, 4, 6], [0, 0, 0, 0, 1])
    short = make_sample([1, 2, 7, 8], [0, 0, 1, 1])
    assert group_sharers([first, second, short]) == [([first, second], 3), ([short], 0)]


def test_kernels_without_a_mask_share_no_prompts() -> None:
    policy = PolicyConfig(attention="flash_attention_2", precision="bfloat16")
    batch = convert_to_batch(make_groups(3, 4))
    for micro_batch in prepare_grpo_batch(batch, batch.rewards, RLTrainingConfig(policy=policy)):
        assert torch.equal(micro_batch.prompt_ids_BT, micro_batch.segment_ids_BT)


@pytest.mark.parametrize(
    ("length", "expected"),
    [(10, 1.0), (16, 1.0), (17, 0.75), (20, 0.0), (22, 0.0)],
)
def test_the_overlong_penalty_by_hand(length: int, expected: float) -> None:
    shaping = RewardShapingConfig(max_response_tokens=20, overlong_buffer_tokens=4)
    assert shape_reward(1.0, num_response_tokens=length, shaping=shaping) == pytest.approx(expected)


def test_the_overlong_penalty_may_go_on_beyond_the_limit() -> None:
    shaping = RewardShapingConfig(max_response_tokens=20, overlong_buffer_tokens=4, overlong_capped=False)
    assert shape_reward(1.0, num_response_tokens=22, shaping=shaping) == pytest.approx(-0.5)


def test_a_buffer_without_a_limit_is_refused() -> None:
    with pytest.raises(ValueError, match="max_response_tokens"):
        RewardShapingConfig(overlong_buffer_tokens=4)


def test_the_penalty_changes_the_advantages() -> None:
    samples = [
        replace(make_sample(range(n + 1)), group_index=0, index=n, reward=1.0, status=Status.COMPLETED) for n in (2, 8)
    ]
    config = RLTrainingConfig(
        advantage=MEAN_ONLY, reward_shaping=RewardShapingConfig(max_response_tokens=8, overlong_buffer_tokens=4)
    )
    credit = assign_credit(samples, [1.0, 1.0], config, RolloutScores())
    assert [float(a) for a in credit.advantages] == [0.5, -0.5]


def test_truncated_samples_may_be_left_out_of_the_loss_but_not_of_the_baseline() -> None:
    samples = [
        replace(s, status=Status.TRUNCATED if s.index == 0 else Status.COMPLETED) for s in graded_samples(num_groups=1)
    ]
    batch = convert_to_batch(samples)
    config = RLTrainingConfig(
        advantage=MEAN_ONLY, packing=False, reward_shaping=RewardShapingConfig(mask_truncated=True)
    )
    [micro_batch] = prepare_grpo_batch(batch, batch.rewards, config)
    assert advantages_of(micro_batch) == pytest.approx({"0/1": -0.25, "0/2": -0.25, "0/3": -0.25})
    assert micro_batch.num_samples == 3
    counting = config.model_copy(update={"loss": LossConfig(count_untrained=True)})
    assert prepare_grpo_batch(batch, batch.rewards, counting)[0].num_samples == 4


def test_with_truncated_samples_left_out_the_penalty_teaches_by_those_that_end_within_the_buffer() -> None:
    # Tokens sampled: 2, 6 (half the buffer), 8 (cut). Shaped rewards: 1, 0.5, 0; the baseline is 0.5.
    ends = {2: Status.COMPLETED, 6: Status.COMPLETED, 8: Status.TRUNCATED}
    samples = [
        replace(make_sample(range(n + 1)), group_index=0, index=n, reward=1.0, status=status)
        for n, status in ends.items()
    ]
    batch = convert_to_batch(samples)
    shaping = RewardShapingConfig(max_response_tokens=8, overlong_buffer_tokens=4, mask_truncated=True)
    config = RLTrainingConfig(advantage=MEAN_ONLY, packing=False, reward_shaping=shaping, loss=LossConfig(kl_coef=0.1))
    scores = RolloutScores(ref_logprobs={place: torch.zeros(n) for place, n in enumerate(ends)})
    [micro_batch] = prepare_grpo_batch(batch, batch.rewards, config, scores=scores)
    assert advantages_of(micro_batch) == pytest.approx({"0/2": 0.5, "0/6": 0.0})


def two_samples() -> tuple[list[Sample], RolloutScores]:
    """A prompt with two completions of two tokens; d = log policy - log reference is 0.1, 0.3 and 0, 0."""
    samples = [replace(make_sample([1, 2, 3]), group_index=0, index=i) for i in range(2)]
    zero_T = torch.zeros(2)
    return samples, RolloutScores(
        old_logprobs={0: torch.tensor([0.1, 0.3]), 1: zero_T}, ref_logprobs={0: zero_T, 1: zero_T}
    )


def test_the_divergence_of_a_completion_is_taken_off_its_reward() -> None:
    samples, scores = two_samples()
    config = RLTrainingConfig(advantage=MEAN_ONLY, reward_shaping=RewardShapingConfig(kl_coef=0.5))
    credit = assign_credit(samples, [1.0, 0.0], config, scores)
    # rewards 1 - 0.5 * 0.4 = 0.8 and 0
    assert [float(a) for a in credit.advantages] == pytest.approx([0.4, -0.4])


def test_the_divergence_may_be_charged_to_the_tokens_before_it() -> None:
    samples, scores = two_samples()
    shaping = RewardShapingConfig(kl_coef=0.5, kl_credit="token")
    credit = assign_credit(samples, [1.0, 0.0], RLTrainingConfig(advantage=MEAN_ONLY, reward_shaping=shaping), scores)
    assert token_advantages(credit, 0) == pytest.approx([0.5 - 0.2, 0.5 - 0.15])
    assert token_advantages(credit, 1) == pytest.approx([-0.5, -0.5])


def test_gae_steps_over_what_the_environment_wrote() -> None:
    # trained tokens 1 and 4; values 0.2 and 0.6 there, the observation's 9.0 between them counts for nothing
    sample = make_sample([1, 2, 3, 4, 5], [0, 1, 0, 0, 1])
    scores = RolloutScores(values={0: torch.tensor([0.2, 9.0, 9.0, 0.6])})
    advantage = AdvantageConfig(estimator="gae", gamma=0.5, gae_lambda=0.5)
    credit = assign_credit([sample], [1.0], RLTrainingConfig(advantage=advantage), scores)
    last = 1.0 - 0.6
    first = 0.5 * 0.6 - 0.2 + 0.25 * last
    assert token_advantages(credit, 0) == pytest.approx([first, 0.0, 0.0, last])
    assert credit.returns[0][[0, 3]].tolist() == pytest.approx([first + 0.2, 1.0])


def test_whitened_advantages_have_mean_zero_over_tokens() -> None:
    samples = graded_samples()
    config = RLTrainingConfig(advantage=AdvantageConfig(estimator="group_mean", whiten=True))
    credit = assign_credit(samples, [s.reward or 0.0 for s in samples], config, RolloutScores())
    weights = [sum(s.loss_mask) for s in samples]
    values = [float(a) for a in credit.advantages]
    assert math.fsum(w * v for w, v in zip(weights, values, strict=True)) == pytest.approx(0.0, abs=1e-4)
    squares = math.fsum(w * v * v for w, v in zip(weights, values, strict=True))
    assert squares / (sum(weights) - 1) == pytest.approx(1.0, abs=1e-4)


def test_an_unscored_sample_is_not_trained_where_the_settings_exclude_it() -> None:
    samples = graded_samples(num_groups=1)
    config = RLTrainingConfig(advantage=AdvantageConfig(unscored="exclude"))
    micro_batches = prepare_grpo_batch(convert_to_batch(samples), [math.nan, 1.0, 0.0, 0.5], config)
    held = [name for m in micro_batches for name in m.sample_ids]
    assert sorted(held) == ["0/1", "0/2"]
    with pytest.raises(ValueError, match="finite"):
        prepare_grpo_batch(convert_to_batch(samples), [math.nan, 1.0, 0.0, 0.5], RLTrainingConfig())


@pytest.mark.parametrize("settings", [{}, {"kl_coef": 0.1, "kl_credit": "token"}])
def test_an_unscored_sample_has_no_part_in_whitening(settings: dict[str, object]) -> None:
    samples = make_groups(1, 4)
    config = RLTrainingConfig(
        advantage=AdvantageConfig(estimator="group_mean", whiten=True, unscored="exclude"),
        reward_shaping=RewardShapingConfig.model_validate(settings),
    )
    scores = RolloutScores(
        old_logprobs={i: torch.full((len(s.tokens) - 1,), -1.0) for i, s in enumerate(samples)},
        ref_logprobs={i: torch.full((len(s.tokens) - 1,), -1.5) for i, s in enumerate(samples)},
    )
    credit = assign_credit(samples, [1.0, 1.0, 0.0, math.nan], config, scores)
    assert not torch.as_tensor(credit.advantages[3]).any()
    first_three = RolloutScores(
        old_logprobs={i: scores.old_logprobs[i] for i in range(3)},
        ref_logprobs={i: scores.ref_logprobs[i] for i in range(3)},
    )
    expected = assign_credit(samples[:3], [1.0, 1.0, 0.0], config, first_three).advantages
    for advantage, other in zip(credit.advantages, expected, strict=False):  # the fourth has no other
        torch.testing.assert_close(torch.as_tensor(advantage), torch.as_tensor(other))


def test_prompts_count_once_in_the_prompt_mean() -> None:
    batch = convert_to_batch(graded_samples(num_groups=3))
    config = RLTrainingConfig(loss=LossConfig(aggregation="prompt_mean"), packing=False)
    [micro_batch] = prepare_grpo_batch(batch, batch.rewards, config)
    assert micro_batch.num_groups == 3
    assert micro_batch.group_tokens_BT is not None
    for name, row_T in zip(micro_batch.sample_ids, micro_batch.group_tokens_BT, strict=True):
        group = [s for s in batch.samples if s.group_index == int(name.split("/")[0])]
        assert float(row_T[0]) == sum(sum(s.loss_mask[1:]) for s in group)


def test_a_value_head_that_would_not_learn_is_refused() -> None:
    with pytest.raises(ValueError, match="value_coef"):
        RLTrainingConfig(advantage=AdvantageConfig(estimator="gae"), loss=LossConfig(value_coef=0.0))


def test_a_trajectory_of_several_samples_counts_once_in_its_groups_baseline() -> None:
    long = [replace(make_sample(), index=0, turn=turn) for turn in range(3)]
    samples = [*long, replace(make_sample(), index=1, turn=0)]
    config = RLTrainingConfig(advantage=MEAN_ONLY)
    advantages = assign_credit(samples, [1.0, 1.0, 1.0, 0.0], config, RolloutScores()).advantages
    assert [float(advantage) for advantage in advantages] == [0.5, 0.5, 0.5, -0.5]


def test_the_length_of_a_trajectory_is_that_of_all_its_samples() -> None:
    shaping = RewardShapingConfig(max_response_tokens=6, overlong_buffer_tokens=4)
    config = RLTrainingConfig(advantage=MEAN_ONLY, reward_shaping=shaping)
    in_parts = [replace(make_sample(), index=0, turn=turn) for turn in range(3)]
    samples = [*in_parts, replace(make_sample(), index=1, turn=0)]
    advantages = assign_credit(samples, [1.0] * 4, config, RolloutScores()).advantages
    assert [float(advantage) for advantage in advantages] == [-0.5, -0.5, -0.5, 0.5]


KL_IN_LOSS = RLTrainingConfig(advantage=MEAN_ONLY, loss=LossConfig(kl_coef=0.1))
KL_IN_REWARD = RLTrainingConfig(advantage=MEAN_ONLY, reward_shaping=RewardShapingConfig(kl_coef=0.1))
LENGTH = RewardShapingConfig(overlong_buffer_tokens=3, max_response_tokens=4)


@pytest.mark.parametrize(
    ("config", "is_equal", "expected"),
    [
        (KL_IN_LOSS, True, False),
        (KL_IN_LOSS, False, True),
        (KL_IN_REWARD, True, False),
        (KL_IN_LOSS.model_copy(update={"reward_shaping": LENGTH}), True, True),  # lengths differ
        (RLTrainingConfig(advantage=AdvantageConfig(estimator="constant", baseline=0.5)), True, True),
        (RLTrainingConfig(advantage=AdvantageConfig(estimator="constant")), True, False),
        (RLTrainingConfig(advantage=AdvantageConfig(estimator="gae")), True, True),  # its value head learns
    ],
)
def test_penalties_alone_do_not_reinforce(config: RLTrainingConfig, is_equal: bool, expected: bool) -> None:
    samples = graded_samples()
    rewards = [0.0 if is_equal else sample.reward or 0.0 for sample in samples]
    assert is_reinforced(samples, rewards, config) == expected


def test_what_is_masked_does_not_reinforce() -> None:
    config = RLTrainingConfig(reward_shaping=RewardShapingConfig(mask_truncated=True), loss=LossConfig(kl_coef=0.1))
    samples = [replace(sample, status=Status.TRUNCATED) for sample in graded_samples()]
    assert not is_reinforced(samples, [sample.reward or 0.0 for sample in samples], config)
