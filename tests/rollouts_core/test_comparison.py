"""Pins that a comparison of checkpoints says how sure it is: no better means no small p-value, better means one.

Without it a lucky checkpoint would be reported as an improvement, or a real one be missed.
"""

import math
import random
from dataclasses import replace

import numpy as np
import pytest

from rollouts_core.comparison import (
    NUM_RESAMPLES,
    compare_paired,
    estimate_mean,
    estimate_means,
    judge_improvement,
    least_p_value,
    least_wins,
    select_best,
)


def draw_scores(seed: int, share: float, num_rows: int = 200) -> list[float]:
    """Scores of 0 and 1 of which about this share is 1."""
    rng = random.Random(seed)
    return [float(rng.random() < share) for _ in range(num_rows)]


def test_identical_scores_have_a_p_value_of_one() -> None:
    scores = draw_scores(0, 0.5)
    comparison = compare_paired(scores, scores)
    assert comparison.p_value == 1.0
    assert (comparison.difference, comparison.low, comparison.high) == (0.0, 0.0, 0.0)


def test_an_obvious_improvement_has_a_tiny_p_value() -> None:
    comparison = compare_paired(draw_scores(0, 0.3), draw_scores(1, 0.8))
    assert comparison.p_value < 0.001
    assert 0.3 < comparison.low < comparison.difference < comparison.high < 0.7


def test_getting_worse_has_a_p_value_near_one() -> None:
    assert compare_paired(draw_scores(0, 0.8), draw_scores(1, 0.3)).p_value > 0.999


def test_the_p_value_of_few_rows_is_that_of_counting() -> None:
    # four rows, each better by 1: one of 2^4 sign choices is as large, so p is about 1/16
    comparison = compare_paired([0.0] * 4, [1.0] * 4)
    assert comparison.p_value == pytest.approx(1 / 16, abs=0.01)


@pytest.mark.parametrize("num_equal", [13, 93, 393])
def test_rows_that_do_not_differ_change_no_p_value(num_equal: int) -> None:
    """Without it seven wins and no loss are an improvement among 200 rows, and none among 100."""
    equal = draw_scores(0, 0.5, num_rows=num_equal)
    few = compare_paired([0.0] * 7, [1.0] * 7)
    assert compare_paired([*equal, *[0.0] * 7], [*equal, *[1.0] * 7]).p_value == few.p_value < 0.01


def test_the_p_value_is_never_zero() -> None:
    assert compare_paired([0.0] * 100, [1.0] * 100).p_value == pytest.approx(1 / (NUM_RESAMPLES + 1))


@pytest.mark.slow
def test_without_a_difference_p_values_are_about_uniform() -> None:
    rng = np.random.default_rng(0)
    p_values = [
        compare_paired(rng.normal(size=30).tolist(), rng.normal(size=30).tolist(), seed=seed).p_value
        for seed in range(100)
    ]
    # Of 100 uniform draws 10 and 50 lie below; four standard deviations are 12 and 20.
    assert sum(p < 0.1 for p in p_values) <= 22
    assert 30 <= sum(p < 0.5 for p in p_values) <= 70


@pytest.mark.parametrize(("num_rows", "share"), [(100, 0.4), (10, 0.95), (50, 0.98), (400, 0.997)])
def test_the_interval_covers_the_true_mean_about_as_often_as_it_says(num_rows: int, share: float) -> None:
    """Without it a model that is wrong in 1 of 50 is said to be right in 100 %, without any doubt."""
    estimates = [estimate_mean(draw_scores(seed, share, num_rows), seed=seed) for seed in range(100)]
    num_covered = sum(estimate.low <= share <= estimate.high for estimate in estimates)
    # 95 are expected, and four standard deviations are 8.7.
    assert num_covered >= 86


def test_the_interval_of_scores_between_0_and_1_covers_their_mean_about_as_often_as_it_says() -> None:
    """Such are the mean scores of several completions."""
    rng = np.random.default_rng(0)
    estimates = [estimate_mean((rng.binomial(4, 0.6, size=100) / 4).tolist(), seed=seed) for seed in range(100)]
    assert sum(estimate.low <= 0.6 <= estimate.high for estimate in estimates) >= 86


@pytest.mark.parametrize(("score", "low", "high"), [(1.0, 0.7225, 1.0), (0.0, 0.0, 0.2775)])
def test_ten_rows_that_are_all_right_or_all_wrong_leave_room_for_others(score: float, low: float, high: float) -> None:
    # n / (n + z^2) = 10 / 13.8415
    estimate = estimate_mean([score] * 10)
    assert (estimate.low, estimate.high) == pytest.approx((low, high), abs=1e-4)


def test_the_intervals_of_one_axis_are_by_one_method() -> None:
    """Wilson's beside a bootstrap of few hits made a model with one half-right row look surer than one without any."""
    none_right, one_half_right = [0.0] * 20, [0.5] + [0.0] * 19
    alone = estimate_mean(none_right)
    first, second = estimate_means([none_right, one_half_right])
    assert alone.high > 0.1 and second.low >= 0.0
    assert first.high < second.high and first.high - first.low <= second.high - second.low
    bounded, rewards = estimate_means([[0.0, 1.0] * 10, [2.5, -1.0] * 10])
    assert bounded == replace(bounded, low=0.3, high=0.7), "by bootstrap, as the rewards beside it"
    assert rewards.low < 0.75 < rewards.high


@pytest.mark.parametrize("num_completions", [1, 2, 8])
def test_intervals_of_models_that_are_compared_cover_their_means(num_completions: int) -> None:
    rng = np.random.default_rng(0)
    shares, num_covered = (0.04, 0.9), [0, 0]
    for _ in range(200):
        drawn = [(rng.binomial(num_completions, share, size=60) / num_completions).tolist() for share in shares]
        for place, (estimate, share) in enumerate(zip(estimate_means(drawn), shares, strict=True)):
            num_covered[place] += estimate.low <= share <= estimate.high
    # 190 are expected, and four standard deviations are 12.3.
    assert min(num_covered) >= 177


def test_an_estimate_says_mean_and_rows() -> None:
    estimate = estimate_mean([0.0, 1.0, 1.0, 1.0])
    assert (estimate.mean, estimate.num_rows) == (0.75, 4)
    assert 0.0 <= estimate.low < 0.75 < estimate.high <= 1.0


def test_a_comparison_is_the_same_every_time() -> None:
    first, second = draw_scores(0, 0.4), draw_scores(1, 0.5)
    assert compare_paired(first, second) == compare_paired(first, second)


@pytest.mark.parametrize("max_numbers", [1, 777, 1 << 40])
def test_how_much_is_resampled_at_a_time_changes_nothing(max_numbers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """10,000 resamples of a million rows at once would take 80 GB."""
    first, second = draw_scores(0, 0.4, num_rows=77), draw_scores(1, 0.5, num_rows=77)
    usual = compare_paired(first, second), estimate_mean(first)
    monkeypatch.setattr("rollouts_core.comparison.MAX_NUMBERS", max_numbers)
    assert (compare_paired(first, second), estimate_mean(first)) == usual


def test_scores_of_different_rows_are_not_compared() -> None:
    with pytest.raises(AssertionError, match="3 scores against 2"):
        compare_paired([0.0] * 3, [0.0] * 2)


@pytest.mark.parametrize(
    ("scores", "best"),
    [
        ([0.1, 0.5, 0.3], 1),
        ([0.5, 0.5, 0.2], 0),
        ([0.1, 0.7, 0.7], 1),
        ([0.0], 0),
        ([-2, -1], 1),
        ([math.nan, -1.0], 1),
        ([-2.0, math.nan, -1.0, math.inf], 2),
        ([math.nan, math.nan], 0),
        ([0.1, (0.1 + 0.2 + 0.3) / 3, (0.3 + 0.2 + 0.1) / 3, 0.2 + 1e-16], 1),
    ],
)
def test_the_best_is_the_highest_and_among_equals_the_first(scores: list[float], best: int) -> None:
    assert select_best(scores) == best


def test_a_verdict_says_both_scores_and_the_p_value() -> None:
    verdict = judge_improvement([0.0] * 50, [1.0] * 50, names=("sft", "rl"), max_p_value=0.01)
    assert verdict.is_improvement
    assert "rl improved on sft: mean score 0.000 -> 1.000 on the same 50" in verdict.sentence
    assert "p < 0.001" in verdict.sentence


def test_a_difference_within_noise_is_no_improvement() -> None:
    verdict = judge_improvement([0.0, 1.0, 0.0], [1.0, 0.0, 1.0], names=("sft", "rl"), max_p_value=0.01)
    assert not verdict.is_improvement
    assert "rl did not improve on sft beyond noise" in verdict.sentence


def test_a_p_value_of_at_most_one_accepts_anything() -> None:
    verdict = judge_improvement([1.0], [0.0], names=("sft", "rl"), max_p_value=1.0)
    assert verdict.is_accepted and verdict.is_improvement is None
    assert verdict.sentence.startswith("rl counts without a test against sft: mean score 1.000 -> 0.000")


@pytest.mark.parametrize(("margin", "is_improvement"), [(0.1, True), (0.3, False)])
def test_a_candidate_must_be_better_by_more_than_the_margin(margin: float, is_improvement: bool) -> None:
    baseline = draw_scores(0, 0.3)
    candidate = [score + 0.2 for score in baseline]
    verdict = judge_improvement(baseline, candidate, names=("a", "b"), max_p_value=0.01, margin=margin)
    assert verdict.is_improvement is is_improvement
    assert f"on a by more than {margin:g}" in verdict.sentence


def test_below_zero_a_margin_lets_an_equal_candidate_pass_and_a_worse_one_not() -> None:
    scores = draw_scores(0, 0.5)
    for lost, is_improvement, claim in (
        (0.0, True, "is at most"),
        (0.02, True, "is at most"),
        (0.1, False, "may be more"),
    ):
        candidate = [score - lost for score in scores]
        verdict = judge_improvement(scores, candidate, names=("a", "b"), max_p_value=0.01, margin=-0.05)
        assert verdict.is_improvement is is_improvement
        assert verdict.sentence.startswith(f"b {claim}") and "improve" not in verdict.sentence
        assert " 0.05 worse than a: mean score " in verdict.sentence


def test_a_p_value_just_above_the_limit_is_not_written_as_the_limit() -> None:
    """Without it a verdict says that p = 0.01 did not count, where 0.01 counts."""
    baseline, candidate = [0.0] * 15 + [1.0] * 4 + [0.0], [1.0] * 15 + [0.0] * 5
    verdict = judge_improvement(baseline, candidate, names=("a", "b"), max_p_value=0.01)
    assert "did not improve" in verdict.sentence
    assert "p = 0.0101 (at most 0.01 counts)" in verdict.sentence


@pytest.mark.parametrize("max_p_value", [0.01, 1.0])
@pytest.mark.parametrize("margin", [-0.05, 0.0, 0.05])
@pytest.mark.parametrize("score", [0.0, 1.0])
def test_every_verdict_says_what_its_p_value_is_about(max_p_value: float, margin: float, score: float) -> None:
    """Terminal, live page, report, message and registry show the sentence; two seeds of a recipe differ by points."""
    verdict = judge_improvement([0.5] * 20, [score] * 20, names=("a", "b"), max_p_value=max_p_value, margin=margin)
    assert verdict.sentence.endswith("; p is about this checkpoint on these rows, not about the recipe")


@pytest.mark.parametrize("num_rows", [1, 7, 50])
@pytest.mark.parametrize("margin", [0.0, 0.2])
def test_no_comparison_of_so_many_rows_has_a_smaller_p_value(num_rows: int, margin: float) -> None:
    least = least_p_value(num_rows)
    assert compare_paired([margin] * num_rows, [1.0] * num_rows).p_value == least
    for seed in range(20):
        assert compare_paired(draw_scores(seed, 0.1, num_rows), draw_scores(seed + 20, 0.9, num_rows)).p_value >= least


@pytest.mark.parametrize(("num_rows", "margin"), [(7, 0.0), (20, 0.0), (20, 0.1), (100, 0.1), (100, 0.3)])
def test_so_many_wins_are_enough_and_one_less_is_not(num_rows: int, margin: float) -> None:
    num_wins = least_wins(num_rows, margin=margin, max_p_value=0.01)
    assert margin * num_rows < num_wins <= num_rows

    def is_better(wins: int) -> bool | None:
        candidate = [1.0] * wins + [0.0] * (num_rows - wins)
        names = ("a", "b")
        return judge_improvement(
            [0.0] * num_rows, candidate, names=names, max_p_value=0.01, margin=margin
        ).is_improvement

    assert (is_better(num_wins), is_better(num_wins - 1)) == (True, False)


def test_where_all_rows_are_too_few_more_are_asked_for_than_there_are() -> None:
    assert least_wins(6, margin=0.0, max_p_value=0.01) == 7
    assert least_wins(100, margin=1.0, max_p_value=0.01) == 101


def test_a_margin_that_lets_an_equal_candidate_pass_asks_for_no_win() -> None:
    assert least_wins(20, margin=-0.1, max_p_value=0.01) == 0
