"""Sessions, run directories whose jobs are gone when the test is over, and a disk of 2 MB.

`session` is every kind of session in turn: what holds for one holds for all. Over SSH it is marked slow, and for the
matrix where the server is 20 ms away, or the one that takes OpenSSH's place.
"""

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from rollouts.infra.jobs import cancel_job
from rollouts.infra.session import LocalSession, Session
from rollouts.infra.ssh.ssh_session import SSHSession
from rollouts.infra.supervisor.processes import find_processes
from tests.infra.delay_proxy import delayed_port
from tests.infra.ssh_server import SSHServer, find_sshd, running_server
from tests.kit.mounts import mounted_tmpfs

SESSIONS = [
    "local",
    pytest.param("ssh", marks=pytest.mark.slow),
    *(pytest.param(name, marks=[pytest.mark.slow, pytest.mark.matrix]) for name in ("far", "stand_in")),
]
"""Parameters of a fixture that returns `session_called(request)`."""


@pytest.fixture(scope="session")
def ssh_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SSHServer]:
    with running_server(tmp_path_factory.mktemp("sshd")) as server:
        yield server


@pytest.fixture
def ssh_session(ssh_server: SSHServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SSHSession]:
    programs_dir = str(tmp_path_factory.mktemp("programs"))
    with SSHSession(ssh_server.access, python=sys.executable, programs_dir=programs_dir) as session:
        yield session


@pytest.fixture
def stand_in_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SSHSession]:
    """On the server that takes the place of OpenSSH's where that is not installed."""
    if find_sshd() is None:
        pytest.skip("every other session over SSH is on this server, too")
    programs_dir = str(tmp_path_factory.mktemp("programs"))
    with (
        running_server(tmp_path_factory.mktemp("stand-in"), stand_in=True) as server,
        SSHSession(server.access, python=sys.executable, programs_dir=programs_dir) as session,
    ):
        yield session


@pytest.fixture
def far_session(ssh_server: SSHServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SSHSession]:
    """The same machine, 20 ms away."""
    programs_dir = str(tmp_path_factory.mktemp("programs"))
    with delayed_port(ssh_server.port, one_way_ms=10) as port:
        access = replace(ssh_server.access, port=port)
        with SSHSession(access, python=sys.executable, programs_dir=programs_dir) as session:
            yield session


@pytest.fixture(params=SESSIONS)
def session(request: pytest.FixtureRequest) -> Session:
    return session_called(request)


def session_called(request: pytest.FixtureRequest) -> Session:
    """The one that the parameter names, also for a fixture of a file's own."""
    if request.param == "local":
        return LocalSession(sys.executable)
    session: SSHSession = request.getfixturevalue(f"{request.param}_session")
    return session


@pytest.fixture
def run_dir(tmp_path: Path, session: Session) -> Iterator[Path]:
    path = tmp_path / "sft-0123"
    yield path
    cancel_job(session, str(path), grace_s=0.2)
    assert find_processes(str(path)) == [], "the test left processes behind"


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    with mounted_tmpfs(tmp_path / "tiny", "size=2m") as path:
        yield path
