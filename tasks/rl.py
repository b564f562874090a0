"""Improve the selected checkpoint by reinforcement learning."""

from __future__ import annotations

from prefect import task

from infra.node import Node
from tasks.caching import STAGE_OPTIONS
from tasks.records import RunScope, Stage, StageRecord
from tasks.stage import run_stage


@task(name="rl", **STAGE_OPTIONS)
def train_rl(stage: Stage, scope: RunScope, node: Node) -> StageRecord:
    """Improve the selected checkpoint by reinforcement learning."""
    return run_stage(stage, scope, node)
