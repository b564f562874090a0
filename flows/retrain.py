"""The `retrain` flow: if the data changed, train, compare the result with production, and promote a better model.

Not here: the order of the steps (tasks/retraining.py), the schedule (schedules.py), the stages (pipeline.py).

    new data? -> the stages of `sft-rl`, which also evaluate production -> registry: candidate -> promote | reject
                                                                                        \\-> a user is asked

A run that waits for approval has no process and no machine. The user's answer starts the run again. The run then reuses
its finished stages, as after Retry.
"""

# No `from __future__ import annotations`: Prefect pickles the flow by value, without the names to resolve annotations.

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from prefect.artifacts import create_markdown_artifact
from prefect.client.schemas.objects import State
from prefect.flow_runs import suspend_flow_run
from prefect.input import RunInput
from prefect.states import Completed
from pydantic import Field

from rollouts.flows.cancellation import cancelled_if_asked, release_after_cancellation
from rollouts.flows.checked_flow import checked_flow
from rollouts.flows.credentials import take_credentials
from rollouts.flows.deployments import RETRAIN_FLOW
from rollouts.flows.evaluate import score_models
from rollouts.flows.form import FormConfig, FormNode, FormRetrain, FormRun, RunOptions
from rollouts.flows.pipeline import (
    known_to_live,
    link_report,
    machine_of_the_run,
    open_scope,
    prepare,
)
from rollouts.flows.retrain_settings import RetrainConfig
from rollouts.flows.run_ends import with_noted_end
from rollouts.infra.ledger import Ledger
from rollouts.infra.node import NodeSettings, settings_of_engines, without_further_nodes
from rollouts.infra.registry import Alias, Model, current
from rollouts.infra.retrainings import Retraining, find_retraining
from rollouts.tasks.candidate import (
    candidate_name,
    judge_candidate,
    register_candidate,
    registered_input,
    render_comparison,
)
from rollouts.tasks.model_aliases import note_in_reports
from rollouts.tasks.plan import with_engines_of_trainer
from rollouts.tasks.plan_node import with_enough_memory
from rollouts.tasks.records import RunScope, StageRecord, artifact_key
from rollouts.tasks.report import write_report
from rollouts.tasks.retraining import Answer, Compared, Rules, retrain_once
from rollouts.tasks.stage_order import note_plan, run_stages
from rollouts.tasks.sync import publish_results, sync_results
from rollouts.tasks.watch import digest_sources, watched_sources
from rollouts_core.config import Config
from rollouts_core.report.markdown import escaped
from rollouts_core.stages.planning import base_model


class Approval(RunInput):
    """A user's answer about a candidate."""

    promote: bool = Field(description="Put the candidate into production.")
    decided_by: str = Field("", description="Your name, for the registry's history.")
    comment: str = Field("", description="The reason, for the registry's history.")


@checked_flow(
    name=RETRAIN_FLOW,
    flow_run_name="{run.name}",
    on_cancellation=[release_after_cancellation],
    on_crashed=[cancelled_if_asked],
)
@with_noted_end
def retrain_model(config: FormConfig, node: FormNode, run: FormRun, retrain: FormRetrain) -> State[Any]:
    """Train on new data, compare the result with the model in production, and promote a better model.

    Ends in the state Skipped, Promoted or Rejected. The state's message has the reason.
    """
    take_credentials(run.credentials)
    scope = open_scope(run)
    rules = Rules(needs_approval=retrain.approval, force=retrain.force, max_failures=retrain.max_failures)
    line = retrain.model or scope.run_name
    work = PipelineWork(config, node, run, retrain, scope)
    with known_to_live(scope), Ledger(scope.ledger_path) as ledger:
        outcome = retrain_once(ledger, work, run_id=scope.run_id, line=line, rules=rules)
        note_in_reports(Path(scope.store), ledger)
        if outcome.is_promotion and run.publish:
            production, row = current(ledger, line, Alias.PRODUCTION), find_retraining(ledger, scope.run_id)
            if (
                production is not None and row is not None and production.id == row.model_id
            ):  # False after a user's rollback
                publish_results(str(Path(scope.store) / production.checkpoint), scope)
    has_report = (scope.output_dir / "report.html").is_file()
    shown = f"; the report is {link_report(scope, str(scope.output_dir / 'report.html'))}" if has_report else ""
    return Completed(name=outcome.name, message=f"{outcome.sentence}{shown}")


class PipelineWork:
    """Implements the steps of `retrain_once` with the pipeline's stages and with Prefect's form for approval."""

    def __init__(
        self, config: Config, node: NodeSettings, run: RunOptions, retrain: RetrainConfig, scope: RunScope
    ) -> None:
        self._config = config
        self._node = node
        self._run = run
        self._retrain = retrain
        self._scope = scope

    def watch(self) -> dict[str, str]:
        """Digests of the watched data, by path."""
        return digest_sources(watched_sources(self._config, self._retrain.sources))

    def train(self, data: Mapping[str, str], production: Model | None) -> Compared:
        """Train, register the candidate, and compare the candidate with the production model. Stages that an earlier
        attempt finished are reused."""
        config, scope, line = self._config, self._scope, self._retrain.model or self._scope.run_name
        local = prepare(config, self._node, self._run, scope, self._retrain)
        store = Path(scope.store)
        rivals = {"production": registered_input("production", production, config, store)} if production else {}
        note_plan(local, scope)
        stages = partial(run_stages, local, scope, rivals=rivals)
        with machine_of_the_run(with_enough_memory(self._node, local), local, scope, stages) as (machine, run_stage):
            final, records = stages(machine, run_stage)
            checkpoint = sync_results(final, scope)
            write_report(records, config, self._node, checkpoint, scope)
        model = register_candidate(line, checkpoint, records, data, scope)
        return self._judge(model, records[-1], production)

    def compare(self, candidate: Model, production: Model | None) -> Compared:
        """Score an existing candidate and the current production model, without training."""
        config, scope = self._config, self._scope
        local = prepare(config, self._node, self._run, scope, self._retrain)
        if settings_of_engines(self._node):
            local = with_engines_of_trainer(local)
        registered = {candidate_name(config): candidate} | ({"production": production} if production else {})
        inputs = {name: registered_input(name, model, config, Path(scope.store)) for name, model in registered.items()}
        stages = partial(score_models, {"base": base_model(local), **inputs}, local, scope)
        scoring = without_further_nodes(self._node)
        with machine_of_the_run(scoring, local, scope, stages, trains=False) as (machine, run_stage):
            evaluation = stages(machine, run_stage)
        return self._judge(candidate, evaluation, production)

    def _judge(self, candidate: Model, evaluation: StageRecord, production: Model | None) -> Compared:
        compared = judge_candidate(
            candidate,
            evaluation,
            names=("production" if production else "base", candidate_name(self._config)),
            production=production,
            margin=self._retrain.margin,
            max_p_value=self._retrain.max_p_value,
        )
        table = render_comparison(candidate.name, compared.evaluation)
        create_markdown_artifact(
            table,
            key=artifact_key("comparison", self._scope),
            description=f"{escaped(candidate.name)} and the model in production",
        )
        return compared

    def ask(self, row: Retraining, candidate: Model) -> Answer:
        """Return the user's answer to the request for approval. Without an answer, suspend the run and end this
        process."""
        table = render_comparison(candidate.name, candidate.evaluation)
        form = Approval.with_initial_data(description=f"## Put {escaped(candidate.name)} into production?\n\n{table}")
        answer = suspend_flow_run(wait_for_input=form, key=f"approve-{candidate.id}-{row.baseline_id}")
        return Answer(approved=answer.promote, by=answer.decided_by or "a user in Prefect", comment=answer.comment)
