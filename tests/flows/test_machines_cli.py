"""Pins what `rollouts gpus`, `nodes` and `reap` print, and that they do what they print.

Without it somebody believes that nothing is rented because a provider did not answer.
"""

from __future__ import annotations

import getpass
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from rollouts.flows.cli import app
from rollouts.flows.commands.machines import render_offers
from rollouts.infra.clouds import cloud_names, find_cloud
from rollouts.infra.ledger import LEDGER_FILE, Ledger
from rollouts.infra.node import InstanceNode, RentedNode
from rollouts.infra.offers import Offer
from rollouts.infra.providers import provision_node
from rollouts.infra.providers.clouds import open_clouds
from rollouts.infra.renting.provision import rent_machines
from rollouts.infra.renting.rentals import Rental, change_rental, open_rentals
from rollouts.infra.renting.request import Renting
from tests.infra.delay_proxy import delayed_port
from tests.infra.fake_cloud import KEY, FakeCloud
from tests.infra.fake_lambda import FakeLambda
from tests.infra.fake_prime import FakePrime
from tests.infra.fake_runpod import FakeRunPod
from tests.infra.ssh_server import running_server
from tests.kit.renting import PACE, REQUEST, usable


@pytest.fixture
def runpod(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeRunPod]:
    for entry in (find_cloud(name).endpoint for name in cloud_names()):
        monkeypatch.delenv(entry.key_variable, raising=False)
    fake = FakeRunPod()
    with offered(fake, "RUNPOD", monkeypatch):
        yield fake


@contextmanager
def offered(fake: FakeCloud, variable: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A provider whose key and address are in the environment."""
    with fake.served() as url:
        monkeypatch.setenv(f"{variable}_API_KEY", KEY)
        monkeypatch.setenv(f"{variable}_API_URL", url)
        yield


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), catch_exceptions=False)


def rent(store: Path) -> Rental:
    """A machine of a run that is no more."""
    store.mkdir()
    with Ledger(store / LEDGER_FILE) as ledger, ledger.living_run(REQUEST.run_id), open_clouds(["runpod"]) as clouds:
        [rental] = rent_machines(Renting(REQUEST, ledger, clouds, check=usable, pace=PACE))
        return rental


def test_offers_of_all_providers_are_one_table_cheapest_first(
    runpod: FakeRunPod, monkeypatch: pytest.MonkeyPatch
) -> None:
    with offered(FakeLambda(), "LAMBDA", monkeypatch):
        result = call("gpus", "--gpu", "H100", "--community")
    lines = result.stdout.splitlines()
    assert result.exit_code == 0 and lines[0].startswith("USD/GPU/h")
    assert [line.split()[0] for line in lines[1:4]] == ["2.49", "2.49", "2.99"]
    assert {"lambda", "runpod"} <= set(result.stdout.split()) and "A6000" not in result.stdout
    without_key = "Prime Intellect (PRIME_API_KEY), Shadeform (SHADEFORM_API_KEY), Vast.ai (VAST_API_KEY)"
    assert lines[-1] == f"not searched, because the API key is missing: {without_key}, SkyPilot (ROLLOUTS_SKY)"


def test_an_offer_without_a_price_is_not_shown_as_free() -> None:
    facts: dict[str, Any] = {"id": "x", "gpu_type": "H100", "gpu_count": 1, "vram_gb": 80.0, "region": "mine"}
    offers = [
        Offer(provider="sky", usd_per_hour=0.0, is_unpriced=True, **facts),
        Offer(provider="sky", usd_per_hour=2.5, **facts),
    ]
    _, unpriced, priced = render_offers(offers).splitlines()
    assert unpriced.split()[:2] == ["?", "?"] and priced.split()[:2] == ["2.50", "2.50"]


def test_filters_reach_the_search(runpod: FakeRunPod, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as for_now, offered(FakePrime(), "PRIME", for_now):
        assert call("gpus", "--spot").stdout.splitlines()[1].split()[0] == "0.90"
    assert "RTX A6000" in call("gpus", "--max-price", "1", "--count", "8", "--min-vram", "40").stdout
    dear = "matches: the cheapest is 1x H100 SXM at runpod for 2.99 USD per GPU and hour: raise --max-price to that"
    assert dear in call("gpus", "--gpu", "H100", "--max-price", "1").stdout
    assert "which does not match --gpu" in call("gpus", "--gpu", "H900").stdout
    assert call("gpus", "--region", "us").stdout.splitlines()[1].split()[-3] == "US-TX-3"


def test_a_provider_that_does_not_answer_is_named(runpod: FakeRunPod) -> None:
    runpod.faults.refuses_key = True
    result = call("gpus")
    assert result.exit_code == 1 and "RUNPOD_API_KEY" in result.stderr and KEY not in result.output


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ("gpus", "--provider", "moon"),
            "there is no provider moon: choose one of runpod, lambda, prime, ",
        ),
        (("gpus", "--provider", "aws"), "--provider: aws is reached through SkyPilot: name the provider sky instead"),
        (("gpus", "--min-cuda", "twelve"), "give it as 12.8"),
        (("gpus", "--min-cuda", "12.8.1"), "--min-cuda 12.8.1 is not a version: give it as 12.8"),
        (("gpus", "--count", "100"), "rollouts: --count: Input should be less than or equal to 64"),
        (("gpus", "--gpu", "-"), "rollouts: --gpu: expected names with letters or digits, found '-'"),
        (("gpus", "--max-price", "inf"), "rollouts: --max-price: Input should be a finite number"),
        (("nodes", "--store", "/nowhere"), "/nowhere has no ledger"),
        (("reap", "--store", "/nowhere"), "/nowhere has no ledger"),
    ],
)
def test_what_cannot_be_done_is_one_sentence(runpod: FakeRunPod, arguments: tuple[str, ...], sentence: str) -> None:
    result = call(*arguments)
    assert result.exit_code == 2 and sentence in result.stderr


@pytest.mark.slow
def test_what_is_rented_is_listed_shown_and_released(runpod: FakeRunPod, tmp_path: Path) -> None:
    store = tmp_path / "store"
    rental = rent(store)
    listed = call("nodes", "--store", str(store))
    assert rental.name in listed.stdout and "2.49" in listed.stdout and listed.exit_code == 0
    runpod.add("rollouts-somebody-elses", next(iter(runpod.machines.values())).request)
    assert "not rented by this store: rollouts-somebody-elses" in call("nodes", "--store", str(store)).stdout
    shown = call("nodes", "show", rental.name, "--store", str(store)).stdout
    assert "provider says  running" in shown and rental.instance_id in shown and "ssh -p" in shown
    released = call("nodes", "release", rental.name, "--store", str(store))
    assert released.exit_code == 0 and f"{rental.name} is gone" in released.stdout
    assert [machine.name for machine in runpod.alive()] == ["rollouts-somebody-elses"]
    assert "nothing is rented" in call("nodes", "--store", str(store)).stdout
    assert rental.name in call("nodes", "--all", "--store", str(store)).stdout


@pytest.mark.slow
def test_a_machine_that_is_there_although_the_ledger_is_done_with_it_is_listed(
    runpod: FakeRunPod, tmp_path: Path
) -> None:
    """Without it `nodes` says that nothing is rented while one that appeared late costs money."""
    store = tmp_path / "store"
    rental = rent(store)
    assert "request given up, but it exists" not in call("nodes", "--store", str(store)).stdout
    assert call("nodes", "release", rental.name, "--store", str(store)).exit_code == 0
    assert "request given up, but it exists" not in call("nodes", "--store", str(store)).stdout
    runpod.add(rental.name, next(iter(runpod.machines.values())).request)
    listed = call("nodes", "--store", str(store)).stdout
    assert f"request given up, but it exists: {rental.name} at runpod, running: `rollouts reap` ends it\n" in listed


@pytest.mark.slow
def test_what_the_ledger_knows_is_shown_also_where_the_provider_refuses_the_key(
    runpod: FakeRunPod, tmp_path: Path
) -> None:
    rental = rent(tmp_path / "store")
    runpod.faults.refuses_key = True
    shown = call("nodes", "show", rental.name, "--store", str(tmp_path / "store"))
    assert f"id             {rental.instance_id}\n" in shown.stdout and "2.49 USD/h" in shown.stdout
    assert shown.exit_code == 2 and "check the key in RUNPOD_API_KEY" in shown.stderr


@pytest.mark.slow
def test_a_key_that_is_none_hinders_nobody_who_looks_at_other_providers(
    runpod: FakeRunPod, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = tmp_path / "store"
    rent(store)
    runpod.add("rollouts-somebody-elses", next(iter(runpod.machines.values())).request)
    monkeypatch.setenv("LAMBDA_API_KEY", "two words")
    listed, reaped = call("nodes", "--store", str(store)), call("reap", "--store", str(store))
    assert "not rented by this store: rollouts-somebody-elses" in listed.stdout and listed.exit_code == 0
    assert [machine.name for machine in runpod.alive()] == ["rollouts-somebody-elses"] and reaped.exit_code == 1
    assert all("the value of LAMBDA_API_KEY is not a key for Lambda" in each.stderr for each in (listed, reaped))


@pytest.mark.slow
def test_nobody_is_logged_in_on_a_machine_that_was_asked_for_and_has_not_appeared(
    runpod: FakeRunPod, tmp_path: Path
) -> None:
    runpod.faults.drop_before_create = 1
    rent(tmp_path / "store")
    with Ledger(tmp_path / "store" / LEDGER_FILE) as ledger:
        [lost] = [rental for rental in open_rentals(ledger) if not rental.instance_id]
    said = call("nodes", "ssh", lost.name, "--store", str(tmp_path / "store"))
    assert said.exit_code == 2 and f"{lost.name} is intended: the provider has not confirmed the machine" in said.stderr


@pytest.mark.slow
def test_what_a_failed_run_keeps_is_shown_stays_when_reaped_and_is_released_by_name(
    runpod: FakeRunPod, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    rental = rent(store)
    until = rental.intended_at + 1800
    with Ledger(store / LEDGER_FILE) as ledger:
        change_rental(ledger, rental, kept_until=until)
    when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(until))
    listed, shown = (call("nodes", *more, "--store", str(store)).stdout for more in ((), ("show", rental.name)))
    assert "  ENDS (UTC)  " in listed
    assert f"{when.removesuffix(' UTC')}  kept until {when} after its run failed" in listed
    assert f"ends           {when}\n" in shown and f"note           kept until {when} after its run failed" in shown
    assert "ssh -p" in shown
    reaped = call("reap", "--store", str(store))
    assert reaped.exit_code == 0 and f"keeps it until {when}" in reaped.stdout and "0 ended, 1 kept" in reaped.stdout
    assert len(runpod.alive()) == 1
    assert call("nodes", "release", rental.name, "--store", str(store)).exit_code == 0 and runpod.alive() == []
    assert "kept until" not in call("nodes", "--all", "--store", str(store)).stdout


@pytest.mark.slow
def test_a_person_logs_in_wherever_the_machine_is_and_nowhere_else(runpod: FakeRunPod, tmp_path: Path) -> None:
    store = tmp_path / "my 100% store"

    def ssh(name: str, *command: str) -> subprocess.CompletedProcess[str]:
        words = ["nodes", "ssh", name, "--key-file", str(server.client_key_file), "--store", str(store), *command]
        return subprocess.run(
            [sys.executable, "-m", "rollouts.flows.cli", *words], capture_output=True, text=True, timeout=60
        )

    with (
        running_server(tmp_path / "sshd") as server,
        delayed_port(server.port, one_way_ms=0) as elsewhere,
        running_server(tmp_path / "stranger") as stranger,
    ):
        runpod.port, runpod.user = server.port, getpass.getuser()
        access = {"key_file": str(server.client_key_file), "root": str(tmp_path / "machine"), "python": sys.executable}
        query = {"providers": ["runpod"]}
        settings = RentedNode.model_validate({"query": query, "max_usd": 5.0, "install": "nothing", **access})
        rented = provision_node(settings, store, run_id="run")
        with Ledger(store / LEDGER_FILE) as ledger:
            [rental] = open_rentals(ledger)
        mine = f"runpod:{rental.instance_id}"
        provision_node(InstanceNode.model_validate({"instance": mine, **access}), store)
        runpod.port = elsewhere
        for name in (rented.name, mine):
            said = ssh(name, "echo", "it's $HOME", "-n")
            assert (said.returncode, said.stdout) == (0, "it's $HOME -n\n"), said.stderr
        runpod.port = stranger.port
        said = ssh(rented.name, "echo", "hello")
        assert said.returncode == 255 and "Host key verification failed" in said.stderr and said.stdout == ""
        runpod.machines[rental.instance_id].status = "EXITED"
        for name, words in (
            (rented.name, "login is not possible"),
            (mine, "start it on"),
            ("me", "knows no machine"),
        ):
            said = ssh(name)
            assert said.returncode != 0 and words in said.stderr and len(said.stderr.splitlines()) == 1, said.stderr


@pytest.mark.slow
def test_reap_ends_what_a_dead_run_left_and_spares_it_where_told(runpod: FakeRunPod, tmp_path: Path) -> None:
    store = tmp_path / "store"
    rent(store)
    spared = call("reap", "--spare", "--store", str(store))
    assert spared.exit_code == 0 and "0 ended, 1 kept" in spared.stdout and len(runpod.alive()) == 1
    runpod.faults.fail_lists = 1
    failed = call("reap", "--store", str(store))
    assert failed.exit_code == 1 and "403" in failed.stderr and len(runpod.alive()) == 1
    ended = call("reap", "--store", str(store))
    assert ended.exit_code == 0 and "1 ended, 0 kept" in ended.stdout and runpod.alive() == []


@pytest.mark.slow
def test_what_a_lost_store_rented_is_ended_from_another_when_it_is_named(runpod: FakeRunPod, tmp_path: Path) -> None:
    rental = rent(tmp_path / "store")
    (tmp_path / "store").rename(tmp_path / "lost")
    assert call("reap", "--store", str(tmp_path / "store")).exit_code == 2
    other = call("reap", "--store", str(tmp_path / "new"), "--other-store", "00000000")
    assert f"another store's  {rental.name}" in other.stdout and len(runpod.alive()) == 1
    ended = call("reap", "--store", str(tmp_path / "new"), "--other-store", rental.name.split("-")[1])
    assert ended.exit_code == 0 and "1 ended" in ended.stdout and runpod.alive() == []
