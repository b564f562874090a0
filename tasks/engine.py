"""Start the inference engine of an RL stage, and stop it again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from infra.engines import check_engine_installed, wait_until_engine_ready
from infra.errors import InfraError
from infra.jobs import JobState, cancel_job, job_status, renew_lease, start_or_attach
from infra.ledger import Ledger
from infra.node import Node
from infra.ports import check_port, find_free_port
from infra.providers import open_session
from infra.session import Session
from rollouts_core.engine_log import explain_engine_log
from rollouts_core.job import ServeJob
from rollouts_core.keys import read_key
from tasks.leases import LEASE_S, LeasedJob, leases_renewed
from tasks.node_job import GRACE_S, gpus_of, gpus_of_engines, job_spec, running_job
from tasks.placement import place_stage
from tasks.plan import plan_engine
from tasks.progress import StageProgress
from tasks.records import EngineRecord, RunScope, Stage
from tasks.stage import claim_stage
from tasks.unit_keys import own_keys

MAX_RESTARTS = 3
"""In a row: of an engine that ran for an hour they are counted anew."""


@task(name="launch-engine", cache_policy=NO_CACHE)
def launch_engine(
    rl: Stage, wanted_port: int, scope: RunScope, node: Node, index: int = 0, ready: Sequence[EngineRecord] = ()
) -> EngineRecord:
    """An engine of this RL stage, ready to generate: the one that already serves it, or a new one.

    Args:
        node: the one that trains.
        ready: the stage's engines that wait for this one; they are kept alive meanwhile.
    """
    own = node.node_of_engine(index, num_per_node=rl.job["deployment"]["num_engines"])
    with (
        StageProgress("engine") as progress,
        Ledger(scope.ledger_path) as ledger,
        ExitStack() as stack,
    ):
        claim_stage(rl, scope, node, ledger)  # else an engine would load its model for a run that is refused then
        sessions = {each.name: stack.enter_context(open_session(each)) for each in (node, *node.engine_nodes)}
        session = sessions[own.name]
        placement = place_stage(session, plan_engine(rl, wanted_port, own, index), own, say=progress.say)
        stage = placement.stage
        job = ServeJob.model_validate(stage.job)
        if job.engine.kind != "embedded":
            check_engine_installed(session, job.engine.kind, python=job.engine.python)
        ledger.add_lease(stage.run_dir, scope.run_id, own.name)
        running = running_job(session, stage.run_dir)
        ports = choose_ports(session, job, is_elsewhere=own is not node) if running is None else ports_of(running)
        keys = own_keys(stage.job, scope)
        status = start_or_attach(
            session,
            job_spec(
                stage.model_copy(update={"job": {**stage.job, **ports}}),
                session,
                scope,
                gpus=gpus_of(rl, node) if own is node else gpus_of_engines(rl),
                code_dir=placement.code_dir,
                known_keys=keys,
                max_restarts=MAX_RESTARTS,
                lease_s=LEASE_S,
            ),
        )
        url = url_of(job.host, ports["port"])
        wait_until_engine_ready(
            session,
            kind=job.engine.kind,
            port=ports["port"],
            host=job.host,
            trainer=sessions[node.name],
            run_dir=stage.run_dir,
            timeout_s=job.engine.start_timeout_s,
            api_key=read_key(job.engine.api_key_variable, "rollout.engine", keys),
            explain_log=explain_engine_log,
            also_renew=[(sessions[node.named(each.node).name], each.run_dir) for each in ready],
            on_wait=progress.say,
            # The RL job pauses its engine now and then, and ends that itself as long as it lives.
            is_idle=status.attached and not is_training(sessions[node.name], rl, node),
        )
        renew_lease(session, stage.run_dir)  # the RL job takes over when it has loaded its model
        progress.say(f"{'still answers' if status.attached else 'answers'} at {url}")
    return EngineRecord(
        provider=job.engine.kind,
        url=url,
        run_dir=stage.run_dir,
        node=own.name,
        lease_url=url_of(job.host, ports["lease_port"]) if own is not node else "",
    )


def kept_alive(engines: Sequence[EngineRecord], node: Node) -> AbstractContextManager[None]:
    """Renew the leases of engines as long as the block runs, where their trainer may be waited for.

    It does that itself once it trains; before that it may have to wait for its GPUs, or for those of other machines
    that train with it. An engine on its own node has waited for the same GPUs as the trainer needs there.
    """
    waiting = [engine for engine in engines if engine.lease_url or node.trainer_nodes]
    return leases_renewed([LeasedJob(node.named(engine.node), engine.run_dir) for engine in waiting])


@task(name="stop-engine", cache_policy=NO_CACHE)
def stop_engine(engine: EngineRecord, scope: RunScope, node: Node) -> None:
    """End the engine, unless another run still wants it; one whose machine is lost, beside others, ends by itself."""
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
            progress.say(f"{engine.url} is not reached, it ends by itself within a minute ({error})")


def is_training(session: Session, rl: Stage, node: Node) -> bool:
    """Whether the RL job is under way on its node."""
    return job_status(session, node.path_on_node(rl.run_dir)).state is JobState.RUNNING


def choose_ports(session: Session, job: ServeJob, *, is_elsewhere: bool) -> dict[str, int]:
    """The ports of a new engine: the wanted one, or a free one for 0, and one for its lease where that is needed.

    Raises:
        PermanentInfraError: another process listens on the wanted port.
    """
    check_port(session, job.port, job.host)
    port, lease_port = job.port or find_free_port(session, job.host), 0
    while is_elsewhere and lease_port in (0, port):
        lease_port = find_free_port(session, job.host)
    return {"port": port, "lease_port": lease_port}


def ports_of(running: Mapping[str, Any]) -> dict[str, int]:  # Any: JSON
    """The ports of an engine that is under way."""
    return {"port": running["port"], "lease_port": running["lease_port"]}


def url_of(host: str, port: int) -> str:
    """Where a server listens."""
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"
