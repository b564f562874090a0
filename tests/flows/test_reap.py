"""The deployment `reap`: a real Prefect server, a provider that is a real HTTP server.

Without these tests somebody could press Run, read Completed, and go on paying; or a look of the schedule could end the
machine of a run that lives.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from rollouts.infra.ledger import LEDGER_FILE, Ledger
from rollouts.infra.providers.runpod import RunPod
from rollouts.infra.renting.rentals import Rental, change_rental
from tests.infra.fake_cloud import KEY
from tests.infra.fake_runpod import FakeRunPod
from tests.kit.commands import Rollouts
from tests.kit.renting import REQUEST, World
from tests.kit.serving import api, logs_of, trigger, up, wait_for_state
from tests.kit.waiting import wait_until

pytestmark = pytest.mark.slow


def reap(rollouts: Rollouts, *assignments: str, state: str = "COMPLETED") -> tuple[str, list[dict[str, str]]]:
    """The message and the table of a run of the deployment."""
    run_id = trigger(rollouts, "reap", *assignments)
    wait_for_state(rollouts, run_id, state)
    run: dict[str, Any] = api(rollouts, "GET", f"/flow_runs/{run_id}")
    question = {"artifacts": {"flow_run_id": {"any_": [run_id]}, "key": {"any_": [f"machines-{run_id}"]}}}
    [table] = api(rollouts, "POST", "/artifacts/filter", question)
    rows = json.loads(table["data"])
    wait_until(
        lambda: all(not row["machine"] or row["machine"] in logs_of(rollouts, run_id) for row in rows),
        what="the log of the run",
    )
    return run["state"]["message"], rows


def expire(path: Path, rental: Rental) -> None:
    with Ledger(path) as ledger:
        change_rental(ledger, rental, expires_at=time.time() - 1)


@pytest.mark.matrix
def test_what_nobody_wants_is_ended_and_the_table_says_what_stays_and_why(
    served: Rollouts,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake = FakeRunPod()
    ledger_path = served.store / LEDGER_FILE
    with fake.served() as url, RunPod(KEY, url) as cloud:
        monkeypatch.setenv("RUNPOD_API_KEY", KEY)
        monkeypatch.setenv("RUNPOD_API_URL", url)
        up(served)
        deployment = api(served, "GET", "/deployments/name/reap/reap")
        [schedule] = deployment["schedules"]
        assert (schedule["active"], schedule["schedule"]["cron"]) == (True, "17 * * * *")
        message, rows = reap(served)
        assert (message, rows) == ("0 ended, 0 kept", [{"outcome": "nothing is rented", "machine": ""}])

        world = World(fake, cloud, ledger_path)
        with Ledger(ledger_path) as ledger, ledger.living_run(REQUEST.run_id):
            rental = world.rent()
            message, [row] = reap(served, "reap.spare=false")
            assert (message, row["outcome"]) == ("0 ended, 1 kept", "kept")
            assert row["machine"] == f"{rental.name}: ready, of run {REQUEST.run_id}, which lives"
        message, [row] = reap(served)
        assert (message, row["outcome"]) == ("0 ended, 1 kept", "kept")
        assert f"of run {REQUEST.run_id}, whose next start may take it until " in row["machine"]
        assert len(fake.alive()) == 1
        message, [row] = reap(served, "reap.spare=false")
        assert (message, row["outcome"]) == ("1 ended, 0 kept", "ended")
        assert row["machine"].startswith(f"{rental.name} at runpod")
        assert fake.alive() == []


@pytest.mark.matrix
def test_a_provider_that_cannot_be_asked_fails_the_run_with_a_sentence(
    served: Rollouts,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake = FakeRunPod()
    with fake.served() as url, RunPod(KEY, url) as cloud:
        world = World(fake, cloud, served.store / LEDGER_FILE)
        with Ledger(world.path) as ledger, ledger.living_run(REQUEST.run_id):
            rental = world.rent()
    monkeypatch.setenv("RUNPOD_API_KEY", KEY)
    monkeypatch.setenv("RUNPOD_API_URL", url)  # where nobody listens any more
    up(served)
    expire(world.path, rental)
    message, [row] = reap(served, state="FAILED")
    assert row["outcome"] == "failed"
    assert "0 ended, 0 kept, 1 not checked or not ended: " in message
