"""Pins how much of the time of a rented machine is for work, and how much for ending it.

Without it a run on a machine that another one has had for hours is stopped before it has begun.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from infra.ledger import Ledger
from infra.node import Node
from infra.renting.rentals import Rental, RentalState, add_rental
from tasks.budget import MARGIN_S, end_of_work
from tasks.records import RunScope

HOUR_S = 3600.0


@pytest.mark.parametrize(
    ("had_s", "left_s", "work_s"),
    [
        (0.0, 24 * HOUR_S, 24 * HOUR_S - MARGIN_S),
        (0.0, 360.0, 288.0),
        (4 * HOUR_S, 360.0, 288.0),
        (4 * HOUR_S, 2 * HOUR_S, 2 * HOUR_S - MARGIN_S),
    ],
)
def test_work_ends_ten_minutes_before_the_machine_and_of_a_short_time_after_four_fifths(
    tmp_path: Path, had_s: float, left_s: float, work_s: float
) -> None:
    scope = RunScope(run_id="run", run_name="small", store=str(tmp_path))
    now = time.time()
    with Ledger(scope.ledger_path) as ledger:
        row = Rental(
            name="machine",
            run_id="run",
            provider="runpod",
            purpose="",
            state=RentalState.READY,
            gpu="1x H100",
            region="",
            usd_per_hour=2.0,
            intended_at=now - had_s,
            expires_at=now + left_s,
        )
        add_rental(ledger, row)
    node = Node(name="machine", provider="provision", root="/", python="/python", mirror=str(tmp_path), is_rented=True)
    assert end_of_work(node, scope, now) == pytest.approx(now + work_s, abs=0.001)
