"""Compare finished runs: settings and data that differ, held-out scores, paired tests, machines and costs.

    ReportInput of each run ─┬─> settings and data that differ        (settings, job.json)
                             ├─> scores, by one method of intervals   (evaluate/result.json)
                             ├─> tests on the shared held-out prompts (result.json, samples/)
                             └─> machine, versions, time, cost        (events.jsonl)

The page calls the runs A, B, ... Not here: curves (compared_curves.py), answers (compared_answers.py), the page
(compared_page.py).
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rollouts_core.comparison import CONFIDENCE, Comparison, Estimate, compare_paired, estimate_means
from rollouts_core.errors import DataError, InputError
from rollouts_core.job import EvalJob, InputDataset, InputFile, InputModel, RLJob, SFTJob
from rollouts_core.metrics import parse_line
from rollouts_core.report.charts import Tick, axis_ticks, format_seconds, padded_axis
from rollouts_core.report.inputs import ReportInput
from rollouts_core.report.provenance import describe_provenance, format_time
from rollouts_core.report.results import (
    Evaluated,
    Scored,
    ScoreDisplay,
    ShownScore,
    choose_display,
    estimate_measures,
    format_p_value,
    load_evaluation,
    measure_display,
    shared_measures,
    show_score,
    signed,
)
from rollouts_core.report.rollout_codec import prompt_turns
from rollouts_core.report.trainings import load_job_of
from rollouts_core.run_directory import RunDirectory
from rollouts_core.stages import EVALUATE

MAX_RUNS = 8
"""Largest number of compared runs, because the style sheet has this number of colours."""
SCORING_SETTINGS = (
    "evaluation.engine",
    "evaluation.metric",
    "evaluation.pass_reward",
    "evaluation.samples_per_prompt",
    "evaluation.seed",
    "evaluation.temperature",
    "rollout.engine.dtype",
    "rollout.engine.kind",
    "rollout.environment",
    "rollout.multi_turn",
    "rollout.reward",
    "rollout.sampling.max_new_tokens",
)
"""Prefixes of the names of settings that decide how scores are computed."""
SCOPE = (
    "Each run is one training with one seed. A test says whether these checkpoints differ on these prompts. It cannot "
    "say that the settings of a run are better, because another seed of the same settings trains another checkpoint, "
    "which may score several points better or worse. To compare settings, train each with several seeds "
    "(training.rl.replicate)."
)
MISSING = "–"


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedRun:
    """One of the finished runs in a comparison."""

    name: str
    """The name of the run's folder: small-11111111."""
    report: ReportInput
    settings: Mapping[str, Any]  # Any: JSON
    """The run's settings by dotted name, without settings at their defaults."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A setting or an input whose value differs between the runs."""

    name: str
    values: tuple[str, ...]
    """The value of each run, as text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunScores:
    """The held-out scores of a run."""

    scored: tuple[Scored, ...]
    """The run's scored models, in the order of training."""
    shown: tuple[ShownScore, ...]
    """The scores of the models in `scored` as texts."""
    display: ScoreDisplay

    def of(self, model: str) -> Scored:
        return next(each for each in self.scored if each.name == model)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreTest:
    """A paired test of two models from two runs, on the prompts that both runs scored."""

    runs: tuple[int, int]
    """Indices of the baseline's run and of the candidate's run."""
    models: tuple[str, str]
    measure: str
    """Name of the measure: accuracy, loss, mean reward, pass@8, ..."""
    num_shared: int
    comparison: Comparison
    """The paired comparison of the two models, with a two-sided p-value."""
    outcome: str
    """Result of the test: better, worse, unclear, or equal. Equal means the same score on every prompt."""
    title: str
    difference: str
    interval: str
    p_value: str
    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedMeasure:
    """pass@k or majority@k of the final models."""

    title: str
    scored: tuple[Scored, ...]
    """The final model of each run; its `scores` are the measure's values per prompt."""
    shown: tuple[ShownScore, ...]
    tests: tuple[ScoreTest, ...]
    """Tests of the first run against each other run that shares prompts with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunComparison:
    """All content of a comparison page, except curves and answers."""

    runs: tuple[ComparedRun, ...]
    settings: tuple[Difference, ...]
    inputs: tuple[Difference, ...]
    scores: tuple[RunScores, ...]
    ticks: tuple[Tick, ...]
    """Ticks of the axis that all runs' scores share; empty if the runs have different metrics."""
    tests: tuple[ScoreTest, ...]
    measures: tuple[ComparedMeasure, ...]
    """pass@k and majority@k of the final models; empty if a run has only one completion per prompt."""
    notes: tuple[str, ...]
    """Sentences about the tests: the prompts that the runs share, the settings that decide the scores, and the limits
    of a test."""
    facts: tuple[Difference, ...]
    """Machine, versions, time and cost of each run, including values that are equal in all runs."""


def letter_of(place: int) -> str:
    """The letter of a run by its index: A for the first run."""
    return chr(ord("A") + place)


def compare_runs(runs: Sequence[ComparedRun]) -> RunComparison:
    """Compare the settings, inputs and scores of finished runs.

    Raises:
        InputError: a run has no held-out scores.
    """
    assert 2 <= len(runs) <= MAX_RUNS, f"{len(runs)} runs, expected 2 to {MAX_RUNS}"
    settings = _differing_settings(runs)
    evaluated = [_load_scores(run) for run in runs]
    scores, ticks = _show_scores(runs, evaluated)
    tests, notes, shared = list[ScoreTest](), list[str](), dict[int, list[tuple[int, int]]]()
    for place in range(1, len(runs)):
        pairs, sentence = _shared_rows(runs, evaluated, place)
        notes.append(sentence)
        if pairs:
            shared[place] = pairs
            tests += _test_models(runs, scores, place, pairs)
    return RunComparison(
        runs=tuple(runs),
        settings=settings,
        inputs=_differing_inputs(runs),
        scores=scores,
        ticks=ticks,
        tests=tuple(tests),
        measures=_compare_measures(runs, scores, shared),
        notes=tuple(dict.fromkeys([*notes, *_cautions(settings, tests)])),
        facts=_facts(runs),
    )


# ---- settings, inputs, machines


def _differing_settings(runs: Sequence[ComparedRun]) -> tuple[Difference, ...]:
    """The settings that are not equal in all runs. run.name is left out, because names always differ."""
    names = dict.fromkeys(itertools.chain(*(run.settings for run in runs)))
    rows = [(name, [_setting_text(run.settings, name) for run in runs]) for name in names if name != "run.name"]
    return tuple(Difference(name=name, values=tuple(texts)) for name, texts in rows if len(set(texts)) > 1)


def _setting_text(settings: Mapping[str, Any], name: str) -> str:  # Any: JSON
    return json.dumps(settings[name], ensure_ascii=False) if name in settings else "default"


def _differing_inputs(runs: Sequence[ComparedRun]) -> tuple[Difference, ...]:
    """The start models and data whose content differs. Equal content at different paths is no difference."""
    every = [_inputs_of(run.report) for run in runs]
    names = dict.fromkeys(itertools.chain(*every))
    return tuple(
        Difference(name=name, values=tuple(found[name][1] if name in found else MISSING for found in every))
        for name in names
        if len({found[name][0] if name in found else None for found in every}) > 1
    )


def _inputs_of(report: ReportInput) -> dict[str, tuple[Hashable, str]]:
    """The digest and description of each input, by its title. Inputs of stages without a readable job are missing."""
    jobs = [load_job_of(training.run_dir) for training in report.trainings]
    found = dict[str, tuple[Hashable, str]]()
    if jobs and isinstance(jobs[0], SFTJob | RLJob):
        found["start model"] = _identity(jobs[0].model)
    for job in jobs:
        if isinstance(job, SFTJob):
            parts = [_identity(each) for each in job.data]
            found["SFT data"] = tuple(each for each, _ in parts), "; ".join(text for _, text in parts)
        elif isinstance(job, RLJob):
            found["RL prompts" if job.prompts else "RL rollouts"] = _identity(job.prompts or job.rollouts)
    selections = [load_job_of(training.selection_dir) for training in report.trainings]
    for name, evaluation in (
        ("selection rows", selections[-1:]),
        ("held-out rows", [load_job_of(report.evaluation_dir)]),
    ):
        if evaluation and isinstance(evaluation[0], EvalJob):
            found[name] = _identity(evaluation[0].data)
    return found


def _identity(given: InputModel | InputFile | InputDataset | None) -> tuple[Hashable, str]:
    assert given is not None
    path = given.model.path if isinstance(given, InputModel) else given.path
    facts = [f"{given.digest[:10]}…"]
    if isinstance(given, InputDataset):
        facts += [f"first {given.max_samples:,} rows"] if given.max_samples else []
        facts += [f"× {given.repeat:g}"] if given.repeat != 1 else []
    return (given.digest, *facts), f"{path} ({', '.join(facts)})"


def _facts(runs: Sequence[ComparedRun]) -> tuple[Difference, ...]:
    every = [dict(_facts_of(run.report)) for run in runs]
    names = dict.fromkeys(itertools.chain(*every))
    return tuple(Difference(name=name, values=tuple(found.get(name, MISSING) for found in every)) for name in names)


def _facts_of(report: ReportInput) -> list[tuple[str, str]]:
    provenance = [
        ("Run id" if what == "Run" else what, text)
        for what, text in describe_provenance(report)
        if what != "Report written"
    ]
    stages = ", ".join(f"{stage.name} {format_seconds(stage.seconds)} ({stage.how})" for stage in report.stages)
    usd = usd_of(report)
    cost = "nothing was rented" if usd is None else f"{usd:.2f} USD"
    return [("Began", format_time(report.began_at) or MISSING), *provenance, ("Stages", stages), ("Cost", cost)]


def usd_of(report: ReportInput) -> float | None:
    """The cost of a run's machines; None if nothing was rented."""
    if report.usd_outside_stages is None:
        return None
    return report.usd_outside_stages + sum(stage.usd or 0.0 for stage in report.stages)


# ---- scores


def _load_scores(run: ComparedRun) -> Evaluated:
    try:
        evaluated = load_evaluation(run.report.evaluation_dir)
        by_name = {scored.name: scored for scored in evaluated.checkpoints}
        known = [by_name[name] for name in run.report.labels if name in by_name]
    except (DataError, OSError, ValueError, LookupError, TypeError):
        known = []
    if not known:
        raise InputError(f"{run.name} has no held-out scores: {run.report.evaluation_dir} has no result.json of them")
    return Evaluated(metric=evaluated.metric, checkpoints=known, best=evaluated.best)


def _show_scores(
    runs: Sequence[ComparedRun], evaluated: Sequence[Evaluated]
) -> tuple[tuple[RunScores, ...], tuple[Tick, ...]]:
    """The scores of all runs. If all runs have the same metric, one method computes all intervals, on one axis."""
    if len({each.metric for each in evaluated}) > 1:
        return tuple(_show_run(run, each, choose_display(each)) for run, each in zip(runs, evaluated, strict=True)), ()
    every = [scored for each in evaluated for scored in each.checkpoints]
    estimates = iter(estimate_means([scored.scores for scored in every]))
    alike = [
        each._replace(checkpoints=[_with_estimate(scored, next(estimates)) for scored in each.checkpoints])
        for each in evaluated
    ]
    display = choose_display(alike[0]._replace(checkpoints=every))
    ends = [display.factor * end for each in alike for scored in each.checkpoints for end in (scored.low, scored.high)]
    axis = padded_axis(ends, 0, 100)
    scores = tuple(_show_run(run, each, display, ends) for run, each in zip(runs, alike, strict=True))
    return scores, axis_ticks(axis, max_ticks=5)


def _with_estimate(scored: Scored, estimate: Estimate) -> Scored:
    return scored._replace(mean=estimate.mean, low=estimate.low, high=estimate.high)


def _show_run(
    run: ComparedRun, evaluated: Evaluated, display: ScoreDisplay, ends: Sequence[float] = (0.0, 1.0)
) -> RunScores:
    axis = padded_axis(ends, 0, 100)
    shown = tuple(
        show_score(
            scored,
            display,
            axis,
            label=run.report.labels[scored.name],
            checkpoint=run.report.selected.get(scored.name, ""),
        )
        for scored in evaluated.checkpoints
    )
    return RunScores(scored=tuple(evaluated.checkpoints), shown=shown, display=display)


# ---- rows that two runs share


def _shared_rows(
    runs: Sequence[ComparedRun], evaluated: Sequence[Evaluated], place: int
) -> tuple[list[tuple[int, int]], str]:
    """Pairs of row indices for the held-out rows that the first run shares with another run, and a sentence about
    them."""
    names = f"{letter_of(0)} and {letter_of(place)}"
    first, other = evaluated[0], evaluated[place]
    if first.metric != other.metric:
        return [], f"{names} are not tested: one has the metric {first.metric}, and the other {other.metric}."
    sizes = [len(each.checkpoints[0].scores) for each in (first, other)]
    jobs = [load_job_of(run.report.evaluation_dir) for run in (runs[0], runs[place])]
    data = [(job.data.digest, tuple(job.data.columns.items())) if isinstance(job, EvalJob) else None for job in jobs]
    if data[0] == data[1] is not None:
        pairs = [(i, i) for i in range(min(sizes))]
    else:
        keys = [
            prompt_keys(run.report.evaluation_dir, size)
            for run, size in zip((runs[0], runs[place]), sizes, strict=True)
        ]
        places = {key: i for i, key in enumerate(keys[1])}
        pairs = [(i, places[key]) for i, key in enumerate(keys[0]) if key in places]
    if not pairs:
        return [], f"{names} are not tested: their held-out rows have no prompt in common that the samples show."
    if sizes[0] == sizes[1] == len(pairs):
        return pairs, f"{names} answered the same {len(pairs):,} held-out rows."
    return pairs, (
        f"{names} have different held-out rows, {sizes[0]:,} and {sizes[1]:,}. They are tested on the {len(pairs):,} "
        "rows that both have. Means in the table are over all rows of a run."
    )


def prompt_keys(evaluation_dir: Path, num_rows: int) -> list[Hashable]:
    """An identifier for each held-out row: prompt, reference and a counter for repeated rows; empty without samples."""
    for path in sorted(RunDirectory(evaluation_dir).samples.glob("*.jsonl")):
        asked: dict[int, str] = {}
        with path.open("rb") as lines:
            for record in filter(None, map(parse_line, lines)):
                answer = (record.get("metadata") or {}).get("answer")
                asked.setdefault(int(record["group_index"]), json.dumps([prompt_turns(record["prompt"]), answer]))
        if sorted(asked) == list(range(num_rows)):
            seen: Counter[str] = Counter()
            keys = list[Hashable]()
            for place in range(num_rows):
                keys.append((asked[place], seen[asked[place]]))
                seen[asked[place]] += 1
            return keys
    return []


# ---- tests


def _test_models(
    runs: Sequence[ComparedRun], scores: Sequence[RunScores], place: int, pairs: Sequence[tuple[int, int]]
) -> list[ScoreTest]:
    """Significance tests of the first run against run `place`: the final models first, then all other models that both
    runs have."""
    first, other = scores[0], scores[place]
    finals = (first.scored[-1].name, other.scored[-1].name)
    named = [each.name for each in reversed(first.scored)]
    alike = [(name, name) for name in named if any(each.name == name for each in other.scored)]
    return [_test_pair(runs, scores, place, models, pairs) for models in dict.fromkeys([finals, *alike])]


def _compare_measures(
    runs: Sequence[ComparedRun], scores: Sequence[RunScores], shared: Mapping[int, Sequence[tuple[int, int]]]
) -> tuple[ComparedMeasure, ...]:
    """The measures that the final models of all runs have, tested on shared prompts."""
    finals = [each.scored[-1] for each in scores]
    compared = []
    for title in shared_measures(finals):
        display, measured = measure_display(title), estimate_measures(finals, title)
        axis = padded_axis([0.0, 100.0], 0, 100)
        alone = [RunScores(scored=(each,), shown=(), display=display) for each in measured]
        compared.append(
            ComparedMeasure(
                title=title,
                scored=tuple(measured),
                shown=tuple(show_score(each, display, axis, label="", checkpoint="") for each in measured),
                tests=tuple(
                    _test_pair(runs, alone, place, (finals[0].name, finals[place].name), pairs)
                    for place, pairs in shared.items()
                ),
            )
        )
    return tuple(compared)


def _test_pair(
    runs: Sequence[ComparedRun],
    scores: Sequence[RunScores],
    place: int,
    models: tuple[str, str],
    pairs: Sequence[tuple[int, int]],
) -> ScoreTest:
    display = scores[0].display
    baseline = [scores[0].of(models[0]).scores[i] for i, _ in pairs]
    candidate = [scores[place].of(models[1]).scores[i] for _, i in pairs]
    comparison = compare_both_ways(baseline, candidate)
    amount = display.factor * comparison.difference
    size = f"{abs(amount):.{display.decimals}f}"
    low, high = sorted((display.factor * comparison.low, display.factor * comparison.high))
    interval = f"{signed(low, display)} to {signed(high, display)}"
    p_value = format_p_value(comparison)
    outcome = "equal" if baseline == candidate else _judge(comparison)
    whom, who = (
        f"{letter_of(i)} ({runs[i].report.labels[model]})" for i, model in zip((0, place), models, strict=True)
    )
    start = f"On {len(pairs):,} shared {display.rows}, the {display.title} of {who} is "
    direction = f"{size}{display.difference_unit} {'higher' if amount > 0 else 'lower'} than that of {whom}"
    direction = direction if float(size) else f"equal to that of {whom}"
    ending = {
        "equal": ": both have the same score on every row.",
        "better": f": better, with a 95 % interval of {interval} ({p_value}).",
        "worse": f": worse, with a 95 % interval of {interval} ({p_value}).",
        "unclear": f": within chance, with a 95 % interval of {interval} ({p_value}).",
    }[outcome]
    return ScoreTest(
        runs=(0, place),
        models=models,
        measure=display.title,
        num_shared=len(pairs),
        comparison=comparison,
        outcome=outcome,
        title=f"{whom} → {who}",
        difference=f"{signed(amount, display)}{display.difference_unit}",
        interval=interval,
        p_value=p_value,
        sentence=f"{start}{direction}{ending}",
    )


def compare_both_ways(baseline: Sequence[float], candidate: Sequence[float]) -> Comparison:
    """The paired comparison with a two-sided p-value, because either run may be better."""
    forward, backward = compare_paired(baseline, candidate), compare_paired(candidate, baseline)
    return replace(forward, p_value=min(1.0, 2 * min(forward.p_value, backward.p_value)))


def _judge(comparison: Comparison) -> str:
    """The outcome: better, worse or unclear. A difference counts only if the interval and the test agree.

    With few differing rows the interval alone is too narrow, because almost every resample contains some of these rows.
    """
    if comparison.p_value > 1 - CONFIDENCE or comparison.low <= 0 <= comparison.high:
        return "unclear"
    return "better" if comparison.difference > 0 else "worse"


def _cautions(settings: Sequence[Difference], tests: Sequence[ScoreTest]) -> list[str]:
    """Sentences that qualify the tests: differing evaluation settings, several tests, one seed per run."""
    if not tests:
        return []
    scoring = [each.name for each in settings if each.name.startswith(SCORING_SETTINGS)]
    found = []
    if scoring:
        found.append(
            f"The runs differ in settings of the {EVALUATE.name} stage itself, so their scores may mean different "
            f"things: {', '.join(scoring)}."
        )
    num_real = sum(test.outcome != "equal" for test in tests)
    if num_real > 1:
        found.append(
            f"The page has {num_real} tests. About one in 20 tests of equal models has p at most 0.05 by chance."
        )
    return [*found, SCOPE]
