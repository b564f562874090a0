"""Pins what is ended in nobody's interest, and what is never touched.

Without it a killed run's machine costs money for ever, or somebody else's is ended.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from infra.ledger import Ledger
from infra.providers.runpod import RunPod
from infra.provision import release_machine
from infra.reaper import UNSEEN_AFTER_S, ReapReport, reap
from infra.rentals import Rental, RentalState, add_rental, all_rentals, change_rental, find_rental
from tests.infra import renting_run
from tests.infra.fake_cloud import KEY
from tests.infra.fake_runpod import FakeRunPod
from tests.infra.test_provision import PACE, REQUEST, World

ROOT = Path(__file__).resolve().parents[2]
BODY = {"image": "x", "disk": 1, "ports": [], "env": {}, "cloud": "SECURE"} | {
    "gpu": {"id": "NVIDIA H100 80GB HBM3", "count": 1}
}


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    fake = FakeRunPod()
    with fake.served() as url, RunPod(KEY, url) as cloud:
        yield World(fake, cloud, tmp_path / "ledger.db")


def rent_and_die(world: World) -> Rental:
    """A ready machine of a run that is no more."""
    with Ledger(world.path) as ledger, ledger.living_run(REQUEST.run_id):
        return world.rent()


def reap_now(world: World, *, spare: bool = False, other_ledger: str = "") -> ReapReport:
    with Ledger(world.path) as ledger:
        return reap(ledger, {"runpod": world.cloud}, spare=spare, other_ledger=other_ledger, pace=PACE)


def test_the_machine_of_a_living_run_is_kept_and_that_of_a_dead_one_ended(world: World) -> None:
    with Ledger(world.path) as ledger, ledger.living_run(REQUEST.run_id):
        rental = world.rent()
        report = reap_now(world)
        assert report.ended == [] and rental.name in report.kept[0] and len(world.fake.alive()) == 1
    assert len(reap_now(world).ended) == 1 and world.fake.alive() == []
    assert reap_now(world) == ReapReport()


def test_the_machine_of_a_dead_run_is_spared_for_the_next_start_until_it_expires(world: World) -> None:
    rental = rent_and_die(world)
    assert reap_now(world, spare=True).ended == [] and len(world.fake.alive()) == 1
    with Ledger(world.path) as ledger:
        change_rental(ledger, rental, expires_at=time.time() - 1)
    assert len(reap_now(world, spare=True).ended) == 1 and world.fake.alive() == []


def test_a_machine_that_expired_is_ended_though_its_run_lives(world: World) -> None:
    with Ledger(world.path) as ledger, ledger.living_run(REQUEST.run_id):
        change_rental(ledger, world.rent(), expires_at=time.time() - 1)
        assert len(reap_now(world).ended) == 1 and world.fake.alive() == []


def test_machines_of_others_are_never_touched(world: World) -> None:
    with Ledger(world.path) as ledger:
        other = ("0" if ledger.identity[0] != "0" else "1") * 8
    world.fake.add("my-own-machine", BODY)
    world.fake.add("rollouts-is-what-i-call-it", BODY)
    world.fake.add(f"rollouts-{other}-run-a1-t1700000000", BODY)
    report = reap_now(world)
    assert len(world.fake.alive()) == 3 and len(report.foreign) == 1 and report.ended == []
    assert len(reap_now(world, other_ledger=other).ended) == 1
    assert sorted(machine.name for machine in world.fake.alive()) == ["my-own-machine", "rollouts-is-what-i-call-it"]


def test_a_machine_of_ours_that_the_ledger_does_not_know_is_ended(world: World) -> None:
    with Ledger(world.path) as ledger:
        world.fake.add(f"rollouts-{ledger.identity}-run-a1-t1700000000", BODY)
    assert len(reap_now(world).ended) == 1 and world.fake.alive() == []


def test_a_machine_that_appears_late_is_ended(world: World) -> None:
    world.fake.faults.drop_creates = 1
    world.fake.faults.list_lag_s = 3.0
    with Ledger(world.path) as ledger, ledger.living_run(REQUEST.run_id):
        release_machine(world.rent(), ledger, world.cloud, pace=PACE)
    assert len(world.fake.alive()) == 1, "the lost one"
    world.fake.faults.list_lag_s = 0.0
    assert len(reap_now(world).ended) == 1 and world.fake.alive() == []


def test_a_refusal_that_was_none_is_found_out(world: World) -> None:
    with Ledger(world.path) as ledger, ledger.living_run(REQUEST.run_id):
        gone = release_machine(world.rent(), ledger, world.cloud, pace=PACE)
        world.fake.add(gone.name, BODY)
        assert len(reap_now(world).ended) == 1 and world.fake.alive() == []
        row = find_rental(ledger, gone.name)
        assert row is not None and row.state is RentalState.GONE


def test_what_never_appeared_is_forgotten_after_an_hour(world: World) -> None:
    world.fake.faults.drop_before_create = 1
    with Ledger(world.path) as ledger:
        kept = world.rent()
        [lost] = [row for row in all_rentals(ledger) if row.state is RentalState.INTENDED]
        assert any("not seen so far" in line for line in reap_now(world).kept)
        change_rental(ledger, lost, intended_at=lost.intended_at - UNSEEN_AFTER_S - 1)
        reap_now(world)
        row = find_rental(ledger, lost.name)
        assert row is not None and row.state is RentalState.REFUSED and row.usd(time.time()) == 0
        assert [machine.name for machine in world.fake.alive()] == [kept.name]


def test_a_provider_that_cannot_be_asked_is_a_failure_and_nothing_is_forgotten(world: World) -> None:
    rental = rent_and_die(world)
    world.fake.faults.fail_lists = 1
    report = reap_now(world)
    assert "403" in report.failures[0] and report.ended == [] and len(world.fake.alive()) == 1
    with Ledger(world.path) as ledger:
        add_rental(ledger, replace(rental, name="rollouts-of-lambda", provider="lambda"))
    assert "there is no key of that provider" in reap_now(world).failures[0]


@pytest.mark.slow
def test_kills_at_thirty_moments_leave_nothing_behind(tmp_path: Path) -> None:
    chance = random.Random(20)
    fake = FakeRunPod()
    fake.faults.list_lag_s, fake.faults.boot_s, fake.faults.end_lag_s = 0.3, 0.1, 0.1
    with fake.served() as url:
        started = time.monotonic()
        assert run_once(tmp_path, url, "whole").wait(60) == 0
        whole_s = time.monotonic() - started
        for number in range(30):
            if number % 3 == 0:
                fake.faults.drop_creates = 1
            run_id = f"n{number:02d}"
            process = run_once(tmp_path, url, run_id)
            time.sleep(chance.uniform(0.0, whole_s))
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            if number % 2 == 0:  # the others are left to the reaper
                assert run_once(tmp_path, url, run_id).wait(60) == 0
        time.sleep(fake.faults.list_lag_s)
        with Ledger(tmp_path / "ledger.db") as ledger, RunPod(KEY, url) as cloud:
            num_left = len(fake.alive())
            report = reap(ledger, {"runpod": cloud}, pace=renting_run.PACE)
            rows = all_rentals(ledger)
    assert report.failures == [] and fake.alive() == []
    assert num_left > 0 and len(fake.machines) > 20, "the kills came at moments that test nothing"
    assert fake.most_at_once == 1, "a run had two machines at once"
    created = {machine.name for machine in fake.machines.values()}
    assert all(row.state.is_over or row.name not in created for row in rows) and created <= {row.name for row in rows}


def run_once(folder: Path, url: str, run_id: str) -> subprocess.Popen[bytes]:
    """A run under way."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.infra.renting_run", str(folder / "ledger.db"), url, run_id, KEY],
        stdout=subprocess.PIPE,
        cwd=ROOT,
    )
    assert process.stdout is not None and process.stdout.readline() == b"begun\n"
    return process
