"""Pins that a server answers a thousand clients at once, also beside clients that send nothing or read nothing.

Without it a few clients could take the connections, the memory or the time of all others.
"""

from __future__ import annotations

import asyncio
import json
import resource
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.kit.waiting import wait_until
from tests.rollouts_core.embedded.test_process import SERVE, serving

pytestmark = [pytest.mark.slow, pytest.mark.matrix]
NUM_CLIENTS = 1000
TIMEOUT_S = 300.0
MAX_GROWTH_BYTES = 200 * 2**20
"""A connection with its request takes some 50 kB."""
USUAL_FILES = 1024
"""Soft limit of open files that most systems set. The commands that serve raise it."""
SERVE_LIKE_COMMANDS = f"""
import resource
from rollouts_core.system.open_files import raise_file_limit
resource.setrlimit(resource.RLIMIT_NOFILE, ({USUAL_FILES}, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
raise_file_limit()
{SERVE}"""
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@pytest.fixture(autouse=True)
def _many_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 2 * NUM_CLIENTS)), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextmanager
def measured_server(model_dir: Path) -> Iterator[tuple[str, Any]]:
    """The address of a server process, and a function that gives its highest memory so far."""
    with serving(model_dir, program=SERVE_LIKE_COMMANDS) as (process, url):
        status = Path(f"/proc/{process.pid}/status")

        def peak_bytes() -> int:
            [line] = [line for line in status.read_text().splitlines() if line.startswith("VmHWM")]
            return int(line.split()[1]) * 1024

        yield url, peak_bytes


def body_of(number: int, **asked: Any) -> dict[str, Any]:
    sampling = {"max_new_tokens": 4, "ignore_eos": True, "sampling_seed": number, **asked}
    return {"input_ids": [2 + number % 59, 2 + number // 59], "sampling_params": sampling}


@asynccontextmanager
async def connected(url: str, count: int) -> AsyncIterator[list[Connection]]:
    """Open connections, all at once."""
    host, port = url.removeprefix("http://").split(":")
    async with AsyncExitStack() as stack:
        connections: list[Connection] = []
        for _ in range(count):
            reader, writer = await asyncio.open_connection(host, int(port))
            stack.callback(writer.close)
            connections.append((reader, writer))
        yield connections


def send(writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
    text = json.dumps(body)
    head = f"POST /generate HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(text)}"
    writer.write(f"{head}\r\n\r\n{text}".encode())


async def read_stream(reader: asyncio.StreamReader) -> list[int]:
    """The tokens of a streamed answer, which must be whole."""
    lines = (await reader.read()).decode().splitlines()
    events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert lines[0].endswith("200 OK") and events[-1] == "[DONE]"
    answer = json.loads(events[-2])
    assert answer["meta_info"]["finish_reason"]
    tokens: list[int] = answer["output_ids"]
    return tokens


def test_a_thousand_streams_at_once_are_all_answered(model_dir: Path) -> None:
    async def stream_all(url: str) -> list[list[int]]:
        async with connected(url, NUM_CLIENTS) as connections:
            for number, (_, writer) in enumerate(connections):
                send(writer, {**body_of(number), "stream": True})
            return await asyncio.gather(*(read_stream(reader) for reader, _ in connections))

    with measured_server(model_dir) as (url, peak_bytes):
        each = [body_of(number) for number in range(NUM_CLIENTS)]
        batch = {name: [body[name] for body in each] for name in each[0]}
        expected = httpx.post(f"{url}/generate", json=batch, timeout=TIMEOUT_S).json()
        before = peak_bytes()
        answers = asyncio.run(asyncio.wait_for(stream_all(url), TIMEOUT_S))
        assert answers == [answer["output_ids"] for answer in expected]
        assert len({tuple(answer) for answer in answers}) > NUM_CLIENTS / 2
        assert peak_bytes() - before < MAX_GROWTH_BYTES


def test_a_thousand_connections_that_send_nothing_keep_nobody_waiting(model_dir: Path) -> None:
    async def ask_beside_them(url: str) -> list[int]:
        async with connected(url, NUM_CLIENTS), httpx.AsyncClient(timeout=TIMEOUT_S) as client:
            answers = [await client.post(f"{url}/generate", json=body_of(number)) for number in range(20)]
        return [len(answer.json()["output_ids"]) for answer in answers]

    with measured_server(model_dir) as (url, peak_bytes):
        httpx.post(f"{url}/generate", json=body_of(0), timeout=TIMEOUT_S)
        before = peak_bytes()
        assert asyncio.run(asyncio.wait_for(ask_beside_them(url), TIMEOUT_S)) == [4] * 20
        assert peak_bytes() - before < MAX_GROWTH_BYTES


def num_running(url: str) -> int:
    load = httpx.get(f"{url}/server_info", timeout=TIMEOUT_S).json()["internal_states"][0]
    return int(load["num_running_reqs"] + load["num_waiting_reqs"])


def test_a_client_that_reads_a_byte_per_second_is_kept_one_event_for(model_dir: Path) -> None:
    """Each event has the whole completion so far: all events of this answer are 100 MB."""

    async def read_slowly(url: str, peak_bytes: Any) -> None:
        async with connected(url, 1) as [(reader, writer)]:
            writer.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            send(writer, {**body_of(0, max_new_tokens=1900), "stream": True, "return_logprob": True})
            before = peak_bytes()
            async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S) as client:
                for _ in range(5):
                    assert len(await reader.readexactly(1)) == 1
                    answer = await client.post("/generate", json=body_of(1))
                    assert len(answer.json()["output_ids"]) == 4
                    await asyncio.sleep(1.0)
            await asyncio.to_thread(wait_until, lambda: num_running(url) == 0)
            assert peak_bytes() - before < MAX_GROWTH_BYTES / 4

    with measured_server(model_dir) as (url, peak_bytes):
        httpx.post(f"{url}/generate", json=body_of(0), timeout=TIMEOUT_S)
        asyncio.run(asyncio.wait_for(read_slowly(url, peak_bytes), TIMEOUT_S))


def test_streams_that_are_cut_are_aborted_and_others_go_on(model_dir: Path) -> None:
    async def cut(url: str) -> list[int]:
        async with connected(url, 101) as [(reader, writer), *others]:
            send(writer, {**body_of(0, max_new_tokens=300), "stream": True})
            for number, (_, its_writer) in enumerate(others):
                send(its_writer, {**body_of(number, max_new_tokens=2000), "stream": True})
            for its_reader, _ in others[:30]:  # the engine has room for 64 requests, the rest waits
                await its_reader.readuntil(b"data: ")
            for _, its_writer in others:
                its_writer.transport.abort()
            await asyncio.to_thread(wait_until, lambda: num_running(url) <= 1)
            return await read_stream(reader)

    with measured_server(model_dir) as (url, _):
        expected = httpx.post(f"{url}/generate", json=body_of(0, max_new_tokens=300), timeout=TIMEOUT_S).json()
        assert asyncio.run(asyncio.wait_for(cut(url), TIMEOUT_S)) == expected["output_ids"]
        wait_until(lambda: num_running(url) == 0)
