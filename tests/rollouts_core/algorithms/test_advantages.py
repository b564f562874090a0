"""Pins the advantages of every estimator by hand, and what groups of one, of equal or of missing rewards give.

Without it another convention (population standard deviation, no epsilon, own reward in the baseline) would slip in and
change the size of every RL gradient. test_peer_advantages.py compares with what well-known systems give.
"""

import math
import random
import statistics

import pytest

from rollouts_core.algorithms.advantages import (
    GROUP_ESTIMATORS,
    batch_advantages,
    compute_advantages,
    gae_advantages,
    group_advantages,
    whiten,
)
from rollouts_core.config import AdvantageConfig, RLTrainingConfig

BATCH_ESTIMATORS = ["group_mean_batch_std", "batch_mean_std"]
ALL_ESTIMATORS = [*GROUP_ESTIMATORS, *BATCH_ESTIMATORS]
CENTRED = ["group_mean_std", "group_mean", "leave_one_out", "group_mean_batch_std", "batch_mean_std"]


def test_a_constant_baseline_is_subtracted() -> None:
    assert compute_advantages([1.0, 0.0, -0.5], baseline=0.25) == [0.75, -0.25, -0.75]


def test_without_a_baseline_rewards_are_advantages() -> None:
    assert compute_advantages([1.0, 0.0]) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        # rewards 1, 0, 0, 1: mean 1/2, sample variance 4 * (1/4) / 3 = 1/3
        ("group_mean_std", [0.5 / (math.sqrt(1 / 3) + 1e-6), -0.5 / (math.sqrt(1 / 3) + 1e-6)] * 2),
        ("group_mean_batch_std", [0.5 / (math.sqrt(1 / 3) + 1e-6), -0.5 / (math.sqrt(1 / 3) + 1e-6)] * 2),
        ("batch_mean_std", [0.5 / (math.sqrt(1 / 3) + 1e-6), -0.5 / (math.sqrt(1 / 3) + 1e-6)] * 2),
        ("group_mean", [0.5, -0.5] * 2),
        # others of a 1 have mean 1/3, others of a 0 have mean 2/3
        ("leave_one_out", [2 / 3, -2 / 3] * 2),
        # others of a 1: 0, 1, 0 with variance (1 - 1/3) / 2 = 1/3; others of a 0: 1, 1, 0, the same
        ("leave_one_out_std", [2 / 3 / (math.sqrt(1 / 3) + 1e-6), -2 / 3 / (math.sqrt(1 / 3) + 1e-6)] * 2),
        ("max_rl", [0.5 / (0.5 + 1e-6), -0.5 / (0.5 + 1e-6)] * 2),
        ("constant", [0.9, -0.1] * 2),
    ],
)
def test_advantages_by_hand(estimator: str, expected: list[float]) -> None:
    config = AdvantageConfig(estimator=estimator, baseline=0.1)
    assert group_advantages([1.0, 0.0, 1.0, 0.0], config) == pytest.approx(expected, abs=1e-12)


def test_the_name_of_an_estimator_is_enough() -> None:
    assert group_advantages([1.0, 0.0], "group_mean") == [0.5, -0.5]
    assert group_advantages([1.0, 0.0]) == group_advantages([1.0, 0.0], AdvantageConfig())


def test_an_unknown_estimator_is_refused() -> None:
    with pytest.raises(ValueError, match="group_mean_std"):
        group_advantages([1.0, 0.0], "group_norm")


@pytest.mark.parametrize("estimator", ["group_mean_std", "group_mean_batch_std", "batch_mean_std"])
def test_the_population_deviation_divides_by_the_number_of_rewards(estimator: str) -> None:
    # 1, 0, 0, 0: mean 1/4, squared deviations 9/16 + 3/16 = 3/4, a fourth of it 3/16
    config = AdvantageConfig(estimator=estimator, std="population", eps=0.0)
    expected = [0.75 / math.sqrt(3 / 16), *[-0.25 / math.sqrt(3 / 16)] * 3]
    assert group_advantages([1.0, 0.0, 0.0, 0.0], config) == pytest.approx(expected, abs=1e-12)


def test_eps_is_added_to_the_deviation() -> None:
    # 1, -1: mean 0, sample variance 2
    assert group_advantages([1.0, -1.0], AdvantageConfig(eps=0.5))[0] == pytest.approx(1 / (math.sqrt(2) + 0.5))


def test_leave_one_out_is_the_centred_reward_times_n_over_n_minus_one() -> None:
    rewards = [0.3, 1.7, -2.0, 0.0, 0.9]
    mean = statistics.fmean(rewards)
    expected = [5 / 4 * (reward - mean) for reward in rewards]
    assert group_advantages(rewards, "leave_one_out") == pytest.approx(expected)


def test_others_that_do_not_differ_leave_the_leave_one_out_advantage_undivided() -> None:
    # others of the 1 are 0, 0, 0; others of a 0 are 1, 0, 0 with mean 1/3 and variance 1/3
    found = group_advantages([1.0, 0.0, 0.0, 0.0], AdvantageConfig(estimator="leave_one_out_std", eps=0.0))
    assert found == pytest.approx([1.0, *[-1 / 3 / math.sqrt(1 / 3)] * 3])


def test_max_rl_weighs_rare_success_more() -> None:
    rare = group_advantages([1.0, 0.0, 0.0, 0.0], AdvantageConfig(estimator="max_rl", eps=0.0))
    assert rare == pytest.approx([3.0, -1.0, -1.0, -1.0])


def test_max_rl_has_no_signal_where_the_mean_is_not_positive() -> None:
    assert group_advantages([-1.0, 1.0, -1.0], "max_rl") == [0.0] * 3


def test_the_batch_deviation_is_taken_over_all_groups() -> None:
    # rewards 1, 0 and 4, 2: mean 7/4, squared deviations (9 + 49 + 81 + 1) / 16 = 35/4, a third of it 35/12
    found = batch_advantages([[1.0, 0.0], [4.0, 2.0]], AdvantageConfig(estimator="group_mean_batch_std", eps=0.0))
    scale = math.sqrt(35 / 12)
    assert found == [pytest.approx([0.5 / scale, -0.5 / scale]), pytest.approx([1 / scale, -1 / scale])]


def test_the_batch_mean_is_taken_over_all_groups() -> None:
    found = batch_advantages([[1.0, 1.0], [4.0, 2.0]], AdvantageConfig(estimator="batch_mean_std", eps=0.0))
    scale = statistics.stdev([1.0, 1.0, 4.0, 2.0])
    assert found == [pytest.approx([-1 / scale, -1 / scale]), pytest.approx([2 / scale, 0.0])]


@pytest.mark.parametrize("estimator", list(GROUP_ESTIMATORS))
def test_groups_do_not_look_at_each_other(estimator: str) -> None:
    groups = [[1.0, 0.0, 0.5], [3.0, 7.0], [2.0, 2.0]]
    assert batch_advantages(groups, estimator) == [group_advantages(group, estimator) for group in groups]


@pytest.mark.parametrize("estimator", CENTRED)
def test_advantages_of_a_batch_add_up_to_zero(estimator: str) -> None:
    groups = batch_advantages([[0.3, 1.7, -2.0, 0.0], [5.0, 1.0, 1.0, 2.0]], estimator)
    assert sum(sum(group) for group in groups) == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("estimator", [*CENTRED, "leave_one_out_std"])
def test_shifting_all_rewards_changes_nothing(estimator: str) -> None:
    groups = [[0.25, 1.5, -2.0, 0.0], [5.0, 1.0, 1.0, 2.0]]
    shifted = [[reward + 8 for reward in group] for group in groups]
    for found, expected in zip(batch_advantages(shifted, estimator), batch_advantages(groups, estimator), strict=True):
        assert found == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("estimator", ["group_mean_std", "group_mean_batch_std", "batch_mean_std", "leave_one_out_std"])
def test_scaling_all_rewards_changes_nothing_but_for_eps(estimator: str) -> None:
    groups = [[0.25, 1.5, -2.0, 0.0], [5.0, 1.0, 1.0, 2.0]]
    scaled = [[3 * reward for reward in group] for group in groups]
    config = AdvantageConfig(estimator=estimator, eps=0.0)
    for found, expected in zip(batch_advantages(scaled, config), batch_advantages(groups, config), strict=True):
        assert found == pytest.approx(expected)


@pytest.mark.parametrize("estimator", ALL_ESTIMATORS)
def test_a_group_of_one_has_no_signal(estimator: str) -> None:
    assert group_advantages([0.7], estimator) == [0.0]


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [("group_mean_std", 0.7 / 1.01), ("group_mean", 0.7), ("leave_one_out", 0.7), ("max_rl", 0.7)],
)
def test_a_group_of_one_may_keep_its_reward(estimator: str, expected: float) -> None:
    config = AdvantageConfig(estimator=estimator, singleton="reward", eps=0.01)
    assert group_advantages([0.7], config) == pytest.approx([expected])


@pytest.mark.parametrize("estimator", ALL_ESTIMATORS)
@pytest.mark.parametrize("reward", [0.0, 1.0, -1.0, 0.1])
def test_a_group_of_equal_rewards_has_exactly_no_signal(estimator: str, reward: float) -> None:
    assert group_advantages([reward] * 7, estimator) == [0.0] * 7


@pytest.mark.parametrize("estimator", ALL_ESTIMATORS)
def test_a_batch_of_equal_rewards_has_no_signal_without_an_eps_either(estimator: str) -> None:
    settings = AdvantageConfig(estimator=estimator, eps=0.0)
    assert batch_advantages([[1.0, 1.0], [1.0, 1.0, 1.0]], settings) == [[0.0] * 2, [0.0] * 3]


def test_a_constant_baseline_gives_signal_to_equal_rewards() -> None:
    assert group_advantages([1.0, 1.0], AdvantageConfig(estimator="constant", baseline=0.5)) == [0.5, 0.5]


def test_rewards_that_hardly_differ_are_not_blown_up() -> None:
    # std 7e-9 is far below the epsilon, so the advantage stays near (1e-8 / 2) / 1e-6
    assert max(map(abs, group_advantages([0.0, 1e-8]))) < 1e-8 / AdvantageConfig().eps


@pytest.mark.parametrize("estimator", [*ALL_ESTIMATORS, "constant"])
@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_no_finite_number_is_refused(estimator: str, reward: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        group_advantages([0.0, reward], estimator)


@pytest.mark.parametrize("estimator", [*ALL_ESTIMATORS, "constant"])
def test_an_excluded_reward_is_not_in_the_baseline_and_has_no_advantage(estimator: str) -> None:
    config = AdvantageConfig(estimator=estimator, unscored="exclude")
    with_gaps = group_advantages([math.nan, 1.0, 0.0, math.nan, 1.0], config)
    scored = group_advantages([1.0, 0.0, 1.0], config)
    assert with_gaps == [0.0, scored[0], scored[1], 0.0, scored[2]]


@pytest.mark.parametrize("estimator", [*ALL_ESTIMATORS, "constant"])
def test_a_group_without_any_score_has_no_advantages(estimator: str) -> None:
    config = AdvantageConfig(estimator=estimator, unscored="exclude")
    assert group_advantages([math.nan, math.nan], config) == [0.0, 0.0]


def test_an_infinite_reward_is_refused_even_where_nan_is_excluded() -> None:
    with pytest.raises(ValueError, match="finite"):
        group_advantages([0.0, math.inf], AdvantageConfig(unscored="exclude"))


def test_every_estimator_of_the_settings_exists() -> None:
    estimators = RLTrainingConfig.model_json_schema()["$defs"]["AdvantageConfig"]["properties"]["estimator"]["enum"]
    assert set(estimators) == {*ALL_ESTIMATORS, "constant", "gae"}


def test_gae_by_hand() -> None:
    # gamma 1/2, lambda 1/2: delta = 0 + 0.5 * 2 - 1 = 0, 0 + 0.5 * 4 - 2 = 0, 8 - 4 = 4; A = 0.25 * A_next + delta
    advantages, returns = gae_advantages([0.0, 0.0, 8.0], [1.0, 2.0, 4.0], gamma=0.5, gae_lambda=0.5)
    assert advantages == pytest.approx([0.25, 1.0, 4.0])
    assert returns == pytest.approx([1.25, 3.0, 8.0])


def test_gae_with_lambda_one_is_the_discounted_return_minus_the_value() -> None:
    rewards, values = [1.0, 0.0, -2.0, 3.0], [0.3, -0.4, 0.9, 0.1]
    advantages, returns = gae_advantages(rewards, values, gamma=0.9, gae_lambda=1.0)
    expected = [sum(0.9**k * reward for k, reward in enumerate(rewards[t:])) for t in range(4)]
    assert returns == pytest.approx(expected)
    assert advantages == pytest.approx([e - v for e, v in zip(expected, values, strict=True)])


def test_gae_with_lambda_zero_is_the_surprise_of_one_step() -> None:
    advantages, _ = gae_advantages([1.0, 0.0, 2.0], [0.5, 0.25, 1.0], gamma=1.0, gae_lambda=0.0)
    assert advantages == pytest.approx([1 + 0.25 - 0.5, 0 + 1 - 0.25, 2 - 1])


def test_values_that_predict_the_return_leave_no_advantage() -> None:
    advantages, _ = gae_advantages([0.0, 0.0, 5.0], [5.0, 5.0, 5.0])
    assert advantages == pytest.approx([0.0, 0.0, 0.0])


@pytest.mark.parametrize(("std", "degrees"), [("sample", 7), ("population", 8)])
def test_whitening_by_hand(std: str, degrees: int) -> None:
    # 8 tokens: 2 - 4 x 1 + 2 x 1 + 0 = 0, so the mean is 0; squares 4 + 4 x 1 + 2 x 1 = 10
    values, weights = [2.0, -1.0, 1.0, 0.0], [1.0, 4.0, 2.0, 1.0]
    divisor = math.sqrt(10 / degrees + 1e-8)
    assert whiten(values, weights, std) == pytest.approx([value / divisor for value in values])


@pytest.mark.parametrize("std", ["sample", "population"])
def test_whitening_counts_tokens(std: str) -> None:
    rng = random.Random(0)
    values, lengths = [rng.gauss(2, 3) for _ in range(9)], [rng.randint(1, 6) for _ in range(9)]
    spelled_out = [value for value, length in zip(values, lengths, strict=True) for _ in range(length)]
    by_token = whiten(spelled_out, [1.0] * len(spelled_out), std)
    by_sample = whiten(values, [float(length) for length in lengths], std)
    assert [v for v, n in zip(by_sample, lengths, strict=True) for _ in range(n)] == pytest.approx(by_token)
    assert statistics.fmean(by_token) == pytest.approx(0.0, abs=1e-12)


def test_whitening_equal_values_gives_zeros() -> None:
    assert whiten([0.5, 0.5], [3.0, 2.0]) == pytest.approx([0.0, 0.0], abs=1e-9)


def test_whitening_nothing_gives_nothing() -> None:
    assert whiten([1.0], [1.0], "sample") == [0.0]
    assert whiten([1.0], [0.0], "population") == [0.0]
