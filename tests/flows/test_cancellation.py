"""Pins that a machine of engines that is lost keeps no cancelled run's training alive on another one.

Without it a training that nobody wants goes on for days, because a machine that it does not need is away.
"""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from prefect.client.schemas.objects import FlowRun

from rollouts.flows.cancellation import (
    Wish,
    ended_when_cancelled,
    give_back_reached,
    is_cancelled,
    release_for,
    release_without_settings,
)
from rollouts.flows.credentials import run_with_credentials
from rollouts.infra.errors import NodeUnreachableError, TransientInfraError
from rollouts.infra.jobs import JobState, job_status, start_or_attach
from rollouts.infra.ledger import LEDGER_FILE, Ledger
from rollouts.infra.node import FurtherNode, LocalNode, SSHNode
from rollouts.infra.providers import provision_node
from rollouts.infra.session import LocalSession
from rollouts.tasks.records import RunScope
from tests.infra.shell_jobs import shell_spec
from tests.infra.ssh_server import running_server

pytestmark = pytest.mark.timeout(120)


def test_a_run_that_ended_itself_knows_that_it_was_cancelled_whatever_the_server_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It ends where servers fail, and would leave its machine rented."""
    monkeypatch.setattr("rollouts.flows.cancellation.get_client", None)  # whoever asks it fails
    monkeypatch.setattr("rollouts.flows.cancellation._ended_by_themselves", {"run-a"})
    assert is_cancelled("run-a")


def test_a_run_that_a_script_started_beside_itself_is_cancelled_and_hears_no_ctrl_c(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Shells start such a process deaf to SIGINT, by which a run of `rollouts run` ends itself."""
    is_asked = False
    monkeypatch.setattr(
        "rollouts.flows.cancellation.read_wish", lambda _: Wish.END_UNLESS_ENDED if is_asked else Wish.GO_ON
    )
    monkeypatch.setattr("rollouts.flows.cancellation.call_running", lambda _: None)
    monkeypatch.setattr("rollouts.flows.cancellation.LOOK_S", 0.01)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with pytest.raises(KeyboardInterrupt), ended_when_cancelled("run-a", is_served=False):
            signal.raise_signal(signal.SIGINT)
            is_asked = True
            time.sleep(20)
            pytest.fail("nobody ended it")
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_run_that_was_cancelled_before_its_settings_were_checked_held_nothing(tmp_path: Path) -> None:
    parameters = {"config": {}, "node": {"kind": "ssh"}, "run": {"store": str(tmp_path)}}  # without a host
    run = FlowRun(name="small", flow_id=uuid4(), parameters=parameters)
    assert release_for(run) == "nothing was left to give back"


@pytest.mark.slow
def test_the_training_of_a_cancelled_run_ends_although_its_engines_machine_is_lost(tmp_path: Path) -> None:
    scope = RunScope(run_id="run-a", run_name="small", store=str(tmp_path / "store"))
    session = LocalSession(sys.executable)
    with running_server(tmp_path / "sshd") as server:
        login: dict[str, Any] = {
            "key_file": server.access.key_file,
            "python": sys.executable,
            "root": str(tmp_path / "root"),
        }
        lost = FurtherNode(host="me@127.0.0.1:1", **login)
        host, pinned = f"{server.access.user}@127.0.0.1:{server.access.port}", server.access.host_key
        settings = SSHNode(host=host, host_key=pinned, engine_nodes=(lost,), **login)
        sft, engine = f"{tmp_path}/root/stages/sft-1", f"{tmp_path}/root/stages/engine-1-0"
        start_or_attach(session, shell_spec(Path(sft), "sleep 60"))
        with Ledger(scope.ledger_path) as ledger:
            ledger.add_lease(sft, scope.run_id, host)
            ledger.add_lease(engine, scope.run_id, lost.host)
            said = give_back_reached(settings, scope)
            assert ledger.leases_of(scope.run_id) == []
        assert job_status(session, sft).state is not JobState.RUNNING
        assert said[0].startswith(
            "the jobs on its further machines end by themselves within a minute (me@127.0.0.1:1 does not answer"
        )
        assert said[1:] == [f"ended the job in {sft}", f"gave back ssh node {host}"]
        with pytest.raises(NodeUnreachableError):
            give_back_reached(SSHNode(host=lost.host, **login), scope)


@pytest.mark.slow
def test_without_its_settings_the_jobs_of_a_run_end_here_and_its_claims_elsewhere_stay(tmp_path: Path) -> None:
    store = tmp_path / "store"
    here = provision_node(LocalNode(), store)
    session, sft = LocalSession(sys.executable), f"{store}/stages/sft-1"
    start_or_attach(session, shell_spec(Path(sft), "sleep 60"))
    with Ledger(store / LEDGER_FILE) as ledger:
        ledger.add_lease(sft, "run-a", here.name)
        ledger.add_lease("/elsewhere/stages/rl-1", "run-a", "me@elsewhere")
        assert release_without_settings("run-a", store) == f"ended the job in {sft}"
        assert job_status(session, sft).state is not JobState.RUNNING
        assert [lease.node for lease in ledger.leases_of("run-a")] == ["me@elsewhere"]
    assert release_without_settings("run-a", store) == "nothing was left to give back"


def test_what_fails_with_the_credentials_of_a_run_is_said_in_its_own_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollouts.flows.credentials.variables_of", lambda name: {"PYTHONPATH": str(tmp_path)})
    (tmp_path / "failing.py").write_text("raise SystemExit('Traceback\\n  of many lines\\nthe ledger cannot be read')")
    with pytest.raises(TransientInfraError, match=r"^failing ended with code 1: the ledger cannot be read$"):
        run_with_credentials("team", "failing")
