"""A run's state comes to say what is true, by itself and within minutes, whatever kept its process from saying it.

Without these tests runs stay Running or AwaitingRetry for ever, block their deployment, and are not started again.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from rollouts.flows.commands.serving_state import find_serving
from rollouts.flows.lost_runs import NO_DEPLOYMENT, STARTED_AGAIN
from tests.kit.commands import ROOT, Rollouts, clean_environment, pids_of
from tests.kit.runs import ENDLESS, events_of
from tests.kit.serving import api, flows_of, set_state, state_of, train_endlessly, trigger, up, wait_for_checkpoint
from tests.kit.small_pipeline import write_small_pipeline
from tests.kit.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.matrix]
WITHIN_S = 240.0
LONGER_THAN_PREFECTS_LEASE_S = 330.0
"""Prefect gives a run's slot away if the slot's lease was not renewed for 300 s."""
NOTICED_S = 60.0
"""A run whose slot is lost notices this within 30 s after it goes on."""

SHORT_LEASES = """
import sys
if "--multiprocessing-fork" in sys.orig_argv:
    from prefect import flow_engine
    maintain = flow_engine.maintain_concurrency_lease
    flow_engine.maintain_concurrency_lease = lambda lease_id, _, **options: maintain(lease_id, 60, **options)
"""
AWAY_AT_THE_END = """
import sys
if "--multiprocessing-fork" in sys.orig_argv:
    import os
    import httpx
    from prefect.client.orchestration import SyncPrefectClient
    set_state = SyncPrefectClient.set_flow_run_state
    def set_unless_ended(self, flow_run_id, state, force=False):
        if not state.is_final():
            return set_state(self, flow_run_id, state, force=force)
        if {is_vanishing}:
            os._exit(0)  # no word to the process that serves, either
        raise httpx.ConnectError("the server is away")
    SyncPrefectClient.set_flow_run_state = set_unless_ended
"""


def up_with(rollouts: Rollouts, folder: Path, program: str, config: Path) -> None:
    """`up`, with a program that each process of a run begins with."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(program)
    done = subprocess.run(
        [sys.executable, "-m", "rollouts.flows.cli", "up", str(config), "--store", str(rollouts.store)],
        env=clean_environment() | {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT / 'src'}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def flow_of(rollouts: Rollouts) -> int:
    """The process of the only run."""
    serving = find_serving(rollouts.store)
    assert serving is not None
    (flow,) = flows_of(serving.pid)
    return flow


def message_of(rollouts: Rollouts, run_id: str) -> str:
    return str(api(rollouts, "GET", f"/flow_runs/{run_id}")["state"]["message"] or "")


def test_a_run_that_stood_still_until_its_slot_was_lost_is_started_again(
    served: Rollouts,
    tmp_path: Path,
) -> None:
    """As a retraining on a machine that was suspended."""
    config = write_small_pipeline(tmp_path / "small", mode="sft", run={"name": "small", "restarts": 1}, **ENDLESS)
    up_with(served, tmp_path / "first", SHORT_LEASES, config)
    limit_to_one_run(served)
    run_id = trigger(served, "small")
    wait_for_checkpoint(served, "sft")
    flow = flow_of(served)
    os.kill(flow, signal.SIGSTOP)
    time.sleep(90)
    os.kill(flow, signal.SIGCONT)
    wait_until(lambda: is_started_again(served, run_id), what="a new start", timeout_s=WITHIN_S, every_s=2.0)
    assert flow_of(served) != flow
    set_state(served, run_id, "CANCELLING")
    wait_until(lambda: state_of(served, run_id) == "CANCELLED", what="the end", timeout_s=90.0)


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("with_server", [False, True], ids=["paused_container", "suspended_machine"])
def test_a_run_that_stood_still_with_its_jobs_for_over_five_minutes_trains_on(
    with_server: bool, served: Rollouts, tmp_path: Path
) -> None:
    """With the lease that Prefect gives. A server on another machine ends the run, which then starts again."""
    config = write_small_pipeline(tmp_path / "small", mode="sft", run={"name": "small", "restarts": 1}, **ENDLESS)
    up(served, str(config))
    limit_id = limit_to_one_run(served)
    run_id = trigger(served, "small")
    directory = wait_for_checkpoint(served, "sft")
    stand_still(served.store, with_server=with_server)
    num_checkpoints = len(events_of(directory, "checkpoint"))
    if with_server:
        time.sleep(NOTICED_S)
    else:
        wait_until(lambda: is_started_again(served, run_id), what="a new start", timeout_s=WITHIN_S, every_s=2.0)

    def is_training() -> bool:
        return (
            state_of(served, run_id) == "RUNNING"
            and api(served, "GET", f"/v2/concurrency_limits/{limit_id}")["active_slots"] == 1
            and len(events_of(directory, "checkpoint")) > num_checkpoints
        )

    wait_until(is_training, what="a run that has its slot and trains", timeout_s=WITHIN_S, every_s=2.0)
    assert flow_of(served)
    set_state(served, run_id, "CANCELLING")
    wait_until(lambda: state_of(served, run_id) == "CANCELLED", what="the end", timeout_s=90.0)


def limit_to_one_run(rollouts: Rollouts) -> str:
    """Give the deployment the limit that a retraining has; returns the limit's id."""
    deployment = api(rollouts, "GET", "/deployments/name/sft-rl/small")["id"]
    api(rollouts, "PATCH", f"/deployments/{deployment}", {"concurrency_limit": 1})
    return str(api(rollouts, "GET", f"/deployments/{deployment}")["global_concurrency_limit"]["id"])


def stand_still(store: Path, *, with_server: bool) -> None:
    """Stop the serving process, the run and its jobs until Prefect's lease is over, and let them go on."""
    server = json.loads((store / "prefect" / "server.json").read_text())["pid"]
    family = family_of(store) - (set() if with_server else {server})
    try:
        for pid in family:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(LONGER_THAN_PREFECTS_LEASE_S)
    finally:
        for pid in family:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def family_of(store: Path) -> set[int]:
    """The processes of a store, and all their children."""
    listing = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=True)
    pairs = [line.split() for line in listing.stdout.splitlines()]
    found = set(pids_of(store))
    while children := {int(pid) for pid, parent in pairs if int(parent) in found} - found:
        found |= children
    return found


def is_started_again(rollouts: Rollouts, run_id: str) -> bool:
    """Whether the run was started again and runs now."""
    states = api(rollouts, "GET", f"/flow_run_states/?flow_run_id={run_id}")
    again = [state for state in states if (state["message"] or "").startswith(STARTED_AGAIN)]
    return bool(again) and state_of(rollouts, run_id) == "RUNNING"


@pytest.mark.parametrize("is_vanishing", [False, True])
def test_a_run_that_could_not_report_its_end_gets_the_state_in_which_it_ended(
    is_vanishing: bool,
    served: Rollouts,
    tmp_path: Path,
) -> None:
    config = write_small_pipeline(tmp_path / "small", mode="sft")
    up_with(served, tmp_path / "first", AWAY_AT_THE_END.format(is_vanishing=is_vanishing), config)
    run_id = trigger(served, "small")
    wait_until(lambda: list(served.store.glob("ledger.ends/*")) != [], what="the end of the run", timeout_s=WITHIN_S)
    assert state_of(served, run_id) != "COMPLETED"
    wait_until(
        lambda: state_of(served, run_id) == "COMPLETED", what="the state Completed", timeout_s=WITHIN_S, every_s=2.0
    )
    wait_until(lambda: list(served.store.glob("ledger.ends/*")) == [], what="the record, forgotten", timeout_s=60.0)


def test_a_killed_run_whose_deployment_was_deleted_is_crashed_and_says_why(
    served: Rollouts,
    tmp_path: Path,
) -> None:
    run_id, _ = train_endlessly(served, tmp_path / "small")
    api(served, "DELETE", f"/deployments/{api(served, 'GET', '/deployments/name/sft-rl/small')['id']}")
    os.kill(flow_of(served), signal.SIGKILL)
    wait_until(lambda: message_of(served, run_id) == NO_DEPLOYMENT, what="the reason", timeout_s=120.0, every_s=1.0)
    assert state_of(served, run_id) == "CRASHED"
    again = {"type": "SCHEDULED", "name": "AwaitingRetry"}  # Retry, on its page
    api(served, "POST", f"/flow_runs/{run_id}/set_state", {"state": again})
    wait_until(lambda: state_of(served, run_id) == "CRASHED", what="Crashed", timeout_s=120.0, every_s=1.0)
    code, output = served.run("cancel", run_id)
    assert code == 0, output
