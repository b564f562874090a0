"""Run the stages of a run as Prefect tasks. A record in Prefect's cache is used only if the stage's files are intact.

Each kind of stage has its own task, so that Prefect's pages show the kind's name.

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
from rollouts.tasks.stage import describe_reuse, run_stage
from rollouts.tasks.tracking import tracked
from rollouts_core.report.results import describe_found
from rollouts_core.run_directory import RunDirectory
from rollouts_core.stages import STAGES, kind_of


def cache_key(context: TaskRunContext, parameters: dict[str, Any]) -> str:  # Any: Prefect's signature
    """Prefect's cache key of a stage: its name and fingerprint, so that all runs share the cached record."""
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
    """Run the task of a stage, or use the record in Prefect's cache if the stage's files are intact."""
    # The ledger records the use of the stage before the check, so that prune keeps a stage that the check finds intact.
    with Ledger(scope.ledger_path) as ledger:
        use = Path(stage.run_dir).name
        ledger.note_use(use, scope.run_id, run=scope.output_dir.name, num_steps=stage.num_steps)
    # Without this check, a deleted or damaged checkpoint would fail only in a later stage that loads it.
    fitting = task.with_options(refresh_cache=not is_finished(stage), task_run_name=stage.name)
    state = fitting(stage, scope, node, return_state=True)
    kept: object = state.result()
    if not isinstance(kept, StageRecord):  # an earlier version cached the record under another class name
        return task.with_options(refresh_cache=True, task_run_name=stage.name)(stage, scope, node)
    return _reuse(kept, stage, scope) if state.name == "Cached" else kept


def _reuse(record: StageRecord, stage: Stage, scope: RunScope) -> StageRecord:
    """Report that this run reuses a stage from Prefect's cache. Returns the cached record, updated for this run."""
    with (
        StageProgress(stage.name) as progress,
        tracked(stage, scope, progress.say),
    ):
        # result.json is read again, because the cached record is outdated if the store was moved, or if a flow was
        # killed after its job had replaced a damaged result.
        result = RunDirectory(Path(stage.run_dir)).read_result() or record.result
        if warning := result.get("warning"):
            progress.say(warning)
        if stage.kind == "eval":
            progress.say(describe_found(Path(stage.run_dir), stage.name))
        progress.say(f"reused from {stage.run_dir}")
    reused = {"how": "reused", "why": describe_reuse("reused", stage, scope, result), "began_at": 0.0, "seconds": 0.0}
    return record.model_copy(update={**reused, "run_dir": stage.run_dir, "result": result})


def do_stage(stage: Stage, scope: RunScope, node: Node) -> StageRecord:
    return run_stage(stage, scope, node)


STAGE_TASKS = {
    name: task(name=name, description=kind.purpose, **STAGE_OPTIONS)(do_stage) for name, kind in STAGES.items()
}


def run_task(stage: Stage, scope: RunScope, node: Node) -> StageRecord:
    """Run a stage by the Prefect task of its kind, and return the stage's record."""
    return run_cached(STAGE_TASKS[kind_of(stage.name).name], stage, scope, node)
