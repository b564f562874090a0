"""Pins that a run may rent several machines that work together, and that none of them is left when it ends.

Without it a training by two machines would pay for both where one of them is of no use. SkyPilot is a stand-in; its
machines are two in namespaces that share nothing but a network which this machine is not in.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollouts.infra.ledger import LEDGER_FILE, Ledger
from rollouts.infra.renting.rentals import RentalState, all_rentals
from tests.flows.breaking import rented_settings
from tests.flows.clusters import Cluster, two_machines
from tests.infra.providers.test_sky import Installed
from tests.infra.separate_node import SeparateNode
from tests.infra.ssh_server import make_key
from tests.kit.commands import Rollouts, digest_of_the_run, digest_trained_here
from tests.kit.small_pipeline import write_small_pipeline
from tests.kit.ssh_nodes import SHORTER

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.namespaces]

MEMORY = Path("/dev/shm")
"""Where each of the machines has files of its own at the same path."""
SHORT = {"mode": "sft", "training__sft__num_steps": 20, "training__sft__checkpoint_every": 10}


@pytest.fixture
def key(tmp_path: Path) -> Path:
    make_key(tmp_path / "key")
    return tmp_path / "key"


@pytest.fixture
def cluster(rollouts: Rollouts, tmp_path: Path, key: Path) -> Iterator[Cluster]:
    with two_machines(rollouts, tmp_path, client_key=key) as cluster:
        cluster.link.route_everything()
        yield cluster


@pytest.fixture
def sky(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Installed:
    """A provider that has the two machines, and nothing else."""
    for name in ("LAMBDA_API_KEY", "PRIME_API_KEY", "SHADEFORM_API_KEY", "VAST_API_KEY", "RUNPOD_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    addresses = [
        {"HostName": node.address, "User": node.access.user, "Port": "22"} for node in (cluster.leader, cluster.further)
    ]
    installed = Installed(tmp_path / "sky", addresses)
    monkeypatch.setenv("ROLLOUTS_SKY", str(installed.program))
    return installed


def unit_settings(key: Path, **numbers: int) -> dict[str, Any]:  # Any: settings of every type
    query = {"gpu_types": ["H100"], "max_usd_per_gpu_hour": 10.0}
    return {**rented_settings(key, MEMORY / "rollouts"), "query": query, "max_usd": 40.0, **numbers}


def stages_on(node: SeparateNode) -> set[str]:
    """What was done there."""
    found = node.files("rollouts/stages/*", folder=MEMORY)
    return {path.name.removesuffix("-0").rpartition("-")[0] for path in found}


def states(rollouts: Rollouts) -> list[RentalState]:
    with Ledger(rollouts.store / LEDGER_FILE) as ledger:
        return [rental.state for rental in all_rentals(ledger)]


@pytest.mark.matrix  # with machines of the user's own in test_cluster.py, rented ones in tests/infra/renting
def test_two_machines_that_are_rented_train_together_and_are_given_back(
    rollouts: Rollouts, served_home: Path, cluster: Cluster, sky: Installed, key: Path, tmp_path: Path
) -> None:
    node = unit_settings(key, num_trainer_nodes=2)
    config = write_small_pipeline(tmp_path / "small", node=node, deployment__trainer_processes=1, **SHORT)
    code, output = rollouts.run("run", str(config))
    assert code == 0, output
    assert "rented 2 times 1x H100 at sky for 13.00 USD/h, for 40 USD at most" in output
    assert "last 3.1 h there" in output and "gave back provision nodes rollouts-" in output
    assert sky.state["num_made"] == 2 and sky.state["clusters"] == {}
    assert states(rollouts) == [RentalState.GONE] * 2
    followed = cluster.further.files("rollouts/stages/follower-*/exit-1.json", folder=MEMORY)
    assert [json.loads(path.read_text())["code"] for path in followed] == [0]
    assert "sft" in stages_on(cluster.leader)
    local_config = write_small_pipeline(tmp_path / "small", **SHORT, deployment__trainer_processes=2)
    assert digest_of_the_run(rollouts) == digest_trained_here(local_config, served_home, tmp_path)


@pytest.mark.matrix  # with machines of the user's own in test_cluster.py
def test_an_engine_has_a_rented_machine_of_its_own(
    rollouts: Rollouts, served_home: Path, cluster: Cluster, sky: Installed, key: Path, tmp_path: Path
) -> None:
    node = unit_settings(key, num_engine_nodes=1)
    code, output = rollouts.run("run", str(write_small_pipeline(tmp_path / "small", node=node, **SHORTER)))
    assert code == 0, output
    assert sky.state["clusters"] == {} and states(rollouts) == [RentalState.GONE] * 2
    assert stages_on(cluster.further) == {"engine"} and "rl" in stages_on(cluster.leader)
    local_config = write_small_pipeline(tmp_path / "small", **SHORTER)
    assert digest_of_the_run(rollouts) == digest_trained_here(local_config, served_home, tmp_path)


@pytest.mark.matrix
def test_machines_without_a_network_of_their_own_are_given_back_at_once(
    rollouts: Rollouts, cluster: Cluster, sky: Installed, key: Path, tmp_path: Path
) -> None:
    node = unit_settings(key, num_trainer_nodes=2)
    config = write_small_pipeline(tmp_path / "small", node=node, deployment__trainer_processes=1, **SHORT)
    with cluster.link.cut_off():
        code, output = rollouts.run("run", str(config))
    assert code == 2 and "the machine has no address of its own (OSError" in output
    assert sky.state["num_made"] == 2 and sky.state["clusters"] == {}
    assert states(rollouts) == [RentalState.GONE] * 2


@pytest.mark.matrix
def test_machines_that_do_not_reach_each_other_are_given_back_before_anything_is_trained(
    rollouts: Rollouts, cluster: Cluster, sky: Installed, key: Path, tmp_path: Path
) -> None:
    node = unit_settings(key, num_trainer_nodes=2)
    config = write_small_pipeline(tmp_path / "small", node=node, deployment__trainer_processes=1, **SHORT)
    with cluster.link.one_way():
        code, output = rollouts.run("run", str(config))
    assert code == 2, output
    assert "node.trainer_nodes, rollouts-" in output and "gave back provision nodes rollouts-" in output
    assert sky.state["clusters"] == {} and states(rollouts) == [RentalState.GONE] * 2
    assert "sft" not in stages_on(cluster.leader)


def test_engines_elsewhere_need_something_to_sample(
    rollouts: Rollouts, cluster: Cluster, sky: Installed, key: Path, tmp_path: Path
) -> None:
    config = write_small_pipeline(tmp_path / "small", node=unit_settings(key, num_engine_nodes=1), **SHORT)
    code, output = rollouts.run("validate", str(config))
    assert code == 2 and 'node.num_engine_nodes: mode "sft" samples nothing' in output
    assert sky.state["num_made"] == 0
