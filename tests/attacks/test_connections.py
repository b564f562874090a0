"""Connections without a whole request, headers without an end, and bodies without one: the engine closes them.

They need no key. Without these tests a stranger could take an engine's memory, or every file that it may open.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from tests.rollouts_core.embedded.test_process import SERVE, serving
from tests.rollouts_core.embedded.tiny_models import make_model, save_model

MAX_SLOW_S, NUM_FILES = 2.0, 400
PROGRAM = f"""
import resource
from rollouts_core.embedded import slow_clients
slow_clients.MAX_SLOW_S = {MAX_SLOW_S}
resource.setrlimit(resource.RLIMIT_NOFILE, ({NUM_FILES}, {NUM_FILES}))
{SERVE}"""
TIMEOUT_S = 20.0
MEMORY_KB = 60_000
BEGIN = b"POST /generate HTTP/1.1\r\nHost: localhost\r\n"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, str]]:
    """The number and the URL of a process that may open 400 files and is patient for two seconds."""
    directory = save_model(make_model(), tmp_path_factory.mktemp("model"))
    with serving(directory, program=PROGRAM) as (process, url):
        yield process.pid, url


@contextmanager
def connected(url: str) -> Iterator[socket.socket]:
    host, _, port = url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), TIMEOUT_S) as connection:
        yield connection


def held_kb(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


def send_until_closed(connection: socket.socket, part: bytes, *, most: int) -> int:
    """How many bytes could be sent before the other side closed the connection, up to `most`."""
    sent = 0
    while sent < most:
        try:
            connection.sendall(part)
        except OSError:
            break
        sent += len(part)
    return sent


@pytest.mark.parametrize(
    ("begin", "part"),
    [
        (BEGIN, b"".join(b"X-%d: %s\r\n" % (number, b"y" * 1000) for number in range(100))),
        (BEGIN + b"X: ", b"y" * 100_000),
        (b"GET /", b"y" * 100_000),
    ],
    ids=["many headers", "a header", "an address"],
)
def test_a_header_without_end_is_cut_off(engine: tuple[int, str], begin: bytes, part: bytes) -> None:
    pid, url = engine
    before = held_kb(pid)
    with connected(url) as connection:
        connection.sendall(begin)
        assert send_until_closed(connection, part, most=200 << 20) < 50 << 20  # of which much lies in the kernel
    assert held_kb(pid) - before < MEMORY_KB
    assert httpx.get(f"{url}/health", timeout=TIMEOUT_S).status_code == 200


@pytest.mark.parametrize("begin", [b"", b"GET /hea", BEGIN + b"Content-Length: 100\r\n\r\nx"], ids=["", "line", "body"])
def test_a_request_that_does_not_come_is_not_waited_for(engine: tuple[int, str], begin: bytes) -> None:
    with connected(engine[1]) as connection:
        connection.sendall(begin)
        began = time.monotonic()
        assert connection.recv(1000) == b""
    assert time.monotonic() - began > MAX_SLOW_S / 2


def test_a_body_that_trickles_after_the_answer_is_not_read_for_ever(engine: tuple[int, str]) -> None:
    with connected(engine[1]) as connection:
        connection.sendall(b"POST /nothing HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n")
        assert connection.recv(1000).startswith(b"HTTP/1.1 404")
        began = time.monotonic()
        while time.monotonic() - began < TIMEOUT_S and send_until_closed(connection, b"x", most=1):
            time.sleep(0.1)
        assert time.monotonic() - began < TIMEOUT_S / 2


def test_the_oldest_of_too_many_connections_without_a_request_are_closed(tmp_path: Path) -> None:
    program = PROGRAM.replace(f"MAX_SLOW_S = {MAX_SLOW_S}", "MAX_SLOW_S = 600.0")
    most = NUM_FILES // 4
    with ExitStack() as opened, serving(save_model(make_model(), tmp_path), program=program) as (_, url):
        kept = [opened.enter_context(connected(url)) for _ in range(20)]
        time.sleep(2)  # they are looked at once a second
        kept += [opened.enter_context(connected(url)) for _ in range(most)]
        for connection in kept[20:]:
            connection.sendall(b"GET /hea")
        assert {connection.recv(100) for connection in kept[:20]} == {b""}
        kept[-1].sendall(b"lth HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert kept[-1].recv(100).startswith(b"HTTP/1.1 200")


def test_a_request_that_waits_for_its_answer_is_not_slow(engine: tuple[int, str]) -> None:
    """Its connection says nothing for longer than one may take to send a request."""
    with httpx.Client(base_url=engine[1], timeout=TIMEOUT_S) as client, httpx.Client(base_url=engine[1]) as other:
        other.post("/pause_generation", json={"mode": "in_place"})
        with connected(engine[1]) as connection:
            body = b'{"input_ids": [3], "sampling_params": {"max_new_tokens": 1}}'
            connection.sendall(BEGIN + b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
            time.sleep(2 * MAX_SLOW_S)
            other.post("/continue_generation", json={})
            assert connection.recv(1000).startswith(b"HTTP/1.1 200")
        assert client.get("/health").status_code == 200
