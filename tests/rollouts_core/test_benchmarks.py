"""Pins the comparison of two models' results of a benchmark: what is paired, and which direction is better.

Without it a lower perplexity would look like a loss, or rows be paired that differ.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from rollouts_core.benchmarks import compare_benchmarks, show_benchmark
from rollouts_core.comparison import compare_paired, estimate_means
from rollouts_core.harnesses.spec import MetricResult

GOOD = (1.0,) * 15 + (0.0,) * 5
BAD = (1.0,) * 5 + (0.0,) * 15


def result_of(scores: tuple[float, ...], **changed: object) -> MetricResult:
    result = MetricResult(
        task="sums",
        metric="acc",
        value=sum(scores) / max(len(scores), 1),
        stderr=None,
        is_lower_better=False,
        num_rows=len(scores),
        scores=scores,
        rows="digest",
    )
    return replace(result, **changed)  # type: ignore[arg-type]


def test_scores_are_compared_as_held_out_scores_are() -> None:
    [found] = compare_benchmarks([result_of(GOOD)], [result_of(BAD)])
    own, other = estimate_means([GOOD, BAD])
    compared = compare_paired(BAD, GOOD)
    assert (found.mean, found.low, found.high) == (own.mean, own.low, own.high)
    assert (found.against_mean, found.against_low, found.against_high) == (other.mean, other.low, other.high)
    assert (found.difference, found.difference_low, found.p_value) == (0.5, compared.low, compared.p_value)
    shown = show_benchmark(found)
    assert shown.value.startswith("75.0 % (") and shown.difference.startswith("+50.0 points (+")


def test_a_lower_value_counts_as_better_where_lower_is_better() -> None:
    low, high = (result_of(scores, is_lower_better=True) for scores in (BAD, GOOD))
    [found] = compare_benchmarks([low], [high])
    assert found.difference == -0.5 and found.difference_high is not None and found.difference_high < 0
    assert found.p_value is not None and found.p_value < 0.01


@pytest.mark.parametrize("changed", [{"rows": "others"}, {"num_rows": 10}, {"metric": "f1"}])
def test_other_rows_and_metrics_are_not_paired(changed: dict[str, object]) -> None:
    [found] = compare_benchmarks([result_of(GOOD)], [result_of(BAD, **changed)])
    assert found.difference is None and found.mean == 0.75
    assert show_benchmark(found).difference == ""


def test_a_value_without_scores_has_the_interval_of_its_standard_error() -> None:
    [found] = compare_benchmarks([result_of((), value=9.0, stderr=1.0)], [result_of((), value=8.0)])
    assert [found.low, found.high] == pytest.approx([9 - 1.96, 9 + 1.96], abs=1e-3)
    assert (found.against_mean, found.against_low, found.difference) == (8.0, None, None)
    shown = show_benchmark(found)
    assert (shown.value, shown.against) == ("9 (7.04 to 10.96)", "8")
