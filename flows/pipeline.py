"""The `sft-rl` flow: it runs the stages in order, and releases the run's jobs and machines at the end.

Not here: the work of a stage (tasks), requests for runs (form.py, cli.py).

    check -> provision -> bootstrap -> sft -> select -> launch-engine -> rl -> select -> evaluate -> sync -> report
          -> release

A missing engine is installed during sft (engines_beside.py).

Inputs from object stores are downloaded before provision, and results are published after release. A remote machine
uploads the final checkpoint itself (send) before the run releases the machine.

When a run finishes, fails, or is interrupted or cancelled, its jobs end and its node is released (cancellation.py). A
failed run keeps its rented node for `keep_on_failure_minutes`. When a run's process is killed or ended by SIGTERM, its
jobs and its node stay, and the run's next start attaches to them.
"""

# No `from __future__ import annotations`: Prefect pickles the flow by value, without the names to resolve annotations.

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

from prefect.artifacts import create_link_artifact
from prefect.client.schemas.objects import State
from prefect.exceptions import TerminationSignal
from prefect.runtime import deployment, flow_run
from prefect.states import Completed, Failed
from pydantic import BaseModel

from rollouts.flows.cancellation import (
    cancelled_if_asked,
    ended_when_cancelled,
    is_cancelled,
    release_after_cancellation,
    release_beside,
)
from rollouts.flows.check import check_settings
from rollouts.flows.checked_flow import checked_flow
from rollouts.flows.credentials import take_credentials
from rollouts.flows.deployments import FLOW, folders_of_deployment
from rollouts.flows.form import FormConfig, FormNode, FormRun, RunOptions
from rollouts.flows.live import find_live_pages
from rollouts.flows.no_improvement import NO_IMPROVEMENT, NoImprovementError
from rollouts.flows.own_server.lend import held_server
from rollouts.flows.retrain_settings import RetrainConfig
from rollouts.flows.run_ends import with_noted_end
from rollouts.infra.errors import BudgetUsedUpError, JobFailedError
from rollouts.infra.interrupts import interrupted_afterwards, noted_interrupts, uninterrupted
from rollouts.infra.ledger import Ledger
from rollouts.infra.node import Node, NodeSettings, RentedNode
from rollouts.infra.providers.rented import ended_when_expired
from rollouts.tasks.artifacts import is_finished
from rollouts.tasks.bootstrap import bootstrap
from rollouts.tasks.budget import stopped_in_time
from rollouts.tasks.candidate import register_candidate
from rollouts.tasks.engine import KeptEngine, any_lapsed, kept_alive, launch_engine, stop_engine
from rollouts.tasks.engine_choice import choice_file, is_open, with_choice_of, with_kept_choice
from rollouts.tasks.engines_beside import WaitForEngines, engine_places, engines_installed_beside
from rollouts.tasks.finished import RunStage, placeholder_if_finished, trainings_begun
from rollouts.tasks.inputs import has_inputs_to_bring
from rollouts.tasks.node_job import starts_engines
from rollouts.tasks.plan import engine_ports, with_engines
from rollouts.tasks.plan_node import with_enough_memory
from rollouts.tasks.provision import provision, release, release_now, release_unknown
from rollouts.tasks.records import EngineRecord, RunScope, Stage, StageRecord, artifact_key
from rollouts.tasks.report import write_report
from rollouts.tasks.stage_order import note_plan, run_stages
from rollouts.tasks.stage_tasks import run_task
from rollouts.tasks.store_paths import note_named
from rollouts.tasks.sync import publish_results, reach_stores, send_from_machine, sync_results
from rollouts.tasks.watch import digest_sources, watched_sources
from rollouts_core.config import Config
from rollouts_core.user_code.code_folders import add_code_folders

MAX_LAPSES = 3
"""A training is attempted at most this number of times if the lease of its engine expires."""


class PipelineResult(BaseModel):
    """The results of a finished run: paths, and the verdict about RL."""

    report: str
    """Path of the HTML report."""
    checkpoint: str
    """Folder of the final checkpoint."""
    verdict: str
    """A sentence that says whether RL improved the model (empty without RL)."""
    published: str = ""
    """URL of the uploaded results (empty without `run.publish`)."""


@checked_flow(
    name=FLOW,
    flow_run_name="{run.name}",
    on_cancellation=[release_after_cancellation],
    on_crashed=[cancelled_if_asked],
)
@with_noted_end
def sft_rl(config: FormConfig, node: FormNode, run: FormRun) -> State[Any]:  # Any: PipelineResult, or the error
    """Turn a base model and data into a trained, evaluated checkpoint.

    Ends in the failed state NoImprovement if RL did not significantly improve the model that it started from. Such a
    run writes its report, but publishes nothing.
    """
    take_credentials(run.credentials)
    scope = open_scope(run)
    with known_to_live(scope):
        local = prepare(config, node, run, scope)
        data = (
            digest_sources(watched_sources(config, ())) if run.register_as else {}
        )  # computed now, because the data may change during the training
        note_plan(local, scope)
        stages = partial(run_stages, local, scope)
        with machine_of_the_run(with_enough_memory(node, local), local, scope, stages) as (machine, run_stage):
            final, records = stages(machine, run_stage)
            checkpoint = sync_results(final, scope)
            report, verdict = write_report(records, config, node, checkpoint, scope)
            if run.publish and machine.is_remote and (verdict is None or verdict.is_accepted):
                send_from_machine(final, checkpoint, machine, scope)
        shown = link_report(scope, report)
        if verdict is not None and not verdict.is_accepted:
            error = NoImprovementError(f"{verdict.sentence}; the report is {shown}")
            return Failed(name=NO_IMPROVEMENT, message=str(error), data=error)
        if run.register_as:
            register_candidate(run.register_as, checkpoint, records, data, scope)
        published = publish_results(checkpoint, scope) if run.publish else ""
    sentence = verdict.sentence if verdict else ""
    result = PipelineResult(report=report, checkpoint=checkpoint, verdict=sentence, published=published)
    return Completed(message=f"{sentence}{'; the' if sentence else 'The'} report is {shown}", data=result)


def prepare(
    config: Config, node: NodeSettings, run: RunOptions, scope: RunScope, retrain: RetrainConfig | None = None
) -> Config:
    """Check the settings and download the inputs, before a machine is rented. Return the configuration with local
    inputs."""
    if deployment.id is not None:  # without a deployment, `rollouts run` has checked the settings
        check_settings(config, node, run, retrain=retrain)
    link_live_page(scope)
    local = reach_stores(config, scope) if run.publish or has_inputs_to_bring(config) else config
    note_named(local.model_dump(mode="json"), Path(scope.store))
    return with_kept_choice(local, node, Path(scope.store))


def run_on(machine: Node, scope: RunScope, wait_for_engines: WaitForEngines, stage: Stage) -> StageRecord:
    """Run a stage on the machine, with inference engines if the stage needs completions. A stage that an earlier run
    finished is reused."""
    if (stage.samples or starts_engines(stage)) and not is_finished(stage):
        wait_for_engines(stage.name)
        if stage.samples:
            return run_with_engines(machine, scope, stage)
    return run_task(stage, scope, machine)


def run_with_engines(machine: Node, scope: RunScope, stage: Stage) -> StageRecord:
    """Run a training with its engines. If it fails because an engine's lease expired, restart training and engines."""
    for attempt in range(1, MAX_LAPSES + 1):
        engines: list[EngineRecord] = []
        with ExitStack() as stack:
            kept: list[KeptEngine] = []
            for index, port in enumerate(engine_ports(stage, machine)):
                engines.append(launch_engine(stage, port, scope, machine, index))
                kept.append(stack.enter_context(kept_alive(stage, engines[-1], scope, machine, index)))
            try:
                record = run_task(with_engines(stage, engines), scope, machine)
                break
            except JobFailedError:
                if attempt == MAX_LAPSES or not any_lapsed(kept, engines, stage, machine):
                    raise
    for engine in engines:
        stop_engine(engine, scope, machine)
    return record


def open_scope(run: RunOptions) -> RunScope:
    """Make the user's modules importable, and return the run's id, name, store and options."""
    add_code_folders(folders_of_deployment(deployment.name))
    store = Path(run.store).resolve()
    return RunScope(
        run_id=str(flow_run.id or uuid4()),
        run_name=run.name,
        store=str(store),
        fresh=run.fresh,
        stop_timeout_s=run.stop_timeout_s,
        publish=run.publish,
        publish_checkpoints=run.publish_checkpoints,
        report_to=run.report_to,
    )


def link_live_page(scope: RunScope) -> None:
    """Add a link to the run's live page to the run in Prefect, if the live pages are served."""
    if link := live_url(scope):
        create_link_artifact(
            link,
            link_text="curves and samples while it runs",
            key=artifact_key("live", scope),
            description=f"Live: {link}",
        )


def live_url(scope: RunScope) -> str:
    """The URL of the run's live page (empty if the live pages are not served)."""
    live = find_live_pages(Path(scope.store))
    return live.run_url(scope.output_dir.name) if live else ""


def link_report(scope: RunScope, path: str) -> str:
    """The URL of the run's report if the live pages are served, else the report's path."""
    url = live_url(scope)
    return f"{url}/report" if url else path


@contextmanager
def known_to_live(scope: RunScope) -> Iterator[None]:
    """While the block runs, hold the lock that marks the run as alive, keep the Prefect server running, and end this
    process after Cancel.

    Enter the block before inputs are downloaded. A retried run outside of the block counts as dead.
    Cancel also works without a serving process.
    """
    ended = ended_when_cancelled(scope.run_id, is_served=deployment.id is not None)
    with held_server(), Ledger(scope.ledger_path) as ledger, ledger.living_run(scope.run_id), ended:
        yield


@contextmanager
def machine_of_the_run(
    settings: NodeSettings,
    config: Config,
    scope: RunScope,
    stages: Callable[[Node, RunStage], object],
    *,
    trains: bool = True,
) -> Iterator[tuple[Node, RunStage]]:
    """Provide a machine that is ready for the stages, and a function that runs a stage on the machine. Release the
    machine when the block ends.

    If all stages are finished, no machine is rented. Missing engines are installed while the block runs. Work on a
    rented node is stopped before the node expires. An expired node is ended.
    """
    nowhere = None if is_open(config) else placeholder_if_finished(settings, scope, stages)
    if nowhere is not None:
        yield nowhere, partial(run_on, nowhere, scope, lambda stage: None)
        return
    released = released_at_the_end(settings, scope)
    with released as machine, ended_when_expired(machine), stopped_in_time(machine, scope):
        begun = trainings_begun(scope, machine, stages) if trains else ()
        kept_choice = choice_file(Path(scope.store), config, settings)
        ready = bootstrap(machine, config, settings, trains=trains, begun=begun, kept_choice=kept_choice)
        chosen = with_choice_of(config, ready)
        places = engine_places(machine, ready, settings, chosen, trains=trains)
        with engines_installed_beside(places, chosen) as wait_for_engines:
            yield ready, partial(run_on, ready, scope, wait_for_engines)


@contextmanager
def released_at_the_end(settings: NodeSettings, scope: RunScope) -> Iterator[Node]:
    """Provide the machine, and release it when the block ends, fails, or is interrupted or cancelled.

    If the run is interrupted while machines are being rented, these machines are released, too. After a SIGTERM without
    a cancellation, nothing is released, and the run's next start attaches to the jobs.
    """
    keep_minutes = settings.keep_on_failure_minutes if isinstance(settings, RentedNode) else 0.0
    began_at = time.time()
    machine: Node | None = None
    try:
        machine = provision(settings, scope)
        yield machine
    except (KeyboardInterrupt, GeneratorExit):  # GeneratorExit: Ctrl-C came just before the block
        with noted_interrupts() as is_impatient:  # this is no Prefect task, because the flow run is ending
            release_whatever(machine, scope, is_impatient)
        if is_impatient() and machine is not None and machine.is_rented:
            release_beside(settings, scope)
        raise
    except TerminationSignal:
        if is_cancelled(scope.run_id):
            release_whatever(machine, scope)
        raise
    except Exception as error:
        if machine is None:
            release_unknown(scope, since=began_at)  # machines of earlier attempts stay for a retry
            raise
        # The machine is kept only if the budget allows more work, and if the run was not cancelled.
        is_kept = keep_minutes > 0 and not isinstance(error, BudgetUsedUpError) and not is_cancelled(scope.run_id)
        with uninterrupted():  # a second Ctrl-C must not skip the message that a machine may still be rented
            release(machine, scope, keep_minutes=keep_minutes if is_kept else 0.0)
        raise
    with interrupted_afterwards():  # after Ctrl-C, nothing is published or promoted
        release(machine, scope)


def release_whatever(machine: Node | None, scope: RunScope, is_impatient: Callable[[], bool] = lambda: False) -> None:
    """Release the machine or, if the run was interrupted while renting, all machines that were rented for the run.

    Args:
        is_impatient: returns True after a second Ctrl-C, to stop waiting for a training that saves its last step.
    """
    if machine is None:
        release_unknown(scope)
    else:
        release_now(machine, scope, is_impatient=is_impatient)
