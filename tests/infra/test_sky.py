"""Pins that clouds behind SkyPilot's command line are rented, found and given back like any provider's machines.

Without it a launch that broke half-way, or was not answered, costs money at a cloud that nobody looks at. SkyPilot is a
stand-in: a program that takes the same options, prints the same records and remembers its clusters.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flows.cli import app
from infra.errors import MissingKeyError, NoMachineError, ProviderUnavailableError
from infra.ledger import Ledger
from infra.offers import GPUQuery, InstanceStatus
from infra.providers import sky
from infra.providers.clouds import ENDPOINTS, open_account
from infra.providers.sky import Sky
from infra.provision import release_machine, rent_machines
from infra.reaper import reap
from infra.rentals import Rental, RentalState, all_rentals
from tests.infra.test_provision import PACE, REQUEST, usable

QUERY = GPUQuery(gpu_types=("H100",), max_usd_per_gpu_hour=10.0)
WANTED = replace(REQUEST, query=QUERY, public_key="ssh-ed25519 AAAA it's me", max_usd=100.0)


ADDRESS = {"HostName": "203.0.113.7", "User": "ubuntu", "Port": "22", "IdentityFile": "~/.ssh/sky-key"}


class Installed:
    """SkyPilot with what it knows and does wrong."""

    def __init__(self, folder: Path, addresses: Sequence[dict[str, str]] = (ADDRESS,)) -> None:
        self.folder = folder
        folder.mkdir()
        made = {"clusters": {}, "calls": [], "num_made": 0}
        self._write({**made, "faults": {}, "address": {}, "addresses": list(addresses)})
        self.program = folder / "sky"
        script = Path(__file__).with_name("fake_sky.py")
        self.program.write_text(f"#!/bin/sh\nexec '{sys.executable}' -I '{script}' '{folder}' \"$@\"\n")
        self.program.chmod(0o755)

    @property
    def state(self) -> dict[str, Any]:  # Any: JSON
        return dict(json.loads((self.folder / "state.json").read_text()))

    def set(self, part: str, **values: Any) -> None:  # Any: JSON
        self._write({**self.state, part: {**self.state[part], **values}})

    def _write(self, state: dict[str, Any]) -> None:  # Any: JSON
        (self.folder / "state.json").write_text(json.dumps(state))


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Installed:
    for endpoint in ENDPOINTS.values():
        monkeypatch.delenv(endpoint.key_variable, raising=False)
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PYTHONPATH", "/of/ours")
    installed = Installed(tmp_path / "sky env")
    monkeypatch.setenv("ROLLOUTS_SKY", str(installed.program))
    return installed


@pytest.fixture
def cloud(installed: Installed) -> Sky:
    cloud = open_account("sky")
    assert isinstance(cloud, Sky)
    return cloud


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    with Ledger(tmp_path / "ledger.db") as ledger:
        yield ledger


def rent(cloud: Sky, ledger: Ledger) -> Rental:
    [rental] = rent_machines(WANTED, ledger, {"sky": cloud}, check=usable, pace=PACE)
    return rental


def test_offers_are_those_of_clouds_that_can_be_used_with_prices_and_memory(cloud: Sky) -> None:
    offers = sorted(cloud.search(QUERY), key=lambda offer: offer.usd_per_hour)
    assert [(offer.id, offer.region, offer.usd_per_hour, offer.vram_gb) for offer in offers] == [
        ("gcp:a3-highgpu-1g:H100", "us-central1", 6.5, 80.0),
        ("aws:p5.4xlarge:H100", "us-east-1", 6.88, 80.0),
        ("aws:p5.4xlarge:H100", "us-west-2", 6.98, 80.0),
    ]
    spot = cloud.search(QUERY.model_copy(update={"spot": True}))
    assert sorted(offer.usd_per_hour for offer in spot) == [2.1, 2.5] and all(offer.is_spot for offer in spot)
    assert [offer.id for offer in cloud.search(GPUQuery(gpu_types=("L4",)))] == ["gcp::L4"]
    assert cloud.search(GPUQuery(gpu_types=("MYSTERY",))) == [], "nobody knows how much memory it has"
    assert cloud.search(GPUQuery(gpu_types=("H100",), gpu_count=8)) == []


def test_a_machine_is_rented_with_its_limits_reached_and_given_back(
    installed: Installed, cloud: Sky, ledger: Ledger
) -> None:
    rental = rent(cloud, ledger)
    assert (rental.state, rental.instance_id, rental.usd_per_hour) == (RentalState.READY, rental.name, 6.5)
    cluster = installed.state["clusters"][rental.name]
    assert cluster["task"]["resources"] == {
        "infra": "gcp/us-central1",
        "accelerators": "H100:1",
        "disk_size": WANTED.query.disk_gb,
        "use_spot": False,
        "max_hourly_cost": 6.5,
        "instance_type": "a3-highgpu-1g",
    }
    assert "'ssh-ed25519 AAAA it'\"'\"'s me' >> ~/.ssh/authorized_keys" in cluster["task"]["setup"]
    assert (cluster["waits_for"], cluster["ends"]) == ("none", True)
    assert abs(60 * cluster["minutes"] - (rental.expires_at - time.time())) < 120
    instance = cloud.get(rental.name)
    assert instance is not None and (instance.host, instance.port, instance.user) == ("203.0.113.7", 22, "ubuntu")
    assert cloud.get("somebody-elses") is None
    assert release_machine(rental, ledger, cloud, pace=PACE).state is RentalState.GONE
    assert installed.state["clusters"] == {}
    cloud.terminate(rental.name)  # it is gone


def test_what_cannot_be_had_is_skipped_and_what_broke_half_way_is_ended(
    installed: Installed, cloud: Sky, ledger: Ledger
) -> None:
    installed.set("faults", no_capacity=1, fail_setup=1)
    rental = rent(cloud, ledger)
    assert rental.region == "us-west-2" and installed.state["num_made"] == 2
    assert list(installed.state["clusters"]) == [rental.name]
    first, second = (each.note for each in all_rentals(ledger) if each.name != rental.name)
    assert "Failed to acquire resources in all zones" in first and "\x1b" not in first
    assert "is failed" in second
    installed.set("faults", no_capacity=100)
    with pytest.raises(NoMachineError, match="Failed to acquire resources"):
        rent_machines(replace(WANTED, run_id="other"), ledger, {"sky": cloud}, check=usable, pace=PACE)


def test_a_launch_that_is_not_answered_is_found_by_its_name(
    installed: Installed, cloud: Sky, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sky, "LAUNCH_TIMEOUT_S", 1.0)
    installed.set("faults", hang_launch_s=30)
    rental = rent(cloud, ledger)
    assert rental.state is RentalState.READY and installed.state["num_made"] == 1
    assert list(installed.state["clusters"]) == [rental.name]


def test_what_a_dead_run_left_is_reaped_and_a_list_that_fails_ends_nothing(
    installed: Installed, cloud: Sky, ledger: Ledger
) -> None:
    installed.set("clusters", mine={"status": "UP", "init_kind": None})
    with ledger.living_run(WANTED.run_id):
        rent(cloud, ledger)
    installed.set("faults", fail_status=1)
    assert reap(ledger, {"sky": cloud}, pace=PACE).failures and len(installed.state["clusters"]) == 2
    installed.set("faults", talk=1, fail_downs=1)
    assert len(reap(ledger, {"sky": cloud}, pace=PACE).ended) == 1
    assert list(installed.state["clusters"]) == ["mine"]


@pytest.mark.parametrize(
    ("said", "status"),
    [
        ("INIT", InstanceStatus.STARTING),
        ("STOPPED", InstanceStatus.STOPPED),
        ("AUTOSTOPPING", InstanceStatus.ENDING),
        ("MELTING", InstanceStatus.UNKNOWN),
    ],
)
def test_what_is_not_up_has_no_address(installed: Installed, cloud: Sky, said: str, status: InstanceStatus) -> None:
    installed.set("clusters", mine={"status": said, "init_kind": None})
    instance = cloud.get("mine")
    assert instance is not None and (instance.status, instance.host, instance.has_address) == (status, "", False)


@pytest.mark.parametrize("address", [{"ProxyCommand": "kubectl port-forward"}, {"HostName": "-oProxyCommand=x"}])
def test_an_address_that_ssh_alone_does_not_reach_is_none(
    installed: Installed, cloud: Sky, address: dict[str, str]
) -> None:
    installed.set("clusters", mine={"status": "UP", "init_kind": None})
    installed.set("address", **address)
    instance = cloud.get("mine")
    assert instance is not None and instance.host == ""


def test_what_does_not_work_is_one_sentence(
    installed: Installed, cloud: Sky, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed.set("faults", fail_status=1)
    with pytest.raises(ProviderUnavailableError, match="sky status ended with 1: Failed to connect to SkyPilot API"):
        cloud.list_named("rollouts-")
    (tmp_path / "talks").write_text("#!/bin/sh\necho nothing to see\n")
    (tmp_path / "talks").chmod(0o755)
    with pytest.raises(ProviderUnavailableError, match="sky status printed something unreadable"):
        Sky(str(tmp_path / "talks")).list_named("rollouts-")
    with pytest.raises(MissingKeyError, match=r"ROLLOUTS_SKY names /nowhere/sky, which cannot be run \(No such file"):
        Sky("/nowhere/sky").search(QUERY)
    monkeypatch.delenv("ROLLOUTS_SKY")
    with pytest.raises(MissingKeyError, match="there is no path of its program for SkyPilot: put it into the variable"):
        open_account("sky")


def test_its_offers_are_in_the_table_of_all(installed: Installed) -> None:
    shown = CliRunner().invoke(app, ["gpus", "--gpu", "H100", "--max-price", "10"])
    assert shown.exit_code == 0, shown.output
    assert [line.split()[0] for line in shown.stdout.splitlines()[1:4]] == ["6.50", "6.88", "6.98"]
