"""Run one stage as a supervised job on a node, attach to the stage's running job, or reuse its result.

Not here: planning the job (plan.py), supervising jobs (infra/jobs.py), the Prefect tasks of stages (stage_tasks.py).

    stage finished and intact -> reuse its record
    job running -> attach, otherwise start the job -> show its metrics and events until it ends
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rollouts.infra.errors import FullGPUError, PermanentInfraError, TransientInfraError
from rollouts.infra.foreign_text import shown_lines
from rollouts.infra.jobs import (
    JobState,
    JobStatus,
    cancel_job,
    describe_saved,
    follow_job,
    read_log_tail,
    require_finished,
    start_or_attach,
)
from rollouts.infra.ledger import Lease, Ledger
from rollouts.infra.node import Node
from rollouts.infra.providers import open_session
from rollouts.infra.session import Session
from rollouts.infra.stores.publication import checkpoints_published
from rollouts.infra.sync.mirror import mirrored, pull_run
from rollouts.tasks.artifacts import find_damage, is_finished, set_damage_aside
from rollouts.tasks.closest_stage import describe_difference
from rollouts.tasks.earlier_scores import take_earlier_scores
from rollouts.tasks.early_end import begin_with_earlier, check_own_end, read_early_end, requests_passed_on
from rollouts.tasks.leases import has_lease
from rollouts.tasks.node_job import GRACE_S, USER_ERROR_CODE, gpus_of, job_spec, longest_grace_s
from rollouts.tasks.plan import check_plugins
from rollouts.tasks.progress import StageProgress
from rollouts.tasks.records import Outcome, RunScope, Stage, StageRecord
from rollouts.tasks.tracking import tracked
from rollouts.tasks.trainer_nodes import start_in_turn, trainers_beside
from rollouts.tasks.unit_keys import own_keys
from rollouts.tasks.upload_inputs import place_stage
from rollouts_core.backends.multi_node import MACHINE_LOST_CODE
from rollouts_core.checkpoint import list_checkpoints
from rollouts_core.errors import InputError
from rollouts_core.less_memory import FULL_GPU_CODE, LESS_MEMORY
from rollouts_core.model.remote_code import check_code_of_start
from rollouts_core.report.results import describe_found
from rollouts_core.run_directory import RunDirectory
from rollouts_core.stages import label_checkpoint
from rollouts_core.stopping import describe_stop

MAX_FULL_GPUS = 64
"""A stage fails if more than this many attempts in a row run out of GPU memory."""

logger = logging.getLogger(__name__)


def run_stage(stage: Stage, scope: RunScope, node: Node) -> StageRecord:
    """Run the unfinished part of a stage, or reuse its result. Returns the record of the stage.

    Raises:
        InputError: the job rejected its settings or its inputs.
        JobFailedError, JobLostError: the job ended without a result.
    """
    began_at, began = time.time(), time.monotonic()
    with StageProgress(stage.name, num_steps=stage.num_steps) as progress:
        if damage := set_damage_aside(stage):
            damage = f"run again, because the result of an earlier run is damaged: {damage}"
        unlike = "" if Path(stage.run_dir).exists() or stage.name in scope.fresh else describe_difference(stage)
        begun, taken = begin_with_earlier(stage), take_earlier_scores(stage, scope)
        for sentence in filter(None, (damage, "" if taken else unlike, begun, taken)):
            progress.say(sentence)
        with tracked(stage, scope, progress.say):
            how: Outcome = "reused" if is_finished(stage) else run_until_it_fits(stage, scope, node, progress)
        result = RunDirectory(Path(stage.run_dir)).read_result()
        assert result is not None, f"{stage.run_dir} is finished without a result.json"
        check_own_end(stage, scope)
        seconds = time.monotonic() - began
        if early := read_early_end(Path(stage.run_dir)):
            progress.say(early.sentence)
        if warning := result.get("warning"):
            progress.say(warning)
        if stage.kind == "eval":
            progress.say(describe_found(Path(stage.run_dir), stage.name))
        progress.say(f"reused from {stage.run_dir}" if how == "reused" else f"finished in {seconds:.1f} s")
    return StageRecord(
        stage=stage.name,
        fingerprint=stage.fingerprint,
        run_dir=stage.run_dir,
        how=how,
        why=damage or begun or (how == "ran" and unlike) or describe_reuse(how, stage, scope, result),
        began_at=began_at,
        seconds=seconds,
        result=result,
    )


def describe_reuse(how: Outcome, stage: Stage, scope: RunScope, result: Mapping[str, Any]) -> str:  # Any: JSON
    """Text for the report: why this run started a stage, attached to it, or reused its result.

    Args:
        result: the content of the stage's result.json.
    """
    if how == "ran":
        return "asked for by run.fresh" if stage.name in scope.fresh else "no run had finished the same stage"
    if scored_by := result.get("reused_from"):
        return f"run {' and '.join(scored_by)} scored the same models"
    with Ledger(scope.ledger_path) as ledger:
        use = ledger.first_use(Path(stage.run_dir).name)
    state = "finished before" if how == "reused" else "under way"
    if use is None:
        return state
    return f"{state}, first for {'an earlier attempt of this run' if use.run_id == scope.run_id else f'run {use.run}'}"


def run_until_it_fits(stage: Stage, scope: RunScope, node: Node, progress: StageProgress) -> Outcome:
    """Call `run_on_node` until the stage fits into GPU memory. Each full GPU makes the next attempt use less memory.

    Only the job of a training on several machines is restarted here. On one machine, its supervisor restarts the job.
    """
    for _ in range(MAX_FULL_GPUS):
        with suppress(FullGPUError):
            return run_on_node(stage, scope, node, progress)
    return run_on_node(stage, scope, node, progress)


def run_on_node(stage: Stage, scope: RunScope, node: Node, progress: StageProgress) -> Outcome:
    """Start the stage's job or attach to it. Returns when all files of the finished job are in `stage.run_dir`."""
    run_dir = node.path_on_node(stage.run_dir)
    with (
        Ledger(scope.ledger_path) as ledger,
        open_session(node) as session,
        claimed(stage, scope, node, ledger),
        start_in_turn(stage, scope, node, progress.say) as turn,
    ):
        if left := ledger.nodes_left(Path(stage.run_dir).name) - {node.name}:
            progress.say(describe_left_job(left))
        check_plugins(stage)
        check_code_to_resume(stage)
        placement = place_stage(session, stage, node, say=progress.say)
        with trainers_beside(stage, session, scope, node, progress.say) as trainers:
            placed = placement.stage.model_copy(update={"job": {**placement.stage.job, **trainers}})
            spec = job_spec(
                placed,
                session,
                scope,
                gpus=gpus_of(stage, node),
                code_dir=placement.code_dir,
                known_keys=own_keys(placed.job, scope),
            )
            ledger.add_lease(run_dir, scope.run_id, node.name)
            status = start_or_attach(session, spec)
            turn.close()
            how = how_it_began(status)
            with checkpoints_published_of(stage, scope):
                with mirrored(session, run_dir, Path(stage.run_dir)) if node.is_remote else nullcontext():
                    if how != "reused":
                        progress.say(f"{'started' if how == 'ran' else 'attached to the running job'} in {run_dir}")
                        with requests_passed_on(session, stage, run_dir, scope, progress.say):
                            labels = label_models(stage)
                            follow_until_finished(session, status, progress, store=ledger.identity, labels=labels)
                ledger.drop_lease(run_dir, scope.run_id)
                if node.is_remote:
                    pull_run(session, run_dir, Path(stage.run_dir))
                    if damage := find_damage(stage):
                        raise PermanentInfraError(f"{node.name} has damaged files ({damage}): delete {run_dir} there")
    return how


def claim_stage(stage: Stage, scope: RunScope, node: Node, ledger: Ledger) -> None:
    """Record in the ledger that this run is about to start the stage on this node.

    The claim lasts until the run has a lease on the stage's job or drops the claim.

    Raises:
        PermanentInfraError: another run executes or has claimed the stage on another node.
    """
    if elsewhere := ledger.claim(node.path_on_node(stage.run_dir), scope.run_id, node.name):
        raise PermanentInfraError(
            f"{stage.name} is running on {' and '.join(elsewhere)} for another run: wait until it has "
            "finished, or end that run"
        )


def describe_left_job(nodes: Collection[str]) -> str:
    """A warning that a killed run may have left a job of the stage running on other nodes."""
    return (
        f"a killed run may have left this stage running on {' and '.join(sorted(nodes))}, and this run ignores that "
        "job; to resume or end the job there, interrupt this run and start the run with that node"
    )


@contextmanager
def claimed(stage: Stage, scope: RunScope, node: Node, ledger: Ledger) -> Iterator[None]:
    """Claim a stage (`claim_stage`) for the `with` block, and drop the claim if the block has not started the job."""
    claim_stage(stage, scope, node, ledger)
    try:
        yield
    finally:
        ledger.drop_claim(node.path_on_node(stage.run_dir), scope.run_id)


def checkpoints_published_of(stage: Stage, scope: RunScope) -> AbstractContextManager[None]:
    """Upload the checkpoints of a training while the `with` block runs, if `run.publish_checkpoints` is set."""
    if not scope.publish_checkpoints or not stage.trains:
        return nullcontext()
    url = f"{scope.publication_url}/stages/{Path(stage.run_dir).name}"
    return checkpoints_published(RunDirectory(Path(stage.run_dir)).checkpoints, url)


def how_it_began(status: JobStatus) -> Outcome:
    """Whether the run started the job, attached to it, or found it finished.

    Args:
        status: the result of `start_or_attach`.
    """
    if status.state is JobState.FINISHED:
        return "reused"
    return "attached" if status.attached else "ran"


def check_code_to_resume(stage: Stage) -> None:
    """Raise CheckpointError if a checkpoint from which the stage could resume has other code than the start model.

    Code in a model's folder is only executed with `trust_remote_code`, so other models are not checked.
    """
    checkpoints = list_checkpoints(Path(stage.run_dir) / "checkpoints")
    if checkpoints and (model := stage.job["model"]["model"]).get("trust_remote_code"):
        for checkpoint in checkpoints:
            check_code_of_start(checkpoint, Path(model["path"]))


def label_models(stage: Stage) -> dict[str, str]:
    """The labels of an evaluation's models in messages, by their names in the job; empty for other stages."""
    models = stage.job.get("checkpoints", ()) if stage.kind == "eval" else ()
    return {each["name"]: label_checkpoint(each["name"], each["step"], stage.name) for each in models}


def follow_until_finished(
    session: Session,
    status: JobStatus,
    progress: StageProgress,
    *,
    store: str,
    labels: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Show the metrics and events of a job until the job is finished.

    Args:
        store: identity of the run's ledger. While this run follows the job, runs of other stores do not end the job.
        labels: the labels of the scored models, by their names in the job.

    Raises:
        InputError: the job rejected its settings or its inputs. The error has the job's message.
        TransientInfraError: the job's machine, or another machine of the training, does not answer.
        FullGPUError: a GPU ran out of memory. The next attempt of the job will need less memory.
        JobFailedError, JobLostError: the job failed for another reason, or its supervisor died.
    """
    complaints: list[str] = []

    def on_event(event: dict[str, Any]) -> None:  # Any: JSON
        if event["event"] == "resumed":
            progress.say(f"resumes from step {event['step']}")
        if event["event"] == "waits_for_gpus" and event["attempt"] == status.attempt:
            progress.say(event["message"])
        if event["event"] == "has_gpus" and event["attempt"] == status.attempt:
            progress.say(f"got its GPUs after {event['waited_s']:.0f} s")
        if event["event"] == "scored" and event["attempt"] == status.attempt:
            progress.say(f"{labels.get(event['name'], event['name'])} has score {event['score']:.3f}")
        if event["event"] in ("warning", LESS_MEMORY) and event["attempt"] == status.attempt:
            progress.say(event["message"])
        if event["event"] == "stopped" and event["attempt"] == status.attempt:
            progress.say(shown_lines(describe_stop(event["step"], event.get("problem", ""))))
        if event["event"] == "failed" and event["attempt"] == status.attempt:
            complaints.append(shown_lines(event["message"]))

    ended = follow_job(
        session,
        status.run_dir,
        on_metrics=progress.on_metrics,
        on_event=on_event,
        store=store,
    )
    if complaints and ended.exit is not None and ended.exit.code == USER_ERROR_CODE:
        raise InputError(complaints[-1])
    if ended.exit is not None and ended.exit.code == MACHINE_LOST_CODE:
        reason = complaints[-1] if complaints else read_log_tail(session, ended.run_dir)
        progress.say(reason)  # shown here, because Prefect retries the stage without showing the reason
        raise TransientInfraError(reason)
    if ended.exit is not None and ended.exit.code == FULL_GPU_CODE:
        raise FullGPUError("a GPU ran out of memory: start again; the next attempt needs less memory")
    require_finished(session, ended)


@dataclass(frozen=True, slots=True)
class GivenUp:
    """The outcome for each job when a run stops using its jobs. The fields list the jobs' directories.

    Jobs that had already ended are not listed.
    """

    ended: dict[str, str] = field(default_factory=dict)
    """Cancelled jobs, each with a phrase about its last saved step for messages."""
    still_saving: list[str] = field(default_factory=list)
    """Cancelled jobs that save and end by themselves, because the caller stopped waiting."""
    left_to_runs: list[str] = field(default_factory=list)
    """Running jobs that other runs of this store use."""
    left_to_stores: list[str] = field(default_factory=list)
    """Running jobs that runs of other stores follow."""
    left_to_those: list[str] = field(default_factory=list)
    """Running engines and followers that runs of other stores may need. Each of them ends when its lease lapses."""


def stop_leased_jobs(
    scope: RunScope,
    node: Node,
    leases: Sequence[Lease],
    *,
    say: Callable[[str], None] = lambda sentence: None,
    is_impatient: Callable[[], bool] = lambda: False,
) -> GivenUp:
    """Drop a run's leases on a node's jobs, and cancel the jobs that no other run uses.

    Args:
        say: receives one sentence about each job that is still saving.
        is_impatient: returns True to stop waiting for jobs that are still saving.
    """
    given_up = GivenUp()
    max_grace_s = longest_grace_s(node, scope)
    with Ledger(scope.ledger_path) as ledger, open_session(node) as session:
        for lease in sorted(leases, key=lambda lease: has_lease(lease.run_dir)):  # a training ends before its engines
            ledger.drop_claim(lease.run_dir, scope.run_id)
            if not lease.is_started:
                continue
            with ledger.dropped_lease(lease.run_dir, scope.run_id) as num_left:
                if num_left > 0:
                    given_up.left_to_runs.append(lease.run_dir)
                    continue
                if given_up.left_to_stores and has_lease(lease.run_dir):
                    given_up.left_to_those.append(lease.run_dir)
                    continue
                found = cancel_job(
                    session,
                    lease.run_dir,
                    GRACE_S,
                    max_grace_s=max_grace_s,
                    store=ledger.identity,
                    on_wait=partial(say, f"waits until the job in {lease.run_dir} has saved its last step"),
                    is_impatient=is_impatient,
                )
            if found.is_ending:
                given_up.still_saving.append(lease.run_dir)
                if node.is_rented:  # a later process downloads the result and releases the machine
                    ledger.add_lease(lease.run_dir, scope.run_id, lease.node)
            elif found.state is JobState.RUNNING:
                given_up.left_to_stores.append(lease.run_dir)
            elif found.exit is not None and found.exit.cancelled:
                given_up.ended[lease.run_dir] = describe_saved(found.exit)
    return given_up


def leases_on(scope: RunScope, node: Node) -> dict[str, list[Lease]]:
    """The run's leases in the ledger, by the name of the node that runs the leased job."""
    by_machine: dict[str, list[Lease]] = {each.name: [] for each in (node, *node.further_nodes)}
    with Ledger(scope.ledger_path) as ledger:
        for lease in ledger.leases_of(scope.run_id):
            by_machine[node.named(lease.node).name].append(lease)
    return by_machine


def drop_leases(scope: RunScope, leases: Sequence[Lease] | None = None) -> None:
    """Drop this run's leases in the ledger, without ending the jobs.

    A failure to write the ledger is only logged, because the leases of an ended run have no effect.

    Args:
        leases: the leases to drop; None drops all leases of the run.
    """
    try:
        with Ledger(scope.ledger_path) as ledger:
            for lease in ledger.leases_of(scope.run_id) if leases is None else leases:
                ledger.drop_lease(lease.run_dir, scope.run_id)
    except TransientInfraError as error:
        logger.warning("the leases of run %s stay in the ledger: %s", scope.run_id, error)
