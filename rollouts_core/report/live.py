"""A page about a run that is under way: how far each stage is, its curves, its newest samples and events.

Not here: serving it (flows/live.py), the report of a finished run (page.py). Like the report, the page is a function of
the files in the run directories; here they are read while a job, or the mirror of one elsewhere, appends to them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollouts_core.config.messages import first_line
from rollouts_core.errors import RolloutsError
from rollouts_core.metrics import metrics_by_step, read_last_lines, read_spread_lines
from rollouts_core.report.charts import Chart, format_number, format_seconds
from rollouts_core.report.curves import draw_curve, draw_gpu_use, draw_seconds
from rollouts_core.report.page import page_templates
from rollouts_core.report.results import describe_found
from rollouts_core.report.transcripts import ShownText, completion_text, read_without_tokens, shorten_text
from rollouts_core.run_directory import RunDirectory
from rollouts_core.stages import is_training, kind_of
from rollouts_core.stopping import describe_stop
from rollouts_core.types import Sample

REFRESH_S = 3.0
MAX_EVENTS = 8
MAX_SAMPLES = 3
MAX_LINES = 4_000
"""About so many lines of metrics, and of the use of GPUs, are read for the curves, every few seconds."""
MAX_SAMPLE_BYTES = 2_000_000
"""So much of a file of samples is looked at, and the rest of the line there: 64,000 tokens are a longer one."""
PACE_STEPS = 20
"""The time left is told from as many steps as these."""
NUMBERS = ("loss", "reward", "response_tokens", "entropy", "tokens_per_s", "score")
UNREADABLE = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError, RolloutsError)
"""Errors of reading files that no job of ours wrote."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveStage:
    """A stage that the run has come to."""

    name: str
    run_dir: Path
    num_steps: int
    """How many metric steps the job goes through; 0 for those without."""
    began_at: float
    """When the run came to it, in seconds since 1970."""
    ended: str = ""
    """How its last attempt ended, by the exit record, in a sentence; empty if there is no record."""
    ended_attempt: int = 0
    """The attempt of that record."""
    is_followed: bool = True
    """Whether a process of the run lives."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Titles of models that the stage scores, by the stage's names of them; others are called by these names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveRun:
    """A run as far as it has come."""

    name: str
    stages: tuple[LiveStage, ...]
    state: str
    """Whether it is running, or what it left, in a few words."""
    usd: float | None
    """Cost of its rented machines so far; None if none was rented."""
    has_report: bool
    """Whether it came to its end, and wrote its report."""
    verdict: str = ""
    """The verdict of a run that came to its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownSample:
    """A completion of the newest step."""

    turns: tuple[tuple[str, ShownText], ...]
    text: ShownText
    reward: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownStage:
    """A stage as texts and charts."""

    name: str
    css: str
    """The name of a training's kind, for colors; empty for stages that do not train."""
    state: str
    done: float
    """Share of the steps, in percent; 0 if there is nothing to say of it."""
    numbers: tuple[tuple[str, str], ...]
    charts: tuple[Chart, ...]
    samples: tuple[ShownSample, ...]
    samples_of: str
    """Which step the samples are of."""
    events: tuple[tuple[str, str], ...]
    run_dir: str


def render_live(run: LiveRun, *, script_nonce: str, now: float) -> str:
    """The page of a run; it asks for itself again while it is looked at."""
    stages = [describe_readable(stage, now=now) for stage in reversed(run.stages)]
    return (
        page_templates()
        .get_template("live.html.jinja")
        .render(run=run, stages=stages, nonce=script_nonce, refresh_ms=int(REFRESH_S * 1000))
    )


def render_runs(runs: Sequence[Mapping[str, str]]) -> str:
    """The list of runs; each has a key for its address, a name, its last stage, its state, and when it began."""
    return page_templates().get_template("live_runs.html.jinja").render(runs=runs)


def describe_readable(stage: LiveStage, *, now: float) -> ShownStage:
    """`describe_stage`; of files that no job of ours writes, as another machine may send some, that they are such."""
    try:
        return describe_stage(stage, now=now)
    except UNREADABLE as error:
        return ShownStage(
            name=stage.name,
            css="",
            state=f"its files cannot be read ({type(error).__name__}: {first_line(error)})",
            done=0.0,
            numbers=(),
            charts=(),
            samples=(),
            samples_of="",
            events=(),
            run_dir=str(stage.run_dir),
        )


def describe_stage(stage: LiveStage, *, now: float) -> ShownStage:
    """The state of a stage by its files."""
    files = RunDirectory(stage.run_dir)
    metrics = metrics_by_step(read_spread_lines(files.metrics, MAX_LINES, rare="eval_loss"))
    events = read_last_lines(files.events)
    last = metrics[-1] if metrics else {}
    step = int(last.get("step", 0))
    kind = kind_of(stage.name) if is_training(stage.name) else None
    is_finished = files.result.is_file()
    charts = [draw_curve(metrics, curve, mark_step=None) for curve in kind.curves] if kind else []
    charts += [draw_seconds(metrics), *draw_gpu_use(read_spread_lines(files.gpu_use, MAX_LINES))] if kind else []
    samples_of, samples = newest_samples(files.samples) if kind and kind.keeps_samples else ("", ())
    return ShownStage(
        name=stage.name,
        css=kind.name if kind else "",
        state=describe_state(stage, metrics, events, is_finished=is_finished, now=now),
        done=100.0 * min(1.0, step / stage.num_steps) if stage.num_steps and not is_finished else 0.0,
        numbers=()
        if kind is None
        else tuple((name.replace("_", " "), format_number(last[name])) for name in NUMBERS if name in last),
        charts=tuple(chart for chart in charts if chart is not None),
        samples=samples,
        samples_of=samples_of,
        events=tuple(describe_event(event) for event in events[: -MAX_EVENTS - 1 : -1]),
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
    """How far the stage is, or what it found if it scored models, in a sentence without a full stop."""
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
    """The time that the remaining steps take at the pace of the last ones; None if nothing can be said."""
    last = metrics[-1]
    paced = [line for line in metrics[-PACE_STEPS:] if line["attempt"] == last["attempt"]]
    num_done, took_s = last["step"] - paced[0]["step"], last["time"] - paced[0]["time"]
    if num_done <= 0 or took_s <= 0 or last["step"] >= num_steps:
        return None
    return (num_steps - last["step"]) * took_s / num_done


def newest_samples(directory: Path) -> tuple[str, tuple[ShownSample, ...]]:
    """The newest file's name and some of its completions: the first, the best and the worst."""
    paths = sorted(directory.glob("*.jsonl"))
    for path in reversed(paths[-2:]):  # the newest may have no whole line yet
        with path.open("rb") as file:
            lines = [line for line in file.readlines(MAX_SAMPLE_BYTES) if line.endswith(b"\n")]
        samples = list(filter(None, map(read_without_tokens, lines)))
        if samples:
            graded = sorted((sample for sample in samples if sample.reward is not None), key=lambda s: s.reward or 0.0)
            chosen = [samples[0], *graded[-1:], *graded[:1]]
            unique = list({id(sample): sample for sample in chosen}.values())[:MAX_SAMPLES]
            return _step_name(path.stem), tuple(_show(sample) for sample in unique)
    return "", ()


def describe_event(event: Mapping[str, Any]) -> tuple[str, str]:  # Any: JSON
    """When and what."""
    details = {key: value for key, value in event.items() if key not in ("event", "attempt", "time", "format")}
    said = " ".join(f"{key}={value}" for key, value in details.items() if not isinstance(value, dict | list))
    return time.strftime("%H:%M:%S", time.localtime(event["time"])), f"{event['event']} {said}".strip()[:200]


def _step_name(stem: str) -> str:
    """What step_000030 is for people."""
    name, _, number = stem.rpartition("_")
    return f"{name} {int(number)}" if name and number.isdigit() else stem


def _show(sample: Sample) -> ShownSample:
    return ShownSample(
        turns=tuple((turn["role"], shorten_text(turn["content"])) for turn in sample.messages),
        text=shorten_text(completion_text(sample)),
        reward=sample.reward,
    )
