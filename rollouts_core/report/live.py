"""Write the live page of a run: each stage's progress, newest metrics, events and warnings.

The page is computed from the files in the run directories, like the report. A job, or the mirror of a remote job, still
appends to these files.

    live.html.jinja   the top of the page, in elements with ids
    refresh.js        requests the page again, and replaces the elements that changed; also for the list of runs
    live.js           loads blocks from the server
    viewer.js         the views of the report, which load blocks from the server

Not here: the blocks of curves and samples (live_blocks.py), the server (flows/live.py), the report of a finished run
(page.py).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollouts_core.config.messages import first_line
from rollouts_core.metrics import metrics_by_step, read_last_lines, read_some_lines
from rollouts_core.report.assets import Assets, make_assets, make_list_assets
from rollouts_core.report.charts import Axis, axis_place, format_number, format_seconds, line_path, padded_axis
from rollouts_core.report.curves import metric_points
from rollouts_core.report.live_blocks import live_sets, version_of
from rollouts_core.report.live_run import UNREADABLE, LiveRun, LiveStage
from rollouts_core.report.page import bare_style, page_templates
from rollouts_core.report.results import describe_found
from rollouts_core.report.warnings import list_warnings
from rollouts_core.run_directory import RunDirectory
from rollouts_core.stages import is_training, kind_of
from rollouts_core.stopping import describe_stop

REFRESH_S = 3.0
RUN_STATES = ("running", "done", "cancelled", "failed", "stopped")
SPARK_LINES = 40
"""Largest number of lines of metrics for the small curve of a run in the list of runs."""
MAX_EVENTS = 8
MAX_WARNINGS = 20
PACE_STEPS = 20
"""Number of latest steps from whose pace the remaining time is estimated."""
NUMBERS = ("loss", "reward", "response_tokens", "entropy", "tokens_per_s", "score")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownStage:
    """The texts that the page shows for a stage."""

    name: str
    css: str = ""
    """The kind of the training, which sets the stage's colours; empty for stages that do not train."""
    mark: str
    """State of the stage: done, running, ended, or waiting. A waiting stage has not begun."""
    state: str
    done: float = 0.0
    """Share of the stage's steps that are done, in percent. 0 if unknown."""
    left: str = ""
    """Estimated remaining time, as text; empty if unknown."""
    numbers: tuple[tuple[str, str], ...] = ()
    events: tuple[tuple[str, str], ...] = ()
    warnings: tuple[str, ...] = ()
    """Warnings of the latest attempt, newest first."""
    run_dir: str = ""

    @property
    def key(self) -> str:
        """The suffix of the ids of the stage's HTML elements. A run may have two stages of the same name with different
        settings."""
        return Path(self.run_dir).name


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedRun:
    """One run as a line in the list of runs."""

    key: str
    """The name of the run's results folder, which identifies the run in addresses."""
    state: str
    """State of the run, one of `RUN_STATES`."""
    stage: str
    """The run's latest stage, or the step of its latest training."""
    began: str
    score: str = ""
    """The score of the model that was scored last."""
    interval: str = ""
    change: str = ""
    """The score difference to the start model, on held-out rows."""
    direction: str = ""
    """Direction of the score difference: up or down."""
    cost: str = ""
    has_report: bool = False
    curve: str = ""
    """The reward or loss of the latest training, as an SVG path."""
    curve_title: str = ""


def live_assets() -> Assets:
    """Style, script and Content-Security-Policy of the live page."""
    return make_assets(bare_style(page_templates()), is_served=True)


def list_assets() -> Assets:
    """Style, script and Content-Security-Policy of the list of runs."""
    return make_list_assets(bare_style(page_templates()))


def render_live(run: LiveRun, *, now: float) -> str:
    """The live page of a run. While the page is open, the browser requests it again at intervals."""
    stages = [describe_readable(stage, now=now) for stage in run.stages]
    if run.is_under_way:
        to_come = [name for name in run.planned if name not in {stage.name for stage in stages}]
        stages += [ShownStage(name=name, mark="waiting", state="to come") for name in to_come]
        stages.sort(key=lambda stage: run.planned.index(stage.name) if stage.name in run.planned else -1)
    return (
        page_templates()
        .get_template("live.html.jinja")
        .render(
            run=run,
            stages=stages,
            versions=describe_versions(run),
            assets=live_assets(),
            refresh_ms=int(REFRESH_S * 1000),
        )
    )


def render_runs(runs: Sequence[ListedRun], *, query: str = "", state: str = "", is_cut: bool = False) -> str:
    """The page with the list of runs. While the page is open, the browser requests it again at intervals.

    Args:
        query: the requested part of the runs' names.
        state: the requested state, one of `RUN_STATES`.
        is_cut: whether more runs match than the page lists.
    """
    template = page_templates().get_template("live_runs.html.jinja")
    return template.render(
        runs=runs,
        query=query,
        state=state,
        states=RUN_STATES,
        is_cut=is_cut,
        assets=list_assets(),
        refresh_ms=int(REFRESH_S * 1000),
    )


def draw_spark(stage: str, run_dir: Path) -> tuple[str, str]:
    """The first curve of a training as a small SVG path, and the curve's first and last value as text; both may be
    empty."""
    curve = kind_of(stage).curves[0]
    lines = metrics_by_step(read_some_lines(RunDirectory(run_dir).metrics, SPARK_LINES))
    points = metric_points(lines, curve.metric)
    if len(points) < 2:
        return "", ""
    steps, values = zip(*points, strict=True)
    x_axis, y_axis = Axis(min(steps), max(steps), 2, 98), padded_axis(values, 22, 2)
    path = line_path([(axis_place(x_axis, step), axis_place(y_axis, value)) for step, value in points])
    return path, f"{curve.title} {format_number(values[0])} → {format_number(values[-1])}"


def describe_versions(run: LiveRun) -> dict[str, str]:
    """The names of the views that have content, with strings that change whenever the curves or the samples change."""
    files = [RunDirectory(stage.run_dir) for stage in run.stages if is_training(stage.name)]
    sizes = [path.stat().st_size for each in files for path in (each.metrics, each.gpu_use) if path.is_file()]
    sets = live_sets(run)
    newest = [f"{each.key}/{len(each.files)}/{each.files[-1].step}/{version_of(each.files[-1])}" for each in sets]
    has = {
        "overview": True,
        "curves": bool(sizes),
        "samples": any(each.is_training for each in sets),
        "held-out": any(not each.is_training for each in sets),
        "sft-rows": any(each.rows.is_file() for each in files),
    }
    return {
        "views": " ".join(name for name, is_there in has.items() if is_there),
        "curves": " ".join(map(str, sizes)),
        "samples": " ".join(newest),
    }


def describe_readable(stage: LiveStage, *, now: float) -> ShownStage:
    """Like `describe_stage`, but with an error text if the stage's files are invalid, for example files that another
    machine wrote."""
    try:
        return describe_stage(stage, now=now)
    except UNREADABLE as error:
        state = f"its files cannot be read ({type(error).__name__}: {first_line(error)})"
        return ShownStage(name=stage.name, mark="ended", state=state, run_dir=str(stage.run_dir))


def describe_stage(stage: LiveStage, *, now: float) -> ShownStage:
    files = RunDirectory(stage.run_dir)
    metrics = metrics_by_step(read_last_lines(files.metrics))
    events = read_last_lines(files.events)
    last = metrics[-1] if metrics else {}
    step = int(last.get("step", 0))
    kind = kind_of(stage.name) if is_training(stage.name) else None
    is_finished = files.result.is_file()
    state = describe_state(stage, metrics, events, is_finished=is_finished, now=now)
    latest_attempt = max((int(each.get("attempt", 0)) for each in events), default=0)
    has_ended = bool(stage.ended) and stage.ended_attempt >= latest_attempt
    is_running = not is_finished and stage.is_followed and not has_ended
    left_s = seconds_left(metrics, stage.num_steps) if metrics and is_running else None
    return ShownStage(
        name=stage.name,
        css=kind.name if kind else "",
        mark="done" if is_finished else "running" if is_running else "ended",
        state=state,
        done=100.0 * min(1.0, step / stage.num_steps) if stage.num_steps and not is_finished else 0.0,
        left=f"about {format_seconds(left_s)} left" if left_s else "",
        numbers=()
        if kind is None
        else tuple((name.replace("_", " "), format_number(last[name])) for name in NUMBERS if name in last),
        events=tuple(describe_event(event) for event in events[: -MAX_EVENTS - 1 : -1]),
        warnings=tuple(list_warnings(events)[: -MAX_WARNINGS - 1 : -1]),
        run_dir=str(stage.run_dir),
    )


def describe_state(
    stage: LiveStage,
    metrics: Sequence[Mapping[str, float]],
    events: Sequence[Mapping[str, Any]],  # Any: JSON
    *,
    is_finished: bool,
    now: float,
) -> str:
    """The stage's progress as a sentence without a full stop. A finished evaluation shows its scores."""
    if is_finished:
        result = RunDirectory(stage.run_dir).read_result() or {}
        if not {"metric", "best"} <= result.keys():
            return "finished"
        return f"finished: {describe_found(stage.run_dir, stage.name, labels=stage.labels)}"
    step = int(metrics[-1]["step"]) if metrics else 0
    of = f" of {stage.num_steps:,}" if stage.num_steps else ""
    failure = next((each for each in reversed(events) if each["event"] == "failed"), None)
    latest_attempt = max((int(each.get("attempt", 0)) for each in events), default=0)
    if failure is not None and failure.get("attempt", latest_attempt) == latest_attempt:
        return f"failed: {failure.get('message', '')}"
    if events and events[-1]["event"] == "stopped":
        return describe_stop(int(events[-1].get("step", 0)), str(events[-1].get("problem", "")))
    if stage.ended and stage.ended_attempt >= latest_attempt:
        return f"{stage.ended}, {f'at step {step:,}{of}' if metrics else 'before its first step'}"
    if not stage.is_followed:
        silent = f", last numbers {format_seconds(max(0.0, now - metrics[-1]['time']))} ago" if metrics else ""
        return f"{f'step {step:,}{of}' if metrics else 'no step'}{silent}, and no process of the run is left"
    if events and events[-1]["event"] == "waits_for_gpus":
        return str(events[-1]["message"])
    took = f"for {format_seconds(max(0.0, now - stage.began_at))}"
    if not metrics:
        return f"under way {took}"
    silent_s = max(0.0, now - metrics[-1]["time"])
    sentences = [f"step {step:,}{of}", f"running {took}, last numbers {format_seconds(silent_s)} ago"]
    if left_s := seconds_left(metrics, stage.num_steps):
        sentences.insert(1, f"about {format_seconds(left_s)} left")
    return ", ".join(sentences)


def seconds_left(metrics: Sequence[Mapping[str, float]], num_steps: int) -> float | None:
    """Estimated seconds for the remaining steps, from the pace of the latest steps; None if unknown."""
    last = metrics[-1]
    paced = [line for line in metrics[-PACE_STEPS:] if line["attempt"] == last["attempt"]]
    num_done, took_s = last["step"] - paced[0]["step"], last["time"] - paced[0]["time"]
    if num_done <= 0 or took_s <= 0 or last["step"] >= num_steps:
        return None
    return (num_steps - last["step"]) * took_s / num_done


def describe_event(event: Mapping[str, Any]) -> tuple[str, str]:  # Any: JSON
    """The event's time of day, and its name with its fields."""
    details = {key: value for key, value in event.items() if key not in ("event", "attempt", "time", "format")}
    said = " ".join(f"{key}={value}" for key, value in details.items() if not isinstance(value, dict | list))
    return time.strftime("%H:%M:%S", time.localtime(event["time"])), f"{event['event']} {said}".strip()[:200]
