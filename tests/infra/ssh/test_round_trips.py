"""Pins how often a distant machine has to answer, and what is sent to it twice: no time can tell that reliably.

Without it a status call takes as long as a new login, and a machine that is ready is made ready anew.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from rollouts.infra.bootstrap import probe_node
from rollouts.infra.environment import LOOK, ensure_environment
from rollouts.infra.jobs import JobState, cancel_job, job_status, start_or_attach
from rollouts.infra.node import Node, SSHAccess
from rollouts.infra.node_agent import ISOLATED
from rollouts.infra.ssh.agent_call import AgentCall, JsonObject
from rollouts.infra.ssh.agents import Agents, Purpose
from rollouts.infra.ssh.ssh_session import SSHSession
from rollouts.tasks.upload_inputs import place_code
from tests.infra.shell_jobs import shell_spec
from tests.infra.ssh.counting_port import CountingPort
from tests.infra.ssh_server import SSHServer

pytestmark = pytest.mark.slow


@pytest.fixture
def way(ssh_server: SSHServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[CountingPort]:
    """To the server, with nobody else on it than those who ask for something."""
    monkeypatch.setattr("rollouts.infra.ssh.connection.HEARTBEAT_INTERVAL_S", 1e4)
    way = CountingPort(ssh_server.port)
    yield way
    way.close()


def test_a_status_call_takes_one_round_trip(way: CountingPort, ssh_server: SSHServer, tmp_path: Path) -> None:
    access = replace(ssh_server.access, port=way.port)
    run_dir = tmp_path / "sft-0123"
    with SSHSession(access, python=sys.executable, programs_dir=str(tmp_path / "programs")) as session:
        _ = session.host_key_evidence  # connects
        way.take_counts()
        assert job_status(session, str(run_dir)).state is JobState.ABSENT
        assert way.take_counts()[0] <= 3, "a channel, a command, the call"
        try:
            start_or_attach(session, shell_spec(run_dir, "sleep 60"))
            way.take_counts()
            for _ in range(3):
                assert job_status(session, str(run_dir)).state is JobState.RUNNING
                num_trips, num_bytes = way.take_counts()
                assert num_trips == 1 and num_bytes < 2000, "and no program goes along"
        finally:
            cancel_job(session, str(run_dir), grace_s=0.2)


class NotingAgents(Agents):
    """Notes what is asked for: the verb, and what it is about."""

    def __init__(self, access: SSHAccess) -> None:
        super().__init__(access, python=sys.executable, find_access=None)
        self.asked: list[tuple[str, ...]] = []

    def ask(self, purpose: Purpose, request: JsonObject, *, timeout_s: float | None = None) -> AgentCall:
        about = request.get("argv") or [request.get("program"), *request.get("arguments", [request.get("path")])]
        self.asked.append((request["verb"], *(Path(word).name for word in about if word)))
        return super().ask(purpose, request, timeout_s=timeout_s)


class NotingSession(SSHSession):
    def __init__(self, access: SSHAccess, programs_dir: Path) -> None:
        super().__init__(access, python=sys.executable, programs_dir=str(programs_dir))
        self.agents = noting = NotingAgents(access)
        self.asked = noting.asked


def test_a_machine_that_is_ready_gets_no_files_and_runs_no_installer(ssh_server: SSHServer, tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')  # which finds no torch, and says so at once
    bare.chmod(0o755)
    node = Node(name="box", kind="ssh", root=str(tmp_path / "root"), python=str(bare))

    def make_ready(session: NotingSession) -> list[tuple[str, ...]]:
        """As tasks/bootstrap.py does; returns what was asked for."""
        num_before = len(session.asked)
        ensure_environment(session, node, [], installer="pip")
        probe_node(session, node)
        place_code(session, node)
        return session.asked[num_before:]

    with NotingSession(ssh_server.access, tmp_path / "programs") as session:
        first = {name.partition("-")[0] for _, name, *_ in make_ready(session)}
        assert {"environment_builder", "supervisor", "receiver", "node_probe"} <= first
        [code] = (tmp_path / "root/code").iterdir()
        probe = next((tmp_path / "programs").glob("node_probe-*.py")).name
        receiver = next(name for _, name, *_ in session.asked if name.startswith("receiver-"))
        nothing_new = [
            ("read", "result.json"),
            ("run", "python", ISOLATED, "-c", Path(LOOK).name),
            ("run", "python", "-Xutf8", probe, "probe", "root"),
            ("run", receiver, "sizes", code.name),
        ]
        assert make_ready(session) == nothing_new
    with NotingSession(ssh_server.access, tmp_path / "programs") as session:  # of the next run
        assert [asked for asked in make_ready(session) if asked != ("write", probe)] == nothing_new
