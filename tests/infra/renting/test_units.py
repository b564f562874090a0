"""Pins that several machines are had all or none, in one place, and that they share the money of their run.

Without it a run that lacks one of its machines would pay for the others, or train across an ocean.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from rollouts.infra.errors import NodeUnreachableError, NoMachineError, PermanentInfraError, StillRentedError
from rollouts.infra.ledger import Ledger
from rollouts.infra.node import RentedNode, settings_of_engines, settings_of_trainers, without_further_nodes
from rollouts.infra.offers import GPUQuery, Instance, MachineSpec, Offer
from rollouts.infra.providers.runpod import RunPod
from rollouts.infra.renting.provision import rent_machines
from rollouts.infra.renting.release import release_machines
from rollouts.infra.renting.rentals import Rental, RentalState, add_rental, all_rentals, change_rental
from rollouts.infra.renting.request import Check, Renting
from tests.infra.fake_cloud import KEY
from tests.infra.fake_runpod import FakeRunPod
from tests.kit.renting import PACE, REQUEST, usable

pytestmark = pytest.mark.slow

PAIR = replace(REQUEST, num_machines=2)


@dataclass
class World:
    """A provider, our account there, and our ledger."""

    fake: FakeRunPod
    cloud: RunPod
    path: Path

    def rent(self, check: Check = usable) -> list[Rental]:
        with Ledger(self.path) as ledger:
            return rent_machines(Renting(PAIR, ledger, {"runpod": self.cloud}, check=check, pace=PACE))

    def release(self, rentals: list[Rental], *, gone_within_s: float = PACE.gone_within_s) -> list[Rental]:
        pace = replace(PACE, gone_within_s=gone_within_s)
        with Ledger(self.path) as ledger:
            return release_machines(rentals, ledger, {"runpod": self.cloud}, pace=pace)

    def rows(self) -> list[Rental]:
        with Ledger(self.path) as ledger:
            return all_rentals(ledger)

    def alive(self) -> list[str]:
        return [machine.id for machine in self.fake.alive()]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    fake = FakeRunPod()
    with fake.served() as url, RunPod(KEY, url) as cloud:
        yield World(fake, cloud, tmp_path / "ledger.db")


def ids(rentals: list[Rental]) -> list[str]:
    return [rental.instance_id for rental in rentals]


def test_machines_of_a_unit_are_of_one_kind_in_one_place_and_share_the_money(world: World) -> None:
    first, second = world.rent()
    assert world.alive() == ids([first, second]) and first.name != second.name
    assert (first.region, first.gpu, first.usd_per_hour) == (second.region, second.gpu, second.usd_per_hour)
    assert first.expires_at == pytest.approx(first.intended_at + 2 * 3600, abs=5), "max_hours"
    assert [rental.state for rental in world.release([first, second])] == [RentalState.GONE] * 2
    assert world.alive() == []


def test_the_money_lasts_half_as_long_for_two(world: World) -> None:
    with Ledger(world.path) as ledger:
        request = replace(PAIR, max_usd=2.49)
        rentals = rent_machines(Renting(request, ledger, {"runpod": world.cloud}, check=usable, pace=PACE))
    assert [rental.expires_at - rental.intended_at for rental in rentals] == pytest.approx([1800, 1800], abs=5)
    assert sum((each.expires_at - each.intended_at) / 3600 * each.usd_per_hour for each in rentals) <= 2.49 + 1e-6


def test_the_money_lasts_for_two_at_the_price_that_they_really_have(world: World) -> None:
    world.fake.faults.price_factor = 1.5
    with Ledger(world.path) as ledger:
        request = replace(PAIR, max_usd=4.98)
        rentals = rent_machines(Renting(request, ledger, {"runpod": world.cloud}, check=usable, pace=PACE))
    assert sum(rental.usd(rental.expires_at) for rental in rentals) == pytest.approx(4.98, abs=0.05)
    assert sum(rental.usd(rental.expires_at) for rental in rentals) <= 4.98 + 1e-6


def test_all_are_asked_for_before_any_is_waited_for_and_to_end_before_any_end(world: World) -> None:
    seen = []

    def look(rental: Rental, instance: Instance) -> str:
        seen.append(len(world.fake.alive()))
        return "SHA256:key"

    rentals = world.rent(look)
    assert seen == [2, 2]
    world.fake.faults.end_lag_s = 0.3
    world.fake.requests.clear()
    world.release(rentals)
    asked = [(method, path.rpartition("/")[2]) for method, path in world.fake.requests]
    assert asked[:2] == [("DELETE", id_) for id_ in ids(rentals)]


def test_a_unit_of_which_one_is_not_to_be_had_is_had_elsewhere_or_not_at_all(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    create, asked = world.cloud.create, []

    def refuse_the_second(offer: Offer, spec: MachineSpec) -> str:
        asked.append(spec.name)
        world.fake.faults.no_capacity = int(len(asked) == 2)
        return create(offer, spec)

    with monkeypatch.context() as patch:
        patch.setattr(world.cloud, "create", refuse_the_second)
        rentals = world.rent()
    assert [row.state for row in world.rows()] == [
        RentalState.GONE,
        RentalState.REFUSED,
        RentalState.READY,
        RentalState.READY,
    ]
    assert world.alive() == ids(rentals)
    world.release(rentals)
    world.fake.faults.no_capacity = 1000
    with pytest.raises(
        NoMachineError, match=r"no 2 machines in the same region with 1x H100 .* no longer any instances"
    ):
        world.rent()
    assert world.alive() == []


def test_one_that_cannot_be_used_gives_the_others_back(world: World) -> None:
    def second_breaks(rental: Rental, instance: Instance) -> str:
        if len(world.fake.machines) == 2 and rental.instance_id == list(world.fake.machines)[1]:
            world.fake.machines[instance.id].status = "EXITED"
            raise NodeUnreachableError("host", "refused")
        return "key"

    rentals = world.rent(second_breaks)
    assert world.alive() == ids(rentals) and len(world.fake.machines) == 4
    assert [row.state for row in world.rows()[:2]] == [RentalState.GONE] * 2


@pytest.mark.parametrize("error", [PermanentInfraError("no Python"), KeyboardInterrupt(), RuntimeError("a bug")])
def test_whatever_ends_the_waiting_gives_all_back(world: World, error: BaseException) -> None:
    def fails_late(rental: Rental, instance: Instance) -> str:
        if rental.instance_id == list(world.fake.machines)[1]:
            raise error
        return "key"

    with pytest.raises(type(error)):
        world.rent(fails_late)
    assert world.alive() == [] and len(world.fake.machines) == 2


def test_ctrl_c_while_the_second_is_being_made_gives_both_back(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    create = world.cloud.create

    def make_and_interrupt(offer: Offer, spec: MachineSpec) -> str:
        made = create(offer, spec)
        if len(world.fake.machines) == 2:
            raise KeyboardInterrupt
        return made

    monkeypatch.setattr(world.cloud, "create", make_and_interrupt)
    with pytest.raises(KeyboardInterrupt):
        world.rent()
    assert world.alive() == [] and len(world.fake.machines) == 2
    assert [row.state for row in world.rows()] == [RentalState.GONE] * 2


@pytest.mark.parametrize("interrupted", [None, 0, 1], ids=["ready", "the first", "the second"])
def test_a_run_that_starts_again_goes_on_with_its_machines_in_their_order(
    world: World, interrupted: int | None
) -> None:
    """Also where it ended before the machine that leads was ready: who cancels it reads the order in the ledger."""
    before = world.rent()
    if interrupted is not None:
        with Ledger(world.path) as ledger:
            change_rental(ledger, before[interrupted], state=RentalState.RENTED)
    assert ids(world.rent()) == ids(before) and world.fake.num_creates() == 2


@pytest.mark.parametrize("lost", [0, 1])
def test_one_that_was_taken_away_is_replaced_beside_the_other(world: World, lost: int) -> None:
    before = world.rent()
    world.fake.machines[before[lost].instance_id].status = "TERMINATED"
    after = world.rent()
    left = before[1 - lost]
    assert after[0].name == left.name and after[1].name not in {rental.name for rental in before}
    assert world.alive() == ids(after) and world.fake.num_creates() == 3
    usd = sum((each.expires_at - each.intended_at) / 3600 * each.usd_per_hour for each in (*before, after[1]))
    assert usd <= PAIR.max_usd * 1.5 + 1e-6, "what the lost one would have cost until its end is left to the new one"


def test_where_none_is_to_be_had_beside_all_are_given_back_and_had_elsewhere(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = world.rent()
    world.fake.machines[before[1].instance_id].status = "TERMINATED"
    elsewhere = [offer for offer in world.cloud.search(PAIR.query) if offer.region != before[0].region]
    assert elsewhere
    monkeypatch.setattr(world.cloud, "search", lambda query: elsewhere)
    after = world.rent()
    assert before[0].instance_id not in world.alive() and world.alive() == ids(after)
    assert {rental.region for rental in after} == {elsewhere[0].region}


def test_the_machines_of_a_dead_run_go_to_one_that_wants_the_same(world: World) -> None:
    with Ledger(world.path) as ledger:
        with ledger.living_run(PAIR.run_id):
            left = world.rent()
        request = replace(PAIR, run_id="another-run")
        taken = rent_machines(Renting(request, ledger, {"runpod": world.cloud}, check=usable, pace=PACE))
    assert ids(taken) == ids(left) and {rental.run_id for rental in taken} == {"another-run"}
    assert world.fake.num_creates() == 2


def test_machines_that_are_taken_over_share_the_money_of_the_run_that_takes_them(world: World) -> None:
    with Ledger(world.path) as ledger:
        with ledger.living_run(PAIR.run_id):
            left = world.rent()
        request = replace(PAIR, run_id="another-run", max_usd=2.49)
        taken = rent_machines(Renting(request, ledger, {"runpod": world.cloud}, check=usable, pace=PACE))
    assert ids(taken) == ids(left)
    assert [rental.expires_at - time.time() for rental in taken] == pytest.approx([1800, 1800], abs=30)
    assert sum(rental.usd(rental.expires_at) for rental in taken) <= 2.49 + 1e-6


def test_a_machine_that_appeared_late_beside_a_whole_unit_is_given_back(world: World) -> None:
    rentals = world.rent()
    name = f"{rentals[0].name}9"
    late = world.fake.add(name, world.fake.machines[rentals[0].instance_id].request)
    with Ledger(world.path) as ledger:
        add_rental(ledger, replace(rentals[0], name=name, instance_id=late.id, state=RentalState.RENTED))
    assert ids(world.rent()) == ids(rentals) == world.alive()


def test_one_that_does_not_end_hinders_the_end_of_no_other(world: World) -> None:
    rentals = world.rent()
    world.fake.faults.never_ends = True
    with pytest.raises(StillRentedError, match=rentals[0].name):
        world.release(rentals, gone_within_s=0.2)
    assert [row.state for row in world.rows()] == [RentalState.RELEASING] * 2
    world.fake.faults.never_ends = False
    world.release(rentals)
    assert world.alive() == []


def test_kept_machines_are_taken_over_as_one(world: World) -> None:
    with Ledger(world.path) as ledger, ledger.living_run(PAIR.run_id):
        kept = [change_rental(ledger, rental, kept_until=rental.expires_at) for rental in world.rent()]
    assert all(rental is not None for rental in kept)
    taken = world.rent()
    assert [rental.kept_until for rental in taken] == [None, None] and world.fake.num_creates() == 2


def test_settings_say_how_many_machines_there_are_and_where_a_network_is_known() -> None:
    node = RentedNode(max_usd=5.0, num_trainer_nodes=2, num_engine_nodes=1)
    assert node.num_machines == 3
    assert (len(settings_of_trainers(node)), len(settings_of_engines(node))) == (1, 1)
    assert without_further_nodes(node) == RentedNode(max_usd=5.0)
    with pytest.raises(ValueError, match=r"runpod, vast may not have one: add lambda or sky to query\.prov"):
        RentedNode(max_usd=5.0, num_engine_nodes=1, query=GPUQuery(providers=("runpod", "vast")))
