"""Pins what is ended in nobody's interest, and what is never touched.

Without it a killed run's machine costs money for ever, or somebody else's is ended.
"""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollouts.infra.cloud import Cloud
from rollouts.infra.clouds import CloudName
from rollouts.infra.errors import StillRentedError
from rollouts.infra.ledger import Ledger
from rollouts.infra.offers import Instance
from rollouts.infra.providers.runpod import RunPod
from rollouts.infra.renting.reaper import UNSEEN_AFTER_S, ReapReport, reap
from rollouts.infra.renting.release import release_machine
from rollouts.infra.renting.rentals import (
    Rental,
    RentalState,
    add_rental,
    all_rentals,
    change_rental,
    find_rental,
    open_rentals,
)
from tests.infra.fake_cloud import KEY, FakeCloud, Faults
from tests.infra.fake_runpod import FakeRunPod
from tests.infra.providers.test_cloud_contracts import PROVIDERS
from tests.infra.renting import renting_run
from tests.kit.renting import PACE, REQUEST, World
from tests.kit.waiting import wait_until

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[3]
BODY = {"image": "x", "disk": 1, "ports": [], "env": {}, "cloud": "SECURE"} | {
    "gpu": {"id": "NVIDIA H100 80GB HBM3", "count": 1}
}


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    fake = FakeRunPod()
    with fake.served() as url, RunPod(KEY, url) as cloud:
        yield World(fake, cloud, tmp_path / "ledger.db", url)


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


@pytest.mark.parametrize(("left_s", "is_spared"), [(1260.0, True), (1140.0, False), (-1.0, False)])
def test_the_machine_of_a_dead_run_is_spared_for_the_next_start_as_long_as_that_would_take_it(
    world: World, left_s: float, is_spared: bool
) -> None:
    rental = rent_and_die(world)
    assert reap_now(world, spare=True).ended == [] and len(world.fake.alive()) == 1
    with Ledger(world.path) as ledger:
        times = {"intended_at": time.time() + left_s - 7200, "expires_at": time.time() + left_s}
        change_rental(ledger, rental, **times)
    if is_spared:
        assert reap_now(world, spare=True).ended == [] and len(world.fake.alive()) == 1
        return
    assert len(reap_now(world, spare=True).ended) == 1 and world.fake.alive() == []


def fail_and_keep(world: World, *, seconds: float) -> Rental:
    """The machine of a run that failed and keeps it."""
    rental = rent_and_die(world)
    with Ledger(world.path) as ledger:
        kept = change_rental(ledger, rental, kept_until=time.time() + seconds)
    assert kept is not None
    return kept


@pytest.mark.parametrize("spare", [False, True])
def test_a_machine_that_a_failed_run_keeps_stays_until_then_and_no_longer(world: World, spare: bool) -> None:
    rental = fail_and_keep(world, seconds=600)
    [line] = reap_now(world, spare=spare).kept
    until = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(rental.ends_at))
    assert f"which failed and keeps it until {until}: `rollouts nodes release` ends it now" in line
    assert len(world.fake.alive()) == 1
    with Ledger(world.path) as ledger:
        change_rental(ledger, rental, kept_until=time.time() - 1)
    assert len(reap_now(world, spare=spare).ended) == 1 and world.fake.alive() == []
    assert reap_now(world, spare=spare) == ReapReport()


def test_a_machine_is_not_kept_when_its_hours_or_the_money_are_used_up(world: World) -> None:
    rental = fail_and_keep(world, seconds=600)
    with Ledger(world.path) as ledger:
        change_rental(ledger, rental, expires_at=time.time() - 1)
    assert len(reap_now(world).ended) == 1 and world.fake.alive() == []


@pytest.mark.parametrize("is_kept", [False, True])
@pytest.mark.parametrize("status", ["EXITED", "ERROR", "TERMINATED", "not there"])
def test_a_machine_that_no_start_could_use_is_neither_spared_nor_kept(world: World, status: str, is_kept: bool) -> None:
    rental = fail_and_keep(world, seconds=600) if is_kept else rent_and_die(world)
    machine = world.fake.machines[rental.instance_id]
    machine.status, machine.ended_at = status, time.monotonic() if status == "not there" else None
    assert len(reap_now(world, spare=True).ended) == 1
    with Ledger(world.path) as ledger:
        row = find_rental(ledger, rental.name)
        assert row is not None and row.state is RentalState.GONE and row.usd(1e12) < 0.1
        assert world.fake.alive() == [] or status == "TERMINATED"


def test_a_kept_machine_that_did_not_end_is_tried_again(world: World) -> None:
    rental = fail_and_keep(world, seconds=600)
    world.fake.faults.never_ends = True
    with Ledger(world.path) as ledger, pytest.raises(StillRentedError):
        release_machine(rental, ledger, world.cloud, pace=replace(PACE, gone_within_s=0.1))
    world.fake.faults.never_ends = False
    assert len(reap_now(world).ended) == 1 and world.fake.alive() == []


def test_a_kept_machine_whose_run_is_tried_again_is_left_to_it_also_a_moment_too_late(world: World) -> None:
    rental = fail_and_keep(world, seconds=-1)
    with Ledger(world.path) as ledger, ledger.living_run(REQUEST.run_id):
        assert reap_now(world).ended == [] and len(world.fake.alive()) == 1
        again = world.rent()
        assert (again.instance_id, again.kept_until) == (rental.instance_id, None)
    assert world.fake.num_creates() == 1


def test_a_machine_that_its_own_run_took_over_since_it_was_judged_is_not_ended(world: World) -> None:
    fail_and_keep(world, seconds=-1)
    with Ledger(world.path) as ledger, pytest.MonkeyPatch.context() as patched:

        def take_over(_: Rental, __: Ledger, *, spare: bool) -> str:
            assert world.rent().kept_until is None
            return ""

        patched.setattr("rollouts.infra.renting.reaper._reason_to_keep", take_over)
        report = reap_now(world)
        assert (report.ended, report.failures, len(report.kept)) == ([], [], 1)
        assert len(world.fake.alive()) == 1
        assert [row.state for row in all_rentals(ledger)] == [RentalState.READY]


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


def test_a_machine_that_the_ledger_does_not_know_has_cost_money_since_it_was_asked_for(world: World) -> None:
    with Ledger(world.path) as ledger:
        world.fake.add(f"rollouts-{ledger.identity}-run-a1-t{int(time.time()) - 10 * 3600}", BODY)
        reap_now(world)
        [row] = all_rentals(ledger)
        assert row.usd(time.time()) == pytest.approx(10 * row.usd_per_hour, rel=0.01) and row.usd_per_hour > 0


def test_one_that_does_not_end_is_in_the_way_of_nobody_who_asks_which_runs_live(world: World) -> None:
    world.fake.faults.never_ends = True
    with Ledger(world.path) as ledger, ledger.living_run("other"):
        world.fake.add(f"rollouts-{ledger.identity}-run-a1-t1700000000", BODY)
        reap(ledger, {"runpod": world.cloud}, pace=replace(PACE, gone_within_s=0.1))
        [row] = open_rentals(ledger)
        assert row.state is RentalState.RELEASING
        assert not ledger.has_died(row.run_id) and not ledger.is_alive(row.run_id)


def test_a_machine_that_appears_late_is_ended(world: World) -> None:
    world.fake.faults.drop_creates = 1
    world.fake.faults.list_lag_s = 3.0
    with Ledger(world.path) as ledger, ledger.living_run(REQUEST.run_id):
        release_machine(world.rent(), ledger, world.cloud, pace=PACE)
    assert len(world.fake.alive()) == 1, "the lost one"
    world.fake.faults.list_lag_s = 0.0
    assert len(reap_now(world).ended) == 1 and world.fake.alive() == []


def test_a_machine_that_appears_when_its_run_has_another_one_is_ended_while_the_run_lives(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "rollouts.infra.renting.request")
    world.fake.faults.drop_creates = 1
    world.fake.faults.list_lag_s = 3.0
    with Ledger(world.path) as ledger, ledger.living_run(REQUEST.run_id):
        used = world.rent()
        assert "has not appeared, and may be rented: `rollouts reap` ends it when it appears" in caplog.text
        world.fake.faults.list_lag_s = 0.0
        report = reap_now(world, spare=True)
        assert len(report.ended) == 1 and [machine.name for machine in world.fake.alive()] == [used.name]


@pytest.mark.parametrize("has_another", [False, True])
def test_a_machine_that_was_asked_for_by_an_earlier_try_and_appears_late_is_ended_while_the_run_lives(
    world: World, has_another: bool
) -> None:
    with Ledger(world.path) as ledger:
        asked_for = {"state": RentalState.INTENDED, "instance_id": "", "rented_at": None, "host_key": ""}
        assert change_rental(ledger, world.rent(), **asked_for) is not None, "killed before it was written down"
        if has_another:
            late = replace(all_rentals(ledger)[0], name=f"rollouts-{ledger.identity}-run-a9-t1700000000")
            add_rental(ledger, replace(late, state=RentalState.READY, instance_id=world.fake.add(late.name, BODY).id))
        world.fake.faults.list_lag_s = 3.0
        with ledger.living_run(REQUEST.run_id):
            used = world.rent()
            world.fake.faults.list_lag_s = 0.0
            assert len(world.fake.alive()) == 2
            assert len(reap_now(world, spare=True).ended) == 1
            assert [machine.name for machine in world.fake.alive()] == [used.name]


def test_a_refusal_that_was_none_is_found_out(world: World) -> None:
    with Ledger(world.path) as ledger, ledger.living_run(REQUEST.run_id):
        gone = release_machine(world.rent(), ledger, world.cloud, pace=PACE)
        world.fake.add(gone.name, BODY)
        assert len(reap_now(world).ended) == 1 and world.fake.alive() == []
        row = find_rental(ledger, gone.name)
        assert row is not None and row.state is RentalState.GONE


def test_a_machine_that_is_there_all_the_same_and_does_not_end_is_tried_again(world: World) -> None:
    with Ledger(world.path) as ledger:
        with ledger.living_run(REQUEST.run_id):
            gone = release_machine(world.rent(), ledger, world.cloud, pace=PACE)
        world.fake.add(gone.name, BODY)
        world.fake.faults.never_ends = True
        reap(ledger, {"runpod": world.cloud}, pace=replace(PACE, gone_within_s=0.1))
        world.fake.faults.never_ends = False
        assert len(reap_now(world, spare=True).ended) == 1 and world.fake.alive() == []


def test_what_never_appeared_is_forgotten_after_an_hour(world: World) -> None:
    world.fake.faults.drop_before_create = 1
    with Ledger(world.path) as ledger:
        kept = world.rent()
        [lost] = [row for row in all_rentals(ledger) if row.state is RentalState.INTENDED]
        assert any("not seen yet" in line for line in reap_now(world).kept)
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
    assert "the key of that provider is missing" in reap_now(world).failures[0]


class Interrupted:
    """The provider, of which somebody else makes use between the first list that it gives and what follows from it."""

    def __init__(self, cloud: RunPod, between: Callable[[], object]) -> None:
        self._cloud = cloud
        self._between: Callable[[], object] | None = between

    def list_named(self, prefix: str) -> list[Instance]:
        listed = self._cloud.list_named(prefix)
        between, self._between = self._between, None
        if between is not None:
            between()
        return listed

    def __getattr__(self, name: str) -> Any:  # Any: the other methods of the provider
        return getattr(self._cloud, name)


def reap_interrupted(world: World, between: Callable[[], object]) -> ReapReport:
    with Ledger(world.path) as ledger:
        return reap(ledger, {"runpod": Interrupted(world.cloud, between)}, pace=PACE)


def test_what_another_look_ended_since_the_list_is_not_taken_for_there(world: World) -> None:
    rental = rent_and_die(world)
    with Ledger(world.path) as ledger:
        world.fake.add(f"rollouts-{ledger.identity}-run-a1-t1700000000", BODY)
        others: list[ReapReport] = []
        report = reap_interrupted(world, lambda: others.append(reap_now(world)))
        assert (report.ended, report.failures, len(others[0].ended)) == ([], [], 2)
        rows = all_rentals(ledger)
        assert {row.state for row in rows} == {RentalState.GONE} and rental.name in {row.name for row in rows}
        assert all("all the same" not in row.note for row in rows)


def test_what_another_look_found_in_the_same_moment_does_not_end_this_one(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Ledger(world.path) as ledger:
        names = [f"rollouts-{ledger.identity}-run-a{number}-t1700000000" for number in range(2)]
        for name in names:
            world.fake.add(name, BODY)
        others: list[ReapReport] = []

        def find_before_the_other(own: Ledger, name: str) -> Rental | None:
            found = find_rental(own, name)
            if not others:
                others.append(ReapReport())
                others.append(reap_now(world))
            return found

        monkeypatch.setattr("rollouts.infra.renting.reaper.find_rental", find_before_the_other)
        report = reap_now(world)
        assert (report.failures, len(others[1].ended)) == ([], 2)
        assert {row.name: row.state for row in all_rentals(ledger)} == dict.fromkeys(names, RentalState.GONE)


def test_a_machine_that_a_run_took_over_since_it_was_judged_is_its_own(world: World) -> None:
    rental = rent_and_die(world)
    with Ledger(world.path) as ledger, ledger.living_run("next"):

        def take_over(_: Rental, __: Ledger, *, spare: bool) -> str:
            change_rental(ledger, rental, run_id="next")
            return ""

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr("rollouts.infra.renting.reaper._reason_to_keep", take_over)
            report = reap_now(world)
        assert (report.ended, report.failures, len(report.kept)) == ([], [], 1)
        assert len(world.fake.alive()) == 1
        row = find_rental(ledger, rental.name)
        assert row is not None and (row.state, row.run_id) == (RentalState.READY, "next")


def test_several_looks_at_once_end_everything_and_none_fails(world: World, tmp_path: Path) -> None:
    world.fake.faults.end_lag_s = 0.2
    with Ledger(world.path) as ledger:
        names = [f"rollouts-{ledger.identity}-run-a{number}-t1700000000" for number in range(8)]
    for name in names:
        world.fake.add(name, BODY)
    rental = rent_and_die(world)
    command = [sys.executable, "-m", "tests.infra.renting.reaping", str(world.path), world.url, KEY]
    looks = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) for _ in range(3)
    ]
    for look in looks:
        assert look.stdout is not None and look.stdout.readline() == "ready\n"
    for look in looks:
        assert look.stdin is not None
        look.stdin.write("begin\n")
        look.stdin.flush()
    reports = [json.loads(look.communicate()[0]) for look in looks]
    assert [look.returncode for look in looks] == [0, 0, 0]
    assert [report["failures"] for report in reports] == [[], [], []]
    assert world.fake.alive() == []
    ended = {line.split()[0] for report in reports for line in report["ended"]}
    assert ended == {*names, rental.name}
    with Ledger(world.path) as ledger:
        assert {row.state for row in all_rentals(ledger)} == {RentalState.GONE}


def test_processes_that_begin_the_same_run_at_once_never_have_two_machines(tmp_path: Path) -> None:
    fake = FakeRunPod()
    fake.faults.boot_s = fake.faults.end_lag_s = 0.3
    fake.faults.busy, fake.faults.retry_after = 3, "1"  # so that all have begun before the first asks for a machine
    with fake.served() as url:
        runs = [begin_run(tmp_path, url, "run") for _ in range(3)]
        assert [run.wait(60) for run in runs] == [0, 0, 0]
    assert fake.alive() == [] and fake.most_at_once == 1


STEPS = ("intended", "asked", "rented", "ready", "releasing", "gone")


@pytest.mark.parametrize(
    ("step", "is_started_again"),
    [
        pytest.param(
            step,
            is_started_again,
            id=f"{step}-{'next start' if is_started_again else 'reaper'}",
            marks=[] if is_started_again == (step in ("asked", "ready")) else pytest.mark.matrix,
        )
        for step in STEPS
        for is_started_again in (True, False)
    ],
)
def test_a_run_that_is_killed_between_two_steps_leaves_nothing_that_is_not_found(
    tmp_path: Path, step: str, is_started_again: bool
) -> None:
    fake = FakeRunPod()
    with fake.served() as url, RunPod(KEY, url) as cloud, Ledger(tmp_path / "ledger.db") as ledger:
        assert run_once(tmp_path, url, "run", step).wait(60) == -signal.SIGKILL
        assert len(fake.alive()) == (step not in ("intended", "gone")) and len(all_rentals(ledger)) == 1
        if is_started_again:
            assert run_once(tmp_path, url, "run").wait(60) == 0
            goes_on = step in ("asked", "rented", "ready")
            assert len(fake.machines) == (1 if goes_on or step == "intended" else 2)
        else:
            report = reap(ledger, {"runpod": cloud}, pace=renting_run.PACE)
            # Killed amid noting that it is gone, a run has not noted it.
            assert (len(report.ended), report.failures) == (int(step != "intended"), [])
        rows = all_rentals(ledger)
    assert fake.alive() == [] and fake.most_at_once <= 1
    created = {machine.name for machine in fake.machines.values()}
    assert [row.name for row in rows if not row.state.is_over] == [rows[0].name] * (step == "intended")
    assert created <= {row.name for row in rows}


def test_a_run_that_is_interrupted_while_its_machine_is_being_made_gives_it_back_however_often(tmp_path: Path) -> None:
    fake = FakeRunPod()
    fake.faults = Faults(hang_creates=1, list_lag_s=0.3, end_lag_s=0.5)
    with fake.served() as url, Ledger(tmp_path / "ledger.db") as ledger:
        process = run_once(tmp_path, url, "run")
        wait_until(lambda: fake.alive() != [], what="the machine", every_s=0.01)
        process.send_signal(signal.SIGINT)
        wait_until(lambda: fake.alive() == [] or process.poll() is not None, what="its end", every_s=0.01)
        process.send_signal(signal.SIGINT)  # while the end is waited for
        assert process.wait(60) == -signal.SIGINT
        [row] = all_rentals(ledger)
    assert (row.state, fake.alive(), len(fake.machines)) == (RentalState.GONE, [], 1)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("num_kills", "num_machines"),
    [(15, 1), pytest.param(30, 1, marks=pytest.mark.matrix), pytest.param(30, 2, marks=pytest.mark.matrix)],
)
def test_kills_at_any_moment_leave_nothing_behind_at_any_provider(
    tmp_path: Path, num_kills: int, num_machines: int
) -> None:
    chance = random.Random(20)
    fakes: list[FakeCloud] = []
    with ExitStack() as stack:
        places = []
        for name, (fake_type, _, _, base, _) in sorted(PROVIDERS.items()):
            fakes.append(fake_type())
            places.append((name, stack.enter_context(fakes[-1].served()) + base))
            fakes[-1].faults = Faults(list_lag_s=0.3, boot_s=0.1, end_lag_s=0.1)
        whole = run_once(tmp_path, places[0][1], "whole", provider=places[0][0], num_machines=num_machines)
        wait_for_request(fakes[0], whole)
        started = time.monotonic()
        assert whole.wait(60) == 0
        whole_s = time.monotonic() - started
        for number in range(num_kills):
            provider, url = places[number % 5]
            if number % 3 == 0:
                fakes[number % 5].faults.drop_creates = 1
            fakes[number % 5].requests.clear()
            run_id = f"n{number:02d}"
            process = run_once(tmp_path, url, run_id, provider=provider, num_machines=num_machines)
            wait_for_request(fakes[number % 5], process)
            time.sleep(chance.uniform(0.0, whole_s))
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            if number % 2 == 0:  # the others are left to the reaper
                assert run_once(tmp_path, url, run_id, provider=provider, num_machines=num_machines).wait(60) == 0
        time.sleep(fakes[0].faults.list_lag_s)
        accounts = [renting_run.ACCOUNTS[name](KEY, url, min_interval_s=0) for name, url in places]
        for account in accounts:
            stack.enter_context(account)
        clouds: dict[CloudName, Cloud] = {account.name: account for account in accounts}
        ledger = stack.enter_context(Ledger(tmp_path / "ledger.db"))
        num_left = sum(len(fake.alive()) for fake in fakes)
        report = reap(ledger, clouds, pace=renting_run.PACE)
        rows = all_rentals(ledger)
    assert report.failures == [] and [fake.alive() for fake in fakes] == [[]] * 5
    created = {machine.name for fake in fakes for machine in fake.machines.values()}
    assert num_left > 0 and len(created) > num_kills * 2 / 3, "the kills came at moments that test nothing"
    assert max(fake.most_at_once for fake in fakes) == num_machines, "a run had more machines at once than it wants"
    assert all(row.state.is_over or row.name not in created for row in rows) and created <= {row.name for row in rows}


def wait_for_request(fake: FakeCloud, process: subprocess.Popen[bytes]) -> None:
    """Return when the provider was asked something: a kill before that tests nothing."""
    wait_until(lambda: bool(fake.requests) or process.poll() is not None, what="a request", every_s=0.005)


def begin_run(
    folder: Path, url: str, run_id: str, *step: str, provider: str = "runpod", num_machines: int = 1
) -> subprocess.Popen[bytes]:
    """A run that begins."""
    words = [str(folder / "ledger.db"), provider, url, run_id, KEY, str(num_machines), *step]
    command = [sys.executable, "-m", "tests.infra.renting.renting_run", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT)


def run_once(
    folder: Path, url: str, run_id: str, *step: str, provider: str = "runpod", num_machines: int = 1
) -> subprocess.Popen[bytes]:
    """A run under way."""
    process = begin_run(folder, url, run_id, *step, provider=provider, num_machines=num_machines)
    assert process.stdout is not None and process.stdout.readline() == b"begun\n"
    return process
