"""Start the inference engine of an RL stage, and stop it again."""

from __future__ import annotations

from collections.abc import Sequence

from prefect import task
from prefect.cache_policies import NO_CACHE

from infra.engines import check_engine_installed, wait_until_engine_ready
from infra.jobs import JobState, cancel_job, job_status, renew_lease, start_or_attach
from infra.ledger import Ledger
from infra.node import Node
from infra.ports import LOOPBACK, check_port, find_free_port
from infra.providers import open_session
from infra.session import Session
from rollouts_core.job import ServeJob
from rollouts_core.keys import read_key
from tasks.placement import place_stage
from tasks.plan import plan_engine
from tasks.progress import StageProgress, stage_console
from tasks.records import EngineRecord, RunScope, Stage
from tasks.stage import GRACE_S, gpus_of, job_spec, running_job

MAX_RESTARTS = 3
LEASE_S = 60.0
"""An engine that no RL job renews for this long ends by itself."""


@task(name="launch-engine", cache_policy=NO_CACHE)
def launch_engine(
    rl: Stage, wanted_port: int, scope: RunScope, node: Node, index: int = 0, ready: Sequence[EngineRecord] = ()
) -> EngineRecord:
    """An engine of this RL stage, ready to generate: the one that already serves it, or a new one.

    Args:
        ready: the stage's engines that wait for this one; they are kept alive meanwhile.
    """
    with (
        StageProgress("engine", num_steps=0, console=stage_console()) as progress,
        Ledger(scope.ledger_path) as ledger,
        open_session(node) as session,
    ):
        placement = place_stage(session, plan_engine(rl, wanted_port, node, index), node)
        stage = placement.stage
        engine = ServeJob.model_validate(stage.job).engine
        if engine.kind != "embedded":
            check_engine_installed(session, engine.kind, python=engine.python)
        ledger.add_lease(stage.run_dir, scope.run_id, node.name)
        running = running_job(session, stage.run_dir)
        port = running["port"] if running else choose_port(session, wanted_port)
        at_port = stage.model_copy(update={"job": {**stage.job, "port": port}})
        start_or_attach(
            session,
            job_spec(
                at_port,
                session,
                scope,
                gpus=gpus_of(rl),
                code_dir=placement.code_dir,
                max_restarts=MAX_RESTARTS,
                lease_s=LEASE_S,
            ),
        )
        url = f"http://{LOOPBACK}:{port}"
        wait_until_engine_ready(
            session,
            kind=engine.kind,
            port=port,
            run_dir=stage.run_dir,
            timeout_s=engine.start_timeout_s,
            api_key=read_key(engine.api_key_variable, "rollout.engine"),
            also_renew=[each.run_dir for each in ready],
            on_wait=progress.say,
            # The RL job pauses its engine now and then, and ends that itself as long as it lives.
            is_idle=running is not None and job_status(session, rl.run_dir).state is not JobState.RUNNING,
        )
        renew_lease(session, stage.run_dir)  # the RL job takes over when it has loaded its model
        progress.say(f"{'still answers' if running else 'answers'} at {url}")
    return EngineRecord(provider=engine.kind, url=url, run_dir=stage.run_dir)


@task(name="stop-engine", cache_policy=NO_CACHE)
def stop_engine(engine: EngineRecord, scope: RunScope, node: Node) -> None:
    """End the engine, unless another run still wants it."""
    with Ledger(scope.ledger_path) as ledger, open_session(node) as session:
        if ledger.drop_lease(engine.run_dir, scope.run_id) == 0:
            cancel_job(session, engine.run_dir, GRACE_S)


def choose_port(session: Session, wanted_port: int) -> int:
    """The wanted port, or a free one for 0.

    Raises:
        PermanentInfraError: another process listens on the wanted port.
    """
    if wanted_port == 0:
        return find_free_port(session)
    check_port(session, wanted_port)
    return wanted_port
