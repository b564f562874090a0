"""Score the checkpoints of a training stage and name the best."""

from __future__ import annotations

from prefect import task

from infra.node import Node
from tasks.caching import STAGE_OPTIONS
from tasks.records import RunScope, Stage, StageRecord
from tasks.stage import run_stage


@task(name="select", **STAGE_OPTIONS)
def select_checkpoint(stage: Stage, scope: RunScope, node: Node) -> StageRecord:
    """Score the checkpoints of a training stage and name the best."""
    return run_stage(stage, scope, node)
