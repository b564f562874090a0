"""The serving process: it registers a store's deployments in Prefect, and starts a process for each requested run.

Not here: the deployments (deployments.py), the start and end of this process (commands/up.py), the flow (pipeline.py),
restarts of killed runs (upkeep.py).

    rollouts up ──starts──> serving ──shared lock──> the Prefect server, which runs as long as this process
                               ├─ a run of a deployment ──> a process with the flow ──> jobs, which outlive both
                               └─ a tool that trains nothing ──> the same, without waiting for a GPU slot

    serving.lock   locked as long as this process runs
    gpu_slots      maximum number of concurrent runs; a change takes effect within a second (store.py)
    serving.json   written when every deployment is registered: pid, process, since, deployments with their digests,
                   gpu_slots, named_url
    serving.log    output of this process and its flows

SIGTERM ends this process and its flows, but not the flows' jobs. A later start or Retry of a run attaches to the jobs.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID

from rollouts.flows.deployments import (
    EVALUATE_FLOW,
    FLOW,
    RETRAIN_FLOW,
    SHORT_FORM,
    load_deployments,
    offered_name,
    parameters_for,
)
from rollouts.flows.live import served_live_pages
from rollouts.flows.own_server.lend import ServerAddress, ServerError, local_server, named_url, prefect_environment
from rollouts.flows.store import STORE_VARIABLE, load_gpu_slots
from rollouts.flows.tools import FINISH_FLOW, REAP_FLOW, TOOLS
from rollouts.flows.upkeep import look_after
from rollouts.infra.process_identity import identify
from rollouts_core.errors import ConfigError
from rollouts_core.system.files import write_json

if TYPE_CHECKING:
    from prefect import Flow
    from prefect.runner import Runner

logger = logging.getLogger(__name__)

POLL_S = 2.0
"""Seconds between two requests to Prefect's server for runs to start and runs to cancel."""
LOOK_S = 1.0
FLOWS_END_S = 20.0
"""Seconds between SIGTERM and SIGKILL to a flow's process. The flow's jobs go on in any case."""
RUNNER_END_S = 10.0
MAX_LOG_BYTES = 8 * 1024 * 1024


def serve_store(store: Path) -> None:
    """Serve the store's deployments until SIGTERM."""
    # Set both variables before the first import of Prefect, which reads the environment only once.
    os.environ["PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL"] = os.environ.get("PREFECT_LOGGING_LEVEL", "WARNING")
    os.environ["PREFECT_RUNNER_POLL_FREQUENCY"] = f"{POLL_S:.0f}"
    with local_server(store, meanwhile=partial(_load_flows, store)) as address, served_live_pages(store):
        if os.environ["PREFECT_API_URL"] != address.api_url:
            raise ServerError(
                f"the server of {store} moved to {address.api_url} while it started: run rollouts up again"
            )
        asyncio.run(_serve(store.resolve()))


def _load_flows(store: Path, address: ServerAddress) -> None:
    """While the server starts, set the environment and import Prefect and the flows, which takes two seconds."""
    os.environ.update({**prefect_environment(store, address), STORE_VARIABLE: str(store.resolve())})
    gc.disable()  # saves a fifth of the imports' time
    offered_flows()
    gc.enable()
    gc.freeze()


def offered_flows() -> dict[str, Flow[..., Any]]:  # Any: results of flows
    """The flows by their keys. The first call imports Prefect, which reads the environment only once."""
    from rollouts.flows.evaluate import evaluate_model
    from rollouts.flows.finish_flow import finish_run
    from rollouts.flows.pipeline import sft_rl
    from rollouts.flows.reap import reap_machines
    from rollouts.flows.retrain import retrain_model
    from rollouts.flows.short_form_flow import sft_rl_short

    return {
        FLOW: sft_rl,
        SHORT_FORM: sft_rl_short,
        RETRAIN_FLOW: retrain_model,
        EVALUATE_FLOW: evaluate_model,
        REAP_FLOW: reap_machines,
        FINISH_FLOW: finish_run,
    }


async def _serve(store: Path) -> None:
    from prefect.runner import Runner

    from rollouts.flows.credentials import Credentials

    home = store / "prefect"
    # Tools have their own runner, so that a run of `finish` is not queued behind the run to be finished.
    runner = Runner(name="rollouts", query_seconds=POLL_S, limit=load_gpu_slots(home))
    tools = Runner(name="rollouts-tools", query_seconds=POLL_S, limit=None)
    served: dict[str, str] = {}
    deployments: set[UUID] = set()
    await Credentials.register_type_and_schema()  # lets users create credentials in the UI
    await _register(runner, tools, store, served, deployments)
    running = [asyncio.create_task(each.start()) for each in (runner, tools)]
    while not (runner.started and tools.started) and not _has_ended(running):
        await asyncio.sleep(0.02)
    stop = asyncio.Event()
    # Replaces Prefect's handler of SIGTERM, which would cancel every run.
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    state = _write_state(home, served, apply_gpu_slots(runner, home))
    upkeep = asyncio.create_task(look_after(store, deployments))
    while not stop.is_set() and not _has_ended([*running, upkeep]):
        with suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), LOOK_S)
        try:
            await _register(runner, tools, store, served, deployments)
            if (served, gpu_slots := apply_gpu_slots(runner, home)) != state:
                state = _write_state(home, served, gpu_slots)
        except Exception:  # a failure here must not end the running flows
            logger.exception("changes of deployments or slots in %s could not be applied; retrying", store)
        if os.fstat(sys.stderr.fileno()).st_size > MAX_LOG_BYTES:
            os.ftruncate(sys.stderr.fileno(), 0)
    upkeep.cancel()
    await asyncio.to_thread(_end_flows)
    for each, task in zip((runner, tools), running, strict=True):
        if not task.done():
            await each.astop()
    await asyncio.wait([*running, upkeep], timeout=RUNNER_END_S)
    for task in (*running, upkeep):
        if task.done() and not task.cancelled() and (error := task.exception()):
            raise error


def _has_ended(running: Sequence[asyncio.Task[None]]) -> bool:
    return any(task.done() for task in running)


def apply_gpu_slots(runner: Runner, home: Path) -> int:
    """Set a started runner's maximum number of concurrent runs to the store's GPU slots, and return the number.

    A smaller number ends no running run: the next run starts when enough runs have ended.
    """
    limiter = runner._limiter  # Prefect's public API sets the limit only at the start
    assert limiter is not None, "the runner has a limit, and was started"
    try:
        limiter.total_tokens = load_gpu_slots(home)
    except ConfigError as error:
        logger.warning("%s", error)
    return int(limiter.total_tokens)


async def _register(runner: Runner, tools: Runner, store: Path, served: dict[str, str], deployments: set[UUID]) -> None:
    """Register new and changed deployments in Prefect.

    Adds their digests to `served`, and their ids to `deployments`.
    """
    from rollouts.flows.schedules import drop_schedule, schedule_options

    flows = offered_flows()
    try:
        wanted = load_deployments(store / "prefect")
    except ConfigError as error:
        logger.warning("%s", error)
        return
    fresh = [each for each in wanted.values() if served.get(each.name) != each.digest]
    for deployment in fresh:
        offered = replace(deployment, name=offered_name(store, deployment.name))
        deployment_id = await (tools if offered.flow in TOOLS else runner).aadd_flow(
            flows[offered.python_flow],
            name=offered.name,
            description=offered.description,
            parameters=parameters_for(store, offered.parameters),
            **await schedule_options(offered),
        )
        if deployment.flow == RETRAIN_FLOW and deployment.schedule is None:
            await drop_schedule(deployment_id)
        served[deployment.name] = deployment.digest
        deployments.add(deployment_id)


def _write_state(home: Path, served: dict[str, str], gpu_slots: int) -> tuple[dict[str, str], int]:
    """Write serving.json, and return the served digests and the number of GPU slots."""
    state = {
        "pid": os.getpid(),
        "process": asdict(identify(os.getpid())),
        "since": time.time(),
        "deployments": served,
        "gpu_slots": gpu_slots,
        "named_url": named_url(),
    }
    write_json(home / "serving.json", state)
    return dict(served), gpu_slots


def _end_flows() -> None:
    """End the processes of all flows. Jobs go on, and the flows' runs become Crashed in Prefect."""
    flows = multiprocessing.active_children()
    for flow in flows:
        flow.terminate()
    deadline = time.monotonic() + FLOWS_END_S
    for flow in flows:
        flow.join(max(0.0, deadline - time.monotonic()))
        if flow.is_alive():
            flow.kill()
            flow.join()


if __name__ == "__main__":
    serve_store(Path(sys.argv[1]))
