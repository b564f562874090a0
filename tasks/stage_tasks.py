"""Run the stages of a run as Prefect tasks. A record in Prefect's cache is used only if the stage's files are intact.

Each kind of stage is a task with the name of the kind, which Prefect's pages show.

Not here: running a stage's job (stage.py), verifying a stage's files (artifacts.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prefect import Task, task
from prefect.cache_policies import CacheKeyFnPolicy
from prefect.context import TaskRunContext

from rollouts.infra.ledger import Ledger
from rollouts.infra.node import Node
from rollouts.tasks.artifacts import is_finished
from rollouts.tasks.progress import StageProgress
from rollouts.tasks.records import RunScope, Stage, StageRecord
from rollouts.tasks.retries import is_worth_a_retry
from rollouts.tasks.stage import run_stage, why_so
from rollouts.tasks.tracking import tracked
from rollouts_core.report.results import describe_found
from rollouts_core.run_directory import RunDirectory
from rollouts_core.stages import STAGES, kind_of


def cache_key(context: TaskRunContext, parameters: dict[str, Any]) -> str:  # Any: Prefect's signature
    """The stage's name and fingerprint. The run and the source code of the task do not enter the key."""
    stage: Stage = parameters["stage"]
    return f"{stage.name}-{stage.fingerprint}"


STAGE_OPTIONS: dict[str, Any] = {  # Any: keywords of prefect.task
    "cache_policy": CacheKeyFnPolicy(cache_key_fn=cache_key),
    "persist_result": True,
    "result_serializer": "json",
    "retries": 2,
    "retry_delay_seconds": 5,
    "retry_condition_fn": is_worth_a_retry,
}


def run_cached(
    task: Task[[Stage, RunScope, Node], StageRecord], stage: Stage, scope: RunScope, node: Node
) -> StageRecord:
    """Run the task of a stage. A record in Prefect's cache is used only if the stage is finished and intact."""
    # The use is recorded before the check, so that prune keeps the stage. A stage that is already pruned runs again.
    with Ledger(scope.ledger_path) as ledger:
        use = Path(stage.run_dir).name
        ledger.note_use(use, scope.run_id, run=scope.output_dir.name, num_steps=stage.num_steps)
    # Without this check, a deleted or damaged checkpoint would be noticed only by the later stage that loads it.
    fitting = task.with_options(refresh_cache=not is_finished(stage), task_run_name=stage.name)
    state = fitting(stage, scope, node, return_state=True)
    kept: object = state.result()
    if not isinstance(kept, StageRecord):  # the cached record has a class name of an earlier version
        return task.with_options(refresh_cache=True, task_run_name=stage.name)(stage, scope, node)
    return _reuse(kept, stage, scope) if state.name == "Cached" else kept


def _reuse(record: StageRecord, stage: Stage, scope: RunScope) -> StageRecord:
    """Show a stage with a cached record like the other stages of this run. Returns the updated record."""
    with (
        StageProgress(stage.name) as progress,
        tracked(stage, scope, progress.say),
    ):
        # The verified directory decides, because the store may have been moved since Prefect cached the record.
        # A cached record is also outdated if a flow was killed after its job had replaced a damaged result.
        result = RunDirectory(Path(stage.run_dir)).read_result() or record.result
        if warning := result.get("warning"):
            progress.say(warning)
        if stage.kind == "eval":
            progress.say(describe_found(Path(stage.run_dir), stage.name))
        progress.say(f"reused from {stage.run_dir}")
    reused = {"how": "reused", "why": why_so("reused", stage, scope, result), "began_at": 0.0, "seconds": 0.0}
    return record.model_copy(update={**reused, "run_dir": stage.run_dir, "result": result})


def do_stage(stage: Stage, scope: RunScope, node: Node) -> StageRecord:
    """Run a stage, or reuse its result."""
    return run_stage(stage, scope, node)


STAGE_TASKS = {
    name: task(name=name, description=kind.purpose, **STAGE_OPTIONS)(do_stage) for name, kind in STAGES.items()
}


def run_task(stage: Stage, scope: RunScope, node: Node) -> StageRecord:
    """Run a stage by the task of its kind, and return the stage's record."""
    return run_cached(STAGE_TASKS[kind_of(stage.name).name], stage, scope, node)
