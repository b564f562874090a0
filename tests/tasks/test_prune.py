"""Pins what pruning never removes, whatever its age, and what it does.

Without it room is made by deleting the stage that the model in production came from, or one that a run is about to use.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.jobs import cancel_job, start_or_attach
from infra.ledger import LEDGER_FILE, Ledger
from infra.registry import register_model, reject
from infra.session import LocalSession
from tasks.prune import DAY_S, plan_prune, remove_stages
from tests.infra.shell_jobs import shell_spec

NOW = 1_000 * DAY_S
SFT, RL, EVALUATE = (f"{stage}-{16 * '0'}" for stage in ("sft", "rl", "evaluate"))
OTHER = f"sft-{16 * '1'}"
SIZE = 1_000
DYING_RUN = """
import os, sys
from pathlib import Path
from infra.ledger import Ledger
with Ledger(Path(sys.argv[1])) as ledger, ledger.living_run("dead"):
    ledger.add_lease(sys.argv[2], "dead", "local")
    os.kill(os.getpid(), 9)
"""
"""A run that claims a job and is killed."""


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A store with four stages of a thousand bytes, used 10, 20, 30 and 40 days ago; RL began with SFT."""
    for age, name in enumerate((SFT, RL, EVALUATE, OTHER), start=1):
        add_stage(tmp_path, name, days=10 * age)
    start = tmp_path / "stages" / SFT / "checkpoints/step_000020"
    (tmp_path / "stages" / RL / "job.json").write_text(json.dumps({"model": {"model": {"path": str(start)}}}))
    set_age(tmp_path / "stages" / RL, days=20)
    return tmp_path


@pytest.fixture
def ledger(store: Path) -> Iterator[Ledger]:
    with Ledger(store / LEDGER_FILE) as ledger:
        yield ledger


def add_stage(store: Path, name: str, *, days: float) -> None:
    path = store / "stages" / name
    path.mkdir(parents=True)
    (path / "weights").write_bytes(bytes(SIZE))
    set_age(path, days=days)


def set_age(path: Path, *, days: float) -> None:
    os.utime(path, (NOW - days * DAY_S,) * 2)


def removed(store: Path, ledger: Ledger, *, days: float, max_bytes: int | None = None) -> list[str]:
    plan = plan_prune(store, ledger, unused_days=days, max_bytes=max_bytes, now=NOW)
    assert {stage.name for stage in plan.removed + plan.kept} == {path.name for path in (store / "stages").iterdir()}
    return [stage.name for stage in plan.removed]


def test_what_was_not_used_for_long_is_removed_and_nothing_before_it_is_asked_for(store: Path, ledger: Ledger) -> None:
    assert removed(store, ledger, days=25) == [OTHER, EVALUATE]
    assert len(list((store / "stages").iterdir())) == 4
    plan = plan_prune(store, ledger, unused_days=25, now=NOW)
    assert [stage.name for stage in remove_stages(store, ledger, plan)] == [OTHER, EVALUATE]
    assert sorted(path.name for path in (store / "stages").iterdir()) == sorted([SFT, RL])


def test_a_use_counts_as_young_as_it_is(store: Path, ledger: Ledger) -> None:
    ledger.note_use(OTHER, "run-a")
    assert removed(store, ledger, days=25) == [EVALUATE]


def test_the_longest_unused_go_first_until_the_rest_fits(store: Path, ledger: Ledger) -> None:
    assert removed(store, ledger, days=100, max_bytes=2 * SIZE + 500) == [OTHER, EVALUATE]
    assert removed(store, ledger, days=100, max_bytes=10 * SIZE) == []


def test_the_lineage_of_a_registered_model_stays_also_when_it_was_rejected(store: Path, ledger: Ledger) -> None:
    model = register_model(
        ledger, "a", checkpoint="runs/a", digest="d", run_id="r", stages=[RL, EVALUATE], data={}, by="me"
    )
    reject(ledger, model, by="me", reason="worse")
    assert removed(store, ledger, days=0, max_bytes=0) == [OTHER]  # and not SFT, which RL began with


def test_what_a_living_run_uses_stays_and_what_a_dead_one_used_does_not(store: Path, ledger: Ledger) -> None:
    with ledger.living_run("alive"):
        ledger.note_use(OTHER, "alive")
        ledger.add_lease(str(store / "stages" / EVALUATE), "alive", "local")
        assert set(removed(store, ledger, days=0, max_bytes=0)) == {SFT, RL}
    command = [sys.executable, "-c", DYING_RUN, str(store / LEDGER_FILE), str(store / "stages" / SFT)]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    assert SFT in removed(store, ledger, days=0, max_bytes=0)


def test_a_run_that_began_after_the_look_keeps_its_stage(store: Path, ledger: Ledger) -> None:
    plan = plan_prune(store, ledger, unused_days=25, now=NOW)
    with ledger.living_run("late"):
        ledger.note_use(OTHER, "late")
        assert [stage.name for stage in remove_stages(store, ledger, plan)] == [EVALUATE]
    assert (store / "stages" / OTHER / "weights").stat().st_size == SIZE


def test_a_stage_that_a_model_was_registered_from_after_the_look_stays(store: Path, ledger: Ledger) -> None:
    plan = plan_prune(store, ledger, unused_days=25, now=NOW)
    assert {stage.name for stage in plan.removed} == {OTHER, EVALUATE}
    register_model(ledger, "a", checkpoint="runs/a", digest="d", run_id="r", stages=[OTHER], data={}, by="me")
    assert [stage.name for stage in remove_stages(store, ledger, plan)] == [EVALUATE]
    assert remove_stages(store, ledger, plan) == []


def test_a_job_that_goes_on_keeps_its_stage(store: Path, ledger: Ledger) -> None:
    with LocalSession(sys.executable) as session:
        path = store / "stages" / OTHER
        start_or_attach(session, shell_spec(path, "sleep 600"))
        try:
            set_age(path, days=40)
            assert OTHER not in removed(store, ledger, days=0, max_bytes=0)
        finally:
            cancel_job(session, str(path), 1.0)


def test_what_a_served_configuration_names_stays(store: Path, ledger: Ledger) -> None:
    deployments = store / "prefect/deployments"
    deployments.mkdir(parents=True)
    samples = f"{store}/stages/{OTHER}/samples"
    (deployments / "mine.json").write_text(json.dumps({"parameters": {"config": {"data": {"rollouts": samples}}}}))
    assert OTHER not in removed(store, ledger, days=0, max_bytes=0)


def test_what_is_no_stage_is_not_touched(store: Path, ledger: Ledger) -> None:
    (store / "stages/notes").mkdir()
    plan = plan_prune(store, ledger, unused_days=0, max_bytes=0, now=NOW)
    remove_stages(store, ledger, plan)
    assert [path.name for path in (store / "stages").iterdir()] == ["notes"]
