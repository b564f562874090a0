"""Pins that clouds behind SkyPilot's command line are rented, found and given back like any provider's machines.

Without it a launch that broke half-way, or was not answered, costs money at a cloud that nobody looks at. SkyPilot is a
stand-in: a program that takes the same options, prints the same records and remembers its clusters.
"""

from __future__ import annotations

import getpass
import json
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rollouts.flows.cli import app
from rollouts.infra.clouds import cloud_names, find_cloud
from rollouts.infra.errors import (
    HostKeyError,
    MissingKeyError,
    NodeUnreachableError,
    NoMachineError,
    PermanentInfraError,
    ProviderRefusedError,
    ProviderUnavailableError,
    StillRentedError,
)
from rollouts.infra.ledger import Ledger
from rollouts.infra.node import InstanceNode
from rollouts.infra.offers import GPUQuery, Instance, InstanceStatus
from rollouts.infra.providers import sky
from rollouts.infra.providers.clouds import open_account
from rollouts.infra.providers.rented import access_to, describe_offer
from rollouts.infra.providers.sky import Sky
from rollouts.infra.renting.provision import rent_machines, search_offers
from rollouts.infra.renting.reaper import reap
from rollouts.infra.renting.release import release_machine
from rollouts.infra.renting.rentals import Rental, RentalState, all_rentals
from rollouts.infra.renting.request import Renting
from rollouts.infra.ssh.openssh import login_command
from rollouts.infra.ssh.ssh_session import SSHSession
from tests.infra.providers.fake_sky import UNHEALTHY
from tests.infra.ssh_server import SSHServer
from tests.kit.renting import PACE, REQUEST, usable

QUERY = GPUQuery(gpu_types=("H100",), max_usd_per_gpu_hour=10.0)
WANTED = replace(REQUEST, query=QUERY, public_key="ssh-ed25519 AAAA it's me", max_usd=100.0)


PROXY = """
import os, socket, sys, threading
peer = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
def send():
    while piece := os.read(0, 1 << 16):
        peer.sendall(piece)
    peer.shutdown(socket.SHUT_WR)
threading.Thread(target=send, daemon=True).start()
while piece := peer.recv(1 << 16):
    os.write(1, piece)
"""
"""In the place of SkyPilot's own, which goes through its server to a port of the pod."""
ADDRESS = {"HostName": "203.0.113.7", "User": "ubuntu", "Port": "22", "IdentityFile": "~/.ssh/sky-key"}


class Installed:
    """SkyPilot with what it knows and does wrong."""

    def __init__(self, folder: Path, addresses: Sequence[dict[str, str]] = (ADDRESS,)) -> None:
        self.folder = folder
        folder.mkdir()
        made = {"clusters": {}, "calls": [], "num_made": 0, "can": {}}
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
    for endpoint in (find_cloud(name).endpoint for name in cloud_names()):
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


def never_usable(rental: Rental, instance: Instance) -> str:
    raise NodeUnreachableError("a@h:22", "it boots")


def rent(cloud: Sky, ledger: Ledger) -> Rental:
    [rental] = rent_machines(Renting(WANTED, ledger, {"sky": cloud}, check=usable, pace=PACE))
    return rental


@pytest.mark.slow
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
    assert [offer.id for offer in cloud.search(GPUQuery(gpu_types=("NVIDIA L4 24GB",)))] == ["gcp::L4"]
    assert cloud.search(GPUQuery(gpu_types=("MYSTERY",))) == [], "nobody knows how much memory it has"
    assert cloud.search(GPUQuery(gpu_types=("H100",), gpu_count=8)) == []


@pytest.mark.slow
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


@pytest.mark.slow
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
        rent_machines(Renting(replace(WANTED, run_id="other"), ledger, {"sky": cloud}, check=usable, pace=PACE))


@pytest.mark.slow
def test_a_launch_that_is_not_answered_is_found_by_its_name(
    installed: Installed, cloud: Sky, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sky, "LAUNCH_TIMEOUT_S", 1.0)
    installed.set("faults", hang_launch_s=30)
    rental = rent(cloud, ledger)
    assert rental.state is RentalState.READY and installed.state["num_made"] == 1
    assert list(installed.state["clusters"]) == [rental.name]


@pytest.mark.slow
def test_a_launch_is_waited_for_no_longer_than_the_money_or_the_hours_last(
    installed: Installed, cloud: Sky, ledger: Ledger
) -> None:
    installed.set("faults", hang_launch_s=30)
    began = time.monotonic()
    with pytest.raises(PermanentInfraError, match="the run has spent its "):  # at 6.5 USD/h, 5 s
        rent_machines(
            Renting(replace(WANTED, max_usd=0.01), ledger, {"sky": cloud}, check=never_usable, pace=PACE),
        )
    assert time.monotonic() - began < 25 and installed.state["clusters"] == {}
    assert [rental.state for rental in all_rentals(ledger)] == [RentalState.GONE]


@pytest.mark.slow
def test_a_launch_that_failed_while_skypilot_could_not_say_what_it_left_is_looked_for(
    installed: Installed, cloud: Sky, ledger: Ledger
) -> None:
    installed.set("faults", fail_setup=1, fail_status=100)
    with ledger.living_run(WANTED.run_id), pytest.raises(NoMachineError, match="API server"):
        rent(cloud, ledger)
    [rental] = all_rentals(ledger)
    assert list(installed.state["clusters"]) == [rental.name] and rental.state is RentalState.INTENDED
    installed.set("faults", fail_status=0)
    assert len(reap(ledger, {"sky": cloud}, pace=PACE).ended) == 1
    [rental] = all_rentals(ledger)
    assert installed.state["clusters"] == {} and rental.state is RentalState.GONE


@pytest.mark.slow
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


def test_a_cloud_in_which_no_machine_ends_by_itself_is_rented_from_all_the_same(
    installed: Installed, cloud: Sky, ledger: Ledger
) -> None:
    installed.set("can", default={"Verda": ["compute"]})
    rental = rent(cloud, ledger)
    assert (rental.region, rental.usd_per_hour) == ("FIN-01", 2.2)
    cluster = installed.state["clusters"][rental.name]
    assert (cluster["minutes"], cluster["ends"]) == (None, False)


def test_an_instance_type_may_have_colons_in_its_name(installed: Installed, cloud: Sky, ledger: Ledger) -> None:
    installed.set("can", default={"Fluidstack": ["compute"]})
    rental = rent(cloud, ledger)
    resources = installed.state["clusters"][rental.name]["task"]["resources"]
    assert (resources["instance_type"], resources["accelerators"]) == ("H100_SXM5_80GB::1", "H100:1")


def test_a_machine_that_does_not_end_is_reported_with_the_reason_that_skypilot_gives(
    installed: Installed, cloud: Sky, ledger: Ledger
) -> None:
    rental = rent(cloud, ledger)
    installed.set("faults", fail_downs=1000)
    with pytest.raises(StillRentedError, match=r"may still be rented: sky down failed: RuntimeError: the cloud did"):
        release_machine(rental, ledger, cloud, pace=replace(PACE, gone_within_s=0.1))
    assert list(installed.state["clusters"]) == [rental.name]


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


@pytest.mark.parametrize(
    ("reason", "was_up", "status"),
    [
        (UNHEALTHY, True, InstanceStatus.UNKNOWN),
        (UNHEALTHY, False, InstanceStatus.FAILED),
        ("Cluster is abnormal because pod-1 is not ready (OOMKilled).", True, InstanceStatus.FAILED),
    ],
)
def test_a_machine_that_runs_and_does_not_answer_skypilot_is_not_lost(
    installed: Installed, cloud: Sky, reason: str, was_up: bool, status: InstanceStatus
) -> None:
    init = {"status": "INIT", "init_kind": "unhealthy", "init_status_reason": reason}
    installed.set("clusters", mine={**init, "cluster_ever_up": was_up})
    instance = cloud.get("mine")
    assert instance is not None and instance.status is status


@pytest.mark.parametrize(
    ("name", "address"),
    [("mine", {"HostName": "-oProxyCommand=x"}), ("mi,ne", {"ProxyCommand": "kubectl port-forward"})],
)
def test_an_address_that_ssh_could_misread_is_none(
    installed: Installed, cloud: Sky, name: str, address: dict[str, str]
) -> None:
    installed.set("clusters", **{name: {"status": "UP", "init_kind": None}})
    installed.set("address", **address)
    instance = cloud.get(name)
    assert instance is not None and (instance.host, instance.proxy_jump) == ("", "")


@pytest.fixture
def kubernetes(installed: Installed) -> str:
    """SkyPilot may use a Kubernetes cluster besides, by this context."""
    installed.set("can", default={"Kubernetes": ["compute"], "AWS": ["compute"]})
    return "gke_mine_europe-west4_gpus"


def test_pods_are_offered_at_no_price_and_those_with_one_at_theirs(kubernetes: str, cloud: Sky) -> None:
    pods = [offer for offer in cloud.search(QUERY) if offer.region == kubernetes]
    assert [(offer.id, offer.gpu_count, offer.vram_gb) for offer in pods] == [("kubernetes::H100-80GB", 1, 80.0)]
    assert (pods[0].usd_per_hour, pods[0].is_unpriced, QUERY.admits(pods[0])) == (0.0, True, True)
    assert describe_offer(pods[0]) == f"1x H100-80GB at sky in {kubernetes} at an unknown price"
    assert not any(offer.is_unpriced for offer in cloud.search(QUERY) if offer.region != kubernetes)
    [priced] = cloud.search(GPUQuery(gpu_types=("L4",)))
    assert (priced.usd_per_hour, priced.is_unpriced) == (0.5, False)
    spot = cloud.search(QUERY.model_copy(update={"spot": True}))
    assert [offer.region for offer in spot] == ["us-east-1"]


def test_a_cluster_that_does_not_answer_hides_no_other_cloud(kubernetes: str, installed: Installed, cloud: Sky) -> None:
    installed.set("faults", away=["kubernetes"])
    assert {offer.region for offer in cloud.search(QUERY)} == {"us-east-1", "us-west-2"}
    installed.set("faults", away=["kubernetes", "aws"])
    with pytest.raises(ProviderUnavailableError, match="sky gpus ended with 1: Timed out"):
        cloud.search(QUERY)


@pytest.mark.slow
def test_a_pod_is_rented_until_its_hours_are_over_and_given_back(
    kubernetes: str, installed: Installed, cloud: Sky, ledger: Ledger
) -> None:
    rental = rent(cloud, ledger)
    assert (rental.region, rental.usd_per_hour, rental.usd(time.time() + 3600)) == (kubernetes, 0.0, 0.0)
    assert rental.expires_at - rental.intended_at == pytest.approx(3600 * WANTED.max_hours)
    cluster = installed.state["clusters"][rental.name]
    assert cluster["task"]["resources"] == {
        "infra": f"kubernetes/{kubernetes}",
        "accelerators": "H100-80GB:1",
        "disk_size": WANTED.query.disk_gb,
        "use_spot": False,
    }
    assert (cluster["waits_for"], cluster["ends"]) == ("none", True)
    assert abs(60 * cluster["minutes"] - 3600 * WANTED.max_hours) < 120
    installed.set("faults", fail_downs=1)
    assert release_machine(rental, ledger, cloud, pace=PACE).state is RentalState.GONE
    assert installed.state["clusters"] == {} and cloud.get(rental.name) is None


def test_the_way_to_a_pod_that_is_shown_is_not_that_to_this_machine(
    kubernetes: str, installed: Installed, cloud: Sky, ledger: Ledger, tmp_path: Path
) -> None:
    installed.set("address", ProxyCommand="kubectl port-forward")
    rental = rent(cloud, ledger)
    shown = CliRunner().invoke(app, ["nodes", "show", rental.name, "--store", str(tmp_path)]).stdout
    assert f"login          rollouts nodes ssh {rental.name}" in shown and "127.0.0.1" not in shown


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("ssh") is None, reason="there is no OpenSSH client here")
def test_a_pod_is_reached_through_the_proxy_of_skypilot_and_its_own_key_is_checked(
    kubernetes: str, installed: Installed, cloud: Sky, ssh_server: SSHServer, tmp_path: Path
) -> None:
    (tmp_path / "proxy.py").write_text(PROXY)
    address = {
        "HostName": "192.0.2.7",  # of the network of the pods, which is not ours
        "User": getpass.getuser(),
        "IdentityFile": str(ssh_server.client_key_file),
        "IdentitiesOnly": "yes",
        "StrictHostKeyChecking": "no",
        "UserKnownHostsFile": "/dev/null",
        "Port": str(ssh_server.port),
        "ProxyCommand": shlex.join([sys.executable, str(tmp_path / "proxy.py"), str(ssh_server.port)]),
    }
    installed.set("clusters", pod={"status": "UP", "init_kind": None})
    installed.set("address", **address)
    instance = cloud.get("pod")
    assert instance is not None and instance.has_address
    settings = InstanceNode(kind="instance", instance="sky:pod", key_file=str(ssh_server.client_key_file))
    known = tmp_path / "known"
    pinned = replace(access_to(instance, settings), host_key=ssh_server.access.host_key)
    with SSHSession(pinned, python=sys.executable, programs_dir=str(tmp_path / "programs")) as session:
        assert session.run(["echo", "inside"], timeout_s=60).stdout == b"inside\n"
    other = replace(pinned, host_key="SHA256:" + 43 * "A")
    with SSHSession(other, python=sys.executable, programs_dir="") as session, pytest.raises(HostKeyError):
        session.run(["true"], timeout_s=60)
    known.write_text(f"[127.0.0.1]:{ssh_server.port} {Path(f'{ssh_server.host_key_file}.pub').read_text()}")
    words = login_command(instance, known, key_file=str(ssh_server.client_key_file), command=["echo", "by hand"])
    said = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
    assert said.stdout == "by hand\n", said.stderr


def test_what_does_not_work_is_one_sentence(
    installed: Installed, cloud: Sky, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed.set("faults", fail_status=1)
    with pytest.raises(ProviderUnavailableError, match="sky status ended with 1: Failed to connect to SkyPilot API"):
        cloud.list_named("rollouts-")
    (tmp_path / "talks").write_text("#!/bin/sh\necho nothing to see\n")
    (tmp_path / "talks").chmod(0o755)
    with pytest.raises(ProviderUnavailableError, match="sky status printed unreadable output"):
        Sky(str(tmp_path / "talks")).list_named("rollouts-")
    with pytest.raises(MissingKeyError, match=r"ROLLOUTS_SKY is /nowhere/sky, which cannot be run \(No such file"):
        Sky("/nowhere/sky").search(QUERY)
    monkeypatch.delenv("ROLLOUTS_SKY")
    with pytest.raises(
        MissingKeyError, match="the path of its program for SkyPilot is missing: put it into the variable"
    ):
        open_account("sky")


def test_without_the_name_of_a_gpu_it_is_not_asked_and_that_is_said(installed: Installed, cloud: Sky) -> None:
    assert installed.state["calls"] == []
    shown = CliRunner().invoke(app, ["gpus"])
    assert shown.exit_code == 1 and "SkyPilot finds GPUs by their names: name some" in shown.stderr
    with pytest.raises(ProviderRefusedError, match=r"node\.query\.gpu_types"):
        search_offers(GPUQuery(), {"sky": cloud})
    assert installed.state["calls"] == []


def test_its_offers_are_in_the_table_of_all(installed: Installed) -> None:
    shown = CliRunner().invoke(app, ["gpus", "--gpu", "H100", "--max-price", "10"])
    assert shown.exit_code == 0, shown.output
    assert [line.split()[0] for line in shown.stdout.splitlines()[1:4]] == ["6.50", "6.88", "6.98"]
