"""Pins that a copy of large files goes on at the chunks that are missing, however its connection over SSH broke.

Without it a shard of 50 GB that is cut at 49 begins again. What is left on the node is pinned in test_sync_resume.py.
"""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import pytest

from rollouts.infra.chunks import CHUNK_BYTES, SHA256, Chunk
from rollouts.infra.errors import NodeUnreachableError
from rollouts.infra.ssh.ssh_session import SSHSession
from rollouts.infra.sync.push import publish_directory
from tests.infra.delay_proxy import delayed_port
from tests.infra.separate_node import separate_node
from tests.infra.ssh_server import SSHServer, running_server
from tests.infra.sync.resuming import NUM_CHUNKS, SIZE, assert_copied, write_source
from tests.kit.waiting import wait_until

pytestmark = pytest.mark.slow


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_source(tmp_path / "source")


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "out" / "model"


@pytest.fixture(autouse=True)
def _without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollouts.infra.sync.push.FIRST_PAUSE_S", 0.0)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[SSHServer]:
    """One that a test may disturb."""
    with running_server(tmp_path / "own-sshd") as server:
        yield server


class CutSession(SSHSession):
    """Loses its connections amid a chunk, some times."""

    def __init__(self, server: SSHServer, port: int, programs_dir: Path, *, num_cuts: int) -> None:
        self.access = replace(server.access, port=port)
        super().__init__(self.access, python=sys.executable, programs_dir=str(programs_dir))
        self._server = server
        self.num_cuts = num_cuts
        self.sent: list[int] = []

    def write_chunks(
        self, directory: str, chunks: Sequence[Chunk], *, digest: str = SHA256
    ) -> dict[tuple[str, int], str]:
        self.sent += [each.number for each in chunks if each.name == "model"]
        cut = chunks[len(chunks) // 2]
        watched = [each._replace(pieces=self._cut(each.pieces)) if each is cut else each for each in chunks]
        return super().write_chunks(directory, watched, digest=digest)

    def _cut(self, pieces: Iterable[bytes]) -> Iterator[bytes]:
        for number, piece in enumerate(pieces):
            if number == 9 and self.num_cuts > 0:
                self.num_cuts -= 1
                time.sleep(0.3)  # what was sent before arrives
                self._server.signal_sessions(signal.SIGKILL)
            yield piece


@pytest.fixture(params=["near", "far"])
def distance(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What the machine is, however busy this one is."""
    monkeypatch.setattr("rollouts.infra.ssh.connection._NEAR_S", 5.0 if request.param == "near" else 0.005)
    return str(request.param)


@contextmanager
def cut_session(server: SSHServer, tmp_path: Path, *, distance: str, num_cuts: int) -> Iterator[CutSession]:
    with (
        delayed_port(server.port, one_way_ms=0 if distance == "near" else 10) as port,
        CutSession(server, port, tmp_path / "programs", num_cuts=num_cuts) as session,
    ):
        yield session


def test_a_link_that_is_cut_amid_a_file_is_gone_on_with(
    distance: str, server: SSHServer, source: Path, target: Path, tmp_path: Path
) -> None:
    with cut_session(server, tmp_path, distance=distance, num_cuts=1) as session:
        report = publish_directory(session, source, str(target))
    assert session.num_cuts == 0 and report.num_bytes == SIZE + 2
    assert NUM_CHUNKS < len(session.sent) < 2 * NUM_CHUNKS, "some had arrived"
    assert_copied(source, target)


def test_a_link_that_is_cut_again_and_again_ends_the_call_and_the_next_one_goes_on(
    distance: str, server: SSHServer, source: Path, target: Path, tmp_path: Path
) -> None:
    target.mkdir(parents=True)
    (target / "old").write_bytes(b"old")
    with cut_session(server, tmp_path, distance=distance, num_cuts=100) as session:
        with pytest.raises(NodeUnreachableError):
            publish_directory(session, source, str(target))
        assert [path.name for path in target.iterdir()] == ["old"]
        session.num_cuts = 0
        report = publish_directory(session, source, str(target))
    assert report.num_sent_bytes < SIZE
    assert_copied(source, target)


KILLED_FAR = """
import sys
from pathlib import Path
from rollouts.infra.node import SSHAccess
from rollouts.infra.ssh.ssh_session import SSHSession
from rollouts.infra.sync.push import publish_directory

access = SSHAccess(host="127.0.0.1", port=int(sys.argv[1]), user=sys.argv[2], key_file=sys.argv[3],
                   host_key=sys.argv[4], known_hosts=())
with SSHSession(access, python=sys.executable, programs_dir=sys.argv[5]) as session:
    publish_directory(session, Path(sys.argv[6]), sys.argv[7])
"""


def test_another_process_goes_on_over_ssh_after_the_first_one_was_killed(
    distance: str, server: SSHServer, source: Path, target: Path, tmp_path: Path
) -> None:
    with (source / "model").open("ab") as file:
        file.write(os.urandom(20 * CHUNK_BYTES))
    whole: set[int] = set()
    with cut_session(server, tmp_path, distance=distance, num_cuts=0) as session:
        access = session.access
        words = [access.port, access.user, access.key_file, access.host_key, tmp_path / "programs", source, target]
        command = [sys.executable, "-c", KILLED_FAR, *map(str, words)]
        with subprocess.Popen(command, cwd=Path(__file__).parents[3]) as killed:
            wait_until(lambda: len(note_whole_chunks(whole, source, target)) >= 3)
            killed.kill()
        assert killed.returncode == -signal.SIGKILL and not target.exists()
        publish_directory(session, source, str(target))
    assert set(session.sent).isdisjoint(whole) and len(session.sent) <= 25 - len(whole)
    assert (
        hashlib.sha256((target / "model").read_bytes()).digest()
        == hashlib.sha256((source / "model").read_bytes()).digest()
    )


def note_whole_chunks(whole: set[int], source: Path, target: Path) -> set[int]:
    """Add the chunks that have come as a whole by now, however many are under way at once, each read until it has."""
    for part in target.parent.glob(".*/model"):
        with part.open("rb") as arrived, (source / "model").open("rb") as original:
            for number in range(part.stat().st_size // CHUNK_BYTES):
                offset = number * CHUNK_BYTES
                if number not in whole and _read_at(arrived, offset) == _read_at(original, offset):
                    whole.add(number)
    return whole


def _read_at(file: BinaryIO, offset: int) -> bytes:
    file.seek(offset)
    return file.read(CHUNK_BYTES)


@pytest.mark.namespaces
def test_packets_that_vanish_amid_a_file_cost_no_more_than_a_link_that_is_cut(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody says so, and the node goes on waiting for the copy of before."""
    monkeypatch.setattr("rollouts.infra.ssh.connection._NEAR_S", 5.0)
    monkeypatch.setattr("rollouts.infra.ssh.connection.HEARTBEAT_INTERVAL_S", 0.5)
    monkeypatch.setattr("rollouts.infra.ssh.connection.HEARTBEAT_LIMIT_S", 2.0)
    monkeypatch.setattr("rollouts.infra.ssh.openssh.HEARTBEAT_INTERVAL_S", 1.0)
    sent: list[int] = []

    class VanishingSession(SSHSession):
        def write_chunks(
            self, directory: str, chunks: Sequence[Chunk], *, digest: str = SHA256
        ) -> dict[tuple[str, int], str]:
            sent.extend(each.number for each in chunks if each.name == "model")
            if len(sent) == NUM_CHUNKS:
                chunks = [each._replace(pieces=self._cut(each)) for each in chunks]
            return super().write_chunks(directory, chunks, digest=digest)

        def _cut(self, chunk: Chunk) -> Iterator[bytes]:
            for number, piece in enumerate(chunk.pieces):
                if (chunk.number, number) == (3, 3):
                    time.sleep(0.3)  # what was sent before arrives
                    cut.enter_context(node.cut_off())
                    threading.Timer(5.0, cut.close).start()
                yield piece

    with (
        separate_node(tmp_path / "node", hidden=[]) as node,
        ExitStack() as cut,
        VanishingSession(node.access, python=sys.executable, programs_dir=f"{node.folder}/programs") as session,
    ):
        publish_directory(session, source, f"{node.folder}/out/model")
        [arrived] = node.files("out/model/model")
        assert arrived.read_bytes() == (source / "model").read_bytes()
        assert sent[:NUM_CHUNKS] == list(range(NUM_CHUNKS)) and sent[-1] == 4 and NUM_CHUNKS < len(sent) < 9
        assert [path.name for path in arrived.parents[1].iterdir()] == ["model"]
