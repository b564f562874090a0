"""Pins that renting ends with one machine or with none, whatever the provider does, and giving back with none.

Without it a lost answer, a slow list or a provider's error becomes a machine that nobody knows and everybody pays.
"""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from rollouts.infra.cloud import Cloud
from rollouts.infra.clouds import CloudName
from rollouts.infra.errors import (
    LoginError,
    MissingKeyError,
    NodeUnreachableError,
    NoMachineError,
    PermanentInfraError,
    ProviderRefusedError,
    StillRentedError,
    UnfitMachineError,
)
from rollouts.infra.ledger import Ledger
from rollouts.infra.offers import GPUQuery, Instance
from rollouts.infra.providers.lambda_cloud import Lambda
from rollouts.infra.providers.runpod import RunPod
from rollouts.infra.renting.provision import MAX_OFFERS, rent_machines
from rollouts.infra.renting.reaper import reap
from rollouts.infra.renting.release import release_machine
from rollouts.infra.renting.rentals import (
    Rental,
    RentalState,
    change_rental,
    find_rental,
    rentals_of,
    usd_spent,
)
from rollouts.infra.renting.request import Renting
from tests.infra.fake_cloud import HANG_S, KEY, FakeCloud
from tests.infra.fake_lambda import FakeLambda
from tests.infra.fake_runpod import FakeRunPod
from tests.kit.renting import PACE, REQUEST, World, usable

pytestmark = pytest.mark.slow


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    fake = FakeRunPod()
    with fake.served() as url, RunPod(KEY, url) as cloud:
        yield World(fake, cloud, tmp_path / "ledger.db", url)


def test_the_cheapest_machine_is_rented_once_and_is_gone_afterwards(world: World) -> None:
    world.fake.faults.boot_s = 0.1
    rental = world.rent()
    assert rental.state is RentalState.READY and rental.host_key == "SHA256:key" and rental.usd_per_hour == 2.49
    [machine] = world.fake.alive()
    assert machine.name == rental.name and machine.request["env"] == {"PUBLIC_KEY": REQUEST.public_key}
    assert rental.expires_at == pytest.approx(rental.intended_at + 2 * 3600)
    gone = world.release(rental)
    assert world.fake.alive() == [] and gone.state is RentalState.GONE and gone.usd(1e12) < 0.1
    assert world.release(rental) == gone and world.fake.num_creates() == 1


@pytest.mark.parametrize("fault", ["drop_creates", "hang_creates", "break_creates"])
def test_a_creation_that_was_not_answered_is_found_by_its_name(
    world: World, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollouts.infra.providers.http.CREATE_TIMEOUT_S", HANG_S / 2)
    setattr(world.fake.faults, fault, 1)
    world.fake.faults.list_lag_s = 0.5
    rental = world.rent()
    assert [machine.id for machine in world.fake.alive()] == [rental.instance_id]
    assert world.fake.num_creates() == 1 and world.fake.most_at_once == 1


def test_a_creation_that_did_not_happen_is_tried_at_the_next_offer_under_another_name(world: World) -> None:
    world.fake.faults.drop_before_create = 1
    rental = world.rent()
    [lost, found] = world.rows()
    assert found == rental and lost.name != rental.name
    assert lost.state is RentalState.INTENDED and "has not appeared" in lost.note, "the reaper must look for it"


def test_offers_that_are_gone_are_skipped_up_to_a_limit(world: World) -> None:
    world.fake.faults.no_capacity = 1
    world.release(world.rent())
    assert [row.state for row in world.rows()] == [RentalState.REFUSED, RentalState.GONE]
    world.fake.faults.no_capacity = 1000
    with pytest.raises(NoMachineError, match="no longer any instances"):
        world.rent()
    assert world.fake.num_creates() <= 2 + 6 and world.fake.alive() == []


def test_an_account_without_money_is_said_at_once_and_no_other_offer_is_tried(world: World) -> None:
    world.fake.faults.no_money = 1000
    with pytest.raises(ProviderRefusedError, match=r"no money on .*insufficient credits.*RUNPOD_API_KEY"):
        world.rent()
    assert world.fake.num_creates() == 1 and world.fake.alive() == []
    assert [row.state for row in world.rows()] == [RentalState.REFUSED]


@contextmanager
def two_providers(world: World) -> Iterator[tuple[FakeCloud, dict[CloudName, Cloud]]]:
    """The one of the world, which is asked first as its price is the same; and another one."""
    other = FakeLambda()
    with other.served() as url, Lambda(KEY, url, min_interval_s=0) as cloud:
        yield other, {"runpod": world.cloud, "lambda": cloud}


def test_a_provider_that_refuses_the_account_is_done_without_where_another_one_has_machines(world: World) -> None:
    world.fake.faults.no_money = 1000
    said: list[str] = []
    with two_providers(world) as (other, clouds), Ledger(world.path) as ledger:
        [rental] = rent_machines(Renting(REQUEST, ledger, clouds, check=usable, say=said.append, pace=PACE))
        assert [machine.id for machine in other.alive()] == [rental.instance_id]
    assert world.fake.num_creates() == 1, "none of its other offers is tried"
    [sentence] = [each for each in said if each.startswith("continues without runpod: ")]
    assert "there is no money on the account" in sentence


def test_a_provider_that_breaks_down_while_it_makes_a_machine_is_done_without_until_it_can_be_asked(
    world: World,
) -> None:
    world.fake.faults.break_creates = world.fake.faults.fail_lists = 1
    with two_providers(world) as (other, clouds), Ledger(world.path) as ledger, ledger.living_run(REQUEST.run_id):
        rental = rent_machines(Renting(REQUEST, ledger, clouds, check=usable, pace=PACE))[0]
        assert [machine.id for machine in other.alive()] == [rental.instance_id]
        assert world.fake.num_creates() == 1, "what it makes would be as unknown"
        [late] = world.fake.alive()
        assert reap(ledger, clouds, pace=PACE).ended == [f"{late.name} at runpod, 1x H100 SXM"]
        world.fake.faults.break_creates = world.fake.faults.fail_lists = 1
        request = replace(REQUEST, run_id="alone")
        with pytest.raises(NoMachineError, match=r"with 500.*it broke.*GET /v2/pods with 403"):
            rent_machines(Renting(request, ledger, {"runpod": world.cloud}, check=usable, pace=PACE))


def test_where_no_provider_leads_to_a_machine_the_reason_of_each_is_said(world: World) -> None:
    with two_providers(world) as (other, clouds), Ledger(world.path) as ledger:
        renting = Renting(REQUEST, ledger, clouds, check=usable, pace=PACE)
        world.fake.faults.no_money = other.faults.no_rights = 1000
        with pytest.raises(ProviderRefusedError, match=r"no money on the account.*; .*the key may not do that"):
            rent_machines(renting)
        other.faults.no_rights, other.faults.no_capacity = 0, 1000
        with pytest.raises(NoMachineError, match=r"Not enough capacity.*; .*no money on the account"):
            rent_machines(renting)
        other.faults.refuses_key = True
        with pytest.raises(ProviderRefusedError, match=r"no money on the account.*; .*the key is not valid"):
            rent_machines(renting)
        world.fake.faults.refuses_key = True
        with pytest.raises(ProviderRefusedError, match=r"the key is not valid.*; .*the key is not valid"):
            rent_machines(renting)
    assert world.fake.alive() == other.alive() == []


def test_where_all_is_too_dear_the_cheapest_is_named_with_what_to_raise(world: World) -> None:
    cheap = REQUEST.query.model_copy(update={"max_usd_per_gpu_hour": 0.5})
    sentence = (
        r"\(the cheapest is 1x H100 SXM at runpod in \S+ for 2\.49 USD .* node\.query\.max_usd_per_gpu_hour to that"
    )
    with pytest.raises(NoMachineError, match=sentence):
        world.rent(replace(REQUEST, query=cheap))
    assert world.fake.num_creates() == 0


def test_a_busy_provider_is_waited_for(world: World) -> None:
    world.fake.faults.busy = 2
    assert world.rent().state is RentalState.READY
    assert len(world.fake.alive()) == 1


@pytest.mark.parametrize(("status", "meaning"), [("EXITED", "stopped"), ("ERROR", "failed")])
def test_a_machine_that_will_never_run_is_given_back_and_another_taken(world: World, status: str, meaning: str) -> None:
    def breaks_first(rental: Rental, instance: Instance) -> str:
        if len(world.fake.machines) == 1:
            world.fake.machines[instance.id].status = status
            raise NodeUnreachableError("host", "refused")
        return "key"

    rental = world.rent(check=breaks_first)
    assert [machine.id for machine in world.fake.alive()] == [rental.instance_id]
    assert world.rows()[0].state is RentalState.GONE and meaning in world.rows()[0].note


def test_a_status_that_nobody_knows_is_neither_usable_nor_an_error(world: World) -> None:
    world.fake.faults.extra_status = "MELTING"
    with pytest.raises(NoMachineError, match="gave it no address"):
        world.rent(replace(REQUEST, usable_within_s=0.2))
    assert world.fake.alive() == [] and world.fake.machines


def test_a_machine_that_cannot_be_logged_in_to_in_time_is_given_back_and_the_next_offer_taken(world: World) -> None:
    def never(rental: Rental, instance: Instance) -> str:
        raise LoginError("root@host:22", "it knows no key of ours")

    with pytest.raises(NoMachineError, match="knows no key of ours"):
        world.rent(replace(REQUEST, usable_within_s=0.2), never)
    assert world.fake.alive() == [] and all(row.state is RentalState.GONE for row in world.rows())
    assert 1 < len(world.rows()) == len(world.fake.machines) <= MAX_OFFERS and world.fake.most_at_once == 1


def test_what_the_provider_told_of_the_host_key_is_expected_by_every_later_try(world: World) -> None:
    """Else the next key would be believed, by whoever it is shown, where the provider is silent for a moment."""
    key = "SHA256:" + 43 * "k"
    world.fake.log = ["Key: /etc/ssh/ssh_host_ed25519_key.pub", f"256 {key} root@pod (ED25519)"]
    expected: list[tuple[str, str]] = []

    def check(rental: Rental, instance: Instance) -> str:
        expected.append((rental.expected_key, rental.believed_by))
        world.fake.log = []
        if len(expected) < 3:
            raise LoginError("root@host:22", "it knows no key of ours")
        return rental.expected_key

    assert world.rent(check=check).host_key == key
    assert expected == 3 * [(key, "provider")]


@pytest.mark.parametrize("error", [PermanentInfraError("no Python"), KeyboardInterrupt(), RuntimeError("a bug")])
def test_whatever_ends_the_waiting_gives_the_machine_back(world: World, error: BaseException) -> None:
    def fails(rental: Rental, instance: Instance) -> str:
        raise error

    with pytest.raises(type(error)):
        world.rent(check=fails)
    assert world.fake.alive() == [] and len(world.fake.machines) == 1


STEPS = (
    "rollouts.infra.renting.provision.add_rental",
    "create",
    "rollouts.infra.renting.provision._adopt_or_release",
    "rollouts.infra.renting.release.change_rental",
)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("lag_s", [0.0, 0.3])
def test_ctrl_c_at_any_step_gives_back_what_was_made_so_far(
    world: World, step: str, lag_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.fake.faults.list_lag_s, world.fake.faults.end_lag_s = lag_s, 0.1
    interrupt_after(step, world, monkeypatch)
    said: list[str] = []
    with Ledger(world.path) as ledger, pytest.raises(KeyboardInterrupt):
        check = refuses if step == "rollouts.infra.renting.release.change_rental" else usable
        rent_machines(Renting(REQUEST, ledger, {"runpod": world.cloud}, check=check, say=said.append, pace=PACE))
    assert world.fake.alive() == [] and len(world.fake.machines) == (
        step != "rollouts.infra.renting.provision.add_rental"
    )
    [row] = world.rows()
    assert row.state is (RentalState.GONE if world.fake.machines else RentalState.INTENDED)
    became = (
        "gave back {0.name} at" if world.fake.machines else "{0.name} was requested at runpod and may be rented (it"
    )
    assert any(sentence.startswith(became.format(row)) for sentence in said)


def interrupt_after(step: str, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a step done once, and this thread interrupted then."""
    place, _, name = step.rpartition(".")
    owner = importlib.import_module(place) if place else world.cloud
    act, done = getattr(owner, name), list[bool]()

    def act_and_interrupt(*arguments: Any, **changes: Any) -> Any:  # Any: whatever it takes and returns
        answer = act(*arguments, **changes)
        done.append(True)
        if len(done) == 1:
            raise KeyboardInterrupt
        return answer

    monkeypatch.setattr(owner, name, act_and_interrupt)


def refuses(rental: Rental, instance: Instance) -> str:
    raise UnfitMachineError("its GPUs do not compute")


def test_a_machine_that_does_not_end_after_ctrl_c_is_named(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.fake.faults.never_ends = True
    interrupt_after("create", world, monkeypatch)
    said: list[str] = []
    pace = replace(PACE, gone_within_s=0.1)
    with Ledger(world.path) as ledger, pytest.raises(KeyboardInterrupt):
        rent_machines(Renting(REQUEST, ledger, {"runpod": world.cloud}, check=usable, say=said.append, pace=pace))
    [row] = world.rows()
    assert (
        row.state is RentalState.RELEASING
        and f"{row.name} ({row.instance_id} at runpod, 2.49 USD/h) may still" in said[-1]
    )


def test_terminated_a_run_leaves_what_can_be_used_and_gives_back_what_cannot(world: World) -> None:
    class Terminated(BaseException):
        """As Prefect's signal is one."""

    def is_terminated(rental: Rental, instance: Instance) -> str:
        raise Terminated

    with pytest.raises(Terminated):
        world.rent(check=is_terminated)
    assert world.fake.alive() == [] and len(world.fake.machines) == 1
    rental = world.rent()
    with pytest.raises(Terminated):
        world.rent(check=is_terminated)
    assert world.rows()[-1] == rental and len(world.fake.alive()) == 1


def test_a_machine_that_costs_more_than_was_offered_is_given_back(world: World) -> None:
    world.fake.faults.price_factor = 2.0
    with pytest.raises(NoMachineError, match="more than offered and allowed"):
        world.rent()
    assert world.fake.alive() == []


def test_a_machine_in_another_place_than_is_allowed_is_given_back_and_the_next_offer_taken(world: World) -> None:
    world.fake.num_elsewhere = 1
    rental = world.rent()
    [elsewhere, there] = world.rows()
    assert there == rental and [machine.id for machine in world.fake.alive()] == [rental.instance_id]
    assert elsewhere.state is RentalState.GONE
    place = f"is in CA-MTL-1 instead of {elsewhere.region}, which node.query.regions"
    assert place in elsewhere.note


def test_a_machine_in_another_place_of_those_allowed_is_taken(world: World) -> None:
    world.fake.num_elsewhere = 1
    rental = world.rent(replace(REQUEST, query=GPUQuery(gpu_types=("H100",), regions=("EU", "CA"))))
    assert [rental] == world.rows() and rental.state is RentalState.READY


def test_a_machine_that_costs_more_than_was_offered_and_less_than_is_allowed_ends_when_the_money_does(
    world: World,
) -> None:
    world.fake.faults.price_factor = 1.5
    rental = world.rent(replace(REQUEST, max_usd=4.98))  # for two hours at the price of the offer
    assert rental.usd_per_hour == pytest.approx(3.735) and rental.rented_at is not None
    assert usd_until_its_end(rental) == pytest.approx(4.98, abs=0.01)
    assert usd_until_its_end(rental) <= 4.98 + 1e-6


def usd_until_its_end(rental: Rental) -> float:
    return rental.usd(rental.expires_at)


def test_the_money_of_a_run_is_a_limit_over_all_its_machines(world: World) -> None:
    rental = world.rent(replace(REQUEST, max_usd=2.49))
    assert rental.expires_at == pytest.approx(rental.intended_at + 3600)
    gone = world.release(rental)
    with Ledger(world.path) as ledger:
        change_rental(ledger, gone, rented_at=gone.intended_at - 7200)
        assert usd_spent(ledger, REQUEST.run_id, 0.0) == pytest.approx(2 * 2.49, abs=0.05)
    with pytest.raises(PermanentInfraError, match=r"has spent its 2\.49 USD"):
        world.rent(replace(REQUEST, max_usd=2.49))
    assert world.fake.num_creates() == 1


def test_a_machine_is_waited_for_no_longer_than_the_money_of_the_run_lasts(world: World) -> None:
    world.fake.faults.boot_s = 15.0
    seconds_paid_for = 2.0
    request = replace(REQUEST, max_usd=2.49 / 3600 * seconds_paid_for)
    with pytest.raises(PermanentInfraError, match=r"has spent its .* USD"):
        world.rent(request)
    [gone] = world.rows()
    assert gone.usd(time.time()) / 2.49 * 3600 < 10 and "the run's money were used up" in gone.note
    assert world.fake.alive() == [] and not gone.is_unfit


@pytest.mark.parametrize("fault", ["fail_ends", "drop_ends"])
def test_giving_back_ends_when_the_provider_has_the_machine_no_more(world: World, fault: str) -> None:
    rental = world.rent()
    world.fake.faults.end_lag_s = 1.5
    setattr(world.fake.faults, fault, 1)
    assert world.release(rental).state is RentalState.GONE
    assert world.fake.listed() == []


class Broken(httpx.BaseTransport):
    """The way to a provider that does what is asked by DELETE and answers 500, however often it is asked."""

    def __init__(self) -> None:
        self._way = httpx.HTTPTransport()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        answer = self._way.handle_request(request)
        return httpx.Response(500) if request.method == "DELETE" else answer


def test_a_machine_that_is_gone_is_given_back_whatever_its_provider_answers_to_the_one_who_ends_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    rental = world.rent()
    monkeypatch.setattr(RunPod, "endpoint", replace(RunPod.endpoint, patience_s=0.1))
    pace = replace(PACE, gone_within_s=2.0)
    with RunPod(KEY, world.url, Broken()) as cloud, Ledger(world.path) as ledger:
        world.fake.faults.never_ends = True
        with pytest.raises(StillRentedError, match=r"may still be rented: RunPod answered DELETE .* with 500"):
            release_machine(rental, ledger, cloud, pace=replace(pace, gone_within_s=0.1))
        world.fake.faults.never_ends = False
        assert release_machine(rental, ledger, cloud, pace=pace).state is RentalState.GONE
    assert world.fake.alive() == []


def test_a_second_machine_that_one_request_made_is_given_back_with_the_first(world: World) -> None:
    """Without it the other one costs money until somebody looks at all that is rented."""
    rental = world.rent()
    twin = world.fake.add(rental.name, world.fake.alive()[0].request)
    world.fake.add(f"{rental.name}0", twin.request)
    world.release(rental)
    assert [machine.name for machine in world.fake.alive()] == [f"{rental.name}0"]


def test_nobody_wants_jobs_of_a_machine_any_more_that_was_given_back(world: World) -> None:
    rental = world.rent()
    with Ledger(world.path) as ledger:
        ledger.add_lease("/root/rollouts/stages/sft-1", "of a killed run", rental.name)
        ledger.add_lease("/root/rollouts/stages/sft-1", "of another one", "me@two:22")
    world.release(rental)
    with Ledger(world.path) as ledger:
        assert [lease.node for lease in ledger.leases()] == ["me@two:22"]


def test_a_machine_that_its_provider_has_no_more_is_given_back_without_an_error(world: World) -> None:
    rental = world.rent()
    world.fake.machines[rental.instance_id].ended_at = time.monotonic()  # from now on 404 answers whatever is asked
    assert world.release(rental).state is RentalState.GONE


def test_a_machine_that_does_not_end_stays_in_the_ledger_and_is_said_aloud(world: World) -> None:
    rental = world.rent()
    world.fake.faults.never_ends = True
    with pytest.raises(StillRentedError, match=f"{rental.name} .* may still be rented"):
        world.release(rental, replace(PACE, gone_within_s=0.2))
    assert [row.state for row in world.rows()] == [RentalState.RELEASING]
    world.fake.faults.never_ends = False
    with pytest.raises(NoMachineError):  # the run that starts again ends it first
        world.fake.faults.no_capacity = 1000
        world.rent()
    assert world.fake.alive() == []


def test_a_run_that_starts_again_goes_on_with_its_machine(world: World) -> None:
    first = world.rent()
    again = world.rent()
    assert (again.name, again.instance_id) == (first.name, first.instance_id) and world.fake.num_creates() == 1


def test_a_machine_that_was_taken_away_is_replaced(world: World) -> None:
    first = world.rent()
    world.fake.machines[first.instance_id].status = "TERMINATED"
    second = world.rent()
    assert second.instance_id != first.instance_id
    assert [row.state for row in world.rows()] == [RentalState.GONE, RentalState.READY]


def test_the_machine_of_a_dead_run_goes_to_one_that_wants_the_same(world: World) -> None:
    with Ledger(world.path) as ledger:
        lock = ledger.living_run(REQUEST.run_id)
        lock.__enter__()
        first = world.rent()
        other = replace(REQUEST, run_id="another-run")
        second = world.rent(other)
        assert second.instance_id != first.instance_id, "the first run lives"
        world.release(second)
        lock.__exit__(None, None, None)
        assert ledger.has_died(REQUEST.run_id)
        third = world.rent(replace(other, purpose="something else"))
        assert third.instance_id != first.instance_id
        world.release(third)
        taken = world.rent(other)
        assert taken.instance_id == first.instance_id and rentals_of(ledger, REQUEST.run_id) == []


def fail_and_keep(world: World) -> Rental:
    """The machine of a run that failed and keeps it."""
    with Ledger(world.path) as ledger, ledger.living_run(REQUEST.run_id):
        kept = change_rental(ledger, world.rent(), kept_until=time.time() + 600)
    assert kept is not None
    return kept


def test_a_machine_at_a_provider_whose_key_is_not_there_is_left_alone_and_asked_for_by_its_own_run(
    world: World,
) -> None:
    with two_providers(world) as (other, clouds), Ledger(world.path) as ledger:
        with ledger.living_run(REQUEST.run_id):
            left = world.rent()
        reached = {name: cloud for name, cloud in clouds.items() if name != left.provider}
        with pytest.raises(MissingKeyError, match=f"the run has {left.name} at runpod, whose key is missing here"):
            rent_machines(Renting(REQUEST, ledger, reached, check=usable, pace=PACE))
        assert other.machines == {}
        another = replace(REQUEST, run_id="another-run")
        [rental] = rent_machines(Renting(another, ledger, reached, check=usable, pace=PACE))
        assert [machine.id for machine in other.alive()] == [rental.instance_id]
        assert find_rental(ledger, left.name) == left and len(world.fake.alive()) == 1


@pytest.mark.parametrize("run_id", [REQUEST.run_id, "another-run"])
def test_a_kept_machine_goes_to_the_run_again_or_to_one_that_wants_the_same(world: World, run_id: str) -> None:
    kept = fail_and_keep(world)
    taken = world.rent(replace(REQUEST, run_id=run_id))
    assert (taken.instance_id, taken.run_id, taken.kept_until) == (kept.instance_id, run_id, None)
    assert taken.rented_at == kept.rented_at, "the time in which nobody used it is paid for, too"
    assert taken.expires_at == kept.expires_at and world.fake.num_creates() == 1


@pytest.mark.parametrize("limits", [{"max_hours": 0.1}, {"max_usd": 0.249}])
def test_a_machine_that_is_taken_over_has_the_hours_and_the_money_of_the_run_that_takes_it(
    world: World, limits: dict[str, Any]
) -> None:
    kept = fail_and_keep(world)
    request = replace(REQUEST, run_id="another-run", **limits)
    before = time.time()
    taken = world.rent(request)
    assert taken.instance_id == kept.instance_id
    assert taken.expires_at == pytest.approx(before + 360, abs=20) and taken.expires_at <= time.time() + 360
    assert usd_until_its_end(taken) <= request.max_usd + 1e-6


@pytest.mark.parametrize("is_kept", [False, True])
def test_a_machine_with_six_minutes_left_is_not_taken_over_and_ends(world: World, is_kept: bool) -> None:
    left = fail_and_keep(world)
    with Ledger(world.path) as ledger:
        ends = {"intended_at": time.time() - 6840, "expires_at": time.time() + 360}
        change_rental(ledger, left, kept_until=left.kept_until if is_kept else None, **ends)
        taken = world.rent(replace(REQUEST, run_id="another-run"))
        assert taken.instance_id != left.instance_id and len(world.fake.alive()) == 2
        reap(ledger, {"runpod": world.cloud}, spare=True, pace=PACE)
    still_there = [machine.id for machine in world.fake.alive()]
    assert still_there == [left.instance_id] * is_kept + [taken.instance_id], "who keeps it may look at it until then"


def test_a_machine_that_has_cost_more_than_a_run_may_spend_is_left_to_one_that_may(world: World) -> None:
    kept = fail_and_keep(world)
    with Ledger(world.path) as ledger:
        change_rental(ledger, kept, rented_at=time.time() - 3600)
        poor = world.rent(replace(REQUEST, run_id="poor", max_usd=2.5))
        assert poor.instance_id != kept.instance_id
        rich = world.rent(replace(REQUEST, run_id="rich", max_usd=10.0))
    assert rich.instance_id == kept.instance_id and usd_until_its_end(rich) <= 10.0


def test_a_kept_machine_that_cannot_be_used_any_more_is_given_back_and_another_taken(world: World) -> None:
    kept = fail_and_keep(world)
    world.fake.machines[kept.instance_id].status = "EXITED"
    assert world.rent().instance_id != kept.instance_id
    assert len(world.fake.alive()) == 1 and world.rows()[0].state is RentalState.GONE


def test_of_several_runs_that_want_a_kept_machine_one_gets_it(world: World) -> None:
    kept = fail_and_keep(world)
    taken: list[Rental] = []
    requests = [replace(REQUEST, run_id=f"other{number}") for number in range(5)]
    threads = [threading.Thread(target=lambda each=each: taken.append(world.rent(each))) for each in requests]
    with Ledger(world.path) as ledger, ExitStack() as living:
        for request in requests:  # what a dead one had been given, the next one could take over
            living.enter_context(ledger.living_run(request.run_id))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert len(taken) == 5 and len({rental.instance_id for rental in taken}) == 5
    assert kept.instance_id in {rental.instance_id for rental in taken} and len(world.fake.alive()) == 5


def test_a_kept_machine_that_another_run_took_since_the_ledger_was_read_is_left_to_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = fail_and_keep(world)
    other = world.rent(replace(REQUEST, run_id="another-run"))
    monkeypatch.setattr("rollouts.infra.renting.provision._inherited", lambda renting: [kept])
    own = world.rent()
    assert own.instance_id != kept.instance_id and len(world.fake.alive()) == 2
    assert world.rows()[0] == other


def test_a_provider_that_does_not_answer_is_done_without_and_is_an_error_only_when_all_are(world: World) -> None:
    broken = FakeRunPod()
    broken.faults.refuses_key = True
    with broken.served() as url, RunPod(KEY, url) as other, Ledger(world.path) as ledger:
        clouds: dict[CloudName, Cloud] = {"lambda": other, "runpod": world.cloud}
        [rental] = rent_machines(Renting(REQUEST, ledger, clouds, check=usable, pace=PACE))
        assert rental.state is RentalState.READY
        with pytest.raises(ProviderRefusedError):
            rent_machines(Renting(replace(REQUEST, run_id="b"), ledger, {"lambda": other}, check=usable, pace=PACE))


def test_two_processes_of_one_run_rent_one_machine(world: World) -> None:
    world.fake.faults.boot_s = 0.3
    rented: list[Rental] = []
    threads = [threading.Thread(target=lambda: rented.append(world.rent())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len({rental.instance_id for rental in rented}) == 1 and len(rented) == 4
    assert world.fake.num_creates() == 1


def test_no_secret_reaches_the_ledger(world: World) -> None:
    world.fake.faults.refuses_key = True
    with pytest.raises(PermanentInfraError, match="RUNPOD_API_KEY"):
        world.rent()
    world.fake.faults.refuses_key = False
    world.rent()
    for path in world.path.parent.iterdir():
        if path.is_file():
            assert KEY.encode() not in path.read_bytes()
