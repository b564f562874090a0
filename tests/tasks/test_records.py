"""Pins that each run has a folder and artifacts of its own.

Without it a later run of a schedule would write its checkpoint over that of an earlier one, which may be in production,
and the card of a run in Prefect's UI would open the page of another run.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from rollouts.infra.ledger import Ledger
from rollouts.infra.renting.rentals import machine_name
from rollouts.infra.run_ids import short_id
from rollouts.tasks.records import RunScope, artifact_key

PLANNED_TOGETHER = ("01a21093-4d30-7389-9d67-c573ecd4e99d", "01a21093-4d30-70b1-abb8-fa180da630c9")
"""Ids that Prefect's server gave to two runs of one schedule."""

RANDOM = "5793d50a-85e8-4afe-bbfa-f9b79b3e03ec"


def test_runs_that_were_planned_together_have_folders_of_their_own() -> None:
    first, second = (RunScope(run_id=run_id, run_name="small", store="/store") for run_id in PLANNED_TOGETHER)
    assert first.output_dir != second.output_dir
    assert first.output_dir.name == "small-ecd4e99d"


@pytest.mark.parametrize(("name", "shown"), [("small", "small"), ("My_Run 1.5", "my-run-1-5")])
def test_artifacts_of_runs_that_were_planned_together_have_keys_of_their_own(name: str, shown: str) -> None:
    scopes = [RunScope(run_id=run_id, run_name=name, store="/store") for run_id in PLANNED_TOGETHER]
    assert [artifact_key("live", scope) for scope in scopes] == [f"live-{shown}-ecd4e99d", f"live-{shown}-0da630c9"]


def test_machines_of_runs_that_were_planned_together_are_named_apart(tmp_path: Path) -> None:
    with Ledger(tmp_path / "ledger.db") as ledger:
        names = [machine_name(ledger, run_id) for run_id in (*PLANNED_TOGETHER, RANDOM)]
    assert [name.split("-")[2] for name in names] == ["c573ecd4e99d", "fa180da630c9", "5793d50a85e8"]


@pytest.mark.parametrize("run_id", [RANDOM, "5793d50a"])
def test_a_random_id_is_known_by_its_beginning(run_id: str) -> None:
    assert short_id(run_id) == "5793d50a"
