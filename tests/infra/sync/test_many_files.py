"""Pins that folders of very many files can be copied: with a few calls, and little memory for each file.

Without it a call for each file, or one that never ends, goes unnoticed until somebody has a hundred thousand samples.
"""

import resource
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from rollouts.infra.ssh.agent_call import AgentCall, JsonObject
from rollouts.infra.ssh.agents import Agents, Purpose
from rollouts.infra.ssh.ssh_session import SSHSession
from rollouts.infra.sync.push import publish_directory
from tests.infra.ssh_server import SSHServer
from tests.infra.sync.pulling import pull_run

pytestmark = pytest.mark.slow
MEMORY = Path("/dev/shm")
"""Where that is there, the disk's speed is none of these tests' business."""


class CountingAgents(Agents):
    """Counts the requests."""

    num_asked = 0

    def ask(self, purpose: Purpose, request: JsonObject, *, timeout_s: float | None = None) -> AgentCall:
        self.num_asked += 1
        return super().ask(purpose, request, timeout_s=timeout_s)


@contextmanager
def counting_session(server: SSHServer, programs_dir: Path) -> Iterator[tuple[SSHSession, CountingAgents]]:
    """A session, with what counts its requests."""
    with SSHSession(server.access, python=sys.executable, programs_dir=str(programs_dir)) as session:
        session.agents = counting = CountingAgents(server.access, python=sys.executable, find_access=None)
        yield session, counting


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    with TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else tmp_path) as folder:
        yield Path(folder)


def write_files(folder: Path, num_files: int) -> None:
    for number in range(num_files):
        if number % 1000 == 0:
            (folder / f"{number // 1000:03}").mkdir(parents=True)
        (folder / f"{number // 1000:03}/{number:06}.json").write_bytes(b"%d" % number)


def contents_of(folder: Path) -> Sequence[tuple[str, bytes]]:
    return sorted((str(path.relative_to(folder)), path.read_bytes()) for path in folder.glob("*/*"))


@pytest.mark.parametrize("num_files", [5_000, pytest.param(100_000, marks=pytest.mark.matrix)])
def test_very_many_files_are_copied_there_and_back(
    ssh_server: SSHServer, folder: Path, tmp_path: Path, num_files: int
) -> None:
    write_files(folder / "source", num_files)
    num_kib_before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with counting_session(ssh_server, tmp_path) as (session, counting):
        report = publish_directory(session, folder / "source", str(folder / "there"))
        assert report.num_sent_bytes == report.num_bytes and report.num_files == num_files
        assert publish_directory(session, folder / "source", str(folder / "there")).was_identical
        assert pull_run(session, str(folder / "there"), folder / "back") == num_files
        assert pull_run(session, str(folder / "there"), folder / "back") == 0
        assert counting.num_asked < 12
    num_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - num_kib_before
    assert num_kib < 64 << 10 or num_kib / num_files < 4
    assert contents_of(folder / "back") == contents_of(folder / "source")
