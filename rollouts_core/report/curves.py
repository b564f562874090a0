"""The curves of the training stages, from their metrics."""

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
from rollouts_core.report.inputs import LABELS, ReportInput
from rollouts_core.report.results import (
    selected_step,
)
from rollouts_core.run_directory import RunDirectory

MAX_CURVE_POINTS = 80
NUM_COLORS = 4
"""Of GPUs, in style.html.jinja; further ones are dashed."""
MAX_PAUSE_S, MAX_PAUSES = 60.0, 6.0
"""What lies between two samples of GPUs takes at most this much of the axis, or as often the usual: a job may rest for
days."""
SECONDS = {"generate_s": "generate", "train_s": "train", "publish_s": "publish"}


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveSection:
    """The curves of one training stage."""

    title: str
    charts: tuple[Chart, ...]


class Curve(NamedTuple):
    """Which metric is drawn, and how."""

    metric: str
    title: str
    note: str
    is_from_zero: bool = True
    min_high: float = 0.0
    """The axis reaches at least this far, so that rounding noise looks as small as it is."""


class Bucket(NamedTuple):
    """Some neighbouring points of a curve as one."""

    step: float
    mean: float
    low: float
    high: float


SFT_CURVES = (
    Curve("loss", "Loss", "Mean negative log-likelihood of the trained tokens, in nats."),
    Curve("eval_loss", "Evaluation loss", "The same mean over data.sft_eval, which is not trained on."),
    Curve("lr", "Learning rate", "As the optimizer used it."),
    Curve("tokens_per_s", "Throughput", "Tokens of the rows per second, also those that are not trained on."),
)
RL_CURVES = (
    Curve("reward", "Reward", "Mean over the step's rollouts, on training prompts.", is_from_zero=False),
    Curve(
        "reward_unfiltered",
        "Reward before the filter",
        "With the groups that it dropped: where it leaves out what is solved, that is how the policy gets better.",
        is_from_zero=False,
    ),
    Curve("response_tokens", "Completion length", "Mean number of sampled tokens."),
    Curve(
        "kl_rollout_policy",
        "KL(rollout ‖ policy)",
        "Between the engine and the policy before each update; with one per step 0 when they agree.",
        min_high=0.001,
    ),
    Curve("entropy", "Entropy", "Mean over the trained tokens, in nats."),
    Curve("staleness_mean", "Staleness", "Mean age of the sampled tokens, in publications of weights.", min_high=1.0),
    Curve("clip_share", "Clip share", "Share of tokens whose gradient the objective limited.", min_high=0.01),
    Curve("num_turns", "Turns", "Mean number of the policy's turns per conversation."),
    Curve("tool_error_share", "Tool errors", "Share of turns that asked a tool for what it cannot do.", min_high=0.1),
    Curve("parse_failure_share", "Parse failures", "Share of turns that the environment cannot read.", min_high=0.1),
    Curve("reward_error_share", "Ungraded", "Share of samples that could not be graded.", min_high=0.1),
    Curve(
        "update_arrived_share",
        "Update in engines",
        "Share of what training changed in the weights that the engines' number format does not round away.",
        min_high=1.0,
    ),
    Curve("signal_share", "Signal share", "Share of groups whose rewards differ; others teach nothing.", min_high=1.0),
)
CURVES = {"sft": SFT_CURVES, "rl": RL_CURVES}
"""By the stage that they are of."""


def load_curves(report: ReportInput) -> list[CurveSection]:
    """The curves of the stages that trained."""
    sections = []
    for stage, directory in (("sft", report.sft_dir), ("rl", report.rl_dir)):
        if directory is None:
            continue
        metrics = read_metrics(RunDirectory(directory).metrics)
        selection = {"sft": report.sft_selection_dir, "rl": report.rl_selection_dir}[stage]
        mark_step = selected_step(selection, report.selected.get(stage, ""))
        charts = [draw_curve(metrics, curve, mark_step=mark_step) for curve in CURVES[stage]]
        charts.append(draw_seconds(metrics))
        charts += draw_gpu_use(read_json_lines(RunDirectory(directory).gpu_use))
        sections.append(CurveSection(title=LABELS[stage], charts=tuple(chart for chart in charts if chart is not None)))
    return sections


def draw_curve(metrics: Sequence[Mapping[str, float]], curve: Curve, *, mark_step: int | None) -> Chart | None:
    """The metric over steps, or None where no step has it. Long curves are thinned to means with their range."""
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
    """The seconds of a step by what they were spent on, stacked; None where no step has them."""
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
    """How busy and how full each GPU was, over the time that the job was under way; none where nothing was sampled."""
    # A clock that is set back takes no time back.
    gaps_s = [max(0.0, after["time"] - before["time"]) for before, after in itertools.pairwise(samples)]
    # Where a page shows every hundredth sample only, it is no pause that lies between two.
    max_pause_s = max(MAX_PAUSE_S, MAX_PAUSES * statistics.median_low(gaps_s)) if gaps_s else MAX_PAUSE_S
    minutes = [
        seconds / 60.0 for seconds in itertools.accumulate((min(gap_s, max_pause_s) for gap_s in gaps_s), initial=0.0)
    ]
    used: dict[int, list[tuple[float, float]]] = {}
    filled: dict[int, list[tuple[float, float]]] = {}
    total_gib = 0.0
    for minute, sample in zip(minutes, samples, strict=False):  # minutes has one without samples, too
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
        note = "Memory that is taken on each GPU, by whomever, in GiB."
        charts.append(_draw_gpus("GPU memory", f"most {format_number(most)}{of} GiB", note, filled, high=total_gib))
    return charts


def _draw_gpus(
    title: str, headline: str, note: str, points: Mapping[int, Sequence[tuple[float, float]]], *, high: float
) -> Chart:
    """A line per GPU over minutes; the axis reaches from zero to `high` at least."""
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
    """(step, value) of the steps that have a finite value; a skipped step has no loss, for instance."""
    return [(line["step"], line[name]) for line in metrics if name in line and math.isfinite(line[name])]


def thin_points(points: Sequence[tuple[float, float]]) -> list[Bucket]:
    """At most MAX_CURVE_POINTS buckets of equally many neighbouring points, in order."""
    size = math.ceil(len(points) / MAX_CURVE_POINTS) or 1
    buckets = []
    for start in range(0, len(points), size):
        steps, values = zip(*points[start : start + size], strict=True)
        buckets.append(Bucket(statistics.fmean(steps), statistics.fmean(values), min(values), max(values)))
    return buckets


def _first_to_last(values: Sequence[float], *, smallest: float) -> str:
    """Both ends of a curve; what is smaller than `smallest` is rounding noise and reads 0."""
    first, last = (format_number(value if abs(value) >= smallest else 0.0) for value in (values[0], values[-1]))
    return f"{first} → {last}" if len(values) > 1 else last
