"""Start, watch and stop the inference engines of an RL stage."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial

from prefect import task
from prefect.cache_policies import NO_CACHE

from rollouts.infra.engines import check_engine_installed, engine_version, wait_until_engine_ready
from rollouts.infra.errors import FileMissingError, InfraError
from rollouts.infra.jobs import JobState, JobStatus, cancel_job, describe_exit, job_status, start_or_attach
from rollouts.infra.ledger import Ledger
from rollouts.infra.node import Node
from rollouts.infra.ports import check_port, find_free_port, is_port_free
from rollouts.infra.providers import open_session
from rollouts.infra.session import Session
from rollouts.infra.supervisor.files import parse_object
from rollouts.tasks.leases import LEASE_S, LeasedJob, lease_renewed
from rollouts.tasks.node_job import GRACE_S, gpus_of, gpus_of_engines, job_spec, running_job
from rollouts.tasks.plan import plan_engine
from rollouts.tasks.progress import StageProgress
from rollouts.tasks.records import EngineRecord, RunScope, Stage
from rollouts.tasks.stage import claim_stage
from rollouts.tasks.unit_keys import own_keys
from rollouts.tasks.upload_inputs import place_stage
from rollouts_core.engine_log import explain_engine_log
from rollouts_core.job import ServeJob
from rollouts_core.keys import read_key

MAX_RESTARTS = 3
"""The supervisor restarts a crashing engine at most this often in a row. An hour without a crash resets the count."""
MAX_RELAUNCHES = 10
"""Per RL job, a run restarts an engine at most this often after its lease lapsed or its supervisor was killed."""


@task(name="launch-engine", cache_policy=NO_CACHE)
def launch_engine(rl: Stage, wanted_port: int, scope: RunScope, node: Node, index: int = 0) -> EngineRecord:
    """Start an inference engine for an RL stage, or attach to it if it runs. Returns when the engine can generate.

    Args:
        wanted_port: the engine's port; 0 chooses a free port.
        node: the training node. The engine may run on one of the further nodes that `node` names.
    """
    own = node_of_engine(rl, node, index)
    with (
        StageProgress("engine") as progress,
        Ledger(scope.ledger_path) as ledger,
        ExitStack() as stack,
    ):
        claim_stage(rl, scope, node, ledger)  # a claim can fail, so it precedes the loading of the model
        sessions = {each.name: stack.enter_context(open_session(each)) for each in (node, *node.engine_nodes)}
        session = sessions[own.name]
        started = start_engine(session, rl, wanted_port, scope, node, index, say=progress.say)
        job, run_dir = started.job, started.run_dir
        url = url_of(job.host, job.port)
        with lease_renewed(LeasedJob(own, run_dir)):
            wait_until_engine_ready(
                session,
                probe=job.engine.spec.probe,
                resume_paths=job.engine.spec.resume_paths,
                port=job.port,
                host=job.host,
                trainer=sessions[node.name],
                run_dir=run_dir,
                timeout_s=job.engine.start_timeout_s,
                api_key=read_key(job.engine.api_key_variable, "rollout.engine", own_keys(rl.job, scope)),
                explain_log=explain_engine_log,
                on_wait=progress.say,
                # A running RL job resumes the engines that it paused. If the RL job does not run, this call resumes a
                # paused engine.
                is_idle=started.attached and not is_training(sessions[node.name], rl, node),
            )
        package = job.engine.spec.package
        version = engine_version(session, package, python=job.engine.python) if package else ""
        name = f"{job.engine.spec.title} {version} " if version else ""
        progress.say(f"{name}{'still answers' if started.attached else 'answers'} at {url}")
    return EngineRecord(
        kind=job.engine.kind,
        version=version,
        url=url,
        run_dir=run_dir,
        node=own.name,
        lease_url=url_of(job.host, job.lease_port) if own is not node else "",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedEngine:
    """An engine process that was started or was already running. The process may still be loading its model."""

    job: ServeJob
    """The engine's job.json, with the ports that the engine listens on."""
    run_dir: str
    """The engine's directory on its node."""
    attached: bool
    """True if the engine was already running."""


def start_engine(
    session: Session,
    rl: Stage,
    wanted_port: int,
    scope: RunScope,
    node: Node,
    index: int,
    *,
    say: Callable[[str], None],
) -> StartedEngine:
    """Start an inference engine for an RL stage, or attach to a running engine, without waiting until it can generate.

    Args:
        session: a session to the engine's node.
        wanted_port: the engine's port; 0 chooses a free port.
        node: the training node.
    """
    own = node_of_engine(rl, node, index)
    placement = place_stage(session, plan_engine(rl, wanted_port, own, index), own, say=say)
    stage = placement.stage
    job = ServeJob.model_validate(stage.job)
    if package := job.engine.spec.package:
        check_engine_installed(session, package, python=job.engine.python)
    with Ledger(scope.ledger_path) as ledger:
        ledger.add_lease(stage.run_dir, scope.run_id, own.name)
    running = running_job(session, stage.run_dir)
    ports = choose_ports(session, job, stage.run_dir, is_elsewhere=own is not node) if running is None else running
    placed = {**stage.job, "port": ports["port"], "lease_port": ports["lease_port"]}
    status = start_or_attach(
        session,
        job_spec(
            stage.model_copy(update={"job": placed}),
            session,
            scope,
            gpus=gpus_of(rl, node) if own is node else gpus_of_engines(rl),
            code_dir=placement.code_dir,
            known_keys=own_keys(stage.job, scope),
            max_restarts=MAX_RESTARTS,
            lease_s=LEASE_S,
        ),
    )
    return StartedEngine(job=ServeJob.model_validate(placed), run_dir=stage.run_dir, attached=status.attached)


class KeptEngine:
    """Starts an engine again on the same port after its lease lapsed or its supervisor was killed.

    The RL job waits for up to `start_timeout_s` seconds while an engine does not answer.
    """

    def __init__(self, engine: EngineRecord, start: Callable[[Session], object], say: Callable[[str], None]) -> None:
        self._num_relaunches = 0
        self._relaunched_at = -math.inf
        self._engine = engine
        self._start = start
        self._say = say
        self._said_of_attempt = 0

    def look_after(self, session: Session, status: JobStatus) -> None:
        """Report why an engine ended. Restart an engine whose lease lapsed or whose supervisor was killed."""
        if status.state is JobState.RUNNING:
            return
        is_new, self._said_of_attempt = status.attempt != self._said_of_attempt, status.attempt
        is_relaunched = has_lapsed(status) and self._num_relaunches < MAX_RELAUNCHES
        if is_new:
            again = " It is started again" if is_relaunched else ""
            self._say(f"{self._engine.url} ended: {why_ended(status)}{again}")
        if is_relaunched:
            self._num_relaunches += 1
            self._relaunched_at = time.monotonic()
            try:
                self._start(session)
            except InfraError as error:
                self._say(f"{self._engine.url} could not be started: {error}")

    def has_lapsed_within(self, seconds: float, session: Session) -> bool:
        """True if the engine was restarted within the last `seconds`, or if `has_lapsed` is true for its status."""
        if time.monotonic() - self._relaunched_at < seconds:
            return True
        status = job_status(session, self._engine.run_dir)
        if is_lapsed := has_lapsed(status):
            self._say(f"{self._engine.url} ended: {why_ended(status)}")
        return is_lapsed


def has_lapsed(status: JobStatus) -> bool:
    """True if an engine ended because its lease lapsed or its supervisor was killed, so that it can start again."""
    return status.state is JobState.LOST or (status.exit is not None and status.exit.lease_expired)


def why_ended(status: JobStatus) -> str:
    """Text for messages: the reason why an engine ended."""
    if status.exit is None:
        return f"{status.reason or 'its directory was moved or deleted'}."
    if status.exit.lease_expired:
        return f"its lease was not renewed for {LEASE_S:.0f} s, because this run or its machine was suspended."
    return describe_exit(status.exit)


@contextmanager
def kept_alive(rl: Stage, engine: EngineRecord, scope: RunScope, node: Node, index: int = 0) -> Iterator[KeptEngine]:
    """Renew the lease of an engine while the `with` block runs, and start the engine again if its lease lapsed.

    A running RL job renews the lease as well, so that the engine survives a killed run.

    Args:
        node: the training node.
    """
    with StageProgress("engine") as progress:
        context = copy_context()  # Prefect needs this context to assign a thread's log lines to the run

        def say(sentence: str) -> None:
            context.run(progress.say, sentence)

        port = int(engine.url.rpartition(":")[2])
        start = partial(start_engine, rl=rl, wanted_port=port, scope=scope, node=node, index=index, say=say)
        kept = KeptEngine(engine, start, say)
        with lease_renewed(LeasedJob(node.named(engine.node), engine.run_dir), kept.look_after):
            yield kept


def any_lapsed(kept: Sequence[KeptEngine], engines: Sequence[EngineRecord], rl: Stage, node: Node) -> bool:
    """True if an RL stage may have failed only because an engine ended after its lease had lapsed."""
    waited_s = rl.job["rollout"]["engine"]["start_timeout_s"] + LEASE_S  # an RL job waits this long for an engine
    for each, engine in zip(kept, engines, strict=True):
        with suppress(InfraError), open_session(node.named(engine.node)) as session:
            if each.has_lapsed_within(waited_s, session):
                return True
    return False


@task(name="stop-engine", cache_policy=NO_CACHE)
def stop_engine(engine: EngineRecord, scope: RunScope, node: Node) -> None:
    """Stop an engine unless another run uses it.

    An engine on an unreachable further node is not stopped, because it ends when its lease lapses.
    """
    own = node.named(engine.node)
    try:
        with (
            Ledger(scope.ledger_path) as ledger,
            open_session(own) as session,
            ledger.dropped_lease(engine.run_dir, scope.run_id) as num_left,
        ):
            if num_left == 0:
                cancel_job(session, engine.run_dir, GRACE_S)
    except InfraError as error:
        if own is node:
            raise
        with StageProgress("engine") as progress:
            progress.say(f"{engine.url} is unreachable, and the engine ends by itself within a minute ({error})")


def is_training(session: Session, rl: Stage, node: Node) -> bool:
    """True if the RL training job is running on its node."""
    return job_status(session, node.path_on_node(rl.run_dir)).state is JobState.RUNNING


def node_of_engine(rl: Stage, node: Node, index: int) -> Node:
    """The node that runs engine number `index` of an RL stage: the training node or a further node."""
    return node.node_of_engine(index, num_per_node=rl.job["deployment"]["num_engines"])


def choose_ports(session: Session, job: ServeJob, run_dir: str, *, is_elsewhere: bool) -> dict[str, int]:
    """Choose the ports of an engine. An engine on another machine than the trainer also needs a port for its lease.

    A running RL job finds its engine by host and port, so a restarted engine takes its former ports if they are free.

    Args:
        run_dir: the engine's directory on its node.
        is_elsewhere: whether the engine runs on another machine than the trainer.

    Raises:
        PermanentInfraError: another process listens on the wanted port.
    """
    former = former_ports(session, run_dir)
    taken = {job.port}

    def free_port(name: str) -> int:
        port = former.get(name, 0)
        while port in (0, *taken) or not is_port_free(session, job.host, port):
            port = find_free_port(session, job.host)
        taken.add(port)
        return port

    check_port(session, job.port, job.host)
    return {"port": job.port or free_port("port"), "lease_port": free_port("lease_port") if is_elsewhere else 0}


def former_ports(session: Session, run_dir: str) -> dict[str, int]:
    """The ports of an engine's last attempt, read from its job.json. Empty before the first attempt."""
    try:
        job = parse_object(session.read_file(f"{run_dir}/job.json")) or {}
    except FileMissingError:
        return {}
    return {name: job[name] for name in ("port", "lease_port") if isinstance(job.get(name), int)}


def url_of(host: str, port: int) -> str:
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"
