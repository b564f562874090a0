"""pass@k and majority@k of the models of an evaluation as records, for evaluation.json and the registry.

Not here: the measures (rollouts_core/pass_rates.py), how reports show them (rollouts_core/report/results.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rollouts_core.comparison import compare_paired, estimate_means
from rollouts_core.pass_rates import measures_of

JsonObject = Mapping[str, Any]  # Any: JSON


def describe_measures(entries: Mapping[str, JsonObject], pair: tuple[str, str] | None) -> dict[str, Any]:  # Any: JSON
    """`models` (mean and interval by model) and `comparison` of each measure, by its name.

    Args:
        entries: the checkpoints in an evaluation's result.json, by model.
        pair: names of the baseline and the candidate; None for a model alone.
    """
    by_model = {name: measures_of(entry) for name, entry in entries.items()}
    first, *others = by_model.values()
    described = {}
    for title in [title for title in first if all(title in each for each in others)]:
        estimates = estimate_means([each[title] for each in by_model.values()])
        compared = compare_paired(*(by_model[name][title] for name in pair)) if pair else None
        described[title] = {
            "models": {name: asdict(estimate) for name, estimate in zip(by_model, estimates, strict=True)},
            "comparison": compared and asdict(compared),
        }
    return described


def compare_measures(before: JsonObject, after: JsonObject) -> dict[str, dict[str, float]]:
    """The measures of a candidate and of its baseline, under the keys that the registry has for the score."""
    baseline = measures_of(before)
    return {
        name: _compare_measure(baseline[name], values)
        for name, values in measures_of(after).items()
        if name in baseline
    }


def _compare_measure(baseline: Sequence[float], candidate: Sequence[float]) -> dict[str, float]:
    against, estimate = estimate_means([baseline, candidate])
    comparison = compare_paired(baseline, candidate)
    return {
        "mean": estimate.mean,
        "low": estimate.low,
        "high": estimate.high,
        "against_mean": against.mean,
        "against_low": against.low,
        "against_high": against.high,
        "difference": comparison.difference,
        "difference_low": comparison.low,
        "difference_high": comparison.high,
        "p_value": comparison.p_value,
    }
