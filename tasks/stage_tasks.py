"""The stages of a run as Prefect tasks. Prefect's pages know them by the names of their kinds.

Not here: what a stage does (plan.py), how its job is run (stage.py).
"""

from __future__ import annotations

from prefect import task

from rollouts.infra.node import Node
from rollouts.tasks.caching import STAGE_OPTIONS, run_cached
from rollouts.tasks.records import RunScope, Stage, StageRecord
from rollouts.tasks.stage import run_stage
from rollouts_core.stages import STAGES, kind_of


def do_stage(stage: Stage, scope: RunScope, node: Node) -> StageRecord:
    """Do a stage, or take what it left."""
    return run_stage(stage, scope, node)


STAGE_TASKS = {
    name: task(name=name, description=kind.purpose, **STAGE_OPTIONS)(do_stage) for name, kind in STAGES.items()
}


def run_task(stage: Stage, scope: RunScope, node: Node) -> StageRecord:
    """The record of a stage, by the task of its kind."""
    return run_cached(STAGE_TASKS[kind_of(stage.name).name], stage, scope, node)
