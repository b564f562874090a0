"""Pins that training may span machines that share nothing but a network, and that they all end together.

Without it a training by several machines could stand on a disk that they share by chance, or a machine whose leader is
gone could keep its GPUs busy for nobody.
"""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollouts.infra.ledger import LEDGER_FILE, Ledger
from rollouts_core.backends.multi_node import MACHINE_LOST_CODE
from tests.flows.clusters import Cluster, two_machines
from tests.kit.commands import Rollouts, digest_of_the_run, digest_trained_here
from tests.kit.small_pipeline import write_small_pipeline
from tests.kit.ssh_nodes import SHORTER
from tests.kit.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.namespaces]

ENDLESS = {"mode": "sft", "training__sft__num_steps": 100_000, "training__sft__checkpoint_every": 20}
LONGER = {"mode": "sft", "training__sft__num_steps": 400, "training__sft__checkpoint_every": 20}
LONGER_THAN_A_LEASE_S = 75.0
ENDED_WITHIN_S = 60.0


@pytest.fixture
def cluster(rollouts: Rollouts, tmp_path: Path) -> Iterator[Cluster]:
    with two_machines(rollouts, tmp_path) as cluster:
        yield cluster


def write(folder: Path, cluster: Cluster, **overrides: Any) -> Path:  # Any: settings of every type
    """A pipeline whose training has one process on each machine."""
    together = {"node": cluster.settings("trainer_nodes"), "deployment__trainer_processes": 1}
    return write_small_pipeline(folder / "small", **{**together, **overrides})


def start_and_train(
    rollouts: Rollouts, cluster: Cluster, config: Path, *, num_checkpoints: int = 1
) -> subprocess.Popen[bytes]:
    """Start a run, and return amid SFT."""
    process = rollouts.start("run", str(config))
    found = "root/stages/sft-*/checkpoints/*/manifest.json"
    wait_until(
        lambda: len(cluster.leader.files(found)) >= num_checkpoints or process.poll() is not None,
        what="a checkpoint of SFT",
        timeout_s=400.0,
    )
    assert process.poll() is None, rollouts.said()
    return process


def is_idle(cluster: Cluster) -> bool:
    return cluster.leader.commands() == cluster.further.commands() == []


def has_no_jobs(cluster: Cluster) -> bool:
    """Whether no job is left; a connection that was cut leaves the program at its end, which waits for requests."""
    return not any("/stages/" in command for node in (cluster.leader, cluster.further) for command in node.commands())


def exit_codes(cluster: Cluster) -> list[int]:
    """How the attempts at SFT ended."""
    return [json.loads(path.read_text())["code"] for path in cluster.leader.files("root/stages/sft-*/exit-*.json")]


@pytest.mark.matrix
def test_a_run_trained_by_two_machines_ends_as_by_two_processes_of_one(
    rollouts: Rollouts, served_home: Path, cluster: Cluster, tmp_path: Path
) -> None:
    config = write(tmp_path, cluster, **SHORTER)
    code, output = rollouts.run("run", str(config))
    assert code == 0, output
    assert is_idle(cluster)
    trained = {path.parent.name.rpartition("-")[0] for path in cluster.leader.files("root/stages/*/result.json")}
    assert trained == {"sft", "select-sft", "rl", "select-rl", "evaluate"}
    followed = cluster.further.files("root/stages/*")
    assert len(followed) == 2 and all(path.name.startswith("follower-") for path in followed)
    for path in followed:
        assert json.loads((path / "exit-1.json").read_text())["code"] == 0, (path / "log.txt").read_text()
    assert cluster.further.files("root/stages/*/checkpoints") == cluster.further.files("root/**/*.safetensors") == []
    (run,) = (rollouts.store / "runs").iterdir()
    with Ledger(rollouts.store / LEDGER_FILE) as ledger:
        assert ledger.leases_of(json.loads((run / "run.json").read_text())["run_id"]) == []

    local_config = write_small_pipeline(tmp_path / "small", **SHORTER, deployment__trainer_processes=2)
    assert digest_of_the_run(rollouts) == digest_trained_here(local_config, served_home, tmp_path)


@pytest.mark.matrix
def test_machines_that_do_not_reach_each_other_end_a_run_before_it_trains(
    rollouts: Rollouts, cluster: Cluster, tmp_path: Path
) -> None:
    config = write(tmp_path, cluster, **SHORTER)
    with cluster.link.cut_off():
        code, output = rollouts.run("run", str(config))
    assert code == 2, output
    assert f"node.trainer_nodes, {cluster.further.access.address}: " in output
    assert not cluster.leader.files("root/stages/*") and not cluster.further.files("root/stages/*")
    assert is_idle(cluster)


@pytest.mark.matrix
def test_a_job_of_another_machine_that_is_killed_is_named_and_the_run_goes_on_from_the_last_checkpoint(
    rollouts: Rollouts, cluster: Cluster, tmp_path: Path
) -> None:
    process = start_and_train(rollouts, cluster, write(tmp_path, cluster, **LONGER))
    cluster.further.kill_job("follower-")
    rollouts.wait_until_said(f"{cluster.further.access.address} was ended or killed during the training", process)
    assert process.wait(400) == 0, rollouts.said()
    assert exit_codes(cluster) == [MACHINE_LOST_CODE, 0]
    (sft,) = (path.parent for path in cluster.leader.files("root/stages/sft-*/result.json"))
    events = [json.loads(line) for line in (sft / "events.jsonl").read_text().splitlines()]
    assert [event["attempt"] for event in events if event["event"] == "resumed"] == [2]
    assert is_idle(cluster)


@pytest.mark.matrix
def test_a_machine_that_is_lost_is_named_and_the_same_command_completes_when_it_is_back(
    rollouts: Rollouts, cluster: Cluster, tmp_path: Path
) -> None:
    config = write(tmp_path, cluster, **LONGER)
    process = start_and_train(rollouts, cluster, config)
    lost = cluster.further.access.address
    with cluster.further.cut_off(), cluster.link.cut_off():
        assert process.wait(400) == 1, rollouts.said()
        assert f"{lost} sent no heartbeat for 30 s" in rollouts.said()
        assert f"the jobs on {lost} end by themselves" in rollouts.said()
        wait_until(lambda: has_no_jobs(cluster), what="the end of the lost machine's job")
    code, output = rollouts.run("run", str(config))
    assert code == 0, output
    assert has_no_jobs(cluster)


@pytest.mark.matrix
def test_when_nobody_is_left_but_another_machine_it_ends_and_the_same_command_completes(
    rollouts: Rollouts, cluster: Cluster, tmp_path: Path
) -> None:
    config = write(tmp_path, cluster, **LONGER)
    process = start_and_train(rollouts, cluster, config)
    process.kill()
    process.wait()
    cluster.leader.kill_job("sft-")
    wait_until(lambda: is_idle(cluster), what="the end of the follower", timeout_s=ENDED_WITHIN_S)
    code, output = rollouts.run("run", str(config))
    assert code == 0, output
    assert is_idle(cluster)


@pytest.mark.matrix
def test_training_goes_on_when_the_command_is_killed_and_ctrl_c_of_the_next_ends_it_on_both_machines(
    rollouts: Rollouts, cluster: Cluster, tmp_path: Path
) -> None:
    """Nobody but the leader's job renews the lease of the other machine's then."""
    config = write(tmp_path, cluster, **ENDLESS)
    process = start_and_train(rollouts, cluster, config)
    process.kill()
    process.wait()
    time.sleep(LONGER_THAN_A_LEASE_S)
    assert exit_codes(cluster) == [] and cluster.further.commands()
    process = rollouts.start("run", str(config))
    rollouts.wait_until_said("sft            attached to the running job", process)
    process.send_signal(signal.SIGINT)
    assert process.wait(120) == 130, rollouts.said()
    assert is_idle(cluster)
    assert len(cluster.further.files("root/stages/*")) == len(exit_codes(cluster)) == 1
