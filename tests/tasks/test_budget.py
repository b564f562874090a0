"""Pins how much of the time of a rented machine is for work, and how much for ending it.

Without it a run on a machine that another one has had for hours is stopped before it has begun.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from rollouts.infra.jobs import start_or_attach
from rollouts.infra.ledger import Ledger
from rollouts.infra.node import Node
from rollouts.infra.renting.rentals import Rental, RentalState, add_rental
from rollouts.infra.session import LocalSession
from rollouts.tasks.budget import MARGIN_S, cancel_jobs, end_of_work
from rollouts.tasks.node_job import longest_grace_s
from rollouts.tasks.records import RunScope
from tests.infra.shell_jobs import shell_spec
from tests.kit.waiting import wait_until

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
    node = rent(scope, had_s=had_s, left_s=left_s, now=now)
    assert end_of_work(node, scope, now) == pytest.approx(now + work_s, abs=0.001)


@pytest.mark.parametrize(("left_s", "stop_timeout_s"), [(HOUR_S, 600.0), (HOUR_S, 30.0), (600.0, 600.0), (-5.0, 600.0)])
def test_a_save_takes_no_more_than_half_of_a_rented_machines_time(
    tmp_path: Path, left_s: float, stop_timeout_s: float
) -> None:
    """The other half is for fetching what was saved."""
    scope = RunScope(run_id="run", run_name="small", store=str(tmp_path), stop_timeout_s=stop_timeout_s)
    node = rent(scope, had_s=60.0, left_s=left_s, now=time.time())
    expected = min(stop_timeout_s, max(0.0, left_s / 2))
    assert longest_grace_s(node, scope) == pytest.approx(expected, abs=1.0)
    own = Node(name="box", kind="ssh", root="/", python="/python", mirror=str(tmp_path))
    assert longest_grace_s(own, scope) == stop_timeout_s


def rent(scope: RunScope, *, had_s: float, left_s: float, now: float) -> Node:
    """The node of a machine that the run rented, as its ledger has it."""
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
    return Node(name="machine", kind="rented", root="/", python="/python", mirror=scope.store, is_rented=True)


@pytest.mark.slow
def test_a_training_is_ended_while_it_still_has_its_engine(tmp_path: Path) -> None:
    node = Node(name="local", kind="local", root=str(tmp_path), python=sys.executable)
    scope = RunScope(run_id="run", run_name="small", store=str(tmp_path / "store"))
    rl, engine = (tmp_path / "stages" / name for name in ("rl-1", "engine-1-0"))
    with Ledger(scope.ledger_path) as ledger:
        ledger.claim(str(rl), scope.run_id, node.name)  # as a run does before it starts its engines
        for run_dir in (engine, rl):
            ledger.add_lease(str(run_dir), scope.run_id, node.name)
            script = f"trap 'echo {run_dir.name} >> {tmp_path}/ends; exit' TERM; echo up; while :; do sleep 0.05; done"
            start_or_attach(LocalSession(sys.executable), shell_spec(run_dir, script))
    wait_until(lambda: [(run_dir / "log.txt").read_text() for run_dir in (rl, engine)] == 2 * ["up\n"])
    cancel_jobs(node, scope)
    assert (tmp_path / "ends").read_text().split() == ["rl-1", "engine-1-0"]
