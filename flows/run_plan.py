"""Describe the plan of a run before it begins: its stages in order, which of them are reused from earlier runs, and how
long the others take if they are as fast as in the last run of the configuration.

    plan: 1 of 5, sft: reused from sft-1f0c9a7d5b3e2468, finished before by run small-5793d50a
    plan: 3 of 5, rl: 40 steps, trains all weights, on this machine; unlike rl-...: training.rl.num_steps was 20, is 40
    plan: 4 of 5, select-rl: score the checkpoints of a training ..., on this machine; about 50 s, as in small-5793d50a
    plan: about 14 min in all
    plan: GPU 0, trainer: about 24.6 of 79.6 GiB
    plan: GPU 1 to 3, 3 engines: about 5.1 of 79.6 GiB on each

Not here: planning a stage (tasks/stage_order.py), checking that its files are intact (tasks/artifacts.py).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from rollouts.flows.form import Pipeline
from rollouts.infra.gpu_state import GpuState
from rollouts.infra.ledger import LEDGER_FILE, Ledger
from rollouts.infra.node import LocalNode, NodeSettings, RentedNode, no_machine
from rollouts.tasks.closest_stage import describe_difference, find_older_version, find_shorter
from rollouts.tasks.records import RunScope, Stage, StageRecord
from rollouts.tasks.stage_order import run_stages
from rollouts.tasks.store_paths import RUN_FILE, newest_first
from rollouts_core.checkpoint import newest_step
from rollouts_core.checks.needed_part import GIB
from rollouts_core.checks.placement_plan import placed_work
from rollouts_core.config import Config
from rollouts_core.findings import Caution
from rollouts_core.job import job_type
from rollouts_core.metrics import read_metrics
from rollouts_core.model.model_size import find_model_size
from rollouts_core.report.charts import format_roughly
from rollouts_core.roll_back import ROLLED_BACK
from rollouts_core.run_directory import RunDirectory
from rollouts_core.stages import STAGES, kind_of, stages_of

MIN_TIMED_STEPS = 2
"""Minimum number of logged steps to estimate the duration of a training."""
MAX_RUNS_READ = 20
"""Number of newest runs whose stages give estimates."""


class TimedStage(NamedTuple):
    """The time that a stage took in an earlier run."""

    run: str
    seconds: float
    num_steps: int | None
    """Number of steps of a training; None for other stages."""


class Estimate(NamedTuple):
    """The expected time of a stage."""

    seconds: float
    reason: str


class _UnfinishedError(Exception):
    """A stage is not finished, so later stages, which depend on its result, cannot be planned."""


def describe_plan(pipeline: Pipeline, config: Config, store: Path, gpus: Sequence[GpuState] = ()) -> list[str]:
    """Return a line for each stage, a line for each group of GPUs, and warnings about finished stages that are not
    reused.

    Args:
        config: the pipeline's configuration with local copies of its inputs, and with the run's engine and placement.
        gpus: the known GPUs of the run's machine.
    """
    names = [name for name, _ in stages_of(config.mode)]
    planned = {stage.name: stage for stage in _plan_stages(pipeline, config, store)}
    timed = read_stage_times(store, pipeline.run.name)
    unfinished = [stage for stage in planned.values() if not _is_finished(stage)]
    left = [name for name in names if name not in planned or planned[name] in unfinished]
    estimates = {name: _estimate(name, config, timed.get(name), planned.get(name)) for name in left}
    lines: list[str] = []
    for number, name in enumerate(names, start=1):
        estimate = estimates.get(name)
        told = (
            _describe_stage(planned[name], pipeline, config, store, estimate)
            if name in planned
            else _with_estimate(_describe_work(name, config, pipeline.node), estimate)
        )
        lines.append(f"plan: {number} of {len(names)}, {name}: {told}")
    if len(estimates) > 1 and all(estimates.values()):
        total = sum(estimate.seconds for estimate in estimates.values() if estimate)
        lines.append(f"plan: about {format_roughly(total)} in all")
    lines += _describe_gpus(config, gpus)
    return [*lines, *(warning for stage in unfinished for warning in _warn_of_finished(stage))]


def _describe_gpus(config: Config, gpus: Sequence[GpuState]) -> Iterator[str]:
    """A line for each group of GPUs: its work, and an estimate of the memory that the work needs."""
    if not gpus:
        return
    held = min(gpu.total_gb for gpu in gpus) * 1e9 / GIB
    for each in placed_work(config, find_model_size(config.model)):
        needed = f"about {each.num_bytes / GIB:.1f}" if each.num_bytes else "an unknown part"
        on_each = "" if each.gpus.isdecimal() else " on each"
        yield f"plan: GPU {each.gpus}, {each.work}: {needed} of {held:.1f} GiB{on_each}"


def _plan_stages(pipeline: Pipeline, config: Config, store: Path) -> list[Stage]:
    """The stages up to the first unfinished stage.

    Empty if the store has no earlier training to reuse, because planning computes digests of data, which may take long.
    """
    place = store.resolve()
    first = next(iter(config.trainings))
    if not any(place.glob(f"stages/{first}-*")):
        return []
    scope = RunScope(run_id="plan", run_name=pipeline.run.name, store=str(place), fresh=pipeline.run.fresh)
    found: list[Stage] = []

    def note(stage: Stage) -> StageRecord:
        found.append(stage)
        if (result := RunDirectory(Path(stage.run_dir)).read_result()) is None:
            raise _UnfinishedError
        return StageRecord.reused(stage, result)

    with suppress(_UnfinishedError):
        run_stages(config, scope, no_machine(str(place)), note)
    return found


def _is_finished(stage: Stage) -> bool:
    return RunDirectory(Path(stage.run_dir)).result.is_file()


def _describe_stage(stage: Stage, pipeline: Pipeline, config: Config, store: Path, estimate: Estimate | None) -> str:
    """Describe whether a stage is reused, resumed or run, and why."""
    directory = RunDirectory(Path(stage.run_dir))
    if _is_finished(stage):
        ledger_path = store / LEDGER_FILE
        use = None
        if ledger_path.is_file():
            with Ledger(ledger_path) as ledger:
                use = ledger.first_use(directory.root.name)
        return f"reused from {directory.root.name}, finished before" + (f" by run {use.run}" if use and use.run else "")
    work = _describe_work(stage.name, config, pipeline.node)
    if step := newest_step(directory.checkpoints):
        return f"{work}; resumes from step {step} of {directory.root.name}"
    why = "requested by run.fresh" if stage.name in pipeline.run.fresh else describe_difference(stage)
    return "; ".join(filter(None, (_with_estimate(work, estimate), why)))


def _with_estimate(work: str, estimate: Estimate | None) -> str:
    return f"{work}; about {format_roughly(estimate.seconds)} {estimate.reason}" if estimate else work


def _describe_work(name: str, config: Config, node: NodeSettings) -> str:
    """Describe the work of a stage and the machine that it runs on."""
    place = _describe_place(node)
    if (training := config.trainings.get(name)) is not None:
        rank = training.policy.lora.rank
        what = f"adapters of rank {rank}" if rank else "all weights"
        return f"{training.num_steps} steps, trains {what}, on {place}"
    purpose = STAGES[kind_of(name).name].purpose.partition(". ")[0].removesuffix(".")
    return f"{purpose[:1].lower()}{purpose[1:]}, on {place}"


def _describe_place(node: NodeSettings) -> str:
    if isinstance(node, LocalNode):
        return "this machine"
    if isinstance(node, RentedNode):
        return f"a rented machine, within ${node.max_usd:g}"
    return str(getattr(node, "host", "") or getattr(node, "instance", ""))


def read_stage_times(store: Path, run_name: str) -> dict[str, TimedStage]:
    """The time that each stage took when a run of this name ran it last, by the name of the stage."""
    found: dict[str, TimedStage] = {}
    for path in newest_first(store.glob(f"runs/*/{RUN_FILE}"))[:MAX_RUNS_READ]:
        with suppress(OSError, ValueError, KeyError, TypeError):  # written by another version, or damaged
            record = json.loads(path.read_text(encoding="utf-8"))
            if record["run_name"] != run_name:
                continue
            trainings = Config.model_validate(record["config"]).trainings
            for entry in record["stages"]:
                name, seconds = entry["stage"], float(entry["seconds"])
                if entry["how"] == "ran" and not entry["finished_early"] and not entry.get(ROLLED_BACK):
                    num_steps = trainings[name].num_steps if name in trainings else None
                    found.setdefault(name, TimedStage(path.parent.name, seconds, num_steps))
    return found


def _estimate(name: str, config: Config, timed: TimedStage | None, stage: Stage | None) -> Estimate | None:
    """Estimate the time of a stage from a finished training with fewer steps, or from the last run of the
    configuration. None if neither exists, or if the stage has a checkpoint to resume from."""
    if stage is not None and newest_step(RunDirectory(Path(stage.run_dir)).checkpoints):
        return None
    if stage is not None and stage.trains and (estimate := _estimate_by_shorter(stage)):
        return estimate
    if timed is None:
        return None
    if name not in config.trainings or not timed.num_steps:
        return Estimate(timed.seconds, f"as in {timed.run}")
    seconds = timed.seconds / timed.num_steps * config.trainings[name].num_steps
    return Estimate(seconds, f"at the pace of {timed.run}")


def _estimate_by_shorter(stage: Stage) -> Estimate | None:
    """Estimate the time of a training from a finished training with the same settings and fewer steps."""
    shorter = find_shorter(stage)
    if not shorter:
        return None
    lines = read_metrics(RunDirectory(Path(stage.run_dir).parent / shorter).metrics)
    if len(lines) < MIN_TIMED_STEPS or lines[-1]["step"] <= lines[0]["step"]:
        return None
    pace = (lines[-1]["time"] - lines[0]["time"]) / (lines[-1]["step"] - lines[0]["step"])
    return Estimate(pace * stage.num_steps, f"at the pace of {shorter}")


def _warn_of_finished(stage: Stage) -> Iterator[Caution]:
    """Warn about finished stages that resemble this unfinished stage but cannot be reused for it."""
    if not stage.trains:
        return
    stages = Path(stage.run_dir).parent
    if older := find_older_version(stage.name, job_type(stage.kind).model_validate(stage.job), stages):
        yield Caution(
            f"{stage.name}: {older} has the same settings and data, but an older version of rollouts trained it: "
            "the current version gives other results, so the run trains again"
        )
    has_begun = newest_step(RunDirectory(Path(stage.run_dir)).checkpoints) > 0
    if not has_begun and not stage.job["training"].get("resume_from") and (shorter := find_shorter(stage)):
        yield Caution(
            f"{stage.name}: {shorter} was trained for fewer steps, but a training with more steps starts from the "
            f'beginning: set training.{stage.name}.resume_from = "{stages / shorter}" to continue it'
        )
