"""Pins that renting, giving back and reaping hold at every provider, with the faults that all of them have.

Without it a client could satisfy its document and still lose a machine: an id read wrongly, a list cut short.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import pytest

import rollouts.infra.providers.http
from rollouts.infra.cloud import Cloud
from rollouts.infra.clouds import find_cloud
from rollouts.infra.errors import (
    MachineGoneError,
    NoMachineError,
    ProviderRefusedError,
    ProviderUnavailableError,
    StillRentedError,
    UnfitMachineError,
)
from rollouts.infra.ledger import LEDGER_FILE, Ledger
from rollouts.infra.node import Node, SSHAccess
from rollouts.infra.offers import GPUQuery, Instance, InstanceStatus, MachineSpec, Offer
from rollouts.infra.providers.http import usable_port
from rollouts.infra.providers.instance import find_instance
from rollouts.infra.providers.lambda_cloud import Lambda
from rollouts.infra.providers.prime import Prime
from rollouts.infra.providers.rented import access_now, find_machine
from rollouts.infra.providers.runpod import RunPod
from rollouts.infra.providers.vast import Vast
from rollouts.infra.renting.provision import UNFIT_FOR_S, rent_machines
from rollouts.infra.renting.reaper import reap
from rollouts.infra.renting.release import release_machine
from rollouts.infra.renting.rentals import Rental, RentalState, all_rentals, change_rental, in_utc
from rollouts.infra.renting.request import Renting, RentRequest
from tests.infra.fake_cloud import HANG_S, KEY, FakeCloud
from tests.infra.fake_lambda import FakeLambda
from tests.infra.fake_prime import FakePrime
from tests.infra.fake_runpod import FakeRunPod
from tests.infra.fake_vast import ASK, FakeVast
from tests.infra.providers.test_cloud_contracts import PROVIDERS, PUBLIC_KEY
from tests.kit.renting import PACE, REQUEST, usable

WANTED = replace(REQUEST, query=GPUQuery(gpu_types=("H100",)), public_key=PUBLIC_KEY)


@dataclass
class World:
    """A provider, our account there, and our ledger."""

    fake: FakeCloud
    cloud: Cloud
    store: Path
    ledger: Ledger

    def rent(self, request: RentRequest = WANTED) -> Rental:
        [rental] = rent_machines(Renting(request, self.ledger, {self.cloud.name: self.cloud}, check=usable, pace=PACE))
        return rental

    def node(self, rental: Rental) -> Node:
        """The machine as its run knows it."""
        access = SSHAccess(host="203.0.113.1", port=1, user="root")
        mirror = str(self.store)
        return Node(name=rental.name, kind="rented", root="/r", python="/p", mirror=mirror, access=access)

    def find(self, rental: Rental) -> Instance:
        """The machine as its run is told by its provider."""
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr("rollouts.infra.providers.rented.account_of", lambda _: nullcontext(self.cloud))
            return find_machine(self.node(rental))


class Altered(httpx.BaseTransport):
    """The way to a provider, on which a test may change what is answered."""

    def __init__(self) -> None:
        self._way = httpx.HTTPTransport()
        self.change: Callable[[httpx.Request, bytes], bytes] = lambda request, content: content
        self.is_lost: Callable[[httpx.Request], bool] = lambda request: False
        """Something in front of the API answers 404 in its place."""

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        if self.is_lost(request):
            return httpx.Response(404, content=b"404 page not found")
        answer = self._way.handle_request(request)
        content = answer.read()
        answer.close()
        headers = {"Retry-After": answer.headers["Retry-After"]} if "Retry-After" in answer.headers else {}
        return httpx.Response(answer.status_code, headers=headers, content=self.change(request, content))


@pytest.fixture
def way() -> Altered:
    return Altered()


@pytest.fixture(params=sorted(PROVIDERS))
def world(
    request: pytest.FixtureRequest, way: Altered, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[World]:
    monkeypatch.setattr(
        rollouts.infra.providers.http, "FIRST_PAUSE_S", 0.05
    )  # how long pauses are pins test_cloud_http.py
    fake_type, _, _, base, open_cloud = PROVIDERS[request.param]
    fake = fake_type()
    with fake.served() as url, open_cloud(url + base, way) as cloud, Ledger(tmp_path / LEDGER_FILE) as ledger:
        yield World(fake, cloud, tmp_path, ledger)


@pytest.mark.slow
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
    with pytest.raises(NoMachineError, match="more than offered"):
        world.rent()
    assert world.fake.alive() == [] and all(rental.state.is_over for rental in all_rentals(world.ledger))


NEVER_RUN = {
    "lambda": ["unhealthy"],
    "prime": ["STOPPED", "ERROR"],
    "runpod": ["EXITED", "ERROR"],
    "shadeform": ["error"],
    "vast": ["exited", "offline", "unknown"],
}
"""What providers say of machines that will not run any more, and may cost money all the same."""


def test_a_machine_that_will_never_run_is_given_back_at_once(world: World) -> None:
    for status in NEVER_RUN[world.cloud.name]:
        world.fake.faults.extra_status = status
        with pytest.raises(NoMachineError, match=r" is (stopped|failed)"):
            world.rent()
    assert world.fake.alive() == [] and {row.state for row in all_rentals(world.ledger)} == {RentalState.GONE}


TAKEN_AWAY = {
    "lambda": ["preempted", "terminated"],
    "prime": ["TERMINATED", "STOPPED"],
    "runpod": ["TERMINATED", "EXITED"],
    "shadeform": ["deleted", "error"],
    "vast": ["offline", "exited"],
}
"""What providers say of a machine that they took away while it was used."""


@pytest.mark.parametrize("how", [0, 1, None], ids=["first", "second", "not there"])
def test_a_machine_that_was_taken_away_is_gone_for_its_run_and_the_next_start_has_another_one(
    world: World, how: int | None
) -> None:
    first = world.rent()
    assert world.find(first).id == first.instance_id
    if how is None:
        world.fake.machines[first.instance_id].ended_at = 0.0
    else:
        world.fake.machines[first.instance_id].status = TAKEN_AWAY[world.cloud.name][how]
    with pytest.raises(MachineGoneError, match="resumes from the last checkpoint on another machine"):
        world.find(first)
    second = world.rent()
    assert [machine.id for machine in world.fake.alive()] == [second.instance_id]
    assert [row.state for row in all_rentals(world.ledger)] == [RentalState.GONE, RentalState.READY]


def test_a_machine_that_is_listed_is_not_taken_for_gone(world: World, way: Altered) -> None:
    rental = world.rent()
    way.is_lost = lambda request: request.method == "GET" and rental.instance_id in request.url.path
    assert world.find(rental).id == rental.instance_id
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("rollouts.infra.providers.instance.open_account", lambda _: nullcontext(world.cloud))
        assert find_instance(f"{world.cloud.name}:{rental.instance_id}").id == rental.instance_id
    assert world.rent().instance_id == rental.instance_id and len(world.fake.alive()) == 1


def test_a_machine_that_moved_is_found_where_it_is_now(world: World) -> None:
    rental = world.rent()
    before = access_now(world.node(rental), lambda: world.find(rental))
    world.fake.host, world.fake.port = "203.0.113.9", 40022
    after = access_now(world.node(rental), lambda: world.find(rental))
    assert (before.host, before.port) == ("127.0.0.1", 22)
    assert (after.host, after.port) == ("203.0.113.9", 22 if world.cloud.name == "lambda" else 40022)
    assert world.fake.num_creates() == 1


@pytest.mark.parametrize("retry_after", ["0.05", ""], ids=["says when", "does not say when"])
def test_a_provider_that_is_busy_is_asked_again_and_has_one_machine(world: World, retry_after: str) -> None:
    world.fake.faults.retry_after = retry_after
    offers = world.cloud.search(WANTED.query)
    world.fake.faults.busy_creates = 1
    spec = MachineSpec(name="rollouts-1", public_key=PUBLIC_KEY, disk_gb=100)
    instance_id = world.cloud.create(offers[0], spec)
    world.fake.faults.busy = 1
    assert [each.id for each in world.cloud.list_named("rollouts-")] == [instance_id]
    world.fake.faults.busy = 1
    world.cloud.terminate(instance_id)
    assert len(world.fake.machines) == 1 and world.fake.num_creates() == 2 and world.fake.alive() == []


@pytest.mark.parametrize("fault", ["no_money", "no_rights"])
def test_an_account_without_money_or_rights_is_said_at_once_and_no_other_offer_is_tried(
    world: World, fault: str
) -> None:
    if (world.cloud.name, fault) == ("runpod", "no_rights"):
        return  # below: it says that of single offers
    setattr(world.fake.faults, fault, 100)
    with pytest.raises(ProviderRefusedError, match=find_cloud(world.cloud.name).endpoint.key_variable) as caught:
        world.rent()
    assert world.fake.num_creates() == 1 and KEY not in str(caught.value)
    assert [row.state for row in all_rentals(world.ledger)] == [RentalState.REFUSED]


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["hang_creates", "break_creates"])
def test_a_machine_whose_creation_was_not_answered_well_is_the_only_one(
    world: World, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollouts.infra.providers.http.CREATE_TIMEOUT_S", HANG_S / 2)
    setattr(world.fake.faults, fault, 1)
    rental = world.rent()
    assert [machine.id for machine in world.fake.alive()] == [rental.instance_id]
    assert world.fake.num_creates() == 1 and [row.name for row in all_rentals(world.ledger)] == [rental.name]


def test_a_key_whose_registration_was_not_answered_is_no_machine_that_may_be_rented(world: World, way: Altered) -> None:
    if not hasattr(world.fake, "keys"):
        return  # no key is registered there

    def cut(request: httpx.Request, content: bytes) -> bytes:
        return b"{" if request.method == "POST" and "key" in request.url.path else content

    way.change = cut
    with pytest.raises(NoMachineError, match="unreadable answer"):
        world.rent()
    assert {row.state for row in all_rentals(world.ledger)} == {RentalState.REFUSED} and world.fake.num_creates() == 0
    way.change = lambda request, content: content
    assert world.rent(replace(WANTED, run_id="another")).state is RentalState.READY
    assert len(world.fake.keys) == 1


def test_two_runs_that_register_a_key_at_lambda_at_once_both_have_it(way: Altered) -> None:
    fake = FakeLambda()
    with fake.served() as url, Lambda(KEY, url, way, min_interval_s=0) as cloud:
        offer = cloud.search(WANTED.query)[0]
        cloud.create(offer, MachineSpec(name="rollouts-1", public_key=PUBLIC_KEY, disk_gb=100))
        unseen = iter([True])

        def as_before(request: httpx.Request, content: bytes) -> bytes:
            is_list = request.method == "GET" and request.url.path.endswith("/ssh-keys")
            return b'{"data": []}' if is_list and next(unseen, False) else content

        way.change = as_before
        cloud.create(offer, MachineSpec(name="rollouts-2", public_key=PUBLIC_KEY, disk_gb=100))
    assert len(fake.machines) == 2 and len(fake.keys) == 1


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


@pytest.mark.parametrize("lost", ["", "fail_ends", "drop_ends"])
def test_a_machine_that_its_provider_does_not_end_twice_is_given_back(world: World, lost: str) -> None:
    rental = world.rent()
    world.fake.faults.end_lag_s, world.fake.faults.refuses_ends_again = 0.3, True
    if lost:
        setattr(world.fake.faults, lost, 1)
    assert release_machine(rental, world.ledger, world.cloud, pace=PACE).state is RentalState.GONE


def test_what_is_too_dear_is_seen_all_the_same(world: World) -> None:
    query = WANTED.query.model_copy(update={"max_usd_per_gpu_hour": 0.01})
    with pytest.raises(NoMachineError, match=rf"the cheapest is .* at {world.cloud.name} .*for 2\.\d\d USD"):
        world.rent(replace(WANTED, query=query))


def test_all_of_thirty_machines_are_listed(world: World) -> None:
    body = _request_of(world)
    names = {f"rollouts-{number}" for number in range(30)}
    for name in names:
        world.fake.add(name, body)
    listed = world.cloud.list_named("rollouts-")
    assert len(listed) == 30 and {instance.name for instance in listed} == names


def test_a_list_that_is_cut_short_ends_nothing_and_forgets_nothing(world: World, way: Altered) -> None:
    body = _request_of(world)
    with world.ledger.living_run(WANTED.run_id):
        world.rent()
    for number in range(3):
        world.fake.add(f"somebody-elses-{number}", body)
    before = all_rentals(world.ledger)
    num_lists = 0

    def cut(request: httpx.Request, content: bytes) -> bytes:
        nonlocal num_lists
        num_lists += 1
        is_last = world.cloud.name in ("runpod", "lambda", "shadeform") or num_lists == 2  # these have one page
        return content[: len(content) // 2] if is_last else content

    way.change = cut
    report = reap(world.ledger, {world.cloud.name: world.cloud}, pace=PACE)
    assert "unreadable answer" in report.failures[0] and report.ended == [] and len(world.fake.alive()) == 4
    assert all_rentals(world.ledger) == before


def _without(value: object, machine_id: str, keep: set[str]) -> object:
    """JSON in which the record of a machine has nothing but what is to be kept; the rest of it is null."""
    if isinstance(value, list):
        return [_without(each, machine_id, keep) for each in value]
    if not isinstance(value, dict):
        return value
    if str(value.get("id")) == machine_id:
        return {key: each if key in keep else None for key, each in value.items()}
    return {key: _without(each, machine_id, keep) for key, each in value.items()}


def _change_machine(way: Altered, machine_id: str, keep: set[str]) -> None:
    def change(request: httpx.Request, content: bytes) -> bytes:
        return json.dumps(_without(json.loads(content), machine_id, keep)).encode() if content else content

    way.change = change


@pytest.mark.parametrize("keep", [{"id"}, set[str]()], ids=["with an id", "without"])
def test_what_a_machine_of_others_lacks_keeps_no_machine_of_ours_rented(
    world: World, way: Altered, keep: set[str]
) -> None:
    foreign = world.fake.add("somebody-elses", _request_of(world))
    with world.ledger.living_run(WANTED.run_id):
        world.rent()
    _change_machine(way, foreign.id, keep)
    report = reap(world.ledger, {world.cloud.name: world.cloud}, pace=PACE)
    assert report.failures == [] and len(report.ended) == 1
    assert world.fake.alive() == [foreign]


def test_a_machine_of_ours_without_its_id_is_an_error(world: World, way: Altered) -> None:
    rental = world.rent()
    _change_machine(way, rental.instance_id, {"name", "label"})
    with pytest.raises(ProviderUnavailableError, match="unreadable answer"):
        world.cloud.list_named("rollouts-")


def test_a_machine_of_ours_of_which_nothing_is_known_but_its_names_is_found_and_not_usable(
    world: World, way: Altered
) -> None:
    rental = world.rent()
    _change_machine(way, rental.instance_id, {"id", "name", "label"})
    found = world.cloud.get(rental.instance_id)
    assert found is not None and not found.has_address and found.status is not InstanceStatus.GONE
    assert [each.id for each in world.cloud.list_named("rollouts-")] == [rental.instance_id]


def test_a_page_without_machines_is_not_the_end_of_a_list_that_has_more(way: Altered) -> None:
    fake = FakePrime()

    def empty(request: httpx.Request, content: bytes) -> bytes:
        answer = json.loads(content)
        return json.dumps(answer | {"data": []}).encode() if answer.get("offset") else content

    way.change = empty
    with fake.served() as url, Prime(KEY, url, way) as cloud, pytest.raises(ProviderUnavailableError, match="2 of 5"):
        offer = cloud.search(WANTED.query)[0]
        for number in range(5):
            cloud.create(offer, MachineSpec(name=f"rollouts-{number}", public_key=PUBLIC_KEY, disk_gb=50))
        cloud.list_named("rollouts-")


def test_what_a_new_version_of_an_api_says_besides_is_passed_over(world: World, way: Altered) -> None:
    def more(value: object) -> object:
        if isinstance(value, list):
            return [more(each) for each in value]
        if isinstance(value, dict):
            return {key: more(each) for key, each in value.items()} | {"brand_new": {"of": [None, 1.5, "\x1b"]}}
        return value

    def add(request: httpx.Request, content: bytes) -> bytes:
        if request.url.path.endswith("/logs"):  # lines
            return content
        document = json.loads(content or b"null")
        if world.cloud.name == "lambda" and "instance-types" in request.url.path:  # kinds by their names
            return json.dumps(document | {"brand_new": 1}).encode()
        return json.dumps(more(document)).encode() if content else content

    way.change = add
    rental = world.rent()
    assert rental.state is RentalState.READY
    assert release_machine(rental, world.ledger, world.cloud, pace=PACE).state is RentalState.GONE
    assert world.fake.alive() == []


@pytest.mark.parametrize("key", ["status", "actual_status"])
def test_a_machine_without_a_status_is_neither_usable_nor_gone(world: World, way: Altered, key: str) -> None:
    rental = world.rent()
    way.change = lambda request, content: content.replace(f'"{key}":'.encode(), b'"renamed":')
    found = world.cloud.get(rental.instance_id)
    has_key = (key == "actual_status") == (world.cloud.name == "vast")
    assert found is not None and found.status is not InstanceStatus.GONE and found.has_address is not has_key


def test_an_address_that_a_program_could_misread_is_none(world: World) -> None:
    rental = world.rent()
    for host in ("-oProxyCommand=touch x", "$(touch x)", "a b", "ho\nst", "h\x1b[2J", "ü.example", ""):
        world.fake.host = host
        found = world.cloud.get(rental.instance_id)
        assert found is not None and not found.has_address, host
    with pytest.raises(NoMachineError, match="gave it no address"):
        world.rent(replace(WANTED, run_id="another", usable_within_s=0.1))
    assert [machine.id for machine in world.fake.alive()] == [rental.instance_id]


def test_a_user_that_a_program_could_misread_is_not_logged_in_as(world: World) -> None:
    rental = world.rent()
    for user in ("-oProxyCommand=x", "ro\x1b[2Jot", "a;b"):
        world.fake.user = user
        found = world.cloud.get(rental.instance_id)
        assert found is not None and found.user in ("root", "ubuntu", "shadeform")


@pytest.mark.parametrize("port", [0, -1, 65_536, "9" * 5000, "²"])
def test_a_port_that_is_none_is_no_port(port: int | str) -> None:
    assert usable_port(port) == 22


def _request_of(world: World) -> dict[str, object]:
    """What a machine is created with at this provider, learnt by creating one."""
    request = replace(WANTED, run_id="another")
    rental = world.rent(request)
    body = world.fake.machines[rental.instance_id].request
    release_machine(rental, world.ledger, world.cloud, pace=PACE)
    return body


def test_a_physical_machine_that_could_not_be_used_is_not_rented_again_within_a_day(tmp_path: Path) -> None:
    fake = FakeVast()
    ask = fake.asks[0]
    fake.asks = [{**ask, "machine_id": 41}, {**ask, "id": 7002, "machine_id": 42, "dph_total": 2.3}]

    def check(rental: Rental, instance: Instance) -> str:
        if rental.host == "41":
            raise UnfitMachineError("it has 1x NVIDIA T4, and 1x H100 SXM was offered")
        return "SHA256:key"

    def rent(run_id: str) -> list[Rental]:
        return rent_machines(Renting(replace(WANTED, run_id=run_id), ledger, {"vast": cloud}, check=check, pace=PACE))

    with fake.served() as url, Vast(KEY, url, min_interval_s=0) as cloud, Ledger(tmp_path / LEDGER_FILE) as ledger:
        assert [rental.host for rental in rent("a")] == ["42"] and fake.num_creates() == 2
        assert [rental.host for rental in rent("b")] == ["42"] and fake.num_creates() == 3
        del fake.asks[1]
        with pytest.raises(NoMachineError, match="1 offered machines were unusable within the last day"):
            rent("c")
        [unfit] = [rental for rental in all_rentals(ledger) if rental.is_unfit]
        change_rental(ledger, unfit, intended_at=unfit.intended_at - UNFIT_FOR_S - 1)
        with pytest.raises(NoMachineError, match="was offered"):
            rent("d")
        assert fake.num_creates() == 4


def test_an_offer_that_the_account_may_not_take_is_passed_over_and_the_next_taken(tmp_path: Path) -> None:
    fake = FakeVast()
    fake.asks = [{**ASK, "dph_total": 2.2}, {**ASK, "id": 7002, "dph_total": 2.3}]
    fake.barred = {7001}
    with fake.served() as url, Vast(KEY, url, min_interval_s=0) as cloud, Ledger(tmp_path / LEDGER_FILE) as ledger:
        world = World(fake, cloud, tmp_path, ledger)
        assert world.rent().usd_per_hour == 2.3 and fake.num_creates() == 2
        assert [row.state for row in all_rentals(ledger)] == [RentalState.REFUSED, RentalState.READY]
        fake.barred = {7001, 7002}
        with pytest.raises(NoMachineError, match=r"Offer 7001 is not your own.*Offer 7002 is not your own"):
            world.rent(replace(WANTED, run_id="another"))
    assert len(fake.alive()) == 1


def test_a_machine_that_its_owner_takes_back_soon_is_rented_only_where_there_is_no_other_and_ends_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "rollouts.infra.renting.request")
    fake = FakeVast()
    brief = {**ASK, "id": 7002, "dph_total": 1.0, "duration": 5400.0}
    fake.asks = [brief, {**ASK, "dph_total": 2.2}, {**ASK, "id": 7003, "dph_total": 0.9, "duration": 1800.0}]
    with fake.served() as url, Vast(KEY, url, min_interval_s=0) as cloud, Ledger(tmp_path / LEDGER_FILE) as ledger:
        world = World(fake, cloud, tmp_path, ledger)
        assert world.rent().usd_per_hour == 2.2 and "takes it back" not in caplog.text
        fake.asks = [brief]
        rental = world.rent(replace(WANTED, run_id="another"))
        assert rental.expires_at == pytest.approx(time.time() + 5400, abs=60)
        assert (
            f"{rental.name} is used until {in_utc(rental.expires_at)}, when its provider takes it back" in caplog.text
        )


def test_a_pool_of_runpod_that_the_account_may_not_use_is_passed_over_and_the_next_offer_taken(tmp_path: Path) -> None:
    fake = FakeRunPod()
    fake.faults.no_rights = 1
    request = replace(WANTED, query=GPUQuery(gpu_types=("H100",), regions=("EU", "US")))
    with fake.served() as url, RunPod(KEY, url) as cloud, Ledger(tmp_path / LEDGER_FILE) as ledger:
        world = World(fake, cloud, tmp_path, ledger)
        assert world.rent(request).region == "US-TX-3" and fake.num_creates() == 2
        fake.faults.no_rights = 100
        with pytest.raises(
            NoMachineError, match=r"403: .*not with this key.*or the key in RUNPOD_API_KEY may not rent"
        ):
            world.rent(replace(request, run_id="another"))
        fake.faults.fail_lists = 1
        with pytest.raises(ProviderRefusedError, match="with 403, the key may not do that"):
            cloud.list_named("rollouts-")


def _search_vast(asks: list[dict[str, object]], query: GPUQuery) -> tuple[list[Offer], FakeVast]:
    """What is admitted of these asks, which take the place of the usual ones."""
    fake = FakeVast()
    fake.asks = [{**ASK, "id": number, **ask} for number, ask in enumerate(asks)]
    with fake.served() as url, Vast(KEY, url, min_interval_s=0) as cloud:
        return [offer for offer in cloud.search(query) if query.admits(offer)], fake


def test_a_machine_that_has_no_port_for_ssh_is_no_offer() -> None:
    asks: list[dict[str, object]] = [{"direct_port_count": 0, "dph_total": 1.0}, {"dph_total": 2.2}]
    offers, _ = _search_vast(asks, GPUQuery(gpu_types=("H100",)))
    assert [offer.usd_per_hour for offer in offers] == [2.2]


CHEAP: list[dict[str, object]] = [
    {"gpu_name": "RTX 4090", "gpu_ram": 24_000, "dph_total": 0.3 + 0.001 * number} for number in range(150)
]


@pytest.mark.parametrize("name", ["H100 SXM", "H100 NVL", "H100_SXM"])
def test_cheaper_machines_with_other_gpus_hide_none_with_the_wanted_one(name: str) -> None:
    offers, fake = _search_vast([*CHEAP, {"gpu_name": name, "dph_total": 2.2}], GPUQuery(gpu_types=("H100",)))
    assert [(offer.gpu_type, offer.usd_per_hour) for offer in offers] == [(name, 2.2)]
    assert len(fake.searches) == 1


def test_a_name_with_the_maker_and_the_memory_is_asked_for_by_what_vast_calls_it() -> None:
    wanted: dict[str, object] = {"gpu_name": "H100 SXM", "gpu_ram": 81_559, "dph_total": 2.2}
    offers, fake = _search_vast([*CHEAP, wanted], GPUQuery(gpu_types=("NVIDIA H100 80GB",)))
    assert [offer.gpu_type for offer in offers] == ["H100 SXM"] and len(fake.searches) == 1


SOLD_GB = {
    ("L4", 23_034): 24,
    ("RTX 4090", 24_564): 24,
    ("L40S", 46_068): 48,
    ("H100 SXM", 81_559): 80,
    ("H100 NVL", 95_830): 94,
    ("RTX PRO 6000", 97_887): 96,
    ("H200", 143_771): 141,
    ("Imaginary", 400_000): 390.6,
}


@pytest.mark.parametrize(("card", "gb"), SOLD_GB.items(), ids=[name for name, _ in SOLD_GB])
def test_a_gpu_is_found_by_the_memory_that_it_is_sold_with(card: tuple[str, int], gb: float) -> None:
    """Vast.ai counts as nvidia-smi does, from which some memory for error correction is already missing."""
    asks: list[dict[str, object]] = [
        {"gpu_name": name, "gpu_ram": mib, "dph_total": 2.2} for name, mib in (card, ("RTX 3080", 10_240))
    ]
    [offer] = _search_vast(asks, GPUQuery(min_vram_gb=gb))[0]
    assert (offer.gpu_type, offer.vram_gb) == (card[0], gb)
    assert _search_vast(asks, GPUQuery(min_vram_gb=gb + 0.1))[0] == []


@pytest.mark.parametrize("gpu_type", ["H100", "Imaginary 9000"], ids=["renamed", "unknown"])
def test_a_gpu_whose_name_at_its_provider_is_not_known_is_found_all_the_same(gpu_type: str) -> None:
    name = f"NVIDIA {gpu_type} Ultra"
    offers, fake = _search_vast([*CHEAP, {"gpu_name": name, "dph_total": 2.2}], GPUQuery(gpu_types=(gpu_type,)))
    assert [offer.gpu_type for offer in offers] == [name] and len(fake.searches) <= 4


@pytest.mark.parametrize("step", [0.001, 0.0], ids=["dearer and dearer", "one price"])
def test_many_cheaper_machines_elsewhere_hide_none_in_the_wanted_region(step: float) -> None:
    elsewhere = [{**ask, "dph_total": 0.3 + step * number} for number, ask in enumerate(CHEAP[:100])]
    there = {"gpu_name": "RTX 4090", "dph_total": 0.9, "geolocation": "Texas, US"}
    offers, fake = _search_vast([*elsewhere, there], GPUQuery(gpu_types=("RTX 4090",), regions=("US",)))
    assert [(offer.region, offer.usd_per_hour) for offer in offers] == [("US", 0.9)]
    assert len(fake.searches) <= 3


def test_the_search_ends_with_the_first_machine_that_is_too_dear() -> None:
    asks: list[dict[str, object]] = [{"dph_total": 3.0 + 0.02 * number} for number in range(300)]
    offers, fake = _search_vast(asks, GPUQuery(gpu_types=("H100",), max_usd_per_gpu_hour=4.0))
    assert len(offers) == 51 and len(fake.searches) == 1
