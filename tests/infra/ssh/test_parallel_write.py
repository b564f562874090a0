"""Pins that chunks that go over several connections at once are as right as those that go over one.

Without it a piece could land in the wrong place, or a broken connection leave senders that wait for ever.
"""

import hashlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollouts.infra.chunks import CHUNK_BYTES, SHA256, Chunk
from rollouts.infra.errors import DiskFullError, NodeUnreachableError
from rollouts.infra.ports import find_free_port
from rollouts.infra.session import LocalSession
from rollouts.infra.ssh.agent_call import MAX_SENDERS, ParallelWrite
from rollouts.infra.ssh.ssh_session import SSHSession
from tests.infra.delay_proxy import delayed_port
from tests.infra.splitting import chunks_of
from tests.infra.ssh_server import SSHServer, running_server
from tests.kit.waiting import wait_until

pytestmark = pytest.mark.slow

ODD_BYTES = 3 * CHUNK_BYTES + 12_345


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


def num_logins(server: SSHServer) -> int:
    """So many connections were let in."""
    return (server.folder / "log").read_text().count("Accepted publickey")


def num_under_way() -> int:
    """So many connections are being made ahead."""
    return sum(thread.name.startswith("agent for pieces") for thread in threading.enumerate())


@pytest.mark.parametrize("num_bytes", [1, 300_000, ODD_BYTES])
def test_the_file_is_the_content_whatever_the_pieces(far: SSHSession, tmp_path: Path, num_bytes: int) -> None:
    content = os.urandom(num_bytes)
    digests = far.write_chunks(str(tmp_path / "deep"), chunks_of(content))
    assert (tmp_path / "deep" / "file").read_bytes() == content
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["file"]
    chunks = [content[start : start + CHUNK_BYTES] for start in range(0, num_bytes, CHUNK_BYTES)]
    assert digests == {("file", number): hashlib.sha256(chunk).hexdigest() for number, chunk in enumerate(chunks)}


def test_files_that_are_no_larger_than_a_chunk_go_over_several_connections_too(
    far: SSHSession, server: SSHServer, tmp_path: Path
) -> None:
    contents = {f"shard-{number}": os.urandom(300_000) for number in range(12)}
    far.write_chunks(str(tmp_path), [chunk for name in contents for chunk in chunks_of(contents[name], name=name)])
    assert {name: (tmp_path / name).read_bytes() for name in contents} == contents
    assert num_logins(server) == MAX_SENDERS + 1


def test_a_large_file_takes_several_connections_and_a_small_one_does_not(
    far: SSHSession, server: SSHServer, tmp_path: Path
) -> None:
    far.write_chunks(str(tmp_path), chunks_of(bytes(1 << 20), name="small"))
    num_for_small = num_logins(server)
    far.write_chunks(str(tmp_path), chunks_of(bytes(4 * CHUNK_BYTES), name="large"))
    assert (num_for_small, num_logins(server)) == (2, 5), "one is for calls"


def test_connections_for_chunks_that_are_expected_are_made_ahead(
    far: SSHSession, server: SSHServer, tmp_path: Path
) -> None:
    far.expect_chunks(4)
    wait_until(lambda: num_logins(server) == 5)
    far.write_chunks(str(tmp_path), chunks_of(bytes(4 * CHUNK_BYTES)))
    assert num_logins(server) == 5


def test_chunks_that_come_early_wait_for_the_connections_that_are_under_way(
    far: SSHSession, server: SSHServer, tmp_path: Path
) -> None:
    far.run(["true"], timeout_s=30)
    far.expect_chunks(4)
    wait_until(lambda: num_under_way() == 4)
    far.write_chunks(str(tmp_path), chunks_of(bytes(4 * CHUNK_BYTES)))
    assert num_logins(server) == 5


def test_a_session_that_is_closed_meanwhile_does_not_say_that_the_node_is_away(
    far: SSHSession, caplog: pytest.LogCaptureFixture
) -> None:
    with far:
        far.run(["true"], timeout_s=30)
        far.expect_chunks(4)
        wait_until(lambda: num_under_way() == 4)
    wait_until(lambda: num_under_way() == 0)
    assert [record.message for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_to_a_near_node_nothing_is_made_ahead(server: SSHServer, tmp_path: Path) -> None:
    with SSHSession(server.access, python=sys.executable, programs_dir=str(tmp_path / "programs")) as near:
        near.expect_chunks(4)
        near.write_chunks(str(tmp_path), chunks_of(bytes(4 * CHUNK_BYTES)))
        assert num_logins(server) == 2


def test_a_node_that_is_not_there_is_said_by_who_needs_it(server: SSHServer, tmp_path: Path) -> None:
    access = replace(server.access, port=find_free_port(LocalSession(sys.executable)))
    with SSHSession(access, python=sys.executable, programs_dir=str(tmp_path / "programs")) as lost:
        lost.expect_chunks(4)
        with pytest.raises(NodeUnreachableError):
            lost.write_chunks(str(tmp_path), chunks_of(bytes(4 * CHUNK_BYTES)))


def test_a_connection_that_breaks_ends_every_sender_and_the_next_try_works(
    far: SSHSession, server: SSHServer, tmp_path: Path
) -> None:
    place = tmp_path / "files" / "model"
    content = os.urandom(3 * CHUNK_BYTES)
    chunks = chunks_of(content, name="model")

    def cut_in_the_middle() -> Iterator[bytes]:
        for number, piece in enumerate(chunks[1].pieces):
            if number == 5:
                wait_until(place.exists)
                server.signal_sessions(signal.SIGKILL)
            yield piece

    before = threading.active_count()
    with pytest.raises(NodeUnreachableError):
        far.write_chunks(str(place.parent), [chunks[0], chunks[1]._replace(pieces=cut_in_the_middle()), chunks[2]])
    wait_until(lambda: threading.active_count() <= before + MAX_SENDERS * 2)
    far.write_chunks(str(place.parent), chunks)
    assert place.read_bytes() == content


def test_a_source_that_fails_ends_every_sender(far: SSHSession, tmp_path: Path) -> None:
    def failing() -> Iterator[bytes]:
        yield bytes(1 << 20)
        raise ValueError("the disk here")

    before = threading.active_count()
    with pytest.raises(ValueError, match="the disk here"):
        far.write_chunks(str(tmp_path), [*chunks_of(bytes(2 * CHUNK_BYTES)), Chunk("file", 2, failing())])
    wait_until(lambda: threading.active_count() <= before + MAX_SENDERS * 2)


def test_a_sender_that_cannot_begin_ends_the_copy_and_waits_for_nobody() -> None:
    """As where no process can be started for it."""

    def out_of_memory(number: int, request: object) -> Any:  # Any: it never returns
        raise OSError("Cannot allocate memory")

    with pytest.raises(OSError, match="Cannot allocate memory"):
        ParallelWrite(out_of_memory, "/nowhere", chunks_of(bytes(3 * CHUNK_BYTES)), digest=SHA256, max_senders=2).run()


def test_a_disk_that_fills_up_is_named(far: SSHSession, tiny_disk: Path) -> None:
    with pytest.raises(DiskFullError):
        far.write_chunks(str(tiny_disk), chunks_of(bytes(ODD_BYTES), name="model"))
