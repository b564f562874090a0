"""Pins that a machine which somebody rented by other means is found by its id, trusted by its key, and never ended.

Without it a run fails as soon as a provider gives the machine another port, sends data to a stranger who has the old
one, or ends a machine that is not its own.
"""

from __future__ import annotations

import getpass
import logging
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollouts.flows.form import parse_pipeline
from rollouts.flows.preflight import reach_node
from rollouts.infra.errors import (
    HostKeyError,
    InfraError,
    MachineGoneError,
    MissingKeyError,
    PermanentInfraError,
    TransientInfraError,
)
from rollouts.infra.ledger import LEDGER_FILE, Ledger
from rollouts.infra.node import InstanceNode, Node
from rollouts.infra.offers import GPUQuery, MachineSpec
from rollouts.infra.providers import instance, open_session, provision_node, release_node
from rollouts.infra.providers.clouds import open_account
from rollouts.infra.renting.rentals import all_rentals
from rollouts_core.errors import ConfigError
from tests.infra.fake_cloud import KEY
from tests.infra.fake_runpod import FakeRunPod
from tests.infra.ssh_server import SSHServer, fingerprint_of, running_server

DATA = {name: f"/data/{name}.jsonl" for name in ("sft", "prompts", "selection", "heldout")}


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeRunPod]:
    fake = FakeRunPod()
    with fake.served() as url:
        monkeypatch.setenv("RUNPOD_API_KEY", KEY)
        monkeypatch.setenv("RUNPOD_API_URL", url)
        yield fake


@pytest.fixture
def name(fake: FakeRunPod) -> str:
    """A machine that somebody has."""
    with open_account("runpod") as cloud:
        spec = MachineSpec(name="my own", public_key="ssh-ed25519 AAAA me", disk_gb=10)
        return f"runpod:{cloud.create(cloud.search(GPUQuery())[0], spec)}"


def provision(name: str, server: SSHServer, tmp_path: Path, **more: Any) -> Node:  # Any: settings of every type
    settings = {
        "instance": name,
        "key_file": str(server.client_key_file),
        "root": str(tmp_path / "machine"),
        "python": sys.executable,
        **more,
    }
    return provision_node(InstanceNode.model_validate(settings), tmp_path / "store")


def lets_in(fake: FakeRunPod, server: SSHServer) -> None:
    fake.port, fake.user = server.port, getpass.getuser()


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        *(
            (
                {"instance": each},
                "instance: expected PROVIDER:ID, for example runpod:abc123, of one of runpod, lambda, ",
            )
            for each in ("abc123", "moon:abc123", "runpod:", "runpod:-oProxyCommand=x", "runpod:../pods", "vast:1\n")
        ),
        ({"python": "python3"}, "expected the absolute path"),
        ({"max_usd": 5}, "unknown key node.max_usd"),
    ],
)
def test_a_misfit_is_one_sentence(change: dict[str, Any], expected: str) -> None:
    node = {"kind": "instance", "instance": "runpod:abc123", **change}
    with pytest.raises(ConfigError, match=re.escape(expected)):
        parse_pipeline({"model": {"path": "/model"}, "data": DATA, "node": node}, Path("a.toml"))


@pytest.mark.slow
def test_it_is_found_wherever_it_is_and_left_as_it_was(
    fake: FakeRunPod, name: str, ssh_server: SSHServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lets_in(fake, ssh_server)
    with caplog.at_level(logging.INFO):
        node = provision(name, ssh_server, tmp_path)
    assert f"{name} is yours and costs 2.99 USD/h: it keeps running after this run" in caplog.text
    assert (node.name, node.is_rented, node.believed_by) == (name, False, "first_use")
    assert node.access is not None and node.access.host_key == fingerprint_of(ssh_server.host_key_file)
    with running_server(tmp_path / "stranger") as stranger:  # who has its old address
        fake.port = stranger.port
        with open_session(node) as session, pytest.raises(HostKeyError, match="an earlier login stored"):
            session.run(["echo", "there"], timeout_s=30)
        with pytest.raises(HostKeyError, match="an earlier login stored"):
            provision(name, ssh_server, tmp_path)
    fake.port = ssh_server.port
    with open_session(node) as session:
        assert session.run(["echo", "there"], timeout_s=30).stdout == b"there\n"
    assert provision(name, ssh_server, tmp_path).believed_by == "pinned"
    release_node(node)
    assert len(fake.alive()) == 1
    with Ledger(tmp_path / "store" / LEDGER_FILE) as ledger:
        assert all_rentals(ledger) == []


@pytest.mark.slow
def test_a_key_that_the_settings_name_is_demanded_at_the_first_login(
    fake: FakeRunPod, name: str, ssh_server: SSHServer, tmp_path: Path
) -> None:
    lets_in(fake, ssh_server)
    with pytest.raises(HostKeyError, match="expected is SHA256:AAAA"):
        provision(name, ssh_server, tmp_path, host_key=f"SHA256:{'A' * 43}")
    own = fingerprint_of(ssh_server.host_key_file)
    assert provision(name, ssh_server, tmp_path, host_key=own).believed_by == "pinned"


@pytest.mark.slow
def test_one_that_starts_is_waited_for(
    fake: FakeRunPod,
    name: str,
    ssh_server: SSHServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(instance, "POLL_S", 0.05)
    lets_in(fake, ssh_server)
    fake.faults.boot_s = 1.0
    with caplog.at_level(logging.INFO):
        assert provision(name, ssh_server, tmp_path).name == name
    assert f"{name} is starting: waits for its address" in caplog.text
    monkeypatch.setattr(instance, "STARTED_WITHIN_S", 0.1)
    fake.faults.boot_s = 1000.0
    with pytest.raises(TransientInfraError, match=f"{name} is starting and had no address for"):
        provision(name, ssh_server, tmp_path)


def test_a_check_does_not_wait_for_one_that_starts(fake: FakeRunPod, name: str, tmp_path: Path) -> None:
    fake.faults.boot_s = 1000.0
    findings: list[str] = []
    assert reach_node(InstanceNode(instance=name), tmp_path, findings) is None
    assert findings == [f"node: {name} is starting: the machine is checked after its start"]


@pytest.mark.parametrize(
    ("status", "error", "words"),
    [
        ("EXITED", PermanentInfraError, "is stopped: start it on its provider's pages"),
        ("TERMINATED", MachineGoneError, "does not exist"),
    ],
)
def test_one_that_does_not_run_is_one_sentence(
    fake: FakeRunPod, name: str, tmp_path: Path, status: str, error: type[InfraError], words: str
) -> None:
    fake.machines[name.partition(":")[2]].status = status
    with pytest.raises(error, match=words):
        provision_node(InstanceNode(instance=name), tmp_path)


def test_neither_is_one_that_nobody_has_or_whose_key_is_missing(
    fake: FakeRunPod, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(MachineGoneError, match="runpod:none does not exist"):
        provision_node(InstanceNode(instance="runpod:none"), tmp_path)
    monkeypatch.delenv("RUNPOD_API_KEY")
    with pytest.raises(MissingKeyError, match="put it into the variable RUNPOD_API_KEY"):
        provision_node(InstanceNode(instance="runpod:none"), tmp_path)
