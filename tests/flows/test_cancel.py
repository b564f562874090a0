"""`rollouts cancel`, in whole runs: those that somebody follows, and those whose process is gone.

Without these tests a job whose run was killed could be stopped by its process id alone.
"""

from __future__ import annotations

import dataclasses
import json
import signal
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rollouts.flows.cancellation import NOT_PAUSED
from rollouts.flows.cli import app
from rollouts.flows.commands.cancel import find_deleted_run, find_flow_run, is_left_alone
from rollouts.flows.own_server.lend import ServerAddress, local_server
from rollouts.flows.prefect_api import ask
from rollouts.infra.ledger import LEDGER_FILE, Ledger
from rollouts.infra.renting.rentals import Rental, RentalState, add_rental
from rollouts_core.checkpoint import list_checkpoints, verify_checkpoint
from rollouts_core.errors import InputError
from tests.kit.commands import ROOT, Rollouts
from tests.kit.runs import (
    ENDLESS,
    LONG,
    assert_goes_on,
    assert_last_step_is_saved,
    assert_nothing_is_left,
    end_flow,
    events_of,
    paused,
    program_of,
    run_until,
)
from tests.kit.serving import kill_serving_and_flow, state_of, trigger, up, wait_for_checkpoint
from tests.kit.small_pipeline import write_small_pipeline
from tests.kit.waiting import wait_until

pytestmark = pytest.mark.slow


@pytest.mark.promise
def test_a_run_of_a_terminal_that_lives_is_cancelled_and_waited_for(rollouts: Rollouts, tmp_path: Path) -> None:
    process, sft = run_until(rollouts, write_small_pipeline(tmp_path / "small", mode="sft", **LONG), "sft")
    other = dataclasses.replace(rollouts, output=rollouts.output.with_name("other.txt"))
    name = f"small-{run_that_holds(rollouts)[:8]}"  # its server has other tests' runs, too, that never end
    with paused(program_of(sft)):
        asking = other.start("cancel", name)
        wait_for_request(sft, asking, other)
    assert asking.wait(60) == 0, other.said()
    assert f"{name}: cancelled" in other.said()
    assert process.wait(120) == 130, rollouts.said()
    assert (
        "rollouts: the run was cancelled in Prefect, or a final state was set there. Finished work is"
        in rollouts.said()
    )
    assert_last_step_is_saved(sft)
    assert_nothing_is_left(rollouts)
    code, output = rollouts.run("cancel", name)
    assert code == 2
    assert "is Cancelled and holds no jobs or machines: there is nothing to cancel" in output
    code, output = rollouts.run("cancel", "smaller")
    assert code == 2
    _, explained, others = output.partition("there is no run smaller; runs that can be cancelled: ")
    assert explained and name not in others


def test_pause_changes_nothing_and_delete_on_the_page_of_a_run_cancels_it(rollouts: Rollouts, tmp_path: Path) -> None:
    """Prefect writes down what was pressed, and the process that trains hears nothing of it."""
    process, sft = run_until(rollouts, write_small_pipeline(tmp_path / "small", mode="sft", **ENDLESS), "sft")
    with Ledger(rollouts.store / LEDGER_FILE) as ledger:
        (lease,) = ledger.leases()
    page = f"/flow_runs/{lease.run_id}"
    with local_server(rollouts.store) as address:
        details = {"pause_timeout": "2100-01-01T00:00:00Z", "pause_reschedule": True}
        pause = {"type": "PAUSED", "name": "Suspended", "state_details": details}
        ask(address, "POST", f"{page}/set_state", {"state": pause, "force": True})
        wait_until(lambda: ask(address, "GET", page)["state_name"] == "Running", what="the run, Running", every_s=0.5)
        assert ask(address, "GET", page)["state"]["message"] == NOT_PAUSED
        ask(address, "DELETE", page)
        assert process.wait(60) == 1, rollouts.said()
    ending = (
        "rollouts: the run was deleted in Prefect: its process ended\nFinished work is kept: the same command continues"
    )
    assert f"{ending} from there.\n" in rollouts.said()
    assert "Traceback" not in rollouts.said()
    assert json.loads((sft / "exit-1.json").read_text())["cancelled"]
    assert_nothing_is_left(rollouts)


def test_the_job_of_a_run_whose_process_was_killed_is_ended(rollouts: Rollouts, tmp_path: Path) -> None:
    process, sft = run_until(rollouts, write_small_pipeline(tmp_path / "small", mode="sft", **LONG), "sft")
    end_flow(process, signal.SIGKILL)
    run_id = run_that_holds(rollouts)
    name = f"small-{run_id[:8]}"
    other = dataclasses.replace(rollouts, output=rollouts.output.with_name("other.txt"))
    with paused(program_of(sft)):
        output = other.run("status")[1]
        assert f"without a run: the next run that needs it attaches to it, rollouts cancel {name} ends it" in output
        asking = other.start("cancel", name)
        wait_for_request(sft, asking, other)
    assert asking.wait(60) == 0, other.said()
    saved = json.loads((sft / "exit-1.json").read_text())["saved_step"]
    assert saved > 0
    assert f"{name}: ended the job in {sft}, step {saved} is saved; gave back local node" in other.said()
    assert json.loads((sft / "exit-1.json").read_text())["cancelled"]
    with local_server(rollouts.store) as address:
        assert ask(address, "GET", f"/flow_runs/{run_id}")["state_type"] == "CANCELLED"
    with Ledger(rollouts.store / LEDGER_FILE) as ledger:
        assert ledger.leases() == []
    last = verify_checkpoint(list_checkpoints(sft / "checkpoints")[-1])
    assert last.step == events_of(sft, "checkpoint")[-1]["step"]


@pytest.mark.matrix
def test_the_job_of_a_run_that_was_killed_and_then_deleted_in_prefect_is_ended(
    rollouts: Rollouts, tmp_path: Path
) -> None:
    process, sft = run_until(rollouts, write_small_pipeline(tmp_path / "small", mode="sft", **LONG), "sft")
    end_flow(process, signal.SIGKILL)
    run_id = run_that_holds(rollouts)
    with local_server(rollouts.store) as address:
        ask(address, "DELETE", f"/flow_runs/{run_id}")
    name = f"small-{run_id[:8]}"
    other = dataclasses.replace(rollouts, output=rollouts.output.with_name("other.txt"))
    assert f"rollouts cancel {name} ends it" in other.run("status")[1]
    code, output = other.run("cancel", name)
    assert code == 0, output
    assert f"cancelling     {name}, which was deleted in Prefect" in output
    assert f"{name}: ended the job in {sft}" in output
    assert json.loads((sft / "exit-1.json").read_text())["cancelled"]
    with Ledger(rollouts.store / LEDGER_FILE) as ledger:
        assert ledger.leases() == []
    code, output = other.run("cancel", name)
    assert code == 2 and f"there is no run {name}" in output


@pytest.mark.matrix
def test_a_served_run_that_nobody_serves_any_more_is_cancelled_and_not_started_again(
    served: Rollouts,
    tmp_path: Path,
) -> None:
    longer = LONG | {"training__sft__num_steps": 2_000}
    up(served, str(write_small_pipeline(tmp_path / "small", mode="sft", **longer)))
    run_id = trigger(served, "small")
    sft = wait_for_checkpoint(served, "sft")
    kill_serving_and_flow(served)
    assert_goes_on(sft)
    code, output = served.run("cancel", run_id)
    assert code == 0, output
    assert f"ended the job in {sft}" in output
    up(served)
    assert state_of(served, run_id) == "CANCELLED"


def test_a_named_server_says_whether_somebody_serves_what_a_lost_run_was_started_by(
    rollouts: Rollouts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else whoever cancels it waits twelve minutes for a process that may be on no machine at all."""
    store, run_id = rollouts.store, str(uuid.uuid4())
    with local_server(store) as address, Ledger(store / LEDGER_FILE) as ledger:
        flow = ask(address, "POST", "/flows/", {"name": "sft-rl"})
        deployment = ask(address, "POST", "/deployments/", {"name": "lost", "flow_id": flow["id"]})
        run = {"id": run_id, "deployment_id": deployment["id"]}
        monkeypatch.setenv("PREFECT_API_URL", address.api_url)
        assert not is_left_alone(address, ledger, store, run), "it never said that it lived"
        killed = "import os; run = Ledger(Path(sys.argv[1])).living_run(sys.argv[2]); run.__enter__(); os._exit(0)"
        program = f"import sys; from pathlib import Path; from rollouts.infra.ledger import Ledger; {killed}"
        subprocess.run([sys.executable, "-c", program, store / LEDGER_FILE, run_id], check=True, cwd=ROOT)
        assert is_left_alone(address, ledger, store, run)
        # As a serving process asks, on whatever machine it is.
        ask(address, "POST", "/deployments/get_scheduled_flow_runs", {"deployment_ids": [deployment["id"]]})
        wait_until(
            lambda: not is_left_alone(address, ledger, store, run), what="the sign of a serving process", every_s=0.5
        )


def test_a_machine_that_is_of_no_run_hinders_the_cancelling_of_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []

    def no_runs(_: ServerAddress, __: str, ___: str, question: dict[str, Any]) -> list[Any]:
        asked.append(question)
        return []

    monkeypatch.setattr("rollouts.flows.commands.cancel.ask", no_runs)
    address = ServerAddress(api_url="", ui_url="")
    with Ledger(tmp_path / LEDGER_FILE) as ledger, ledger.living_run(str(uuid.uuid4())):
        row = Rental(
            name="rollouts-1",
            run_id="",
            provider="runpod",
            purpose="",
            state=RentalState.RELEASING,
            gpu="unknown",
            region="",
            usd_per_hour=2.0,
            intended_at=0.0,
            expires_at=0.0,
        )
        add_rental(ledger, row)
        assert find_deleted_run(address, ledger, "small") is None
        with pytest.raises(InputError, match="there is no run small"):
            find_flow_run(address, ledger, tmp_path, "small")
    assert asked and all("" not in question.get("flow_runs", {}).get("id", {}).get("any_", ()) for question in asked)


def run_that_holds(rollouts: Rollouts) -> str:
    """The id of the only run that holds something."""
    with Ledger(rollouts.store / LEDGER_FILE) as ledger:
        (lease,) = ledger.leases()
    return lease.run_id


def wait_for_request(run_dir: Path, asking: subprocess.Popen[bytes], command: Rollouts) -> None:
    """Return when the job was asked to end, which the command that asks for it waits for."""
    request = run_dir / ".job/cancel-1"
    wait_until(lambda: request.exists() or asking.poll() is not None, what=f"{request}")
    assert request.exists(), command.said()


def test_a_store_without_runs_stays_none(tmp_path: Path) -> None:
    outcome = CliRunner().invoke(app, ["cancel", "small", "--store", str(tmp_path / "nothing")])
    assert outcome.exit_code == 2
    assert "no run has used it" in outcome.stderr
    assert not (tmp_path / "nothing").exists()
