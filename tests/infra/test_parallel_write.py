"""Pins that a file that goes over several connections at once is as whole, and as absent, as one that goes over one.

Without it a piece could land in the wrong place, or a broken connection leave a file with a hole.
"""

import hashlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from infra.agent_call import MAX_FRAME_BYTES
from infra.errors import DiskFullError, NodeUnreachableError
from infra.parallel_write import BYTES_PER_SENDER, MAX_SENDERS, ParallelWrite
from infra.ssh_session import SSHSession
from tests.infra.delay_proxy import delayed_port
from tests.infra.ssh_server import SSHServer, running_server
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

ODD_BYTES = 3 * BYTES_PER_SENDER + 12_345


@pytest.fixture
def server(tmp_path: Path) -> Iterator[SSHServer]:
    """One that a test may disturb."""
    with running_server(tmp_path / "own-sshd") as server:
        yield server


@pytest.fixture
def far(server: SSHServer, tmp_path: Path) -> Iterator[SSHSession]:
    """A session on that server, from 20 ms away."""
    with delayed_port(server.port, one_way_ms=10) as port:
        access = replace(server.access, port=port)
        with SSHSession(access, python=sys.executable, programs_dir=str(tmp_path / "programs")) as session:
            yield session


def in_chunks(content: bytes, size: int) -> Iterator[bytes]:
    for start in range(0, len(content), size):
        yield content[start : start + size]


@pytest.mark.parametrize("num_bytes", [0, 1, 300_000, ODD_BYTES])
def test_the_file_is_the_content_whatever_the_pieces(far: SSHSession, tmp_path: Path, num_bytes: int) -> None:
    content = os.urandom(num_bytes)
    far.write_chunks(str(tmp_path / "deep" / "file"), in_chunks(content, 999_999))
    assert (tmp_path / "deep" / "file").read_bytes() == content
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["file"]


def test_a_large_file_takes_several_connections_and_a_small_one_does_not(
    far: SSHSession, server: SSHServer, tmp_path: Path
) -> None:
    def num_logins() -> int:
        return (server.folder / "log").read_text().count("Accepted publickey")

    far.write_chunks(str(tmp_path / "small"), [bytes(1 << 20)])
    num_for_small = num_logins()
    far.write_chunks(str(tmp_path / "large"), in_chunks(bytes(4 * BYTES_PER_SENDER), 1 << 20))
    assert (num_for_small, num_logins()) == (2, 5), "one is for calls"


def test_what_was_there_stays_until_the_new_file_is_whole(far: SSHSession, tmp_path: Path) -> None:
    place = tmp_path / "files" / "model"
    far.write_file(str(place), b"old")

    def watched() -> Iterator[bytes]:
        for chunk in in_chunks(bytes(ODD_BYTES), 1 << 20):
            assert place.read_bytes() == b"old"
            yield chunk

    far.write_chunks(str(place), watched())
    assert hashlib.sha256(place.read_bytes()).digest() == hashlib.sha256(bytes(ODD_BYTES)).digest()


def test_a_connection_that_breaks_leaves_the_old_file_and_the_next_try_works(
    far: SSHSession, server: SSHServer, tmp_path: Path
) -> None:
    place = tmp_path / "files" / "model"
    far.write_file(str(place), b"old")
    content = os.urandom(2 * BYTES_PER_SENDER)

    def cut_in_the_middle() -> Iterator[bytes]:
        yield content[:BYTES_PER_SENDER]
        wait_until(lambda: len(list(place.parent.iterdir())) == 2)
        server.signal_sessions(signal.SIGKILL)
        yield content[BYTES_PER_SENDER:]

    with pytest.raises(NodeUnreachableError):
        far.write_chunks(str(place), cut_in_the_middle())
    assert place.read_bytes() == b"old"
    assert [path.name for path in place.parent.iterdir()] == ["model"]
    far.write_chunks(str(place), [content])
    assert place.read_bytes() == content


def test_a_source_that_fails_ends_every_sender(far: SSHSession, tmp_path: Path) -> None:
    def failing() -> Iterator[bytes]:
        yield from in_chunks(bytes(2 * BYTES_PER_SENDER), 1 << 20)
        raise ValueError("the disk here")

    before = threading.active_count()
    with pytest.raises(ValueError, match="the disk here"):
        far.write_chunks(str(tmp_path / "files" / "model"), failing())
    assert list((tmp_path / "files").iterdir()) == []
    wait_until(lambda: threading.active_count() <= before + MAX_SENDERS * 2)


def test_a_sender_that_cannot_begin_ends_the_copy_and_waits_for_nobody() -> None:
    """As where no process can be started for it: the pieces of the others would wait for room for ever."""

    def out_of_memory(number: int, request: object) -> Any:  # Any: it never returns
        raise OSError("Cannot allocate memory")

    with pytest.raises(OSError, match="Cannot allocate memory"):
        ParallelWrite(out_of_memory, "/nowhere/model").run(bytes(MAX_FRAME_BYTES) for _ in range(1000))


def test_a_disk_that_fills_up_is_named_and_nothing_is_left(far: SSHSession, tiny_disk: Path) -> None:
    with pytest.raises(DiskFullError):
        far.write_chunks(str(tiny_disk / "model"), in_chunks(bytes(ODD_BYTES), 1 << 20))
    assert list(tiny_disk.iterdir()) == []
