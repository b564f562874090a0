"""Pins that a trainer on another machine keeps its engine alive, and nobody without the key does.

Without it an engine on another machine ends by itself amid a training, or outlives it for ever.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from rollouts.infra.jobs import start_or_attach
from rollouts.infra.session import LocalSession
from rollouts_core.config import EngineConfig, ModelConfig, RLTrainingConfig, RolloutConfig
from rollouts_core.errors import ConfigError, EngineUnavailableError, InputError
from rollouts_core.job import EngineAddress, InputFile, InputModel, RLJob, ServeJob
from rollouts_core.jobs.job_engines import keep_leases, open_engines, renew_lease
from rollouts_core.jobs.serve_job import offer_renewals
from rollouts_core.run_directory import RunDirectory
from rollouts_core.system.listening import bind_port
from tests.infra.shell_jobs import shell_spec, wait_for_end
from tests.kit.waiting import wait_until

pytestmark = pytest.mark.timeout(120)

KEY, VARIABLE = "known-to-both-sides", "TESTS_LEASE_KEY"
ENGINE = """
import socket, sys, time
from rollouts_core.jobs.lease_service import start_lease_service
with socket.socket(fileno=int(sys.argv[1])) as listener:
    start_lease_service(listener, sys.argv[2], sys.argv[3])
time.sleep(60)
"""
LONG_AGO = 1.0


@pytest.fixture
def lease_file(tmp_path: Path) -> Path:
    path = tmp_path / "lease"
    path.touch()
    os.utime(path, (LONG_AGO, LONG_AGO))
    return path


@contextmanager
def offered(lease_file: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """The service beside a process that stands for the engine."""
    with bind_port("127.0.0.1", 0) as listener:
        number = listener.fileno()
        process = subprocess.Popen(
            [sys.executable, "-c", ENGINE, str(number), str(lease_file), VARIABLE],
            pass_fds=[number],
            env=os.environ | {VARIABLE: KEY},
        )
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    try:
        yield url, process
    finally:
        process.kill()
        process.wait()


def address_of(url: str) -> EngineAddress:
    return EngineAddress(url="http://10.0.0.2:1", lease_file="/of/another/machine", lease_url=url)


@pytest.mark.slow
def test_whoever_has_the_key_renews_and_nobody_else_as_long_as_the_engine_lives(lease_file: Path) -> None:
    with offered(lease_file) as (url, engine):
        assert httpx.post(url, timeout=60.0).status_code == 401
        assert httpx.post(url, headers={"Authorization": "Bearer guessed"}, timeout=60.0).status_code == 401
        assert lease_file.stat().st_mtime == LONG_AGO
        renew_lease(address_of(url), KEY)
        assert lease_file.stat().st_mtime > LONG_AGO
        engine.send_signal(signal.SIGKILL)
        engine.wait()
        wait_until(lambda: not answers(url), what="the end of the service")


def answers(url: str) -> bool:
    try:
        httpx.post(url, timeout=5.0)
    except httpx.TransportError:
        return False
    return True


@pytest.mark.slow
def test_a_job_keeps_the_leases_of_engines_here_and_elsewhere(lease_file: Path, tmp_path: Path) -> None:
    own = tmp_path / "own-lease"
    gone = address_of("http://127.0.0.1:1")
    with offered(lease_file) as (url, _):
        here = EngineAddress(url="http://127.0.0.1:2", lease_file=str(own))
        with keep_leases([gone, address_of(url), here], KEY):
            wait_until(lambda: own.exists() and lease_file.stat().st_mtime > LONG_AGO, what="both renewals")


@pytest.mark.slow
def test_a_lease_that_cannot_be_written_is_written_when_it_can_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollouts_core.jobs.job_engines.LEASE_RENEWAL_S", 0.05)
    lease = tmp_path / "disk" / "lease"
    with keep_leases([EngineAddress(url="http://127.0.0.1:2", lease_file=str(lease))]):
        time.sleep(0.2)
        lease.parent.mkdir()
        wait_until(lease.exists, what="the renewal")


def serve_job(**changes: object) -> ServeJob:
    model = InputModel(name="base", model=ModelConfig(path="/models/m"), digest="")
    return ServeJob(model=model, port=0, context_length=100).model_copy(update=changes)


def test_renewals_are_offered_with_a_key_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = RunDirectory(tmp_path)
    with pytest.raises(InputError, match="lease_port 4000 is reachable from other machines, so it needs an API key"):
        offer_renewals(serve_job(lease_port=4000), directory)
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(ConfigError, match=f"{VARIABLE} is not set"):
        offer_renewals(serve_job(lease_port=4000, engine=EngineConfig(api_key_variable=VARIABLE)), directory)
    assert directory.lease_file == tmp_path / ".job" / "lease"


def test_a_port_for_renewals_that_is_in_use_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, KEY)
    with bind_port("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        job = serve_job(lease_port=port, engine=EngineConfig(api_key_variable=VARIABLE))
        with pytest.raises(InputError, match=f"port {port} on 127.0.0.1 is in use"):
            offer_renewals(job, RunDirectory(tmp_path))


@pytest.mark.slow
def test_an_engine_that_ended_by_its_lease_is_the_reason_that_a_training_names(
    base_model: ModelConfig, tmp_path: Path
) -> None:
    """As where the process of a run is killed while that of RL still loads, so that neither renews the lease."""
    engine = tmp_path / "engine"
    session = LocalSession(sys.executable)
    start_or_attach(session, shell_spec(engine, "exec sleep 60", lease_s=0.5))
    assert wait_for_end(session, engine).exit is not None
    with bind_port("127.0.0.1", 0) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    job = RLJob(
        model=InputModel(name="base", model=base_model, digest=""),
        prompts=InputFile(path="prompts.jsonl", digest=""),
        training=RLTrainingConfig(),
        rollout=RolloutConfig(reward_fn="math", engine=EngineConfig(start_timeout_s=1.0)),
        engines=(EngineAddress(url=url, lease_file=str(RunDirectory(engine).lease_file)),),
    )

    async def ask() -> None:
        async with open_engines(job, RunDirectory(tmp_path)):
            pytest.fail("nothing answers there")

    with pytest.raises(EngineUnavailableError, match=r"ended because its lease was not renewed: .* Start the run"):
        asyncio.run(ask())
    # Started again, and gone for another reason.
    start_or_attach(session, shell_spec(engine, "exit 3"))
    assert wait_for_end(session, engine).exit is not None
    with pytest.raises(EngineUnavailableError, match=f"^{url} did not answer"):
        asyncio.run(ask())
