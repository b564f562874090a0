"""Run the stages of a run in order. Each stage is planned from the settings and from the results of earlier stages.

Not here: executing one stage (stage.py), building its job and fingerprint (plan.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from rollouts.infra.ledger import Ledger
from rollouts.infra.node import Node
from rollouts.tasks.engine_choice import with_choice_of
from rollouts.tasks.plan import plan_evaluation, plan_selection, plan_training, selected_model
from rollouts.tasks.records import RunScope, StageRecord
from rollouts_core.config import Config
from rollouts_core.job import InputModel
from rollouts_core.stages import BASE, EVALUATE, SELECT, stages_of
from rollouts_core.stages.planning import base_model

if TYPE_CHECKING:
    from rollouts.tasks.finished import RunStage


def note_plan(config: Config, scope: RunScope) -> None:
    """Record the names of the run's stages in the ledger, so that the live page shows stages that have not started."""
    with Ledger(scope.ledger_path) as ledger:
        ledger.note_plan(scope.output_dir.name, [place.name for place in stages_of(config.mode)])


def run_stages(
    config: Config,
    scope: RunScope,
    machine: Node,
    run: RunStage,
    *,
    rivals: Mapping[str, InputModel] = MappingProxyType({}),
) -> tuple[InputModel, list[StageRecord]]:
    """Run every stage of the run's mode, in order. Returns the final checkpoint and the records of the stages.

    Args:
        run: runs a stage and returns its record, or only loads the record of a finished stage.
        rivals: further models for the final evaluation, by name.
    """
    config = with_choice_of(config, machine)
    models = {BASE: base_model(config)}
    records: list[StageRecord] = []
    for name, kind in stages_of(config.mode):
        if kind.trains:
            start = [*models.values()][-1]
            records.append(run(plan_training(name, start, config, scope, machine)))
        elif kind == SELECT:
            trained = records[-1]
            records.append(run(plan_selection(trained, config, scope, machine)))
            models[trained.stage] = selected_model(trained, records[-1], config)
        else:
            assert kind == EVALUATE, f"nothing plans the stage {name}"
            records.append(run(plan_evaluation({**models, **rivals}, config, scope, machine)))
    return [*models.values()][-1], records
