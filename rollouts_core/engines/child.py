"""Start engines as child processes of a job, and end them after sampling.

The engines of RL are jobs of their own (tasks/engine.py); command lines are built in launch.py.

    start ── answer ── sample ── end      all engines serve the weights of one checkpoint
      └────────┴── an engine ended early: the error quotes the reason from the engine's log
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rollouts_core.config import DeploymentConfig, EngineConfig, RolloutConfig
from rollouts_core.engine_log import explain_engine_log
from rollouts_core.engines.client import EngineClient
from rollouts_core.engines.endpoint import Endpoint, create_engine
from rollouts_core.engines.pool import EnginePool
from rollouts_core.errors import ConfigError, EngineError, EngineUnavailableError
from rollouts_core.job import InputModel, ServeJob
from rollouts_core.metrics import read_json_lines
from rollouts_core.run_directory import RunDirectory
from rollouts_core.system.concurrency import gather
from rollouts_core.system.files import write_json
from rollouts_core.system.listening import bind_port

LOOPBACK = "127.0.0.1"
LOOK_S = 2.0
"""Seconds between two checks of an engine that does not answer yet."""
RESTART_TIMEOUT_S = 5.0
"""How long clients wait for a lost engine, seconds. The time is short because an engine that ended is not restarted."""
GRACE_S = 10.0
"""Seconds between asking an engine to end and killing it."""
TAIL_BYTES, TAIL_LINES = 65_536, 20
"""Bytes at the end of the log that are searched for the reason of an early end, and number of lines shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildEngine:
    """One engine process, which is starting or ready."""

    job: ServeJob
    directory: RunDirectory
    """Folder for the engine's own files while it runs."""
    log: Path
    """The log file, which also has the output of earlier engines."""
    log_start: int
    """Position in the log at which this engine's output begins, in bytes."""
    process: subprocess.Popen[bytes]

    def client(self, rollout: RolloutConfig) -> EngineClient:
        """Create a client of the engine."""
        return create_engine(
            Endpoint(
                provider=self.job.engine.kind,
                url=f"http://{LOOPBACK}:{self.job.port}",
                model=self.job.model.model.path,
                api_key_variable=self.job.engine.api_key_variable,
            ),
            request_timeout_s=rollout.request_timeout_s,
            silence_timeout_s=rollout.silence_timeout_s,
            start_timeout_s=rollout.engine.start_timeout_s,
            restart_timeout_s=RESTART_TIMEOUT_S,
        )


@asynccontextmanager
async def started_engines(
    model: InputModel, config: RolloutConfig, deployment: DeploymentConfig, directory: RunDirectory, *, max_tokens: int
) -> AsyncIterator[EnginePool]:
    """A pool of engines with the weights of a checkpoint: one engine per set of GPUs, or one engine on a CPU.

    Args:
        directory: run directory of the job, in which the engines' logs are written: `engine-0.txt` and so on.
        max_tokens: highest number of tokens of a prompt with its completion.

    Raises:
        ConfigError: an engine cannot be started with its settings.
        EngineError: all engines ended. The error has the reason if an engine's log shows a reason.
        EngineUnavailableError: an engine did not answer in time.
    """
    num_engines = deployment.num_engines if deployment.engine_gpu_ranks else 1
    children: list[ChildEngine] = []
    try:
        for index in range(num_engines):
            alone = {"colocated": False, "engine_memory_share": 0.0}
            placement = deployment.of_engine(index).model_copy(update=alone)
            children.append(start_engine(index, model, config.engine, placement, directory, max_tokens=max_tokens))
        clients = [child.client(config) for child in children]
        async with EnginePool(clients) as pool:
            timeout_s = config.engine.start_timeout_s
            started = zip(children, clients, strict=True)
            await gather([partial(wait_until_ready, child, client, timeout_s) for child, client in started])
            yield pool
    except EngineUnavailableError as error:
        if ended := [child for child in children if child.process.poll() is not None]:
            raise explain_end(ended[0]) from error
        raise
    finally:
        stop_engines(children)


def start_engine(
    index: int,
    model: InputModel,
    engine: EngineConfig,
    placement: DeploymentConfig,
    directory: RunDirectory,
    *,
    max_tokens: int,
) -> ChildEngine:
    """Start one engine without waiting for its answer. Call this in the main thread, because the engine ends with the
    thread that started it."""
    with bind_port(LOOPBACK, 0) as listener:
        port = listener.getsockname()[1]
    job = ServeJob(
        model=model,
        port=port,
        parent_pid=os.getpid(),
        context_length=max_tokens,
        engine=engine,
        deployment=placement,
    )
    own = RunDirectory(directory.weights / f"engine-{index}")
    return start_child(job, own, directory.root / f"engine-{index}.txt")


def start_child(job: ServeJob, directory: RunDirectory, log: Path) -> ChildEngine:
    """Start the engine of a job without waiting for its answer. Call this in the main thread, as `start_engine`.

    Args:
        directory: folder for the engine's own files while it runs. Files that an earlier engine left in this folder are
            removed.
    """
    shutil.rmtree(directory.root, ignore_errors=True)  # a killed process may leave files
    directory.root.mkdir(parents=True)
    write_json(directory.job, job.model_dump(mode="json"))
    ranks = ",".join(map(str, job.deployment.engine_gpu_ranks))
    with log.open("ab") as output:
        log_start = output.tell()
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "rollouts_core", "serve", str(directory.job)],
            env=os.environ | ({"CUDA_VISIBLE_DEVICES": ranks, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"} if ranks else {}),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    return ChildEngine(job=job, directory=directory, log=log, log_start=log_start, process=process)


async def wait_until_ready(child: ChildEngine, client: EngineClient, timeout_s: float) -> None:
    """Return when the engine answers.

    Raises:
        ConfigError, EngineError: the engine ended.
        EngineUnavailableError: the engine did not answer in time.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return await client.wait_until_ready(LOOK_S)
        except EngineUnavailableError as error:
            if child.process.poll() is not None:
                raise explain_end(child) from error
            if time.monotonic() > deadline:
                last_line = "".join(last_lines(child, 1))
                raise EngineUnavailableError(
                    f"the engine for {child.job.model.name} did not answer within {timeout_s:g} s "
                    f"(rollout.engine.start_timeout_s); the last line of {child.log.name} is {last_line!r}"
                ) from error


def stop_engines(children: list[ChildEngine]) -> None:
    """End the engines with all their processes, and remove all their files except the logs."""
    for child in children:
        child.process.terminate()
    deadline = time.monotonic() + GRACE_S
    for child in children:
        with suppress(subprocess.TimeoutExpired):
            child.process.wait(max(0.0, deadline - time.monotonic()))
        with suppress(ProcessLookupError):
            os.killpg(child.process.pid, signal.SIGKILL)  # kills the engine's children too
        child.process.wait()
        shutil.rmtree(child.directory.root, ignore_errors=True)


def explain_end(child: ChildEngine) -> ConfigError | EngineError:
    """Create the error that says why an engine ended unexpectedly."""
    events = read_json_lines(child.directory.events) if child.directory.events.exists() else []
    if refused := [event["message"] for event in events if event["event"] == "failed"]:
        return ConfigError(refused[-1])
    lines = last_lines(child)
    reason = explain_engine_log("\n".join(lines)) or f"exit code {child.process.returncode}"
    shown = "\n".join(lines[-TAIL_LINES:])
    return EngineError(
        f"the {child.job.engine.kind} engine for {child.job.model.name} ended by itself: {reason}\n"
        f"The last lines of {child.log}:\n{shown}"
    )


def last_lines(child: ChildEngine, number: int = 0) -> list[str]:
    """The last `number` lines that the engine printed, or all lines within `TAIL_BYTES` if `number` is 0."""
    with child.log.open("rb") as log:
        log.seek(max(child.log_start, child.log.stat().st_size - TAIL_BYTES))
        return log.read().decode(errors="replace").splitlines()[-number:]
