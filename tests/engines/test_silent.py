"""Pins that an engine which takes requests and then falls silent is noticed by that, and a busy or paused one is not.

Without it a group waits ten minutes for a process that stands still, or a full engine is given up amid its work.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import anyio
import httpx
import pytest

from rollouts_core.config import SamplingConfig
from rollouts_core.engines import Completion, EnginePool, GenerationRequest
from rollouts_core.engines.client import EngineClient
from rollouts_core.errors import EngineUnavailableError
from tests.engines.asking import LOGPROB_TOLERANCE, REQUESTS, ask, num_running, versions_of, worst_gap
from tests.engines.models import SavedModel
from tests.engines.servers import CONTEXT_LENGTH, START_TIMEOUT_S, Server, serving
from tests.engines.test_contract import PAUSES

pytestmark = pytest.mark.timeout(400)

SILENCE_TIMEOUT_S = 6.0
"""A hundredth of a request's time; on a crowded machine a step can take a second."""
GENERATING = {"embedded": "rollouts_core", "sglang": "sglang::scheduler", "vllm": "VLLM::EngineCore"}
"""In the command lines of the processes that generate."""

ANSWERED_ALONE = {"sglang": "/model_info", "vllm": "/health"}
"""What the process that answers HTTP says without any other; the embedded engine is one process."""


def client_of(server: Server) -> EngineClient:
    """A client that leaves a request ten minutes."""
    return type(server.client())(
        server.url, request_timeout_s=600.0, restart_timeout_s=1.0, silence_timeout_s=SILENCE_TIMEOUT_S
    )


def generating_processes(server: Server) -> list[int]:
    """The processes of a server that generate; the one that answers HTTP is another, but for the embedded engine."""
    assert server.process is not None
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            is_of_server = os.getpgid(int(folder.name)) == server.process.pid
            title = (folder / "cmdline").read_bytes().decode(errors="replace")
        except (ProcessLookupError, FileNotFoundError):
            continue
        if is_of_server and GENERATING[server.job.engine.kind] in title:
            found.append(int(folder.name))
    assert found
    return found


@contextmanager
def stopping(server: Server) -> Iterator[Callable[[bool], None]]:
    """A function that stops what generates, or has it go on; it goes on at the end."""
    processes = generating_processes(server)

    def signal_all(is_stop: bool) -> None:
        for process in processes:
            os.kill(process, signal.SIGSTOP if is_stop else signal.SIGCONT)

    try:
        yield signal_all
    finally:
        signal_all(False)


async def start_asking(
    server: Server, engine: EnginePool | EngineClient, requests: Sequence[GenerationRequest]
) -> asyncio.Future[list[Completion]]:
    """The requests, under way at the server by its own count."""
    under_way = asyncio.ensure_future(engine.generate(requests))
    with anyio.fail_after(60):
        while not await asyncio.to_thread(num_running, server):
            if under_way.done():  # before anybody looked: a completion may end early
                under_way = asyncio.ensure_future(engine.generate(requests))
    return under_way


async def stop_amid(
    server: Server, engine: EngineClient, stop: Callable[[bool], None]
) -> asyncio.Future[list[Completion]]:
    """The requests, which the server had not answered when it was stopped."""
    for _ in range(10):
        under_way = await start_asking(server, engine, REQUESTS)
        stop(True)
        await anyio.sleep(1.0)  # for answers that are on their way
        if not under_way.done():
            return under_way
        stop(False)
    raise AssertionError("the requests ended every time before the server was stopped")


def test_requests_of_an_engine_that_stands_still_go_to_another_and_it_comes_back_with_the_weights_of_then(
    server: Server, start: SavedModel, trained: SavedModel, tmp_path: Path
) -> None:
    async def stand_still(stop: Callable[[bool], None], other: Server) -> tuple[list[Completion], list[Completion]]:
        async with EnginePool([client_of(server), other.client()], retry_s=0.2) as pool:
            await pool.load_weights(start.directory, "start-11")
            for _ in range(5):
                under_way = await start_asking(server, pool, REQUESTS)
                stop(True)
                meanwhile = await asyncio.wait_for(under_way, 120)
                if pool.quarantined:
                    break
                stop(False)  # all of them had ended a moment before
            assert pool.quarantined.keys() == {server.url}
            await asyncio.wait_for(pool.load_weights(trained.directory, "trained-11"), 60)
            assert pool.quarantined.keys() == {server.url}
            stop(False)
            with anyio.fail_after(START_TIMEOUT_S):
                while pool.quarantined:
                    await anyio.sleep(0.05)
            return meanwhile, await pool.generate([ask()])

    with serving("embedded", start.directory, tmp_path / "other") as other, stopping(server) as stop:
        meanwhile, afterwards = asyncio.run(stand_still(stop, other))
    assert len(meanwhile) == len(REQUESTS)
    assert versions_of(meanwhile) == {"start-11"}
    for request, completion in zip(REQUESTS, meanwhile, strict=True):
        assert worst_gap(start, request, completion) < LOGPROB_TOLERANCE
    assert versions_of(afterwards) == {"trained-11"}
    assert worst_gap(trained, ask(), afterwards[0]) < LOGPROB_TOLERANCE


def test_a_web_server_that_lives_does_not_vouch_for_what_generates(server: Server, start: SavedModel) -> None:
    async def stand_still(stop: Callable[[bool], None]) -> list[Completion]:
        async with client_of(server) as engine:
            await engine.load_weights(start.directory, "start-12")
            under_way = await stop_amid(server, engine, stop)
            if path := ANSWERED_ALONE.get(server.job.engine.kind):
                assert (await asyncio.to_thread(httpx.get, f"{server.url}{path}")).status_code == 200
            with pytest.raises(EngineUnavailableError, match=f"{server.url} did not answer within 1 s"):
                await asyncio.wait_for(under_way, 120)
            assert engine.watch.is_silent
            stop(False)
            return await engine.generate([ask()])

    with stopping(server) as stop:
        assert versions_of(asyncio.run(stand_still(stop))) == {"start-12"}


def test_neither_a_full_queue_nor_a_pause_is_taken_for_silence(server: Server, start: SavedModel) -> None:
    """The pause is longer than the time of a silence, and so is what waits in the queue before it."""
    path, arguments = PAUSES[server.job.engine.kind]
    long = SamplingConfig(temperature=1.0, max_new_tokens=CONTEXT_LENGTH - 40)
    requests = [replace(request, sampling=long, seed=seed) for seed in range(24) for request in REQUESTS]

    async def fill_and_pause() -> list[Completion]:
        async with client_of(server) as engine:
            await engine.load_weights(start.directory, "start-13")
            for _ in range(5):
                under_way = await start_asking(server, engine, requests)
                await asyncio.to_thread(httpx.post, f"{server.url}{path}", timeout=60.0, **arguments)
                await anyio.sleep(1.0)  # for answers that are on their way
                if not under_way.done():
                    break
                await engine.resume()  # all of them ended before the pause
            await anyio.sleep(2 * SILENCE_TIMEOUT_S)
            assert not under_way.done()
            await engine.resume()
            return await under_way

    completions = asyncio.run(fill_and_pause())
    assert len(completions) == len(requests)
    assert versions_of(completions) == {"start-13"}
