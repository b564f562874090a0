"""Read the runs of a store from its ledger and files, without a Prefect server: stages, state, scores and cost.

Not here: pages about runs (live.py), commands (commands/runs.py), the states of runs in Prefect (commands/status.py).
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from rollouts.infra.jobs import JobExit, describe_exit, describe_saved
from rollouts.infra.ledger import LEDGER_FILE, Ledger, StageUse
from rollouts.infra.renting.rentals import all_rentals, usd_spent
from rollouts.tasks.store_paths import EVALUATION_FILE, RUN_FILE
from rollouts_core.errors import InputError, RolloutsError
from rollouts_core.metrics import read_last_lines
from rollouts_core.run_directory import RunDirectory
from rollouts_core.stages import BASE, EVALUATE, is_selection, is_training

if TYPE_CHECKING:
    from rollouts_core.report.live_run import LiveRun

MIN_ID_CHARS = 4
"""Minimum number of leading characters of a run's id that a user may give instead of the whole id."""

MAX_NAMES = 10
"""The error about an unknown run's name suggests a similar name among this many latest runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelScore:
    """The score of a model in a selection or an evaluation."""

    model: str
    """Name of the model: base, sft, rl, or the name of a checkpoint."""
    mean: float
    low: float
    """Lower end of the confidence interval. The report names the interval's method."""
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """The state and the results of a run, for one line of a table."""

    run: str
    """The name of the run's folder of results."""
    state: str
    """running, done, cancelled, failed, or stopped. stopped: the run's process is gone, and its last job recorded no
    end."""
    stage: str
    """The last stage that the run has reached."""
    training: str
    """The last training stage that the run has reached (empty for an evaluation)."""
    step: int
    """The last logged step of the stage in `training`."""
    num_steps: int
    began_at: float
    """Seconds since 1970."""
    score: ModelScore | None
    """Score of the last scored model, on held-out rows, or on the rows of a selection before the evaluation."""
    change: float | None
    """Mean score of the last model minus the mean score of the base model, on held-out rows."""
    usd: float | None
    """Cost of rented machines so far (None without rented machines)."""
    verdict: str
    report: str
    """The path of the report (empty before the end)."""


def runs_by_use(store: Path) -> list[list[StageUse]]:
    """The stages that each run has reached, in order. The run that used a stage most recently comes first."""
    runs: dict[str, list[StageUse]] = {}
    with Ledger(store / LEDGER_FILE) as ledger:
        for use in ledger.stage_uses():
            runs.setdefault(use.run, []).append(use)
    runs.pop("", None)
    return sorted(runs.values(), key=lambda uses: uses[-1].used_at, reverse=True)


def find_run(store: Path, name: str) -> list[StageUse] | None:
    """The stages of the run whose folder of results has this name (None if there is no such run)."""
    return next((uses for uses in runs_by_use(store) if uses[0].run == name), None)


def find_named_run(store: Path, given: str) -> list[StageUse]:
    """The stages of the run that a user named.

    Args:
        given: the name of the run's folder, the start of its id, or its name (then the latest run with this name).

    Raises:
        InputError: the store has no such run.
    """
    runs = runs_by_use(store) if (store / LEDGER_FILE).is_file() else []
    for fits in (
        lambda uses: given in (uses[0].run, uses[0].run_id),
        lambda uses: given == uses[0].run.rpartition("-")[0],
        lambda uses: len(given) >= MIN_ID_CHARS and any(use.run_id.startswith(given) for use in uses),
    ):
        if found := next(filter(fits, runs), None):
            return found
    names = [uses[0].run for uses in runs]
    if not names:
        raise InputError(f"the store {store} has no runs yet: --store names another store")
    from rollouts_core.config.messages import closest_name  # loads all settings

    hint = closest_name(given, names[:MAX_NAMES])
    raise InputError(f"the store {store} has no run {given}{hint}")


def report_path(store: Path, uses: Sequence[StageUse]) -> Path:
    return store / "runs" / uses[0].run / "report.html"


def describe_run_state(store: Path, uses: Sequence[StageUse], *, is_alive: bool) -> str:
    """The state of a run in a few words: running, its results, or how its last stage ended."""
    if is_alive:
        return "running"
    report = report_path(store, uses)
    if report.is_file():
        return "has a report"
    if report.with_name(EVALUATION_FILE).is_file():
        return "has its scores"
    last = store / "stages" / uses[-1].stage
    _, ended = ("", "") if RunDirectory(last).result.is_file() else describe_end(last)
    return ended or "not running, no report"


def load_run(store: Path, uses: Sequence[StageUse]) -> LiveRun:
    """Load a run with the stages that it has reached, for its live page."""
    from rollouts_core.report.live_run import LiveRun, LiveStage  # loads the pages

    is_followed = lives(uses, living_runs(store))
    path = report_path(store, uses)
    labels = labels_of(path.with_name(EVALUATION_FILE))
    stages = []
    for use in uses:
        run_dir = store / "stages" / use.stage
        ended_attempt, ended = describe_end(run_dir)
        stages.append(
            LiveStage(
                name=stage_name(use),
                run_dir=run_dir,
                num_steps=use.num_steps,
                began_at=use.used_at,
                ended=ended,
                ended_attempt=ended_attempt,
                is_followed=is_followed,
                labels=labels,
            )
        )
    return LiveRun(
        name=uses[0].run,
        stages=tuple(stages),
        state=describe_run_state(store, uses, is_alive=is_followed),
        usd=usd_of(store, uses),
        has_report=path.is_file(),
        verdict=verdict_of(path.with_name(RUN_FILE)),
        is_under_way=is_followed,
        planned=planned_stages(store, uses[0].run),
    )


def planned_stages(store: Path, run: str) -> tuple[str, ...]:
    """The names of all planned stages of a run, in order (empty if they are unknown)."""
    with Ledger(store / LEDGER_FILE) as ledger:
        return ledger.planned_stages(run)


def describe_end(run_dir: Path) -> tuple[int, str]:
    """The number of a stage's last attempt, and a phrase about how the attempt ended.

    Returns 0 and "" if the attempt is still running or left no readable exit record.
    """
    attempts = [int(path.stem[5:]) for path in run_dir.glob("exit-*.json") if path.stem[5:].isdecimal()]
    if not attempts:
        return 0, ""
    attempt = max(attempts)
    if (run_dir / ".job" / f"meta-{attempt + 1}.json").is_file():  # a later attempt is running
        return 0, ""
    try:
        record = json.loads((run_dir / f"exit-{attempt}.json").read_text())
        at = datetime.fromisoformat(record["ended_at"]).astimezone().strftime("%Y-%m-%d %H:%M:%S")
        exit_record = JobExit(**{each.name: record[each.name] for each in fields(JobExit) if each.name in record})
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return 0, ""
    if exit_record.cancelled:
        return attempt, f"cancelled at {at}{describe_saved(exit_record)}"
    return attempt, f"ended at {at}: {describe_exit(exit_record).rstrip('.')}"


def verdict_of(record: Path) -> str:
    """The verdict about RL in a run.json (empty if the file or the verdict is missing)."""
    try:
        return str(json.loads(record.read_text(encoding="utf-8")).get("verdict", ""))
    except (OSError, ValueError, AttributeError, RecursionError):
        return ""


def labels_of(record: Path) -> dict[str, str]:
    """The names by which the user referred to the models of an evaluation, by the models' names in the stage.

    Empty without the record of an evaluation.
    """
    try:
        models = json.loads(record.read_text(encoding="utf-8"))["models"]
        return {name: str(model["named"]) for name, model in models.items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return {}


def living_runs(store: Path) -> Collection[str]:
    """The ids of runs with a running process. Each call locks a folder, so call this once for many runs."""
    with Ledger(store / LEDGER_FILE) as ledger:
        return ledger.living_runs().keys()


def lives(uses: Sequence[StageUse], living: Collection[str]) -> bool:
    """Whether a run has a running process. A run's stages may belong to several attempts, each with its own id."""
    return any(use.run_id in living for use in uses)


def stage_name(use: StageUse) -> str:
    return use.stage.rpartition("-")[0]


def usd_of(store: Path, uses: Sequence[StageUse]) -> float | None:
    """The cost of the run's machines (None if it rented no machine)."""
    ids = {use.run_id for use in uses}
    with Ledger(store / LEDGER_FILE) as ledger:
        if not any(rental.run_id in ids for rental in all_rentals(ledger)):
            return None
        return sum(usd_spent(ledger, run_id, time.time()) for run_id in ids)


def summarize_run(store: Path, uses: Sequence[StageUse], *, living: Collection[str]) -> RunSummary:
    """Collect the state and the results of a run for one line of a table."""
    path = report_path(store, uses)
    last = store / "stages" / uses[-1].stage
    training = next((use for use in reversed(uses) if is_training(stage_name(use))), None)
    step = 0
    if training:
        lines = read_last_lines(RunDirectory(store / "stages" / training.stage).metrics)
        step = int(lines[-1].get("step", 0)) if lines else 0
    scores = next((found for use in reversed(uses) if (found := scores_of(store, use))), [])
    is_heldout = len(scores) > 1 and scores[0].model == BASE
    return RunSummary(
        run=uses[0].run,
        state=state_of(path, last, is_alive=lives(uses, living)),
        stage=stage_name(uses[-1]),
        training=stage_name(training) if training else "",
        step=step,
        num_steps=training.num_steps if training else 0,
        began_at=min(use.began_at for use in uses),
        score=scores[-1] if scores else None,
        change=scores[-1].mean - scores[0].mean if is_heldout else None,
        usd=usd_of(store, uses),
        verdict=verdict_of(path.with_name(RUN_FILE)),
        report=str(path) if path.is_file() else "",
    )


def state_of(report: Path, last_stage: Path, *, is_alive: bool) -> str:
    """The state of a run in one word."""
    if is_alive:
        return "running"
    if report.is_file() or report.with_name(EVALUATION_FILE).is_file():
        return "done"
    _, ended = ("", "") if RunDirectory(last_stage).result.is_file() else describe_end(last_stage)
    return next((word for word in ("cancelled", "ended") if ended.startswith(word)), "stopped").replace(
        "ended", "failed"
    )


def scores_of(store: Path, use: StageUse) -> list[ModelScore]:
    """The scores in the result of a stage: of all models of an evaluation, or of the chosen checkpoint of a selection.

    Empty for other stages and for unfinished stages.
    """
    name = stage_name(use)
    if not is_selection(name) and name != EVALUATE.name:
        return []
    try:
        result = RunDirectory(store / "stages" / use.stage).read_result() or {}
        return [
            ModelScore(model=each["name"], mean=each["mean"], low=each["low"], high=each["high"])
            for each in result.get("checkpoints", [])
            if name == EVALUATE.name or each["name"] == result.get("best")
        ]
    except (RolloutsError, ValueError, LookupError, TypeError):
        return []
