"""Pins that the process that serves deployments ends machines whose time is over, and spares the others.

Without it the machine of a killed run costs money until somebody thinks of it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rollouts.flows.cli import app
from rollouts.flows.expired_machines import end_expired
from rollouts.infra.ledger import LEDGER_FILE, Ledger
from rollouts.infra.providers.runpod import RunPod
from rollouts.infra.renting.reaper import UNSEEN_AFTER_S
from rollouts.infra.renting.rentals import (
    Rental,
    RentalState,
    add_rental,
    all_rentals,
    change_rental,
    find_rental,
    open_rentals,
)
from tests.infra.fake_cloud import KEY
from tests.infra.fake_runpod import FakeRunPod
from tests.kit.mounts import fill, mounted_tmpfs
from tests.kit.renting import REQUEST, World


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    fake = FakeRunPod()
    with fake.served() as url, RunPod(KEY, url) as cloud:
        monkeypatch.setenv("RUNPOD_API_KEY", KEY)
        monkeypatch.setenv("RUNPOD_API_URL", url)
        yield World(fake, cloud, tmp_path / LEDGER_FILE)


@pytest.mark.slow
def test_what_has_expired_is_ended_and_what_the_next_start_may_take_is_not(world: World, tmp_path: Path) -> None:
    with Ledger(world.path) as ledger, ledger.living_run(REQUEST.run_id):
        rental = world.rent()
    assert end_expired(tmp_path) == [] and len(world.fake.alive()) == 1
    end_expired_now(world, rental, tmp_path)
    assert world.fake.alive() == []
    assert end_expired(tmp_path) == []


@pytest.mark.slow
def test_what_a_failed_run_keeps_is_named_by_status_and_ended_when_that_is_over(world: World, tmp_path: Path) -> None:
    with Ledger(world.path) as ledger:
        with ledger.living_run(REQUEST.run_id):
            rental = world.rent()
        kept = change_rental(ledger, rental, kept_until=time.time() + 600)
        assert kept is not None
        assert end_expired(tmp_path) == [] and len(world.fake.alive()) == 1
        for command in ("status", "down"):
            said = CliRunner().invoke(app, [command, "--store", str(tmp_path)]).output.replace("\n", " ")
            assert "kept until " in said and " UTC after its run failed" in said
        change_rental(ledger, kept, kept_until=time.time() - 1)
    [line] = end_expired(tmp_path)
    assert rental.name in line and world.fake.alive() == []


@pytest.mark.slow
def test_what_has_expired_is_ended_although_the_disk_of_the_store_is_full(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with mounted_tmpfs(tmp_path / "store", "size=2m") as store:
        world.path = store / LEDGER_FILE
        with Ledger(world.path) as ledger, ledger.living_run(REQUEST.run_id):
            rental = world.rent()
            change_rental(ledger, rental, expires_at=time.time() - 1)
        filler = fill(store)
        assert end_expired(store) == [] and world.fake.alive() == []
        assert f"{rental.name} at runpod is given back, but the ledger still has it as rented" in caplog.text
        filler.unlink()
        [line] = end_expired(store)
        assert rental.name in line


@pytest.mark.slow
def test_status_and_down_name_what_goes_on_costing_money(world: World, tmp_path: Path) -> None:
    with Ledger(world.path) as ledger, ledger.living_run(REQUEST.run_id):
        rental = world.rent()
    for command in ("status", "down"):
        outcome = CliRunner().invoke(app, [command, "--store", str(tmp_path)])
        assert outcome.exit_code == 0, outcome.output
        assert f"{rental.name} ready" in outcome.output and "USD so far" in outcome.output
    end_expired_now(world, rental, tmp_path)
    assert rental.name not in CliRunner().invoke(app, ["status", "--store", str(tmp_path)]).output


@pytest.mark.slow
def test_a_machine_that_appears_more_than_an_hour_after_it_was_asked_for_is_ended(world: World, tmp_path: Path) -> None:
    world.fake.faults.drop_creates, world.fake.faults.list_lag_s = 1, 3600.0
    world.release(world.rent())
    [late] = world.fake.alive()
    with Ledger(world.path) as ledger:
        [lost] = [row for row in all_rentals(ledger) if row.state is RentalState.INTENDED]
        change_rental(ledger, lost, intended_at=lost.intended_at - UNSEEN_AFTER_S - 1)
        assert end_expired(tmp_path) == [] and open_rentals(ledger) == []
    world.fake.faults.list_lag_s = 0.0
    [line] = end_expired(tmp_path)
    assert late.name in line and world.fake.alive() == []


@pytest.mark.slow
def test_after_a_day_nobody_is_asked_any_more_for_a_machine_that_never_appeared(world: World, tmp_path: Path) -> None:
    world.fake.faults.drop_before_create = 1
    world.release(world.rent())
    with Ledger(world.path) as ledger:
        [lost] = [row for row in all_rentals(ledger) if row.state is RentalState.INTENDED]
        change_rental(ledger, lost, intended_at=lost.intended_at - UNSEEN_AFTER_S - 1)
        end_expired(tmp_path)
        given_up = find_rental(ledger, lost.name)
        assert given_up is not None and given_up.ended_at is not None
        for hours_ago, is_asked in ((23, True), (25, False)):
            given_up = change_rental(ledger, given_up, ended_at=time.time() - 3600 * hours_ago)
            assert given_up is not None
            before = len(world.fake.requests)
            end_expired(tmp_path)
            assert (len(world.fake.requests) > before) is is_asked


def end_expired_now(world: World, rental: Rental, store: Path) -> None:
    with Ledger(world.path) as ledger:
        change_rental(ledger, rental, expires_at=time.time() - 1)
    end_expired(store)


def test_without_a_key_nothing_is_ended_and_the_reason_is_logged(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with Ledger(world.path) as ledger, ledger.living_run(REQUEST.run_id):
        world.rent()
    monkeypatch.delenv("RUNPOD_API_KEY")
    assert end_expired(tmp_path) == []
    assert "RUNPOD_API_KEY" in caplog.text and len(world.fake.alive()) == 1


@pytest.mark.slow
def test_a_key_that_is_missing_keeps_no_machine_of_another_provider_rented(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Ledger(world.path) as ledger, ledger.living_run(REQUEST.run_id):
        rental = world.rent()
        add_rental(ledger, replace(rental, name=f"{rental.name}-2", provider="lambda", instance_id="there"))
    with Ledger(world.path) as ledger:
        change_rental(ledger, rental, expires_at=time.time() - 1)
    [line] = end_expired(tmp_path)
    assert rental.name in line and world.fake.alive() == []
    assert "LAMBDA_API_KEY" in caplog.text and f"{rental.name}-2 at lambda cannot be checked" in caplog.text


def test_a_store_that_never_rented_anything_gets_no_ledger(tmp_path: Path) -> None:
    assert end_expired(tmp_path) == [] and list(tmp_path.iterdir()) == []
