"""The `evaluate` flow: score a model on held-out rows, and optionally compare it with another model.

Not here: the evaluation stage, which `sft-rl` also uses (tasks/stage_tasks.py), the lookup of a model's name
(tasks/model_names.py).

    check -> inputs: names become checkpoints -> provision -> bootstrap -> evaluate -> release -> report
"""

# No `from __future__ import annotations`: Prefect pickles the flow by value, without the names to resolve annotations.

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from prefect.client.schemas.objects import State
from prefect.runtime import deployment
from prefect.states import Completed
from pydantic import BaseModel

from rollouts.flows.cancellation import cancelled_if_asked, release_after_cancellation
from rollouts.flows.check import check_settings
from rollouts.flows.checked_flow import checked_flow
from rollouts.flows.credentials import take_credentials
from rollouts.flows.deployments import EVALUATE_FLOW
from rollouts.flows.form import FormConfig, FormEvaluate, FormNode, FormRun
from rollouts.flows.pipeline import known_to_live, link_live_page, live_url, machine_of_the_run, open_scope
from rollouts.flows.run_ends import with_noted_end
from rollouts.infra.node import Node, settings_of_engines, without_further_nodes
from rollouts.tasks.engine_choice import with_choice_of, with_kept_choice
from rollouts.tasks.evaluation_report import as_inputs, find_inputs, write_evaluation
from rollouts.tasks.finished import RunStage
from rollouts.tasks.plan import plan_evaluation, with_engines_of_trainer
from rollouts.tasks.records import RunScope, StageRecord
from rollouts_core.config import Config
from rollouts_core.job import InputModel


class EvaluationResult(BaseModel):
    """The results of an evaluation."""

    record: str
    """Path of evaluation.json."""
    summary: str
    """The scores and their comparison, as text for a terminal."""


@checked_flow(
    name=EVALUATE_FLOW,
    flow_run_name="{run.name}",
    on_cancellation=[release_after_cancellation],
    on_crashed=[cancelled_if_asked],
)
@with_noted_end
def evaluate_model(evaluate: FormEvaluate, config: FormConfig, node: FormNode, run: FormRun) -> State[Any]:
    """Score a model on held-out rows, and compare it with another model.

    Reads `evaluation`, the graders of `rollout`, and `data.heldout` from the configuration. Nothing is trained.
    """
    take_credentials(run.credentials)
    scope = open_scope(run)
    with known_to_live(scope):
        if deployment.id is not None:  # without a deployment, `rollouts evaluate` has checked the settings
            check_settings(config, node, run, evaluate)
        link_live_page(scope)
        scored, found = find_inputs(evaluate.model, evaluate.against, evaluate.data, config, scope)
        scoring = without_further_nodes(node)
        if settings_of_engines(node):
            scored = with_engines_of_trainer(scored)
        scored = with_kept_choice(scored, scoring, Path(scope.store))
        stages = partial(score_models, as_inputs(found), scored, scope)
        with machine_of_the_run(scoring, scored, scope, stages, trains=False) as (machine, run_stage):
            record = stages(machine, run_stage)
        path, summary, finding = write_evaluation(record, found, evaluate.data or config.data.heldout, scope)
    shown = live_url(scope) or path
    result = EvaluationResult(record=path, summary=summary)
    return Completed(message=f"{finding.rstrip('.')}; the scores are at {shown}", data=result)


def score_models(
    models: Mapping[str, InputModel], config: Config, scope: RunScope, machine: Node, run: RunStage
) -> StageRecord:
    """Run the evaluation stage, the only stage of this flow."""
    return run(plan_evaluation(models, with_choice_of(config, machine), scope, machine))
