"""The stages that are jobs, one Prefect task each: their names are what Prefect's pages and its cache know them by.

Not here: what a stage does (plan.py), how its job is run (stage.py).
"""

from __future__ import annotations

from prefect import task

from rollouts.infra.node import Node
from rollouts.tasks.caching import STAGE_OPTIONS
from rollouts.tasks.records import RunScope, Stage, StageRecord
from rollouts.tasks.stage import run_stage


@task(name="sft", **STAGE_OPTIONS)
def train_sft(stage: Stage, scope: RunScope, node: Node) -> StageRecord:
    """Fine-tune the base model on demonstrations."""
    return run_stage(stage, scope, node)


@task(name="rl", **STAGE_OPTIONS)
def train_rl(stage: Stage, scope: RunScope, node: Node) -> StageRecord:
    """Improve the selected checkpoint by reinforcement learning."""
    return run_stage(stage, scope, node)


@task(name="select", **STAGE_OPTIONS)
def select_checkpoint(stage: Stage, scope: RunScope, node: Node) -> StageRecord:
    """Score the checkpoints of a training stage and name the best."""
    return run_stage(stage, scope, node)


@task(name="evaluate", **STAGE_OPTIONS)
def evaluate_models(stage: Stage, scope: RunScope, node: Node) -> StageRecord:
    """Score base, SFT and RL on the held-out rows."""
    return run_stage(stage, scope, node)
