"""Train on several machines: the jobs on the further machines start before the leader's job and end after it.

Not here: how the jobs connect and detect a lost machine (rollouts_core/backends/multi_node.py), engines on further
machines (engine.py).

    further machine   job with a lease, waits at its address     <── connects ──   job of the stage, on the leader
                      this run renews the lease; once connected, each heartbeat of the leader's job also renews it
"""

from __future__ import annotations

import fcntl
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rollouts.infra.errors import InfraError
from rollouts.infra.jobs import JobState, cancel_job, job_status, start_or_attach
from rollouts.infra.ledger import Ledger
from rollouts.infra.locks import lock_file, try_lock
from rollouts.infra.node import Node
from rollouts.infra.ports import find_free_port
from rollouts.infra.providers import open_session
from rollouts.infra.session import Session
from rollouts.tasks.leases import LEASE_S, LeasedJob, lease_renewed
from rollouts.tasks.node_job import GRACE_S, gpus_of, job_spec, running_job
from rollouts.tasks.plan import plan_follower
from rollouts.tasks.records import RunScope, Stage
from rollouts.tasks.unit_keys import own_keys
from rollouts.tasks.upload_inputs import place_stage
from rollouts_core.job import FurtherTrainer

GPU_POLL_S = 2.0
TURN_POLL_S = 0.5

Trainers = Mapping[str, Any]  # Any: JSON
"""The part of job.json that lists the further machines. Empty if one machine trains alone."""
ALONE: Trainers = MappingProxyType({})


@contextmanager
def start_in_turn(stage: Stage, scope: RunScope, node: Node, say: Callable[[str], None]) -> Iterator[ExitStack]:
    """Lock a stage, so that only one run at a time starts its jobs. The lock ends with the `with` block, or earlier
    when the yielded stack is closed.

    Without this lock, two runs could mistake each other's jobs for leftovers, or overwrite a job that has just started.
    """
    with ExitStack() as turn:
        if node.is_remote or trains_with_others(stage, node):
            with Ledger(scope.ledger_path) as ledger:
                lock = turn.enter_context(lock_file(ledger.start_lock(Path(stage.run_dir).name)))
            if not try_lock(lock, fcntl.LOCK_EX):
                say("waits for another run that starts the same stage")
                while not try_lock(lock, fcntl.LOCK_EX):
                    time.sleep(TURN_POLL_S)
        yield turn


def trains_with_others(stage: Stage, node: Node) -> bool:
    """True if the stage is a training on several machines."""
    return stage.trains and bool(node.trainer_nodes)


@contextmanager
def trainers_beside(
    stage: Stage, leader: Session, scope: RunScope, node: Node, say: Callable[[str], None]
) -> Iterator[Trainers]:
    """Start the jobs on the further machines of a training, and end these jobs after the `with` block.

    If the block fails, the jobs keep running, because the training may continue without this process. Jobs without a
    leader end by themselves. The caller must hold the lock of `start_in_turn`.

    Args:
        leader: a session to `node`.
    """
    if not trains_with_others(stage, node):
        yield ALONE
        return
    run_dir = node.path_on_node(stage.run_dir)
    if job_status(leader, run_dir).state is JobState.FINISHED:
        yield ALONE
        return
    with Ledger(scope.ledger_path) as ledger, ExitStack() as stack:
        sessions = [stack.enter_context(open_session(each)) for each in node.trainer_nodes]
        running = running_job(leader, run_dir)
        if running is not None and not is_by(node.trainer_nodes, running):
            yield ALONE  # another run trains this stage with other machines
            return
        if running is None:
            end_followers(stage, sessions, node)  # jobs of an earlier attempt would not connect to a new leader
        trainers = {
            "further_trainers": running["further_trainers"] if running else choose_places(stage, sessions, node)
        }
        followers = []
        with ExitStack() as renewals:
            for rank, (own, session) in enumerate(zip(node.trainer_nodes, sessions, strict=True), start=1):
                planned = plan_follower(with_trainers(stage, trainers), own, rank)
                followers.append(start_follower(planned, session, own, scope, ledger))
                # The renewals begin now, because uploading inputs to the next machine may take longer than a lease.
                renewals.enter_context(lease_renewed(followers[-1]))
            for follower, session in zip(followers, sessions, strict=True):
                wait_for_gpus(follower, session, say)
            yield trainers
        for follower, session in zip(followers, sessions, strict=True):
            try:
                with ledger.dropped_lease(follower.run_dir, scope.run_id) as num_left:
                    if num_left == 0:
                        cancel_job(session, follower.run_dir, GRACE_S)
            except InfraError as error:  # not fatal: the training has finished
                say(f"{follower.node.name} is unreachable, and its job ends by itself ({error})")


def is_by(nodes: Sequence[Node], running: Mapping[str, Any]) -> bool:  # Any: JSON
    """True if a running training uses exactly these further machines."""
    return [each["name"] for each in running.get("further_trainers", ())] == [node.name for node in nodes]


def with_trainers(stage: Stage, trainers: Trainers) -> Stage:
    """The stage with the list of further machines in its job."""
    return stage.model_copy(update={"job": {**stage.job, **trainers}})


def choose_places(stage: Stage, sessions: Sequence[Session], node: Node) -> list[dict[str, Any]]:  # Any: JSON
    """Choose the ports at which the further machines wait for the leader. Returns their addresses for job.json."""
    return [
        FurtherTrainer(
            name=own.name,
            host=own.address,
            port=find_free_port(session, own.address),
            run_dir=own.path_on_node(plan_follower(stage, own, rank).run_dir),
        ).model_dump(mode="json")
        for rank, (own, session) in enumerate(zip(node.trainer_nodes, sessions, strict=True), start=1)
    ]


def start_follower(stage: Stage, session: Session, node: Node, scope: RunScope, ledger: Ledger) -> LeasedJob:
    """Start the job on a further machine, or attach to it if it runs.

    Args:
        stage: the further machine's job, from `plan_follower`.
    """
    placement = place_stage(session, stage, node)
    run_dir = placement.stage.run_dir
    ledger.add_lease(run_dir, scope.run_id, node.name)
    spec = job_spec(
        placement.stage,
        session,
        scope,
        gpus=gpus_of(stage, node),
        code_dir=placement.code_dir,
        known_keys=own_keys(stage.job, scope),
        lease_s=LEASE_S,
    )
    start_or_attach(session, spec)
    return LeasedJob(node, run_dir)


def end_followers(stage: Stage, sessions: Sequence[Session], node: Node) -> None:
    """Cancel jobs on further machines that an earlier attempt left behind although its leader no longer runs."""
    for rank, (own, session) in enumerate(zip(node.trainer_nodes, sessions, strict=True), start=1):
        cancel_job(session, own.path_on_node(plan_follower(stage, own, rank).run_dir), GRACE_S)


def wait_for_gpus(job: LeasedJob, session: Session, say: Callable[[str], None]) -> None:
    """Wait until the job on a further machine has locked its GPUs.

    The leader's job starts after this wait. If the leader started earlier, its own GPUs would be locked but idle.
    """
    said = ""
    while waits_for := job_status(session, job.run_dir).waits_for:
        if waits_for != said:
            said = waits_for
            say(f"{job.node.name} {waits_for}")
        time.sleep(GPU_POLL_S)
