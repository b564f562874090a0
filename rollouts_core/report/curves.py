"""Draw the curves of the training stages from the stages' metrics."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rollouts_core.metrics import read_json_lines, read_metrics
from rollouts_core.report.charts import (
    CHART_BOTTOM,
    CHART_TOP,
    Chart,
    Line,
    area_path,
    axis_place,
    axis_ticks,
    format_number,
    line_path,
    padded_axis,
    step_axis,
)
from rollouts_core.report.inputs import ReportInput
from rollouts_core.report.results import (
    selected_step,
)
from rollouts_core.run_directory import RunDirectory
from rollouts_core.stages import kind_of, label_of
from rollouts_core.stages.kind import Curve

MAX_CURVE_POINTS = 80
NUM_COLORS = 4
"""Number of GPU colours in style.html.jinja. Further GPUs reuse the colours with dashed lines."""
MAX_PAUSE_S, MAX_PAUSES = 60.0, 6.0
"""Limits for a pause between two GPU samples on the time axis: 60 seconds or 6 times the median pause, whichever is
longer. Longer pauses are shortened, because a job may be interrupted for days."""
SECONDS = {"generate_s": "generate", "train_s": "train", "publish_s": "publish"}


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveSection:
    """The curves of one training stage."""

    title: str
    css: str
    """The kind of the training, which sets the curves' colours."""
    charts: tuple[Chart, ...]


class Bucket(NamedTuple):
    """The mean and range of neighbouring points of a curve."""

    step: float
    mean: float
    low: float
    high: float


def load_curves(report: ReportInput) -> list[CurveSection]:
    sections = []
    for training in report.trainings:
        metrics = read_metrics(RunDirectory(training.run_dir).metrics)
        mark_step = selected_step(training.selection_dir, training.selected)
        charts = [draw_curve(metrics, curve, mark_step=mark_step) for curve in kind_of(training.name).curves]
        charts.append(draw_seconds(metrics))
        charts += draw_gpu_use(read_json_lines(RunDirectory(training.run_dir).gpu_use))
        drawn = tuple(chart for chart in charts if chart is not None)
        sections.append(CurveSection(title=label_of(training.name), css=kind_of(training.name).name, charts=drawn))
    return sections


def draw_curve(metrics: Sequence[Mapping[str, float]], curve: Curve, *, mark_step: int | None) -> Chart | None:
    """A chart of the metric over steps, or None if no step has the metric. Long curves show means and ranges of
    neighbours."""
    points = metric_points(metrics, curve.metric)
    if not points:
        return None
    buckets = thin_points(points)
    ends = [end for bucket in buckets for end in (bucket.low, bucket.high)]
    zero = [0.0] if curve.is_from_zero else []
    x_axis = step_axis([step for step, _ in points])
    y_axis = padded_axis([*ends, *zero, *([curve.min_high] if curve.min_high else [])], CHART_BOTTOM, CHART_TOP)
    is_thinned = len(buckets) < len(points)
    band = area_path(
        [(axis_place(x_axis, b.step), axis_place(y_axis, b.low), axis_place(y_axis, b.high)) for b in buckets]
    )
    line = line_path([(axis_place(x_axis, b.step), axis_place(y_axis, b.mean)) for b in buckets])
    thinning = " Line: means of neighbouring steps; band: their range." if is_thinned else ""
    return Chart(
        title=curve.title,
        headline=_first_to_last([value for _, value in points], smallest=curve.min_high / 1000),
        note=curve.note + thinning,
        x_ticks=axis_ticks(x_axis, max_ticks=6, is_whole=True),
        y_ticks=axis_ticks(y_axis, max_ticks=5),
        areas=(Line("band", band),) if is_thinned else (),
        lines=(Line("series-1", line),),
        mark_x=axis_place(x_axis, mark_step) if mark_step and points[0][0] <= mark_step <= points[-1][0] else None,
    )


def draw_seconds(metrics: Sequence[Mapping[str, float]]) -> Chart | None:
    """A stacked chart of each step's seconds of sampling, training and publishing; None without timings."""
    timed = [line for line in metrics if all(name in line for name in SECONDS)]
    if not timed:
        return None
    thinned = [thin_points(metric_points(timed, name)) for name in SECONDS]
    tops = [list(itertools.accumulate(bucket.mean for bucket in column)) for column in zip(*thinned, strict=True)]
    x_axis = step_axis([line["step"] for line in timed])
    y_axis = padded_axis([0.0, *(column[-1] for column in tops)], CHART_BOTTOM, CHART_TOP)
    places = [axis_place(x_axis, bucket.step) for bucket in thinned[0]]
    areas = []
    for i in range(len(SECONDS)):
        floors = [column[i - 1] if i else 0.0 for column in tops]
        edges = zip(places, floors, (column[i] for column in tops), strict=True)
        path = area_path([(x, axis_place(y_axis, low), axis_place(y_axis, high)) for x, low, high in edges])
        areas.append(Line(f"series-{i + 1}", path))
    totals = [sum(line[name] for name in SECONDS) for line in timed]
    return Chart(
        title="Seconds per step",
        headline=f"mean {format_number(statistics.fmean(totals))} s",
        note="Sampling and grading, updating the weights, handing them to the engines.",
        x_ticks=axis_ticks(x_axis, max_ticks=6, is_whole=True),
        y_ticks=axis_ticks(y_axis, max_ticks=5),
        areas=tuple(areas),
        legend=tuple(Line(f"series-{i}", label) for i, label in enumerate(SECONDS.values(), start=1)),
    )


def draw_gpu_use(samples: Sequence[Mapping[str, Any]]) -> list[Chart]:  # Any: JSON
    """Charts of each GPU's utilization and memory over the job's running time; empty without samples."""
    minutes = gpu_minutes(samples)
    used: dict[int, list[tuple[float, float]]] = {}
    filled: dict[int, list[tuple[float, float]]] = {}
    total_gib = 0.0
    for minute, sample in zip(minutes, samples, strict=False):  # without samples, `minutes` has one entry
        for reading in sample["gpus"]:
            if "use_percent" in reading:
                used.setdefault(reading["gpu"], []).append((minute, reading["use_percent"]))
            if "memory_gib" in reading:
                filled.setdefault(reading["gpu"], []).append((minute, reading["memory_gib"]))
            total_gib = max(total_gib, reading.get("total_gib", 0.0))
    charts = []
    if used:
        mean = statistics.fmean(percent for points in used.values() for _, percent in points)
        note = "Share of the time in which a GPU computed, in percent."
        charts.append(_draw_gpus("GPU use", f"mean {format_number(round(mean))} %", note, used, high=100.0))
    if filled:
        most = max(gib for points in filled.values() for _, gib in points)
        of = f" of {format_number(total_gib)}" if total_gib else ""
        note = "Memory in use on each GPU by all processes, in GiB."
        charts.append(_draw_gpus("GPU memory", f"most {format_number(most)}{of} GiB", note, filled, high=total_gib))
    return charts


def gpu_minutes(samples: Sequence[Mapping[str, Any]]) -> list[float]:  # Any: JSON
    """The running time in minutes at each GPU sample, with long pauses shortened. [0.0] without samples."""
    # If the clock was set back, the gap is negative. A negative gap counts as 0, so that time never runs backwards.
    gaps_s = [max(0.0, after["time"] - before["time"]) for before, after in itertools.pairwise(samples)]
    # In a file that was thinned to every hundredth sample, all gaps are long, so the limit grows with the median gap.
    max_pause_s = max(MAX_PAUSE_S, MAX_PAUSES * statistics.median_low(gaps_s)) if gaps_s else MAX_PAUSE_S
    pauses_s = (min(gap_s, max_pause_s) for gap_s in gaps_s)
    return [seconds / 60.0 for seconds in itertools.accumulate(pauses_s, initial=0.0)]


def _draw_gpus(
    title: str, headline: str, note: str, points: Mapping[int, Sequence[tuple[float, float]]], *, high: float
) -> Chart:
    """A chart with a line per GPU over minutes. The y axis reaches at least from zero to `high`."""
    x_axis = step_axis([minute for each in points.values() for minute, _ in each])
    values = [value for each in points.values() for _, value in each]
    y_axis = padded_axis([0.0, high, *values], CHART_BOTTOM, CHART_TOP)
    lines, legend = [], []
    for index, gpu in enumerate(sorted(points)):
        css = f"gpu-{index % NUM_COLORS + 1}" + (" dashed" if index >= NUM_COLORS else "")
        buckets = thin_points(points[gpu])
        lines.append(Line(css, line_path([(axis_place(x_axis, b.step), axis_place(y_axis, b.mean)) for b in buckets])))
        legend.append(Line(css, f"GPU {gpu}"))
    is_thinned = any(len(each) > MAX_CURVE_POINTS for each in points.values())
    return Chart(
        title=title,
        headline=headline,
        note=note + (" Means of neighbouring samples." if is_thinned else ""),
        x_ticks=axis_ticks(x_axis, max_ticks=6, is_whole=True),
        y_ticks=axis_ticks(y_axis, max_ticks=5),
        lines=tuple(lines),
        x_name="minutes under way",
        legend=tuple(legend) if len(legend) > 1 else (),
    )


def metric_points(metrics: Sequence[Mapping[str, float]], name: str) -> list[tuple[float, float]]:
    """(step, value) for each step with a finite value. A step may lack the metric; for example, a skipped step has no
    loss."""
    return [(line["step"], line[name]) for line in metrics if name in line and math.isfinite(line[name])]


def thin_points(points: Sequence[tuple[float, float]]) -> list[Bucket]:
    """At most MAX_CURVE_POINTS buckets of neighbouring points, in order."""
    size = math.ceil(len(points) / MAX_CURVE_POINTS) or 1
    buckets = []
    for start in range(0, len(points), size):
        steps, values = zip(*points[start : start + size], strict=True)
        buckets.append(Bucket(statistics.fmean(steps), statistics.fmean(values), min(values), max(values)))
    return buckets


def _first_to_last(values: Sequence[float], *, smallest: float) -> str:
    """The curve's first and last value as text. A value smaller than `smallest` is rounding noise and becomes 0."""
    first, last = (format_number(value if abs(value) >= smallest else 0.0) for value in (values[0], values[-1]))
    return f"{first} → {last}" if len(values) > 1 else last
