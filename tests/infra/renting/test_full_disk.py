"""Pins that machines are ended although nothing about that can be written: the disk of the ledger is full.

Without it a full disk, the likeliest thing to break on a machine that trains, makes every rented machine go on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from rollouts.infra.errors import LedgerUnwritableError, TransientInfraError, UnfitMachineError
from rollouts.infra.ledger import Ledger
from rollouts.infra.offers import Instance
from rollouts.infra.providers.runpod import RunPod
from rollouts.infra.renting.reaper import reap, release_named
from rollouts.infra.renting.release import release_machine, release_machines
from rollouts.infra.renting.rentals import Rental, RentalState, add_rental
from tests.infra.fake_cloud import KEY
from tests.infra.fake_runpod import FakeRunPod
from tests.infra.renting.test_reaper import BODY, reap_now, rent_and_die
from tests.kit.mounts import fill
from tests.kit.renting import PACE, REQUEST, World, usable

UNNOTED = "at runpod is given back, but the ledger still has it as rented"


@pytest.fixture
def world(tiny_disk: Path) -> Iterator[World]:
    fake = FakeRunPod()
    with fake.served() as url, RunPod(KEY, url) as cloud:
        yield World(fake, cloud, tiny_disk / "ledger.db", url)


@pytest.fixture(params=["open before the disk was full", "opened on a full disk"])
def filled(request: pytest.FixtureRequest, world: World) -> Iterator[Callable[[], Path]]:
    """Fill the disk of the ledger, which somebody has open meanwhile, or nobody: then SQLite itself finds no room."""
    with ExitStack() as stack:

        def fill_it() -> Path:
            if request.param.startswith("open before"):
                stack.enter_context(Ledger(world.path))
            return fill(world.path.parent)

        yield fill_it


def test_a_machine_is_given_back_and_the_row_closed_when_there_is_room(
    world: World, filled: Callable[[], Path]
) -> None:
    rental = rent_and_die(world)
    filler = filled()
    with Ledger(world.path) as ledger:
        with pytest.raises(TransientInfraError, match=f"{rental.name} {UNNOTED}"):
            release_machine(rental, ledger, world.cloud, pace=PACE)
        assert world.fake.alive() == []
        with pytest.raises(TransientInfraError, match=f"{rental.name} {UNNOTED}"):
            release_named(rental.name, ledger, {"runpod": world.cloud}, pace=PACE)
    filler.unlink()
    assert [row.state for row in world.rows()] == [RentalState.READY]
    assert len(reap_now(world).ended) == 1
    assert [row.state for row in world.rows()] == [RentalState.GONE]


def test_of_a_unit_all_machines_are_given_back(world: World, filled: Callable[[], Path]) -> None:
    rentals = [rent_and_die(world)]
    with Ledger(world.path) as ledger:
        second = replace(rentals[0], name=f"{rentals[0].name}0", instance_id=world.fake.add("second", BODY).id)
        add_rental(ledger, second)
    filled()
    with Ledger(world.path) as ledger, pytest.raises(TransientInfraError, match=UNNOTED):
        release_machines([*rentals, second], ledger, {"runpod": world.cloud}, pace=PACE)
    assert world.fake.alive() == []


def test_the_reaper_ends_what_nobody_wants_whatever_its_row_says(world: World, filled: Callable[[], Path]) -> None:
    rental = rent_and_die(world)
    unknown, asked_for, refused, unseen = (rental.name.replace("-a1-", f"-a{number}-") for number in range(2, 6))
    never = replace(rental, instance_id="", rented_at=None, host_key="", intended_at=rental.intended_at - 7200)
    with Ledger(world.path) as ledger:
        add_rental(ledger, replace(never, name=asked_for, state=RentalState.INTENDED))
        add_rental(ledger, replace(never, name=refused, state=RentalState.REFUSED, ended_at=rental.intended_at))
        add_rental(ledger, replace(never, name=unseen, state=RentalState.INTENDED))
    for name in (unknown, asked_for, refused):
        world.fake.add(name, BODY)
    filler = filled()
    report = reap_now(world)
    assert world.fake.alive() == [] and report.ended == []
    said = "\n".join(report.failures)
    assert all(f"{name} {UNNOTED}" in said for name in (rental.name, unknown, asked_for, refused))
    filler.unlink()
    reap_now(world)
    rows = {row.name: row.state for row in world.rows()}
    assert rows[rental.name] is RentalState.GONE
    assert rows[unseen] is RentalState.REFUSED, "one that cannot be written hinders no other"


def test_the_reaper_leaves_a_machine_that_a_run_took_over_when_there_was_room_again(world: World) -> None:
    rental = rent_and_die(world)
    filler = fill(world.path.parent)
    with Ledger(world.path) as ledger:
        filler.unlink()
        with Ledger(world.path) as other, other.living_run("next"):
            assert world.rent(replace(REQUEST, run_id="next")).name == rental.name
            report = reap(ledger, {"runpod": world.cloud}, pace=PACE)
    assert report.ended == [] and report.failures == [] and len(world.fake.alive()) == 1


@pytest.mark.parametrize("moment", ["created", "usable", "unfit"])
def test_a_machine_is_given_back_when_the_disk_fills_up_while_it_is_rented(world: World, moment: str) -> None:
    make = world.fake.add

    def make_and_fill(name: str, body: dict[str, object]) -> object:
        machine = make(name, body)
        fill(world.path.parent)
        return machine

    def check(rental: Rental, instance: Instance) -> str:
        if moment != "created":
            fill(world.path.parent)
        if moment == "unfit":
            raise UnfitMachineError("its GPU is broken")
        return usable(rental, instance)

    if moment == "created":
        world.fake.add = make_and_fill  # type: ignore[method-assign,assignment]
    with pytest.raises(TransientInfraError, match=UNNOTED) as caught:
        world.rent(check=check)
    assert len(world.fake.machines) == 1 and world.fake.alive() == []
    assert isinstance(caught.value.__cause__, LedgerUnwritableError)
