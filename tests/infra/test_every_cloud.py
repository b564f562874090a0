"""Pins that renting, giving back and reaping hold at every provider, with the faults that all of them have.

Without it a client could satisfy its document and still lose a machine: an id read wrongly, a list cut short.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import pytest

from infra.errors import NoMachineError, StillRentedError
from infra.ledger import Ledger
from infra.offers import GPUQuery
from infra.providers.cloud import Cloud
from infra.provision import RentRequest, release_machine, rent_machine
from infra.reaper import reap
from infra.rentals import Rental, RentalState, all_rentals
from tests.infra.fake_cloud import FakeCloud
from tests.infra.test_cloud_contracts import PROVIDERS, PUBLIC_KEY
from tests.infra.test_provision import PACE, REQUEST, usable

WANTED = replace(REQUEST, query=GPUQuery(gpu_types=("H100",)), public_key=PUBLIC_KEY)


@dataclass
class World:
    """A provider, our account there, and our ledger."""

    fake: FakeCloud
    cloud: Cloud
    ledger: Ledger

    def rent(self, request: RentRequest = WANTED) -> Rental:
        return rent_machine(request, self.ledger, {self.cloud.name: self.cloud}, check=usable, pace=PACE)


@pytest.fixture(params=sorted(PROVIDERS))
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    fake_type, _, _, base, open_cloud = PROVIDERS[request.param]
    fake = fake_type()
    with fake.served() as url, open_cloud(url + base, httpx.HTTPTransport()) as cloud, Ledger(tmp_path / "l") as ledger:
        yield World(fake, cloud, ledger)


def test_a_lost_answer_a_slow_boot_and_a_slow_end_leave_nothing(world: World) -> None:
    world.fake.add("somebody-elses", _request_of(world))
    world.fake.faults.drop_creates, world.fake.faults.list_lag_s = 1, 0.3
    world.fake.faults.boot_s, world.fake.faults.end_lag_s, world.fake.faults.fail_ends = 0.4, 0.4, 1
    rental = world.rent()
    assert rental.state is RentalState.READY and rental.usd_per_hour > 0
    assert release_machine(rental, world.ledger, world.cloud, pace=PACE).state is RentalState.GONE
    assert [machine.name for machine in world.fake.alive()] == ["somebody-elses"]
    assert world.fake.most_at_once == 1


def test_what_a_dead_run_left_is_reaped_and_the_rest_is_not_touched(world: World) -> None:
    world.fake.add("somebody-elses", _request_of(world))
    with world.ledger.living_run(WANTED.run_id):
        world.rent()
    world.fake.faults.fail_lists = 1
    clouds = {world.cloud.name: world.cloud}
    assert reap(world.ledger, clouds, pace=PACE).failures and len(world.fake.alive()) == 2
    report = reap(world.ledger, clouds, pace=PACE)
    assert report.failures == [] and len(report.ended) == 1
    assert [machine.name for machine in world.fake.alive()] == ["somebody-elses"]


def test_no_capacity_an_unknown_status_and_a_higher_price_end_with_nothing_rented(world: World) -> None:
    world.fake.faults.no_capacity = 100
    with pytest.raises(NoMachineError):
        world.rent()
    world.fake.faults.no_capacity, world.fake.faults.extra_status = 0, "melting"
    with pytest.raises(NoMachineError, match="no address"):
        world.rent(replace(WANTED, usable_within_s=0.1))
    world.fake.faults.extra_status, world.fake.faults.price_factor = "", 3.0
    with pytest.raises(NoMachineError, match="more than was offered"):
        world.rent()
    assert world.fake.alive() == [] and all(rental.state.is_over for rental in all_rentals(world.ledger))


def test_a_machine_that_does_not_end_is_not_forgotten(world: World) -> None:
    rental = world.rent()
    world.fake.faults.never_ends = True
    with pytest.raises(StillRentedError):
        release_machine(rental, world.ledger, world.cloud, pace=replace(PACE, gone_within_s=0.1))
    world.fake.faults.never_ends = False
    with world.ledger.living_run(WANTED.run_id):
        pass
    assert len(reap(world.ledger, {world.cloud.name: world.cloud}, pace=PACE).ended) == 1
    assert world.fake.alive() == []


def _request_of(world: World) -> dict[str, object]:
    """What a machine is created with at this provider, learnt by creating one."""
    request = replace(WANTED, run_id="another")
    rental = world.rent(request)
    body = world.fake.machines[rental.instance_id].request
    release_machine(rental, world.ledger, world.cloud, pace=PACE)
    return body
