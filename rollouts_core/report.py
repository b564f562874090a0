"""Write one page about one pipeline run: what was trained on what, how good it is, and how to use it.

Not here: running or scoring anything. The page is a function of the files in the run directories and of `ReportInput`:
one HTML file without scripts or external resources, the same bytes for the same input. This file turns numbers into
records with places and texts; report.html.jinja only lays them out.

    evaluation_dir  result.json, samples/   -> held-out results, comparisons, transcripts
    sft_dir, rl_dir job.json, metrics.jsonl -> what was trained on what, curves
    *_selection_dir result.json             -> the score of every checkpoint
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from rollouts_core.comparison import NUM_RESAMPLES, Comparison, compare_paired
from rollouts_core.config import ModelConfig, OptimConfig, name_of_function
from rollouts_core.errors import ConfigError, DataError
from rollouts_core.job import EvalJob, InputFile, InputModel, Job, RLJob, SFTJob, load_job
from rollouts_core.metrics import read_metrics
from rollouts_core.run_directory import RunDirectory
from rollouts_core.types import Message, Sample, Status, sample_from_json

LABELS = {"base": "Base", "sft": "SFT", "rl": "RL"}
"""What the checkpoints of the final evaluation are called on the page, in the order of training."""
MODES = {
    "sft": "supervised fine-tuning",
    "rl": "reinforcement learning",
    "sft+rl": "supervised fine-tuning, then reinforcement learning",
}
MAX_TRANSCRIPTS = 8
LONG_TEXT_CHARS = 500
"""Longer texts are shown collapsed, with this much of their start."""
LONG_TEXT_LINES = 10
MAX_TEXT_CHARS = 8_000
"""The rest of a longer text is left out of the page."""
MAX_EXAMPLE_CHARS = 80
MAX_CURVE_POINTS = 80
MAX_OPEN_ROWS = 8
"""Longer tables of checkpoints are shown collapsed."""
CHART_WIDTH, CHART_HEIGHT = 360, 200
CHART_LEFT, CHART_RIGHT, CHART_TOP, CHART_BOTTOM = 46, 344, 10, 168


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSummary:
    """How one stage of the pipeline came to its result."""

    name: str
    """The stage: sft, select-sft, rl, ..."""
    how: str
    """Whether it ran, was attached to while another run had started it, or was reused."""
    seconds: float
    """Time that this pipeline run spent on it."""
    run_dir: str
    """Where its files lie; empty for a stage without a run directory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportInput:
    """Everything that a report is made of."""

    run_name: str
    """The page's title."""
    mode: str
    """The mode of the configuration: sft, rl or sft+rl."""
    stages: tuple[StageSummary, ...]
    """The stages in the order in which they ran."""
    evaluation_dir: Path
    """Run directory of the final evaluation; its checkpoints are named base, sft and rl, as far as they exist."""
    sft_dir: Path | None
    """Run directory of SFT; None in mode rl."""
    sft_selection_dir: Path | None
    """Run directory of the evaluation that chose among the checkpoints of SFT."""
    rl_dir: Path | None
    """Run directory of RL; None in mode sft."""
    rl_selection_dir: Path | None
    """Run directory of the evaluation that chose among the checkpoints of RL."""
    selected: Mapping[str, str]
    """The chosen checkpoint of each training stage: `{"sft": "step_000800", "rl": "step_000030"}`."""
    checkpoint_path: str
    """Folder of the run's final checkpoint."""
    settings_toml: str
    """The settings that differ from their defaults, as TOML."""
    reproduce_command: str
    """Command line that trains the same again."""
    use_command: str
    """Command line that serves the final checkpoint."""
    verdict: str
    """One sentence on whether RL improved the model; empty where nothing was judged."""
    is_improvement: bool | None
    """Whether the run counts as an improvement; None where nothing was judged."""


def render_report(report: ReportInput) -> str:
    """The report as one HTML page.

    Raises:
        DataError: the final evaluation is not finished.
    """
    results = load_results(report)
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html.jinja").render(
        report=report,
        mode=MODES.get(report.mode, report.mode),
        results=results,
        trainings=describe_trainings(report),
        curve_sections=load_curves(report),
        selections=load_selections(report),
        transcripts=load_transcripts(report.evaluation_dir, [score.name for score in results.scores]),
        stages=[(stage, format_seconds(stage.seconds)) for stage in report.stages],
        total_time=format_seconds(sum(stage.seconds for stage in report.stages)),
        python_code=usage_code(report),
        num_resamples=NUM_RESAMPLES,
    )


def render_summary_markdown(report: ReportInput) -> str:
    """The report's results, comparisons, verdict and stages as a page of Markdown.

    Raises:
        DataError: the final evaluation is not finished.
    """
    results = load_results(report)
    title = results.display.title
    heading = {True: "Improvement", False: "No improvement", None: "Result"}[report.is_improvement]
    lines = [f"# {report.run_name}", "", f"**{heading}.** {report.verdict or results.finding}", ""]
    lines += [f"| Checkpoint | {title.capitalize()} | 95 % interval | {results.display.rows.capitalize()} |"]
    lines += ["|---|---:|---:|---:|"]
    lines += [f"| {s.label} {s.checkpoint} | {s.mean} | {s.interval} | {s.num_rows} |" for s in results.scores]
    lines += ["", *(f"- {difference.sentence}" for difference in results.differences), ""]
    lines += ["| Stage | How | Time | Run directory |", "|---|---|---:|---|"]
    lines += [
        f"| {stage.name} | {stage.how} | {format_seconds(stage.seconds)} | {_markdown_code(stage.run_dir)} |"
        for stage in report.stages
    ]
    return "\n".join([*lines, "", f"Final checkpoint: {_markdown_code(report.checkpoint_path)}", ""])


def _markdown_code(text: str) -> str:
    return f"`{text}`" if text else ""


# Held-out results


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreDisplay:
    """How scores are shown to people; internally higher is always better."""

    title: str
    """What the number is called."""
    rows: str
    """What was scored: prompts or demonstrations."""
    factor: float
    """Shown number per score: 100 for percent, -1 for a loss."""
    unit: str
    """Written after a number."""
    difference_unit: str
    """Written after a difference."""
    decimals: int

    @property
    def is_lower_better(self) -> bool:
        """Whether a lower shown number is the better one."""
        return self.factor < 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownScore:
    """One checkpoint's score as texts, and as places on an axis in percent of its width."""

    name: str
    """base, sft or rl for held-out results; also the CSS class."""
    label: str
    checkpoint: str
    """The name of the checkpoint in its training run; empty for the base model."""
    mean: str
    interval: str
    num_rows: int
    mean_at: float
    low_at: float
    high_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownDifference:
    """A paired comparison of two checkpoints as texts."""

    title: str
    outcome: str
    """better, worse or unclear: whether the interval excludes zero."""
    difference: str
    interval: str
    p_value: str
    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """The held-out results, ready to be laid out."""

    display: ScoreDisplay
    scores: tuple[ShownScore, ...]
    ticks: tuple[Tick, ...]
    """Of the axis that the scores share, in percent of its width."""
    differences: tuple[ShownDifference, ...]
    finding: str
    """The sentence of the last comparison: the final checkpoint against the one it started from."""


class Scored(NamedTuple):
    """One checkpoint of an evaluation's result.json; scores are higher for better."""

    name: str
    step: int
    scores: list[float]
    mean: float
    low: float
    high: float


class Evaluated(NamedTuple):
    """The content of an evaluation's result.json."""

    metric: str
    checkpoints: list[Scored]
    best: str


def load_evaluation(directory: Path) -> Evaluated:
    """What an evaluation found.

    Raises:
        DataError: it is not finished.
    """
    result = RunDirectory(directory).read_result()
    if result is None:
        raise DataError(f"{directory} has no result.json: the evaluation has to finish before the report")
    checkpoints = [Scored(*(entry[key] for key in Scored._fields)) for entry in result["checkpoints"]]
    return Evaluated(metric=result["metric"], checkpoints=checkpoints, best=result["best"])


def load_results(report: ReportInput) -> Results:
    """The final evaluation: every checkpoint's score, and each one against the one before and the base."""
    evaluated = load_evaluation(report.evaluation_dir)
    by_name = {scored.name: scored for scored in evaluated.checkpoints}
    found = [by_name[name] for name in LABELS if name in by_name]
    if not found:
        raise DataError(f"{report.evaluation_dir} scored {', '.join(by_name)}: expected base, sft or rl")
    display = choose_display(evaluated)
    pairs = [*itertools.pairwise(found), *([(found[0], found[-1])] if len(found) > 2 else [])]
    differences = tuple(describe_difference(baseline, candidate, display) for baseline, candidate in pairs)
    axis = _padded_axis([display.factor * end for scored in found for end in (scored.low, scored.high)], 0, 100)
    return Results(
        display=display,
        scores=tuple(
            _show_score(
                scored, display, axis, label=LABELS[scored.name], checkpoint=report.selected.get(scored.name, "")
            )
            for scored in found
        ),
        ticks=axis_ticks(axis, max_ticks=5),
        differences=differences,
        finding=differences[len(found) - 2].sentence if differences else "Only one checkpoint was evaluated.",
    )


def choose_display(evaluated: Evaluated) -> ScoreDisplay:
    """Percent for rewards between 0 and 1, plain numbers for other rewards, the loss for minus losses."""
    if evaluated.metric == "loss":
        return ScoreDisplay(
            title="loss", rows="demonstrations", factor=-1, unit="", difference_unit=" nats per token", decimals=3
        )
    if all(0 <= score <= 1 for scored in evaluated.checkpoints for score in scored.scores):
        return ScoreDisplay(
            title="accuracy", rows="prompts", factor=100, unit=" %", difference_unit=" points", decimals=1
        )
    return ScoreDisplay(title="mean reward", rows="prompts", factor=1, unit="", difference_unit="", decimals=3)


def describe_difference(baseline: Scored, candidate: Scored, display: ScoreDisplay) -> ShownDifference:
    """How the candidate compares with the baseline on the same rows, in numbers and as a sentence."""
    comparison = compare_paired(baseline.scores, candidate.scores)
    low, high = sorted((display.factor * comparison.low, display.factor * comparison.high))
    interval = f"{_signed(low, display)} to {_signed(high, display)}"
    outcome = "better" if comparison.low > 0 else "worse" if comparison.high < 0 else "unclear"
    amount = display.factor * comparison.difference
    size = f"{abs(amount):.{display.decimals}f}"
    who, whom = LABELS[candidate.name], LABELS[baseline.name]
    direction = f"{size}{display.difference_unit} {'higher' if amount > 0 else 'lower'} than"
    p_value = format_p_value(comparison)
    ending = {
        "better": f"better, with a 95 % interval of {interval} ({p_value}).",
        "worse": f"worse, with a 95 % interval of {interval}.",
        "unclear": f"within chance, since the 95 % interval of {interval} includes zero ({p_value}).",
    }[outcome]
    return ShownDifference(
        title=f"{whom} → {who}",
        outcome=outcome,
        difference=f"{_signed(amount, display)}{display.difference_unit}",
        interval=interval,
        p_value=p_value,
        sentence=f"On the same {len(candidate.scores):,} {display.rows}, the {display.title} of {who} is "
        f"{direction if float(size) else 'equal to'} that of {whom}: {ending}",
    )


def format_p_value(comparison: Comparison) -> str:
    """The p-value with as many digits as the number of sign flips supports."""
    if comparison.p_value < 0.001:
        return "p < 0.001"
    return "p > 0.999" if comparison.p_value > 0.999 else f"p = {comparison.p_value:.3f}"


def _signed(value: float, display: ScoreDisplay) -> str:
    text = f"{abs(value):.{display.decimals}f}"
    return text if float(text) == 0 else f"{'+' if value > 0 else '−'}{text}"


def _plain(value: float, display: ScoreDisplay) -> str:
    return f"{value:.{display.decimals}f}".replace("-", "−")


def _show_score(scored: Scored, display: ScoreDisplay, axis: Axis, *, label: str, checkpoint: str) -> ShownScore:
    mean = display.factor * scored.mean
    low, high = sorted((display.factor * scored.low, display.factor * scored.high))
    return ShownScore(
        name=scored.name,
        label=label,
        checkpoint=checkpoint,
        mean=_plain(mean, display) + display.unit,
        interval=f"{_plain(low, display)} to {_plain(high, display)}{display.unit}",
        num_rows=len(scored.scores),
        mean_at=axis_place(axis, mean),
        low_at=axis_place(axis, low),
        high_at=axis_place(axis, high),
    )


# What was trained on what


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What one stage started from, read and did, as (what, text) pairs."""

    title: str
    facts: tuple[tuple[str, str], ...]


def describe_trainings(report: ReportInput) -> list[Training]:
    """What every stage was made of, as far as its job.json can be read."""
    trainings = []
    if isinstance(sft_job := _job_of(report.sft_dir), SFTJob):
        trainings.append(_describe_sft(report, sft_job))
    if isinstance(rl_job := _job_of(report.rl_dir), RLJob):
        trainings.append(_describe_rl(report, rl_job))
    if isinstance(evaluation_job := _job_of(report.evaluation_dir), EvalJob):
        trainings.append(_describe_evaluation(evaluation_job))
    return trainings


def _job_of(directory: Path | None) -> Job | None:
    """The job of a run directory, or None: a reused directory may be of another version."""
    if directory is None:
        return None
    try:
        return load_job(RunDirectory(directory).job)
    except ConfigError:
        return None


def _describe_sft(report: ReportInput, job: SFTJob) -> Training:
    training = job.training
    rows = "packed rows" if training.packing else "rows"
    return Training(
        title="Supervised fine-tuning",
        facts=(
            ("Start", _describe_model(job.model)),
            ("Data", _describe_data(job.data, report.sft_dir, "num_samples", "demonstrations")),
            (
                "Training",
                f"{training.num_steps:,} steps of {training.batch_size} {rows} of at most {training.max_length:,} "
                f"tokens, {_describe_optim(training.optim)}",
            ),
            ("Selected", report.selected.get("sft", "")),
        ),
    )


def _describe_rl(report: ReportInput, job: RLJob) -> Training:
    training, rollout = job.training, job.rollout
    reward = name_of_function(rollout.reward_fn) or f"environment {rollout.environment}"
    return Training(
        title="Reinforcement learning",
        facts=(
            ("Start", _describe_model(job.model)),
            ("Prompts", _describe_data(job.prompts, report.rl_dir, "num_prompts", "prompts")),
            ("Reward", reward),
            (
                "Training",
                f"{training.num_steps:,} steps of {rollout.batch_size} prompts × {rollout.n_samples_per_prompt} "
                f"completions of at most {rollout.sampling.max_new_tokens:,} tokens at temperature "
                f"{rollout.sampling.temperature:g}, {_describe_optim(training.optim)}",
            ),
            ("Selected", report.selected.get("rl", "")),
        ),
    )


def _describe_evaluation(job: EvalJob) -> Training:
    evaluation = job.evaluation
    sampling = (
        f"{evaluation.samples_per_prompt} completion{'s' if evaluation.samples_per_prompt > 1 else ''} per prompt at "
        f"temperature {evaluation.temperature:g}, at most {job.rollout.sampling.max_new_tokens:,} tokens"
    )
    scoring = "mean loss of the trained tokens" if evaluation.metric == "loss" else sampling
    return Training(
        title="Held-out evaluation", facts=(("Data", _describe_data(job.data, None, "", "")), ("Scoring", scoring))
    )


def _describe_model(model: InputModel) -> str:
    config: ModelConfig = model.model
    revision = f" at {config.revision}" if config.revision else ""
    return f"{config.path}{revision} ({config.dtype})"


def _describe_optim(optim: OptimConfig) -> str:
    return f"{optim.schedule} learning rate, peak {format_number(optim.lr)}"


def _describe_data(file: InputFile, directory: Path | None, key: str, rows: str) -> str:
    """Path, number of rows as the stage's record has it under `key`, and the start of the digest."""
    result = (RunDirectory(directory).read_result() if directory else None) or {}
    count = f"{result[key]:,} {rows}, " if key in result else ""
    return f"{file.path} ({count}sha256 {file.digest[:10]}…)"


# Charts: values become places in a drawing of CHART_WIDTH x CHART_HEIGHT


class Tick(NamedTuple):
    """A labelled place on an axis."""

    at: float
    label: str


class Axis(NamedTuple):
    """Values from `low` to `high` lie between the places `start` and `end`."""

    low: float
    high: float
    start: float
    end: float


class Line(NamedTuple):
    """A path of SVG with its CSS class."""

    css: str
    path: str


class Bar(NamedTuple):
    """A mean with its interval, as places."""

    x: float
    mean_y: float
    low_y: float
    high_y: float
    is_selected: bool
    hint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A drawing with its texts."""

    title: str
    headline: str
    """The numbers that one would read off the curve: first and last."""
    note: str
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    areas: tuple[Line, ...] = ()
    lines: tuple[Line, ...] = ()
    bars: tuple[Bar, ...] = ()
    """The selected one is last and so drawn on top."""
    mark_x: float | None = None
    """Where the selected checkpoint lies, on a curve."""
    legend: tuple[Line, ...] = ()
    """(CSS class, label) per series, for charts with several."""


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
    Curve("lr", "Learning rate", "As the optimizer used it."),
)
RL_CURVES = (
    Curve("reward", "Reward", "Mean over the step's rollouts, on training prompts.", is_from_zero=False),
    Curve("response_tokens", "Completion length", "Mean number of sampled tokens."),
    Curve(
        "kl_rollout_policy", "KL(rollout ‖ policy)", "Between engine and trainer; 0 when they agree.", min_high=0.001
    ),
    Curve("clip_share", "Clip share", "Share of tokens whose probability ratio was clipped.", min_high=0.01),
    Curve("signal_share", "Signal share", "Share of groups whose rewards differ; others teach nothing.", min_high=1.0),
)
SECONDS = {"generate_s": "generate", "train_s": "train", "publish_s": "publish"}


def load_curves(report: ReportInput) -> list[CurveSection]:
    """The curves of the stages that trained."""
    sections = []
    for stage, directory, curves in (("sft", report.sft_dir, SFT_CURVES), ("rl", report.rl_dir, RL_CURVES)):
        if directory is None:
            continue
        metrics = read_metrics(RunDirectory(directory).metrics)
        selection = {"sft": report.sft_selection_dir, "rl": report.rl_selection_dir}[stage]
        mark_step = _selected_step(selection, report.selected.get(stage, ""))
        charts = [draw_curve(metrics, curve, mark_step=mark_step) for curve in curves]
        charts.append(draw_seconds(metrics))
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
    x_axis = _step_axis([step for step, _ in points])
    y_axis = _padded_axis([*ends, *zero, *([curve.min_high] if curve.min_high else [])], CHART_BOTTOM, CHART_TOP)
    is_thinned = len(buckets) < len(points)
    band = _area_path(
        [(axis_place(x_axis, b.step), axis_place(y_axis, b.low), axis_place(y_axis, b.high)) for b in buckets]
    )
    line = _line_path([(axis_place(x_axis, b.step), axis_place(y_axis, b.mean)) for b in buckets])
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
    x_axis = _step_axis([line["step"] for line in timed])
    y_axis = _padded_axis([0.0, *(column[-1] for column in tops)], CHART_BOTTOM, CHART_TOP)
    places = [axis_place(x_axis, bucket.step) for bucket in thinned[0]]
    areas = []
    for i in range(len(SECONDS)):
        floors = [column[i - 1] if i else 0.0 for column in tops]
        edges = zip(places, floors, (column[i] for column in tops), strict=True)
        path = _area_path([(x, axis_place(y_axis, low), axis_place(y_axis, high)) for x, low, high in edges])
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


def axis_place(axis: Axis, value: float) -> float:
    """Where a value lies on the axis."""
    share = (value - axis.low) / (axis.high - axis.low)
    return round(axis.start + share * (axis.end - axis.start), 2)


def axis_ticks(axis: Axis, *, max_ticks: int, is_whole: bool = False) -> tuple[Tick, ...]:
    """Round values on the axis, at most `max_ticks` of them."""
    rough = (axis.high - axis.low) / max_ticks
    magnitude = 10.0 ** math.floor(math.log10(rough))
    spacing = next(factor * magnitude for factor in (1, 2, 5, 10) if factor * magnitude >= rough)
    if is_whole:
        spacing = max(1.0, spacing)
    first = math.ceil(axis.low / spacing - 1e-9)
    last = math.floor(axis.high / spacing + 1e-9)
    values = [n * spacing for n in range(first, last + 1)]
    return tuple(Tick(axis_place(axis, value), _tick_label(value, spacing)) for value in values)


def format_number(value: float) -> str:
    """Three significant digits or a whole number, with a short exponent."""
    if abs(value) >= 100 or value == round(value):
        return f"{value:,.0f}" if abs(value) < 1e6 else f"{value:.3g}".replace("e+0", "e")
    return f"{value:.3g}".replace("e-0", "e-").replace("-", "−")


def format_seconds(seconds: float) -> str:
    """A duration as people say it."""
    if round(seconds, 1) < 60:
        return f"{seconds:.1f} s"
    minutes, rest_s = divmod(round(seconds), 60)
    hours, rest_minutes = divmod(minutes, 60)
    return f"{hours} h {rest_minutes:02d} min" if hours else f"{minutes} min {rest_s:02d} s"


def _tick_label(value: float, spacing: float) -> str:
    decimals = max(0, math.ceil(-math.log10(spacing) - 1e-9))
    if decimals > 4 or abs(value) >= 1e6:
        return format_number(value)
    return f"{value:,.{decimals}f}".replace("-", "−")


def _step_axis(steps: Sequence[float]) -> Axis:
    low, high = min(steps), max(steps)
    margin = 0.5 if low == high else 0.0
    return Axis(low - margin, high + margin, CHART_LEFT, CHART_RIGHT)


def _padded_axis(values: Sequence[float], start: float, end: float) -> Axis:
    """An axis with all values on it and a little room, but none below zero where no value is."""
    low, high = min(values), max(values)
    room = 0.06 * (high - low) or 0.1 * abs(high) or 0.5
    return Axis(max(0.0, low - room) if low >= 0 else low - room, high + room, start, end)


def _line_path(points: Sequence[tuple[float, float]]) -> str:
    """The path through the points; a single point becomes a short dash."""
    if len(points) == 1:
        (x, y) = points[0]
        return f"M{x - 6:g},{y:g}H{x + 6:g}"
    return "M" + "L".join(f"{x:g},{y:g}" for x, y in points)


def _area_path(edges: Sequence[tuple[float, float, float]]) -> str:
    """The area between a lower and an upper edge, given as (x, lower y, upper y)."""
    wide = edges if len(edges) > 1 else [(edges[0][0] + shift, *edges[0][1:]) for shift in (-6, 6)]
    upper = [f"{x:g},{high:g}" for x, _, high in wide]
    lower = [f"{x:g},{low:g}" for x, low, _ in reversed(wide)]
    return f"M{'L'.join(upper + lower)}Z"


def _first_to_last(values: Sequence[float], *, smallest: float) -> str:
    """Both ends of a curve; what is smaller than `smallest` is rounding noise and reads 0."""
    first, last = (format_number(value if abs(value) >= smallest else 0.0) for value in (values[0], values[-1]))
    return f"{first} → {last}" if len(values) > 1 else last


# Checkpoint selection


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """How the checkpoints of a training stage scored, and which was taken."""

    title: str
    display: ScoreDisplay
    chart: Chart
    scores: tuple[ShownScore, ...]
    selected: str
    is_long: bool


def load_selections(report: ReportInput) -> list[Selection]:
    """The selection of each training stage whose evaluation is finished."""
    directories = {"sft": report.sft_selection_dir, "rl": report.rl_selection_dir}
    return [
        describe_selection(load_evaluation(directory), title=LABELS[stage], selected=report.selected.get(stage, ""))
        for stage, directory in directories.items()
        if directory is not None and RunDirectory(directory).result.is_file()
    ]


def describe_selection(evaluated: Evaluated, *, title: str, selected: str) -> Selection:
    """The checkpoints of a training stage in order of steps, with the selected one marked."""
    display = choose_display(evaluated)
    checkpoints = sorted(evaluated.checkpoints, key=lambda scored: scored.step)
    chosen = selected or evaluated.best
    values = [display.factor * end for scored in checkpoints for end in (scored.low, scored.high)]
    y_axis = _padded_axis(values, CHART_BOTTOM, CHART_TOP)
    x_axis = _padded_axis([scored.step for scored in checkpoints], CHART_LEFT, CHART_RIGHT)
    scores = tuple(_show_score(scored, display, y_axis, label=scored.name, checkpoint="") for scored in checkpoints)
    bars = tuple(
        Bar(
            x=axis_place(x_axis, scored.step),
            mean_y=shown.mean_at,
            low_y=shown.low_at,
            high_y=shown.high_at,
            is_selected=scored.name == chosen,
            hint=f"{scored.name}: {shown.mean} ({shown.interval})",
        )
        for scored, shown in zip(checkpoints, scores, strict=True)
    )
    better = "lower is better" if display.is_lower_better else "higher is better"
    chart = Chart(
        title=f"{title} checkpoints",
        headline=f"{chosen} selected",
        note=f"Selection {display.title} with 95 % intervals over steps; {better}.",
        x_ticks=axis_ticks(x_axis, max_ticks=6, is_whole=True),
        y_ticks=tuple(Tick(at, label + display.unit) for at, label in axis_ticks(y_axis, max_ticks=5)),
        bars=tuple(sorted(bars, key=lambda bar: bar.is_selected)),
    )
    return Selection(
        title=title,
        display=display,
        chart=chart,
        scores=scores,
        selected=chosen,
        is_long=len(scores) > MAX_OPEN_ROWS,
    )


def _selected_step(directory: Path | None, selected: str) -> int | None:
    """The step of the selected checkpoint, or None where no selection knows it."""
    if directory is None or not RunDirectory(directory).result.is_file():
        return None
    steps = {scored.name: scored.step for scored in load_evaluation(directory).checkpoints}
    return steps.get(selected)


# Transcripts


class ShownText(NamedTuple):
    """A text with what is shown of it at first; both are equal for a short one."""

    start: str
    text: str
    num_left_out: int
    """Characters that the page does not hold."""

    @property
    def is_long(self) -> bool:
        """Whether the text is shown collapsed."""
        return self.start != self.text


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What one checkpoint said to a prompt."""

    name: str
    label: str
    text: ShownText
    reward: float | None
    outcome: str
    """best or rest where rewards differ, else empty."""
    is_truncated: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Transcript:
    """One held-out prompt with every checkpoint's first completion."""

    turns: tuple[tuple[str, ShownText], ...]
    """(role, text) of the prompt."""
    reference: str
    """The dataset's answer; empty where it has none."""
    answers: tuple[Answer, ...]


def load_transcripts(evaluation_dir: Path, names: Sequence[str]) -> list[Transcript]:
    """Prompts that all checkpoints with samples answered, preferring those where the rewards differ.

    Different outcomes take turns (RL alone is right, RL alone is wrong, ...), the most frequent first, so that a
    rare loss is shown beside frequent gains.
    """
    directory = RunDirectory(evaluation_dir).samples
    by_name = {name: first for name in names if (first := _first_samples(directory / f"{name}.jsonl"))}
    if not by_name:
        return []
    shared = sorted(set.intersection(*(set(first) for first in by_name.values())))
    groups = pick_different([[first[i].reward for first in by_name.values()] for i in shared], MAX_TRANSCRIPTS)
    return [_describe_transcript({name: first[shared[i]] for name, first in by_name.items()}) for i in groups]


def pick_different(rewards: Sequence[Sequence[float | None]], count: int) -> list[int]:
    """Up to `count` places whose rewards differ, by turns of their pattern; then places where they agree."""
    patterns = [tuple(row) for row in rewards]
    frequency = Counter(patterns)
    seen: Counter[tuple[float | None, ...]] = Counter()
    turn = []
    for pattern in patterns:
        turn.append(seen[pattern])
        seen[pattern] += 1
    order = sorted(
        range(len(patterns)), key=lambda i: (len(set(patterns[i])) == 1, turn[i], -frequency[patterns[i]], i)
    )
    return order[:count]


def shorten_text(text: str) -> ShownText:
    """The text as it is shown: whole, collapsed behind its start, or without its end."""
    kept = text[:MAX_TEXT_CHARS]
    start = "\n".join(kept[:LONG_TEXT_CHARS].split("\n")[:LONG_TEXT_LINES])
    return ShownText(start, kept, len(text) - len(kept))


def _first_samples(path: Path) -> dict[int, Sample]:
    """The first sample of every group of a sample file, without its tokens; empty where there is no file."""
    if not path.is_file():
        return {}
    return {sample.group_index: sample for sample in _iterate_samples(path) if sample.index == 0}


def _iterate_samples(path: Path) -> Iterator[Sample]:
    with path.open() as lines:
        for line in lines:
            record = json.loads(line)
            yield sample_from_json({**record, "tokens": [], "loss_mask": [], "rollout_log_probs": None})


def _describe_transcript(samples: Mapping[str, Sample]) -> Transcript:
    asked = next(iter(samples.values()))
    prompt = (Message(role="user", content=asked.prompt),) if isinstance(asked.prompt, str) else asked.prompt
    rewards = [sample.reward for sample in samples.values() if sample.reward is not None]
    highest = max(rewards) if len(set(rewards)) > 1 else None
    return Transcript(
        turns=tuple((turn["role"], shorten_text(turn["content"])) for turn in prompt),
        reference=str(asked.metadata.get("answer", "")),
        answers=tuple(
            Answer(
                name=name,
                label=LABELS.get(name, name),
                text=shorten_text(sample.response),
                reward=sample.reward,
                outcome="" if highest is None else "best" if sample.reward == highest else "rest",
                is_truncated=sample.status == Status.TRUNCATED,
            )
            for name, sample in samples.items()
        ),
    )


# Using the checkpoint


def usage_code(report: ReportInput) -> str:
    """Three lines of Python that ask the final checkpoint something."""
    job = _job_of(report.evaluation_dir)
    max_new_tokens = job.rollout.sampling.max_new_tokens if isinstance(job, EvalJob) else 256
    question = _example_question(RunDirectory(report.evaluation_dir).samples)
    return (
        "from transformers import pipeline\n"
        f'generate = pipeline("text-generation", model={json.dumps(report.checkpoint_path)})\n'
        f'print(generate([{{"role": "user", "content": {json.dumps(question, ensure_ascii=False)}}}], '
        f'max_new_tokens={max_new_tokens})[0]["generated_text"][-1]["content"])'
    )


def _example_question(samples: Path) -> str:
    """The first held-out prompt if it is a short question of one turn, else a greeting."""
    first = next((sample for path in sorted(samples.glob("*.jsonl")) for sample in _iterate_samples(path)), None)
    if first is None or isinstance(first.prompt, str) or len(first.prompt) != 1:
        return "Hello!"
    content = first.prompt[0]["content"]
    return content if len(content) <= MAX_EXAMPLE_CHARS and "\n" not in content else "Hello!"
