"""Pins that what machines cost is counted for the stage during which it was paid, and nothing twice or not at all.

Without it nobody learns whether the money went into training, into evaluations, or into machines that were set up.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollouts.infra.ledger import Ledger
from rollouts.infra.renting.rentals import Rental, RentalState, add_rental, change_rental, find_rental
from rollouts.tasks.records import RunScope
from rollouts.tasks.spending import note_spending, spending_of, with_spending

HOUR = 3600.0


@pytest.fixture
def scope(tmp_path: Path) -> RunScope:
    return RunScope(run_id="mine", run_name="small", store=str(tmp_path))


@pytest.fixture
def ledger(scope: RunScope) -> Iterator[Ledger]:
    with Ledger(scope.ledger_path) as ledger:
        yield ledger


@pytest.fixture
def began() -> float:
    """Ten hours ago."""
    return time.time() - 10 * HOUR


def rent(ledger: Ledger, name: str, *, rented_at: float | None, ended_at: float | None, usd_per_hour: float) -> None:
    row = Rental(
        name=name,
        run_id="mine",
        provider="runpod",
        purpose="",
        state=RentalState.READY if ended_at is None else RentalState.GONE,
        gpu="1x H100",
        region="",
        usd_per_hour=usd_per_hour,
        intended_at=0.0,
        rented_at=rented_at,
        ended_at=ended_at,
        expires_at=1e12,
    )
    add_rental(ledger, row)


def test_a_stage_costs_what_machines_cost_meanwhile_and_the_rest_is_outside(
    scope: RunScope, ledger: Ledger, began: float
) -> None:
    rent(ledger, "lost", rented_at=began, ended_at=began + 2 * HOUR, usd_per_hour=1.0)
    rent(ledger, "next", rented_at=began + 3 * HOUR, ended_at=began + 9 * HOUR, usd_per_hour=2.0)
    rent(ledger, "beside", rented_at=began + 3 * HOUR, ended_at=began + 9 * HOUR, usd_per_hour=0.5)
    rent(ledger, "never there", rented_at=None, ended_at=began, usd_per_hour=100.0)
    stages = {
        "sft": (began + HOUR, 3 * HOUR),  # an hour on the first machine, one on none, one on the others
        "rl": (began + 5 * HOUR, 2 * HOUR),
        "evaluate": (0.0, 0.0),  # it was there
    }
    spending = spending_of(stages, scope)
    assert spending is not None and spending.is_final
    assert spending.usd_by_stage == pytest.approx({"sft": 1.0 + 2.5, "rl": 5.0, "evaluate": 0.0})
    assert spending.total_usd == pytest.approx(2 * 1.0 + 6 * 2.5)
    assert spending.outside_stages_usd == pytest.approx(17.0 - 8.5)


def test_a_machine_that_is_still_rented_is_counted_until_now(scope: RunScope, ledger: Ledger, began: float) -> None:
    rent(ledger, "here", rented_at=began, ended_at=None, usd_per_hour=2.0)
    spending = spending_of({"sft": (began + 5 * HOUR, 5 * HOUR)}, scope)
    assert spending is not None and not spending.is_final
    assert spending.total_usd == pytest.approx(20.0, abs=0.1)
    assert spending.usd_by_stage["sft"] == pytest.approx(10.0, abs=0.1)


def test_where_nothing_was_rented_nothing_is_said(scope: RunScope, ledger: Ledger) -> None:
    assert spending_of({"sft": (0.0, 5.0)}, scope) is None
    run = with_spending({"stages": [{"stage": "sft"}]}, None)
    assert run == {"stages": [{"stage": "sft", "usd": None}], "spent": None}


def test_the_end_of_the_machine_is_noted_in_what_was_written_before(
    scope: RunScope, ledger: Ledger, began: float
) -> None:
    note_spending(scope)  # a run that failed wrote nothing
    rent(ledger, "here", rented_at=began, ended_at=None, usd_per_hour=2.0)
    path = scope.output_dir / "run.json"
    path.parent.mkdir(parents=True)
    stages = [{"stage": "sft", "began_at": began, "seconds": HOUR}]
    path.write_text(json.dumps({"run_id": "mine", "stages": stages, "spent": {"total_usd": 1.0}}))
    row = find_rental(ledger, "here")
    assert row is not None
    change_rental(ledger, row, state=RentalState.GONE, ended_at=began + 4 * HOUR)
    note_spending(scope)
    run = json.loads(path.read_text())
    assert (run["run_id"], run["stages"][0]["usd"], run["stages"][0]["seconds"]) == ("mine", 2.0, HOUR)
    spent = run["spent"]
    assert (spent["total_usd"], spent["outside_stages_usd"], spent["is_final"]) == (8.0, 6.0, True)
