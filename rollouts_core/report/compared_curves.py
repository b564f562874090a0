"""The curves of compared runs on common axes: data for compare.js, and drawings for browsers without scripts.

    describe_curves(run A) ─┐   {"label": "RL", "xName": "step", "runs": [{"steps": [...], "mark": 30}, ...],
    describe_curves(run B) ─┴─>  "metrics": [{"name": "reward", "values": [[...], [...]]}, ...]}

`runs` and `values` have an entry per compared run: null if the run lacks the stage or the metric. A metric that has the
same constant value in all runs is left out.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rollouts_core.metrics import read_metrics
from rollouts_core.report.charts import (
    CHART_BOTTOM,
    CHART_TOP,
    Chart,
    Line,
    axis_place,
    axis_ticks,
    line_path,
    padded_axis,
    step_axis,
)
from rollouts_core.report.compared import ComparedRun, letter_of
from rollouts_core.report.curve_data import describe_curves
from rollouts_core.report.curves import CurveSection, metric_points, thin_points
from rollouts_core.run_directory import RunDirectory
from rollouts_core.stages import TRAININGS, label_of
from rollouts_core.stages.kind import Curve

JsonObject = dict[str, Any]  # Any: JSON objects have no better type at this edge


def overlay_curves(runs: Sequence[ComparedRun]) -> list[JsonObject]:
    every = [{section["label"]: section for section in describe_curves(run.report)} for run in runs]
    same = describe_same_stages(runs)
    return [
        {**_overlay([found.get(label) for found in every]), "note": same.get(label, "")}
        for label in dict.fromkeys(itertools.chain(*every))
    ]


def describe_same_stages(runs: Sequence[ComparedRun]) -> dict[str, str]:
    """A sentence for each training that several runs share, by the training's label. The sentence says that the curves
    are equal."""
    letters: dict[tuple[str, Path], list[str]] = {}
    for place, run in enumerate(runs):
        for training in run.report.trainings:
            letters.setdefault((label_of(training.name), training.run_dir), []).append(letter_of(place))
    return {
        label: f"{', '.join(shared[:-1])} and {shared[-1]} share one training, so their curves are the same."
        for (label, _), shared in letters.items()
        if len(shared) > 1
    }


def _overlay(sections: Sequence[JsonObject | None]) -> JsonObject:
    """One stage of all runs. `sections` has None for a run without the stage."""
    first = next(section for section in sections if section)
    metrics: dict[str, JsonObject] = {}
    for section in filter(None, sections):
        for metric in section["metrics"]:
            metrics.setdefault(metric["name"], metric)
        for name, value in section["constant"].items():
            metrics.setdefault(name, _constant(name, value))
    shown = []
    for name, metric in metrics.items():
        values = [_values(section, name) if section else None for section in sections]
        known = {number for each in values for number in each or ()}
        if len(known) > 1 or metric["isMain"]:
            shown.append({**metric, "values": values})
    return {
        "label": first["label"],
        "xName": first["xName"],
        "runs": [section and {"steps": section["steps"], "mark": section["mark"]} for section in sections],
        "metrics": sorted(shown, key=lambda metric: not metric["isMain"]),
    }


def _constant(name: str, value: float) -> JsonObject:
    return {"name": name, "title": name, "note": "", "isMain": False, "fromZero": False, "minHigh": 0, "value": value}


def _values(section: JsonObject, name: str) -> list[float | None] | None:
    """The values of a metric at the run's steps; None if the run lacks the metric."""
    for metric in section["metrics"]:
        if metric["name"] == name:
            return list(metric["values"])
    return [section["constant"][name]] * len(section["steps"]) if name in section["constant"] else None


def draw_overlays(runs: Sequence[ComparedRun]) -> list[CurveSection]:
    """The main curves of each training, with a line per run."""
    sections = []
    for name, kind in TRAININGS.items():
        metrics = {
            f"run-{letter_of(place)}": read_metrics(RunDirectory(training.run_dir).metrics)
            for place, run in enumerate(runs)
            for training in run.report.trainings
            if training.name == name
        }
        charts = [chart for curve in kind.curves if (chart := _draw_overlay(metrics, curve))]
        if charts:
            sections.append(CurveSection(title=label_of(name), css=kind.name, charts=tuple(charts)))
    return sections


def _draw_overlay(metrics: Mapping[str, Sequence[Mapping[str, float]]], curve: Curve) -> Chart | None:
    """A chart of a metric with a line per run, or None if no run has the metric. `metrics` is by the runs' CSS
    classes."""
    found = {css: metric_points(lines, curve.metric) for css, lines in metrics.items()}
    thinned = {css: thin_points(points) for css, points in found.items() if points}
    buckets = [bucket for each in thinned.values() for bucket in each]
    if not buckets:
        return None
    zero = [0.0] if curve.is_from_zero else []
    x_axis = step_axis([bucket.step for bucket in buckets])
    y_axis = padded_axis([*(bucket.mean for bucket in buckets), *zero], CHART_BOTTOM, CHART_TOP)
    return Chart(
        title=curve.title,
        headline="",
        note=curve.note,
        x_ticks=axis_ticks(x_axis, max_ticks=6, is_whole=True),
        y_ticks=axis_ticks(y_axis, max_ticks=5),
        lines=tuple(
            Line(css, line_path([(axis_place(x_axis, b.step), axis_place(y_axis, b.mean)) for b in each]))
            for css, each in thinned.items()
        ),
        legend=tuple(Line(css, css.removeprefix("run-")) for css in thinned),
    )
