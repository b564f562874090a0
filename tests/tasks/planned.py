"""Trainings planned in a line, for tests."""

from __future__ import annotations

from rollouts.infra.node import Node
from rollouts.tasks.plan import plan_training
from rollouts.tasks.records import RunScope, Stage
from rollouts_core.config import Config
from rollouts_core.job import InputModel
from rollouts_core.stages.planning import base_model


def plan_sft(config: Config, scope: RunScope, node: Node) -> Stage:
    return plan_training("sft", base_model(config), config, scope, node)


def plan_rl(start: InputModel, config: Config, scope: RunScope, node: Node) -> Stage:
    return plan_training("rl", start, config, scope, node)
