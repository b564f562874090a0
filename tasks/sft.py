"""Fine-tune the base model on demonstrations."""

from __future__ import annotations

from prefect import task

from infra.node import Node
from tasks.caching import STAGE_OPTIONS
from tasks.records import RunScope, Stage, StageRecord
from tasks.stage import run_stage


@task(name="sft", **STAGE_OPTIONS)
def train_sft(stage: Stage, scope: RunScope, node: Node) -> StageRecord:
    """Fine-tune the base model on demonstrations."""
    return run_stage(stage, scope, node)
