"""Compute the cost of a run's rented machines from the ledger: per stage, outside of stages, and in total.

Not here: prices and times of rentals (infra/renting/rentals.py), the limit of a run's cost (budget.py).

    ledger     |<------------- rented, at a price per hour ------------->|
    stages           |<--- sft --->|<-- select-sft -->|    |<-- rl -->|
    outside    boot, set-up                             engines         sync, end

The stages of a run's earlier attempts count as outside of stages, because the last attempt did not wait for them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rollouts.infra.ledger import Ledger
from rollouts.infra.renting.rentals import rentals_of
from rollouts.tasks.records import RunScope, StageRecord, TaskRecord
from rollouts.tasks.store_paths import RUN_FILE
from rollouts_core.system.files import write_json


class Spending(TaskRecord):
    """Money that a run has spent on machines, in US dollars."""

    total_usd: float
    outside_stages_usd: float
    """Cost of the time without a stage: booting and setting up machines, starting engines, earlier attempts."""
    until: float
    """The costs are counted until this time, in seconds since 1970."""
    is_final: bool
    """Whether all rented machines have been released, so that the costs no longer rise."""
    usd_by_stage: dict[str, float]


def spending_of(stages: Mapping[str, tuple[float, float]], scope: RunScope) -> Spending | None:
    """Money that a run has spent on machines until now, or None if the run rented no machine.

    Args:
        stages: start (seconds since 1970) and duration (seconds) of each stage, by name. Stages do not overlap.
    """
    now = time.time()
    with Ledger(scope.ledger_path) as ledger:
        rentals = [rental for rental in rentals_of(ledger, scope.run_id) if rental.rented_at is not None]
    if not rentals:
        return None
    usd_by_stage = {
        name: sum(rental.usd_within(began_at, min(now, began_at + seconds)) for rental in rentals)
        for name, (began_at, seconds) in stages.items()
    }
    total_usd = sum(rental.usd(now) for rental in rentals)
    return Spending(
        total_usd=total_usd,
        outside_stages_usd=max(0.0, total_usd - sum(usd_by_stage.values())),
        until=now,
        is_final=all(rental.state.is_over for rental in rentals),
        usd_by_stage=usd_by_stage,
    )


def spending_of_records(records: Sequence[StageRecord], scope: RunScope) -> Spending | None:
    """Money that a run has spent on machines, as in `spending_of`, with the stages of these records."""
    return spending_of({record.stage: (record.began_at, record.seconds) for record in records}, scope)


def with_spending(run: Mapping[str, Any], spending: Spending | None) -> dict[str, Any]:  # Any: JSON
    """Add the costs to the content of run.json: `spent` and each stage's `usd`. Without rented machines, add nulls."""
    usd_by_stage = spending.usd_by_stage if spending else {}
    stages = [{**stage, "usd": _rounded(usd_by_stage.get(stage["stage"]))} for stage in run["stages"]]
    spent = spending and {
        "total_usd": _rounded(spending.total_usd),
        "outside_stages_usd": _rounded(spending.outside_stages_usd),
        "until": spending.until,
        "is_final": spending.is_final,
    }
    return {**run, "stages": stages, "spent": spent}


def note_spending(scope: RunScope) -> None:
    """Update the costs in an existing run.json. The report wrote this file while the machine was still rented."""
    path = scope.output_dir / RUN_FILE
    if not path.is_file():
        return
    run = json.loads(path.read_text())
    stages = {stage["stage"]: (stage.get("began_at", 0.0), stage["seconds"]) for stage in run["stages"]}
    write_json(path, with_spending(run, spending_of(stages, scope)))


def _rounded(usd: float | None) -> float | None:
    return None if usd is None else round(usd, 4)
