"""Pins that a machine which was rented for a run is given back also where the run was not told of it any more.

Without it Ctrl-C, Cancel or an error in the moment between renting and working leaves a machine that nobody mentions.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rollouts.flows.cancellation import give_back_rented
from rollouts.flows.pipeline import released_at_the_end
from rollouts.infra.cloud import Pace
from rollouts.infra.jobs import JobState, job_status, start_or_attach
from rollouts.infra.ledger import LEDGER_FILE, Ledger
from rollouts.infra.node import LocalNode, Node, RentedNode, SSHAccess
from rollouts.infra.providers.runpod import RunPod
from rollouts.infra.renting.rentals import Rental, RentalState, all_rentals, change_rental
from rollouts.infra.session import LocalSession
from rollouts.tasks.provision import release_now
from rollouts.tasks.records import RunScope
from tests.infra.fake_cloud import KEY
from tests.infra.fake_runpod import FakeRunPod
from tests.infra.shell_jobs import shell_spec
from tests.kit.renting import PACE, REQUEST, World

SETTINGS = RentedNode(max_usd=5.0)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(
        "rollouts.tasks.provision.LOOKED_ALREADY", Pace(poll_s=PACE.poll_s, looks_s=(0.0,), gone_within_s=20.0)
    )
    fake = FakeRunPod()
    with fake.served() as url, RunPod(KEY, url) as cloud:
        monkeypatch.setenv("RUNPOD_API_KEY", KEY)
        monkeypatch.setenv("RUNPOD_API_URL", url)
        yield World(fake, cloud, tmp_path / LEDGER_FILE)


@pytest.fixture
def scope(tmp_path: Path) -> RunScope:
    return RunScope(run_id=REQUEST.run_id, run_name="small", store=str(tmp_path))


def provisions(act: Callable[[], Node], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the run's machine be had in this way."""
    monkeypatch.setattr("rollouts.flows.pipeline.provision", lambda settings, scope: act())


def forget_id(world: World, rental: Rental) -> None:
    """The row as it is while the provider makes the machine."""
    with Ledger(world.path) as ledger:
        asked_for = {"state": RentalState.INTENDED, "instance_id": "", "rented_at": None, "host_key": ""}
        assert change_rental(ledger, rental, **asked_for) is not None


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("Prefect's server is away")])
@pytest.mark.parametrize("is_known", [True, False], ids=["ready", "asked for"])
def test_what_was_rented_is_given_back_where_the_run_is_not_told_of_it(
    world: World,
    scope: RunScope,
    error: BaseException,
    is_known: bool,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    def rent_and_fail() -> Node:
        rental = world.rent()
        if not is_known:
            forget_id(world, rental)
        raise error

    provisions(rent_and_fail, monkeypatch)
    with pytest.raises(type(error)), released_at_the_end(SETTINGS, scope):
        pytest.fail("there is no machine")
    [row] = world.rows()
    assert world.fake.alive() == [] and row.state is RentalState.GONE
    assert f"gave back {row.name} at runpod" in capfd.readouterr().err


def test_what_may_have_been_made_and_does_not_appear_is_named(
    world: World, scope: RunScope, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def rent_and_fail() -> Node:
        forget_id(world, world.rent())
        world.fake.faults.list_lag_s = 3600.0
        raise KeyboardInterrupt

    provisions(rent_and_fail, monkeypatch)
    with pytest.raises(KeyboardInterrupt), released_at_the_end(SETTINGS, scope):
        pytest.fail("there is no machine")
    [row] = world.rows()
    sentence = f"{row.name} was requested at runpod and may be rented (it has not appeared yet): `rollouts reap`"
    assert row.state is RentalState.INTENDED and sentence in capfd.readouterr().err


def test_an_error_before_anything_is_rented_leaves_what_the_run_had_before_and_ctrl_c_does_not(
    world: World, scope: RunScope, monkeypatch: pytest.MonkeyPatch
) -> None:
    rental = world.rent()
    for error, left in ((RuntimeError("no network"), [rental.instance_id]), (KeyboardInterrupt(), [])):

        def fail(error: BaseException = error) -> Node:
            raise error

        provisions(fail, monkeypatch)
        with pytest.raises(type(error)), released_at_the_end(SETTINGS, scope):
            pytest.fail("there is no machine")
        assert [machine.id for machine in world.fake.alive()] == left


@pytest.mark.slow
@pytest.mark.parametrize("error", [None, RuntimeError("the training failed")], ids=["finished", "failed"])
def test_ctrl_c_while_the_machine_of_a_run_that_is_over_is_given_back_stops_what_comes_after_that(
    world: World, scope: RunScope, error: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollouts.flows.pipeline.release", release_now)  # the function of the task
    rental, terminate = world.rent(), world.cloud.terminate
    machine = Node(
        name=rental.name,
        kind="rented",
        root="/root/rollouts",
        python=sys.executable,
        mirror=scope.store,
        access=SSHAccess(host="127.0.0.1", port=22, user="root"),
        is_rented=True,
    )

    def interrupt_and_terminate(_: RunPod, instance_id: str) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        terminate(instance_id)

    monkeypatch.setattr(RunPod, "terminate", interrupt_and_terminate)
    provisions(lambda: machine, monkeypatch)
    with pytest.raises(type(error or KeyboardInterrupt())), released_at_the_end(SETTINGS, scope):
        if error:
            raise error
    assert world.fake.alive() == [] and world.rows()[0].state is RentalState.GONE


def test_a_block_that_never_began_gives_everything_back(
    scope: RunScope, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Node(name="local", kind="local", root=str(tmp_path), python=sys.executable)
    session, job = LocalSession(sys.executable), tmp_path / "sft-1"
    with Ledger(scope.ledger_path) as ledger:
        ledger.add_lease(str(job), scope.run_id, node.name)
    start_or_attach(session, shell_spec(job, "sleep 60"))
    provisions(lambda: node, monkeypatch)
    released = released_at_the_end(LocalNode(), scope)
    released.__enter__()
    assert job_status(session, str(job)).state is JobState.RUNNING
    del released  # as when Ctrl-C comes before the first statement of the block
    assert job_status(session, str(job)).state is not JobState.RUNNING


@pytest.mark.slow
def test_a_run_that_is_cancelled_while_its_machine_is_being_made_gives_it_back(world: World, scope: RunScope) -> None:
    forget_id(world, world.rent())
    said = give_back_rented(SETTINGS, scope)
    with Ledger(world.path) as ledger:
        [row] = all_rentals(ledger)
    assert said == [f"gave back {row.name} at runpod"]
    assert world.fake.alive() == [] and row.state is RentalState.GONE
