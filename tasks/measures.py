"""Compute pass@k and majority@k of an evaluation's models, for evaluation.json and for the registry.

Not here: the formulas (rollouts_core/pass_rates.py), the measures in reports (rollouts_core/report/results.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rollouts_core.comparison import compare_paired, estimate_means
from rollouts_core.pass_rates import measures_of

JsonObject = Mapping[str, Any]  # Any: JSON


def describe_measures(entries: Mapping[str, JsonObject], pair: tuple[str, str] | None) -> dict[str, Any]:  # Any: JSON
    """Estimate each measure, such as "pass@4". Returns two entries per measure, `models` and `comparison`.

    `models` has the mean and the interval of each model. `comparison` compares the two models in `pair`.

    Args:
        entries: the checkpoints in an evaluation's result.json, by model.
        pair: names of the baseline and the candidate; None if the evaluation has only one model.
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
    """Compare the measures of two models in an evaluation, with the keys that the registry uses for scores."""
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
