"""Prepare scores for display: held-out results, comparisons, and the selection of checkpoints."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from rollouts_core.comparison import CONFIDENCE, Comparison, compare_paired, estimate_means
from rollouts_core.errors import DataError
from rollouts_core.pass_rates import measures_of
from rollouts_core.report.charts import (
    CHART_BOTTOM,
    CHART_LEFT,
    CHART_RIGHT,
    CHART_TOP,
    Axis,
    Bar,
    Chart,
    Tick,
    axis_place,
    axis_ticks,
    padded_axis,
)
from rollouts_core.report.inputs import LABELS, ReportInput
from rollouts_core.run_directory import RunDirectory
from rollouts_core.stages import is_selection, kind_of, label_checkpoint, label_of

MAX_OPEN_ROWS = 8
"""Largest number of checkpoints in a table that is not shown collapsed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreDisplay:
    """How the page shows scores. In the code, a higher score is always better."""

    title: str
    """The name of the shown number: accuracy, loss, mean reward."""
    rows: str
    """The kind of scored rows: prompts or demonstrations."""
    factor: float
    """A score is multiplied by this number to be shown: 100 for percent, -1 for a loss."""
    unit: str
    """The text after a shown score."""
    difference_unit: str
    """The text after a shown difference."""
    decimals: int

    @property
    def is_lower_better(self) -> bool:
        return self.factor < 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownScore:
    """One checkpoint's score as texts, and as positions in percent of an axis's width."""

    name: str
    """Name of the start model or of a training in held-out results: base, sft, rl."""
    label: str
    checkpoint: str
    """The checkpoint's name in its training run; empty for the base model."""
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
    """The outcome: better, worse or unclear. Unclear means that the interval includes zero or the p-value is too
    high."""
    difference: str
    interval: str
    p_value: str
    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownMeasure:
    """pass@k or majority@k of the checkpoints as texts, in percent."""

    title: str
    """Name of the measure, for example pass@8."""
    values: tuple[tuple[str, str], ...]
    """Mean and confidence interval of each checkpoint."""
    difference: ShownDifference | None
    """The comparison of the last two checkpoints; None if there is only one checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """The texts and positions of the held-out results."""

    display: ScoreDisplay
    scores: tuple[ShownScore, ...]
    ticks: tuple[Tick, ...]
    """Ticks of the axis that all scores share, in percent of the axis's width."""
    differences: tuple[ShownDifference, ...]
    finding: str
    """The sentence that compares the final checkpoint with the checkpoint from which its training started."""
    measures: tuple[ShownMeasure, ...] = ()
    """pass@k and majority@k of the checkpoints; empty with one completion per prompt."""


class Scored(NamedTuple):
    """One checkpoint of an evaluation's result.json. Higher scores are better."""

    name: str
    step: int
    scores: list[float]
    mean: float
    low: float
    high: float
    measures: Mapping[str, list[float]] = MappingProxyType({})
    """Values of pass@k and majority@k per row, by the measure's name."""


class Evaluated(NamedTuple):
    """The content of an evaluation's result.json."""

    metric: str
    checkpoints: list[Scored]
    best: str


def load_evaluation(directory: Path) -> Evaluated:
    """The content of an evaluation's result.json, with confidence intervals that one method computes for all
    checkpoints.

    Raises:
        DataError: the evaluation is not finished.
    """
    result = RunDirectory(directory).read_result()
    if result is None:
        raise DataError(f"{directory} has no result.json: the evaluation has to finish before the report")
    entries = result["checkpoints"]
    # Recompute the intervals, because the recorded intervals may come from several evaluations with different methods.
    estimates = estimate_means([entry["scores"] for entry in entries])
    checkpoints = [
        Scored(
            name=entry["name"],
            step=entry["step"],
            scores=entry["scores"],
            mean=estimate.mean,
            low=estimate.low,
            high=estimate.high,
            measures=measures_of(entry),
        )
        for entry, estimate in zip(entries, estimates, strict=True)
    ]
    return Evaluated(metric=result["metric"], checkpoints=checkpoints, best=result["best"])


def load_results(report: ReportInput) -> Results:
    """The results of the final evaluation. Each checkpoint is compared with the previous one, and the last also with
    the first."""
    return describe_results(report.evaluation_dir, report.labels, report.selected)


def describe_results(
    evaluation_dir: Path, labels: Mapping[str, str], checkpoints: Mapping[str, str] = MappingProxyType({})
) -> Results:
    """The results of an evaluation for labelled models. Each model is compared with the previous model, and the last
    model also with the first.

    Args:
        labels: the models' titles by their name in the evaluation, in the page's order.
        checkpoints: the models' checkpoint names in their training runs, by their name in the evaluation.
    """
    evaluated = load_evaluation(evaluation_dir)
    by_name = {scored.name: scored for scored in evaluated.checkpoints}
    found = [by_name[name] for name in labels if name in by_name]
    if not found:
        raise DataError(f"{evaluation_dir} scored {', '.join(by_name)}: expected {' or '.join(labels)}")
    display = choose_display(evaluated)
    pairs = [*itertools.pairwise(found), *([(found[0], found[-1])] if len(found) > 2 else [])]
    differences = tuple(describe_difference(baseline, candidate, display, labels) for baseline, candidate in pairs)
    axis = padded_axis([display.factor * end for scored in found for end in (scored.low, scored.high)], 0, 100)
    return Results(
        display=display,
        scores=tuple(
            show_score(scored, display, axis, label=labels[scored.name], checkpoint=checkpoints.get(scored.name, ""))
            for scored in found
        ),
        ticks=axis_ticks(axis, max_ticks=5),
        differences=differences,
        finding=differences[len(found) - 2].sentence if differences else "Only one checkpoint was evaluated.",
        measures=tuple(show_measure(title, found, labels) for title in shared_measures(found)),
    )


def shared_measures(found: Sequence[Scored]) -> list[str]:
    """The measures that all checkpoints have. A result.json from an older version has no measures."""
    return [title for title in found[0].measures if all(title in scored.measures for scored in found)]


def estimate_measures(found: Sequence[Scored], title: str) -> list[Scored]:
    """The checkpoints with a measure's values as their scores, and with the measure's mean and confidence interval."""
    estimates = estimate_means([scored.measures[title] for scored in found])
    return [
        scored._replace(scores=scored.measures[title], mean=estimate.mean, low=estimate.low, high=estimate.high)
        for scored, estimate in zip(found, estimates, strict=True)
    ]


def measure_display(title: str) -> ScoreDisplay:
    """The display settings of pass@k and majority@k."""
    return ScoreDisplay(title=title, rows="prompts", factor=100, unit=" %", difference_unit=" points", decimals=1)


def show_measure(title: str, found: Sequence[Scored], labels: Mapping[str, str]) -> ShownMeasure:
    """A measure of all checkpoints, with a paired test of the last two checkpoints."""
    display, measured = measure_display(title), estimate_measures(found, title)
    axis = padded_axis([0.0, 100.0], 0, 100)
    shown = [show_score(scored, display, axis, label="", checkpoint="") for scored in measured]
    return ShownMeasure(
        title=title,
        values=tuple((score.mean, score.interval) for score in shown),
        difference=describe_difference(measured[-2], measured[-1], display, labels) if len(measured) > 1 else None,
    )


def describe_found(evaluation_dir: Path, stage: str, *, labels: Mapping[str, str] = MappingProxyType({})) -> str:
    """The results of an evaluation in words.

    A selection gives the chosen checkpoint with its score and interval. Other evaluations give every model's score.

    Args:
        stage: the name of the stage that scored.
        labels: the models' titles by their name in the evaluation. Other models are named by `label_checkpoint`.
    """
    evaluated = load_evaluation(evaluation_dir)
    display = choose_display(evaluated)
    shown = []
    for scored in evaluated.checkpoints:
        low, high = sorted((display.factor * scored.low, display.factor * scored.high))
        mean = _plain(display.factor * scored.mean, display)
        interval = f"95 % interval {_plain(low, display)} to {_plain(high, display)}{display.unit}"
        score = f"{display.title} {mean}{display.unit} ({interval})"
        if not is_selection(stage):
            shown.append(f"{labels.get(scored.name, label_checkpoint(scored.name, scored.step, stage))} has {score}")
        elif scored.name == evaluated.best:
            chosen = label_checkpoint(scored.name, scored.step, stage)
            shown.append(f"{chosen} is chosen of {len(evaluated.checkpoints)}, {score}")
    return "; ".join(shown)


def choose_display(evaluated: Evaluated) -> ScoreDisplay:
    """The display settings: percent for rewards from 0 to 1, plain numbers for other rewards, the loss for the metric
    loss."""
    if evaluated.metric == "loss":
        return ScoreDisplay(
            title="loss", rows="demonstrations", factor=-1, unit="", difference_unit=" nats per token", decimals=3
        )
    if all(0 <= score <= 1 for scored in evaluated.checkpoints for score in scored.scores):
        return ScoreDisplay(
            title="accuracy", rows="prompts", factor=100, unit=" %", difference_unit=" points", decimals=1
        )
    return ScoreDisplay(title="mean reward", rows="prompts", factor=1, unit="", difference_unit="", decimals=3)


def describe_difference(
    baseline: Scored, candidate: Scored, display: ScoreDisplay, labels: Mapping[str, str] = LABELS
) -> ShownDifference:
    """Compare the candidate with the baseline on the same rows, in numbers and as a sentence."""
    comparison = compare_paired(baseline.scores, candidate.scores)
    low, high = sorted((display.factor * comparison.low, display.factor * comparison.high))
    interval = f"{signed(low, display)} to {signed(high, display)}"
    outcome, p_value = _judge(comparison, baseline, candidate)
    amount = display.factor * comparison.difference
    size = f"{abs(amount):.{display.decimals}f}"
    who, whom = labels[candidate.name], labels[baseline.name]
    direction = f"{size}{display.difference_unit} {'higher' if amount > 0 else 'lower'} than"
    ending = {
        "better": f"better, with a 95 % interval of {interval} ({p_value}).",
        "worse": f"worse, with a 95 % interval of {interval}.",
        "unclear": f"within chance, since the 95 % interval of {interval} includes zero ({p_value})."
        if comparison.low <= 0 <= comparison.high
        else f"within chance ({p_value}): too few {display.rows} differ for the 95 % interval of {interval} to count.",
    }[outcome]
    return ShownDifference(
        title=f"{whom} → {who}",
        outcome=outcome,
        difference=f"{signed(amount, display)}{display.difference_unit}",
        interval=interval,
        p_value=format_p_value(comparison),
        sentence=f"On the same {len(candidate.scores):,} {display.rows}, the {display.title} of {who} is "
        f"{direction if float(size) else 'equal to'} that of {whom}: {ending}",
    )


def _judge(comparison: Comparison, baseline: Scored, candidate: Scored) -> tuple[str, str]:
    """The outcome (better, worse or unclear) and the p-value as text.

    A difference counts only if the interval and the test agree. With few differing rows the interval alone is too
    narrow: if all these rows differ in the same direction, almost every resample contains some of them.
    """
    tail = (1 - CONFIDENCE) / 2
    if comparison.high < 0:
        reverse = compare_paired(candidate.scores, baseline.scores)
        return "worse" if reverse.p_value <= tail else "unclear", format_p_value(reverse)
    is_better = comparison.low > 0 and comparison.p_value <= tail
    return "better" if is_better else "unclear", format_p_value(comparison)


def format_p_value(comparison: Comparison) -> str:
    """The p-value with three digits, because the number of sign flips supports no more digits."""
    if comparison.p_value < 0.001:
        return "p < 0.001"
    return "p > 0.999" if comparison.p_value > 0.999 else f"p = {comparison.p_value:.3f}"


def signed(value: float, display: ScoreDisplay) -> str:
    """A score difference with its sign, rounded like the scores."""
    text = f"{abs(value):.{display.decimals}f}"
    return text if float(text) == 0 else f"{'+' if value > 0 else '−'}{text}"


def _plain(value: float, display: ScoreDisplay) -> str:
    return f"{value:.{display.decimals}f}".replace("-", "−")


def show_score(scored: Scored, display: ScoreDisplay, axis: Axis, *, label: str, checkpoint: str) -> ShownScore:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The scores of a training's checkpoints, and the selected checkpoint."""

    css: str
    """The kind of the training, which sets the colours."""
    display: ScoreDisplay
    chart: Chart
    scores: tuple[ShownScore, ...]
    selected: str
    is_long: bool


def load_selections(report: ReportInput) -> list[Selection]:
    """The selection of each training stage whose evaluation is finished."""
    return [
        describe_selection(load_evaluation(training.selection_dir), training.name, selected=training.selected)
        for training in report.trainings
        if training.selection_dir is not None and RunDirectory(training.selection_dir).result.is_file()
    ]


def describe_selection(evaluated: Evaluated, training: str, *, selected: str) -> Selection:
    """The checkpoints of a training stage in order of steps, with a mark on the selected checkpoint.

    Args:
        training: the name of the stage.
    """
    display = choose_display(evaluated)
    checkpoints = sorted(evaluated.checkpoints, key=lambda scored: scored.step)
    chosen = selected or evaluated.best
    values = [display.factor * end for scored in checkpoints for end in (scored.low, scored.high)]
    y_axis = padded_axis(values, CHART_BOTTOM, CHART_TOP)
    x_axis = padded_axis([scored.step for scored in checkpoints], CHART_LEFT, CHART_RIGHT)
    scores = tuple(show_score(scored, display, y_axis, label=scored.name, checkpoint="") for scored in checkpoints)
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
        title=f"{label_of(training)} checkpoints",
        headline=f"{chosen} selected",
        note=f"Selection {display.title} with 95 % intervals over steps; {better}.",
        x_ticks=axis_ticks(x_axis, max_ticks=6, is_whole=True),
        y_ticks=tuple(Tick(at, label + display.unit) for at, label in axis_ticks(y_axis, max_ticks=5)),
        bars=tuple(sorted(bars, key=lambda bar: bar.is_selected)),
    )
    return Selection(
        css=kind_of(training).name,
        display=display,
        chart=chart,
        scores=scores,
        selected=chosen,
        is_long=len(scores) > MAX_OPEN_ROWS,
    )


def selected_step(directory: Path | None, selected: str) -> int | None:
    """The step of the selected checkpoint; None if no selection has scored this checkpoint."""
    if directory is None or not RunDirectory(directory).result.is_file():
        return None
    steps = {scored.name: scored.step for scored in load_evaluation(directory).checkpoints}
    return steps.get(selected)
