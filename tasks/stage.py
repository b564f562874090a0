"""Run one stage as a supervised job on a node, attach to the job, or take its result.

Not here: what the job is (plan.py), how jobs are supervised (infra/jobs.py), Prefect (the task files).

    finished and whole? -> its record          under way? -> attach          else -> start
                                                                \\-> follow metrics and events until it ends
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rollouts.infra.errors import PermanentInfraError, TransientInfraError
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
from rollouts.tasks.records import How, RunScope, Stage, StageRecord
from rollouts.tasks.tracking import tracked
from rollouts.tasks.trainer_nodes import start_in_turn, trainers_beside
from rollouts.tasks.unit_keys import own_keys
from rollouts.tasks.upload_inputs import place_stage
from rollouts_core.backends.multi_node import MACHINE_LOST_CODE
from rollouts_core.checkpoint import list_checkpoints
from rollouts_core.errors import InputError
from rollouts_core.model.remote_code import check_code_of_start
from rollouts_core.report.results import describe_found
from rollouts_core.run_directory import RunDirectory
from rollouts_core.stopping import describe_stop

logger = logging.getLogger(__name__)


def run_stage(stage: Stage, scope: RunScope, node: Node) -> StageRecord:
    """The record of the stage, after doing whatever of it is not done yet.

    Raises:
        InputError: the job says that the user must change something.
        JobFailedError, JobLostError: it ended without its record.
    """
    began_at, began = time.time(), time.monotonic()
    with StageProgress(stage.name, num_steps=stage.num_steps) as progress:
        if damage := set_damage_aside(stage):
            damage = f"done again, because what an earlier run left is damaged: {damage}"
        unlike = "" if Path(stage.run_dir).exists() or stage.name in scope.fresh else describe_difference(stage)
        begun, taken = begin_with_earlier(stage), take_earlier_scores(stage, scope)
        for sentence in filter(None, (damage, "" if taken else unlike, begun, taken)):
            progress.say(sentence)
        with tracked(stage, scope, progress.say):
            how: How = "reused" if is_finished(stage) else run_on_node(stage, scope, node, progress)
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
        why=damage or begun or (how == "ran" and unlike) or why_so(how, stage, scope, result),
        began_at=began_at,
        seconds=seconds,
        result=result,
    )


def why_so(how: How, stage: Stage, scope: RunScope, result: Mapping[str, Any]) -> str:  # Any: JSON
    """Why a stage was begun, attached to or reused.

    Args:
        result: the stage's record.
    """
    if how == "ran":
        return "asked for by run.fresh" if stage.name in scope.fresh else "nobody had finished the same"
    if scored_by := result.get("reused_from"):
        return f"run {' and '.join(scored_by)} scored the same"
    with Ledger(scope.ledger_path) as ledger:
        use = ledger.first_use(Path(stage.run_dir).name)
    state = "finished before" if how == "reused" else "under way"
    if use is None:
        return state
    return f"{state}, first for {'an earlier try of this run' if use.run_id == scope.run_id else f'run {use.run}'}"


def run_on_node(stage: Stage, scope: RunScope, node: Node, progress: StageProgress) -> How:
    """Start the job or attach to it. Returns when its record and all named files are in `stage.run_dir`."""
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
                            follow_until_finished(session, status, progress, store=ledger.identity)
                ledger.drop_lease(run_dir, scope.run_id)
                if node.is_remote:
                    pull_run(session, run_dir, Path(stage.run_dir))
                    if damage := find_damage(stage):
                        raise PermanentInfraError(f"what {node.name} has is damaged ({damage}): delete {run_dir} there")
    return how


def claim_stage(stage: Stage, scope: RunScope, node: Node, ledger: Ledger) -> None:
    """Keep a stage for this run and node, from now until the run holds a lease on its job or gives the claim up.

    Raises:
        PermanentInfraError: another run does it on another node.
    """
    if elsewhere := ledger.claim(node.path_on_node(stage.run_dir), scope.run_id, node.name):
        raise PermanentInfraError(
            f"{stage.name} is being done on {' and '.join(elsewhere)} for another run: wait for it, or end that run"
        )


def describe_left_job(nodes: Collection[str]) -> str:
    """A warning of the stage's jobs that killed runs left on other nodes."""
    return (
        f"may be under way on {' and '.join(sorted(nodes))}, too, begun there by a run that was killed: what comes "
        "of that is not used here; to go on with it, or end it, interrupt this run and start it with that node"
    )


@contextmanager
def claimed(stage: Stage, scope: RunScope, node: Node, ledger: Ledger) -> Iterator[None]:
    """`claim_stage`, given up where the block fails before it holds a lease."""
    claim_stage(stage, scope, node, ledger)
    try:
        yield
    finally:
        ledger.drop_claim(node.path_on_node(stage.run_dir), scope.run_id)


def checkpoints_published_of(stage: Stage, scope: RunScope) -> AbstractContextManager[None]:
    """Publish the checkpoints of a training while it goes on, where the run asks for that."""
    if not scope.publish_checkpoints or not stage.trains:
        return nullcontext()
    url = f"{scope.publication_url}/stages/{Path(stage.run_dir).name}"
    return checkpoints_published(RunDirectory(Path(stage.run_dir)).checkpoints, url)


def how_it_began(status: JobStatus) -> How:
    """What `start_or_attach` found."""
    if status.state is JobState.FINISHED:
        return "reused"
    return "attached" if status.attached else "ran"


def check_code_to_resume(stage: Stage) -> None:
    """Raise CheckpointError if a checkpoint of an earlier attempt, perhaps of another machine, brings other code."""
    checkpoints = list_checkpoints(Path(stage.run_dir) / "checkpoints")
    if checkpoints and (model := stage.job["model"]["model"]).get("trust_remote_code"):
        for checkpoint in checkpoints:
            check_code_of_start(checkpoint, Path(model["path"]))


def follow_until_finished(session: Session, status: JobStatus, progress: StageProgress, *, store: str) -> None:
    """Show what the job writes until it has its record.

    Args:
        store: identity of the run's ledger.

    Raises:
        InputError: it ended with the exit code of a user's mistake; the sentence is the job's own.
        TransientInfraError: this machine, or another machine of the training, does not answer. JobFailedError,
        JobLostError: it ended otherwise.
    """
    complaints: list[str] = []

    def on_event(event: dict[str, Any]) -> None:  # Any: JSON
        if event["event"] == "resumed":
            progress.say(f"goes on from step {event['step']}")
        if event["event"] == "waits_for_gpus" and event["attempt"] == status.attempt:
            progress.say(event["message"])
        if event["event"] == "has_gpus" and event["attempt"] == status.attempt:
            progress.say(f"has its GPUs, after {event['waited_s']:.0f} s")
        if event["event"] == "scored" and event["attempt"] == status.attempt:
            progress.say(f"{event['name']} has score {event['score']:.3f}")
        if event["event"] == "warning" and event["attempt"] == status.attempt:
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
        progress.say(reason)  # Prefect tries the stage again, without a word here
        raise TransientInfraError(reason)
    require_finished(session, ended)


@dataclass(frozen=True, slots=True)
class GivenUp:
    """The fate of a run's jobs, by their directories; jobs that had ended by themselves are left out."""

    ended: dict[str, str] = field(default_factory=dict)
    """With which step they have saved, as the rest of a sentence."""
    still_saving: list[str] = field(default_factory=list)
    """They end by themselves: the caller did not want to wait."""
    left_to_runs: list[str] = field(default_factory=list)
    """Other runs of this store want them."""
    left_to_stores: list[str] = field(default_factory=list)
    """Runs of other stores follow them."""
    left_to_those: list[str] = field(default_factory=list)
    """Jobs that runs of other stores may need; they end by themselves when their leases lapse."""


def stop_leased_jobs(
    scope: RunScope,
    node: Node,
    leases: Sequence[Lease],
    *,
    say: Callable[[str], None] = lambda sentence: None,
    is_impatient: Callable[[], bool] = lambda: False,
) -> GivenUp:
    """Give up the run's claims on jobs of a node. Jobs without another run end.

    Args:
        say: told once which job is still saving.
        is_impatient: True stops the waiting.
    """
    given_up = GivenUp()
    max_grace_s = longest_grace_s(node, scope)
    with Ledger(scope.ledger_path) as ledger, open_session(node) as session:
        for lease in sorted(leases, key=lambda lease: has_lease(lease.run_dir)):  # a training before what it needs
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
                if node.is_rented:  # a later process fetches the result and gives the machine back
                    ledger.add_lease(lease.run_dir, scope.run_id, lease.node)
            elif found.state is JobState.RUNNING:
                given_up.left_to_stores.append(lease.run_dir)
            elif found.exit is not None and found.exit.cancelled:
                given_up.ended[lease.run_dir] = describe_saved(found.exit)
    return given_up


def leases_on(scope: RunScope, node: Node) -> dict[str, list[Lease]]:
    """This run's claims, by the name of the machine of the unit that they are on."""
    by_machine: dict[str, list[Lease]] = {each.name: [] for each in (node, *node.further_nodes)}
    with Ledger(scope.ledger_path) as ledger:
        for lease in ledger.leases_of(scope.run_id):
            by_machine[node.named(lease.node).name].append(lease)
    return by_machine


def drop_leases(scope: RunScope, leases: Sequence[Lease] | None = None) -> None:
    """Give up this run's claims on ended jobs: all, or some.

    If the ledger cannot be written they stay: claims of a run that is over do not count.
    """
    try:
        with Ledger(scope.ledger_path) as ledger:
            for lease in ledger.leases_of(scope.run_id) if leases is None else leases:
                ledger.drop_lease(lease.run_dir, scope.run_id)
    except TransientInfraError as error:
        logger.warning("the claims of run %s stay in the ledger: %s", scope.run_id, error)
