"""Score base, SFT and RL on the held-out rows."""

from __future__ import annotations

from prefect import task

from infra.node import Node
from tasks.caching import STAGE_OPTIONS
from tasks.records import RunScope, Stage, StageRecord
from tasks.stage import run_stage


@task(name="evaluate", **STAGE_OPTIONS)
def evaluate_models(stage: Stage, scope: RunScope, node: Node) -> StageRecord:
    """Score base, SFT and RL on the held-out rows."""
    return run_stage(stage, scope, node)
