"""Prepare all metrics of the trainings as data for the curves that viewer.js draws.

Not here: the drawings of a page without scripts (curves.py).
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from rollouts_core.metrics import read_json_lines, read_metrics
from rollouts_core.report.curves import gpu_minutes
from rollouts_core.report.inputs import ReportInput
from rollouts_core.report.results import selected_step
from rollouts_core.run_directory import RunDirectory
from rollouts_core.stages import kind_of, label_of

MAX_POINTS = 1_200
"""Largest number of points of a curve. In longer trainings, each point is the mean of neighbouring steps."""
DIGITS = 5
NO_METRICS = ("step", "attempt", "time")
SECONDS = {"generate_s": "Generate", "train_s": "Train", "publish_s": "Publish"}
JsonObject = dict[str, Any]  # Any: JSON objects have no better type at this edge


def describe_curves(report: ReportInput) -> list[JsonObject]:
    """The curves of each training, and of the training's GPUs if GPU use was sampled."""
    sections = []
    for training in report.trainings:
        files, mark = RunDirectory(training.run_dir), selected_step(training.selection_dir, training.selected)
        sections += describe_training(training.name, read_metrics(files.metrics), mark=mark)
        sections += describe_gpus(training.name, read_json_lines(files.gpu_use))
    return sections


def describe_training(training: str, lines: Sequence[Mapping[str, float]], *, mark: int | None) -> list[JsonObject]:
    """The curves of a training as one section; empty without metrics.

    Args:
        mark: the step of the chosen checkpoint.
    """
    kind = kind_of(training)
    curves = {curve.metric: curve for curve in kind.curves}
    seconds = {name: f"{title}, seconds per step" for name, title in SECONDS.items()}
    others = sorted({name for line in lines for name in line} - set(curves) - set(seconds) - set(NO_METRICS))
    section: JsonObject = {
        "label": label_of(training),
        "css": kind.name,
        "set": training if kind.keeps_samples else None,
        "xName": "step",
        "mark": mark,
        "steps": [_short(statistics.fmean(line["step"] for line in bucket)) for bucket in _buckets(lines)],
        "metrics": [],
        "constant": {},
    }
    for name in (*curves, *seconds, *others):
        values = [_mean([line.get(name) for line in bucket]) for bucket in _buckets(lines)]
        known = {value for value in values if value is not None}
        if len(known) == 1 and len(lines) > 1 and None not in values and name not in curves:
            section["constant"][name] = known.pop()
        elif known:
            curve = curves.get(name)
            section["metrics"].append(
                {
                    "name": name,
                    "title": curve.title if curve else seconds.get(name, name),
                    "note": curve.note if curve else "",
                    "isMain": bool(curve),
                    "fromZero": curve.is_from_zero if curve else name in seconds,
                    "minHigh": curve.min_high if curve else 0,
                    "values": values,
                }
            )
    return [section] if section["metrics"] or section["constant"] else []


def describe_gpus(training: str, samples: Sequence[Mapping[str, Any]]) -> list[JsonObject]:  # Any: JSON
    """The GPU use of a training as one section of curves; empty if GPU use was not sampled."""
    if not samples:
        return []
    rows = list(zip(gpu_minutes(samples), samples, strict=False))
    gpus = sorted({reading["gpu"] for sample in samples for reading in sample["gpus"]})
    metrics = []
    for gpu, (key, title) in itertools.product(gpus, (("use_percent", "use, percent"), ("memory_gib", "memory, GiB"))):
        values = [
            _mean([reading.get(key) for _, sample in bucket for reading in sample["gpus"] if reading["gpu"] == gpu])
            for bucket in _buckets(rows)
        ]
        if any(value is not None for value in values):
            name = f"GPU {gpu} {title}"
            shown = {"name": name, "title": name, "note": "", "isMain": True, "fromZero": True, "minHigh": 0}
            metrics.append({**shown, "values": values})
    return [
        {
            "label": f"GPUs of {label_of(training)}",
            "css": kind_of(training).name,
            "set": None,
            "xName": "minute",
            "mark": None,
            "steps": [_short(statistics.fmean(minute for minute, _ in bucket)) for bucket in _buckets(rows)],
            "metrics": metrics,
            "constant": {},
        }
    ]


def _buckets(lines: Sequence[Any]) -> list[Sequence[Any]]:  # Any: one type per call
    """At most `MAX_POINTS` buckets of neighbouring lines. All buckets except the last have the same size."""
    size = math.ceil(len(lines) / MAX_POINTS) or 1
    return [lines[start : start + size] for start in range(0, len(lines), size)]


def _mean(values: Sequence[Any]) -> float | None:  # Any: JSON
    """The mean of the finite numbers. If no number is finite, None, which a curve shows as a gap."""
    finite = [each for each in values if isinstance(each, int | float) and math.isfinite(each)]
    return _short(statistics.fmean(finite)) if finite else None


def _short(value: float) -> float:
    rounded = float(f"{value:.{DIGITS}g}")
    return int(rounded) if rounded == int(rounded) and abs(rounded) < 1e15 else rounded


def metrics_total(lines: Sequence[Mapping[str, float]], name: str, num_steps: int) -> float | None:
    """The estimated sum of a metric over all steps: the mean over the logged steps, times the number of steps."""
    values = [line[name] for line in lines if math.isfinite(line.get(name, math.nan))]
    return statistics.fmean(values) * num_steps if values else None
