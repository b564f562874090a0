"""Real inference servers for tests, started as the pipeline starts them; they end with the block."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from rollouts.infra.ports import find_free_port
from rollouts.infra.session import LocalSession
from rollouts_core.config import DeploymentConfig, EngineConfig, EngineKind, ModelConfig, WeightTransfer
from rollouts_core.engines import SGLangEngine, VLLMEngine, cleanup_process
from rollouts_core.engines.client import EngineClient
from rollouts_core.engines.launch import LaunchCommand
from rollouts_core.job import InputModel, ServeJob
from rollouts_core.keys import read_key

ROOT = Path(__file__).parents[2]
CONTEXT_LENGTH = 600
START_TIMEOUT_S = 240.0


@dataclass
class Server:
    """One server process, which can be killed and started again on its port."""

    job: ServeJob
    run_dir: Path
    process: subprocess.Popen[bytes] | None = field(default=None, init=False)

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://{self.job.host}:{self.job.port}"

    def start(self) -> None:
        """Start it; it is not ready when this returns."""
        (self.run_dir / "job.json").write_text(self.job.model_dump_json())
        with (self.run_dir / "log.txt").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "rollouts_core", "serve", str(self.run_dir / "job.json")],
                cwd=ROOT,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def kill(self) -> None:
        """SIGKILL to all its processes, also to those that outlived the first of them."""
        if self.process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def client(self) -> EngineClient:
        """A new client of it."""
        client = VLLMEngine if self.job.engine.kind == "vllm" else SGLangEngine
        api_key = read_key(self.job.engine.api_key_variable, "engine")
        return client(self.url, request_timeout_s=120.0, restart_timeout_s=START_TIMEOUT_S, api_key=api_key)

    def wait_until_ready(self, log: Path | None = None) -> None:
        """Return when it answers; fail with the end of its log otherwise."""

        async def wait() -> None:
            async with self.client() as client:
                await client.wait_until_ready(START_TIMEOUT_S)

        try:
            asyncio.run(wait())
        except Exception:
            print((log or self.run_dir / "log.txt").read_text()[-4000:])  # noqa: T201 - shown by pytest
            raise


def engine_python(kind: EngineKind) -> Path:
    """The interpreter of an installed engine; skips the test where it is not installed."""
    python = ROOT / ".engines" / kind / "bin" / "python"
    if not python.exists():
        pytest.skip(f"{kind} is not installed in .engines: make engines")
    return python


def make_server(
    kind: EngineKind, model_dir: Path, run_dir: Path, *, api_key_variable: str = "", adapter_rank: int = 0
) -> Server:
    """A server of that kind for a model, not started; skips the test where it is not installed."""
    python = "" if kind == "embedded" else str(engine_python(kind))
    # vLLM alone is started in another way to be sent weights. Adapters are not sent.
    way: WeightTransfer = "gloo" if kind == "vllm" and not adapter_rank else "auto"
    job = ServeJob(
        model=InputModel(name="base", model=ModelConfig(path=str(model_dir)), digest=""),
        port=find_free_port(LocalSession(sys.executable)),
        context_length=CONTEXT_LENGTH,
        engine=EngineConfig(kind=kind, python=python, api_key_variable=api_key_variable, weight_transfer=way),
        adapter_rank=adapter_rank,
        deployment=DeploymentConfig(max_running_requests=16),
    )
    run_dir.mkdir()
    return Server(job, run_dir)


@contextmanager
def serving(kind: EngineKind, model_dir: Path, run_dir: Path, *, api_key_variable: str = "") -> Iterator[Server]:
    """A server of that kind for a model, ready; with a variable's name it asks for the key that is in it."""
    server = make_server(kind, model_dir, run_dir, api_key_variable=api_key_variable)
    try:
        server.start()
        server.wait_until_ready()
        yield server
    finally:
        server.kill()


@contextmanager
def started_by_hand(command: LaunchCommand, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """An engine that somebody starts without our job around it; what it leaves behind goes as that of ours does.

    Args:
        folder: gets its output, log.txt.
    """
    scratch = folder / "scratch"
    scratch.mkdir()
    closed_at_the_end, held_by_the_engine = os.pipe()
    subprocess.run(
        [sys.executable, "-I", "-S", cleanup_process.__file__, str(scratch)], stdin=closed_at_the_end, check=True
    )
    os.close(closed_at_the_end)
    with (folder / "log.txt").open("wb") as log:
        process = subprocess.Popen(
            command.argv,
            env={**os.environ, **command.env, **cleanup_process.scratch_variables(str(scratch))},
            stdout=log,
            stderr=log,
            pass_fds=(held_by_the_engine,),
            start_new_session=True,
        )
    os.close(held_by_the_engine)
    try:
        yield process
    finally:
        time.sleep(cleanup_process.LOOK_S)  # what it made a moment ago has not been looked at
        os.killpg(process.pid, signal.SIGKILL)  # while it starts it is deaf to SIGTERM
        process.wait()
