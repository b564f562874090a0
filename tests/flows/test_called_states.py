"""A state that a user or a program sets while a run lives: what lives follows it, in whole runs.

Without these tests a run that is called Cancelled or Failed trains on for days, and no command stops it.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from rollouts.flows.commands.serving_state import find_serving
from rollouts.flows.own_server.lend import local_server
from rollouts.flows.prefect_api import ask
from rollouts.infra.ledger import LEDGER_FILE, Ledger
from rollouts_core.checkpoint import list_checkpoints, verify_checkpoint
from tests.flows.test_cancel import run_that_holds
from tests.kit.commands import Rollouts
from tests.kit.runs import ENDLESS, assert_goes_on, assert_nothing_is_left, paused, run_until
from tests.kit.serving import flows_of, state_of, train_endlessly
from tests.kit.small_pipeline import write_small_pipeline
from tests.kit.waiting import wait_until

pytestmark = pytest.mark.slow


def call(rollouts: Rollouts, run_id: str, state: str, *, message: str = "said by hand") -> None:
    """Set a state as the UI and programs can, whatever Prefect's rules are."""
    with local_server(rollouts.store) as address:
        question = {"state": {"type": state, "message": message}, "force": True}
        ask(address, "POST", f"/flow_runs/{run_id}/set_state", question)


def wait_until_given_up(rollouts: Rollouts, run_id: str, stage: Path) -> None:
    """Return when the run holds nothing and has no process; its job has ended with a checkpoint."""
    with Ledger(rollouts.store / LEDGER_FILE) as ledger:
        wait_until(lambda: not ledger.leases_of(run_id) and not ledger.is_alive(run_id), what="the end", timeout_s=90.0)
    assert json.loads((stage / "exit-1.json").read_text())["cancelled"]
    verify_checkpoint(list_checkpoints(stage / "checkpoints")[-1])


@pytest.mark.matrix
@pytest.mark.parametrize("state", ["CANCELLED", "FAILED", "COMPLETED"])
def test_a_served_run_that_is_called_ended_ends_and_keeps_that_state(
    state: str,
    served: Rollouts,
    tmp_path: Path,
) -> None:
    run_id, sft = train_endlessly(served, tmp_path / "small")
    call(served, run_id, state)
    wait_until_given_up(served, run_id, sft)
    wait_until(lambda: state_of(served, run_id) == state, what=f"the state {state}")
    with local_server(served.store) as address:
        assert ask(address, "GET", f"/flow_runs/{run_id}")["state"]["message"] == "said by hand"


@pytest.mark.matrix
def test_a_run_of_a_terminal_that_is_called_failed_ends(rollouts: Rollouts, tmp_path: Path) -> None:
    process, sft = run_until(rollouts, write_small_pipeline(tmp_path / "small", mode="sft", **ENDLESS), "sft")
    run_id = run_that_holds(rollouts)
    call(rollouts, run_id, "FAILED")
    assert process.wait(60) == 130, rollouts.said()
    wait_until_given_up(rollouts, run_id, sft)
    assert state_of(rollouts, run_id) == "FAILED"
    assert_nothing_is_left(rollouts)


@pytest.mark.matrix
@pytest.mark.parametrize("state", ["FAILED", "CRASHED"])
def test_cancel_ends_a_living_run_whatever_it_is_called(
    state: str,
    served: Rollouts,
    tmp_path: Path,
) -> None:
    run_id, sft = train_endlessly(served, tmp_path / "small")
    serving = find_serving(served.store)
    assert serving is not None
    (flow,) = flows_of(serving.pid)
    with paused(flow):  # it cannot follow the state by itself
        call(served, run_id, state)
        code, output = dataclasses.replace(served, output=tmp_path / "cancel.txt").run("cancel", run_id)
    assert code == 0, output
    wait_until_given_up(served, run_id, sft)
    assert state_of(served, run_id) == "CANCELLED"


@pytest.mark.matrix
def test_a_run_that_is_called_crashed_leaves_its_job_and_one_that_was_not_heard_of_goes_on(
    served: Rollouts,
    tmp_path: Path,
) -> None:
    run_id, sft = train_endlessly(served, tmp_path / "small")
    call(served, run_id, "CRASHED", message="nothing was heard of its process for 10 minutes; its jobs go on")
    wait_until(lambda: state_of(served, run_id) == "RUNNING", what="the run, Running", timeout_s=60.0)
    call(served, run_id, "CRASHED")
    with Ledger(served.store / LEDGER_FILE) as ledger:
        wait_until(lambda: ledger.has_died(run_id), what="the end of its process", timeout_s=60.0)
    assert_goes_on(sft)
    wait_until(lambda: state_of(served, run_id) == "CRASHED", what="the state")
    code, output = dataclasses.replace(served, output=tmp_path / "cancel.txt").run("cancel", run_id)
    assert code == 0, output
    wait_until_given_up(served, run_id, sft)
