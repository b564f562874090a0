"""Compare two models' results of a benchmark on the same rows, as numbers with intervals and as texts.

Not here: running a benchmark (harnesses/), the table in the report (report/page.html.jinja).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

from rollouts_core.comparison import CONFIDENCE, Comparison, compare_paired, estimate_means
from rollouts_core.harnesses.spec import MetricResult

Interval = tuple[float, float | None, float | None]
"""A mean and the ends of its interval, which are None if they are unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """One metric of one task: a model's value, and the difference to another model on the same rows.

    Intervals have 95 %. They are None if the harness reports neither scores of rows nor a standard error.
    """

    task: str
    metric: str
    num_rows: int
    is_share: bool
    """Whether all scores are between 0 and 1."""
    mean: float
    low: float | None
    high: float | None
    against_mean: float | None = None
    """The other model's value; None without another model."""
    against_low: float | None = None
    against_high: float | None = None
    difference: float | None = None
    """The model's value minus the other model's value; None if the rows cannot be paired."""
    difference_low: float | None = None
    difference_high: float | None = None
    p_value: float | None = None
    """Probability of at least this improvement if both models were equally good."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkTable:
    """The results of one command, for the report."""

    title: str
    """Harness with its version, tasks and settings."""
    against: str
    """Name of the other model; empty without another model."""
    metrics: tuple[Benchmark, ...]


def compare_benchmarks(model: Sequence[MetricResult], against: Sequence[MetricResult]) -> list[Benchmark]:
    """The model's results, each paired with the other model's result of the same task and metric."""
    others = {(each.task, each.metric): each for each in against}
    return [_compare(each, others.get((each.task, each.metric))) for each in model]


def _compare(model: MetricResult, against: MetricResult | None) -> Benchmark:
    results = [model, *([against] if against else [])]
    has_scores = all(each.scores for each in results)
    intervals = _from_scores(results) if has_scores else [_from_stderr(each) for each in results]
    mean, low, high = intervals[0]
    against_mean, against_low, against_high = intervals[1] if against else (None, None, None)
    paired = None
    if against and has_scores and (model.rows, model.num_rows) == (against.rows, against.num_rows):
        paired = _compare_scores(against, model)
    return Benchmark(
        task=model.task,
        metric=model.metric,
        num_rows=model.num_rows,
        is_share=has_scores and all(0 <= score <= 1 for each in results for score in each.scores),
        mean=mean,
        low=low,
        high=high,
        against_mean=against_mean,
        against_low=against_low,
        against_high=against_high,
        difference=paired.difference if paired else None,
        difference_low=paired.low if paired else None,
        difference_high=paired.high if paired else None,
        p_value=paired.p_value if paired else None,
    )


def _from_scores(results: Sequence[MetricResult]) -> list[Interval]:
    return [(each.mean, each.low, each.high) for each in estimate_means([each.scores for each in results])]


def _from_stderr(result: MetricResult) -> Interval:
    if result.stderr is None:
        return result.value, None, None
    half = NormalDist().inv_cdf((1 + CONFIDENCE) / 2) * result.stderr
    return result.value, result.value - half, result.value + half


def _compare_scores(against: MetricResult, model: MetricResult) -> Comparison:
    """The model's scores minus the other model's scores. The p-value is about a lower mean if lower is better."""
    if not model.is_lower_better:
        return compare_paired(against.scores, model.scores)
    turned = compare_paired([-score for score in against.scores], [-score for score in model.scores])
    return replace(turned, difference=-turned.difference, low=-turned.high, high=-turned.low)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownBenchmark:
    """One metric of one task as texts."""

    task: str
    metric: str
    num_rows: int
    value: str
    """The model's value with its interval."""
    against: str
    """The other model's value with its interval; empty without another model."""
    difference: str
    """The difference with its interval and p-value; empty if the rows are not paired."""


def show_benchmark(found: Benchmark) -> ShownBenchmark:
    """The texts of a metric, in percent if all scores are between 0 and 1."""
    unit = " %" if found.is_share else ""
    difference = ""
    if found.difference is not None and found.p_value is not None:
        ends = _interval(found.difference_low, found.difference_high, found, sign="+")
        points = " points" if found.is_share else ""
        chance = "p < 0.001" if found.p_value < 0.001 else f"p = {found.p_value:.3f}"
        difference = f"{_number(found.difference, found, sign='+')}{points}{ends}, {chance}"
    return ShownBenchmark(
        task=found.task,
        metric=found.metric,
        num_rows=found.num_rows,
        value=f"{_number(found.mean, found)}{unit}{_interval(found.low, found.high, found)}",
        against=""
        if found.against_mean is None
        else f"{_number(found.against_mean, found)}{unit}{_interval(found.against_low, found.against_high, found)}",
        difference=difference,
    )


def _interval(low: float | None, high: float | None, found: Benchmark, *, sign: str = "") -> str:
    if low is None or high is None:
        return ""
    return f" ({_number(low, found, sign=sign)} to {_number(high, found, sign=sign)})"


def _number(value: float, found: Benchmark, *, sign: str = "") -> str:
    return f"{100 * value:{sign}.1f}" if found.is_share else f"{value:{sign}.4g}"
