"""Pins that trainer and engines of a run may be on different machines that share nothing but a network of their own.

Without it an engine could be fed from a disk or a memory that it shares with the trainer by chance, a key could be read
by whoever looks, or a machine that is lost could end a run without saying which.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollouts_core.metrics import read_metrics
from tests.flows.clusters import Cluster, further_node_settings, two_machines
from tests.infra.separate_node import private_link, separate_node
from tests.kit.commands import Rollouts, digest_of_the_run, digest_trained_here
from tests.kit.processes import Watch
from tests.kit.small_pipeline import write_small_pipeline
from tests.kit.ssh_nodes import SHORTER
from tests.kit.waiting import wait_until

event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.namespaces]


@pytest.fixture
def cluster(rollouts: Rollouts, tmp_path: Path) -> Iterator[Cluster]:
    """Nodes that see neither the store nor the files of the configuration."""
    with two_machines(rollouts, tmp_path) as cluster:
        yield cluster


@pytest.mark.promise
def test_a_run_with_its_engine_on_another_machine_ends_as_on_one_and_its_key_is_seen_nowhere(
    rollouts: Rollouts, served_home: Path, cluster: Cluster, tmp_path: Path
) -> None:
    settings = {"node": cluster.settings("engine_nodes"), "run__report_to": ["tensorboard"], **SHORTER}
    config = write_small_pipeline(tmp_path / "small", **settings)
    key_file = rollouts.store / "unit-key"
    key_file.write_text("sk-canary-8d0b26f3a1")  # as the run would make one
    key_file.chmod(0o600)
    with Watch(key_file.read_text()) as sightings:
        code, output = rollouts.run("run", str(config))
    assert code == 0, output
    assert f"answers at http://{cluster.link.addresses[1]}:" in output
    trained = {path.parent.name.rpartition("-")[0] for path in cluster.leader.files("root/stages/*/result.json")}
    assert trained == {"sft", "select-sft", "rl", "select-rl", "evaluate"}
    (engine,) = cluster.further.files("root/stages/*")
    assert engine.name.startswith("engine-")
    assert cluster.leader.commands() == cluster.further.commands() == []
    for stage, name in (("sft", "loss"), ("rl", "reward")):
        (mirror,) = rollouts.store.glob(f"stages/{stage}-*")
        events = event_accumulator.EventAccumulator(str(*rollouts.store.glob(f"tensorboard/*/{stage}")))
        shown = [event.step for event in events.Reload().Scalars(name)]
        assert shown == [line["step"] for line in read_metrics(mirror / "metrics.jsonl")]

    assert sightings == []
    ours = [path for path in (*rollouts.store.rglob("*"), tmp_path / "small", rollouts.output) if path.is_file()]
    theirs = [path for node in (cluster.leader, cluster.further) for path in node.files("**/*") if path.is_file()]
    assert len(ours) > 50 and len(theirs) > 50
    assert [path for path in (*ours, *theirs) if key_file.read_bytes() in path.read_bytes()] == [key_file]

    local_config = write_small_pipeline(tmp_path / "small", **SHORTER)
    assert digest_of_the_run(rollouts) == digest_trained_here(local_config, served_home, tmp_path)


@pytest.mark.matrix
def test_an_evaluation_needs_the_machine_that_leads_and_no_gpu_of_the_engines(
    rollouts: Rollouts, cluster: Cluster, tmp_path: Path
) -> None:
    own = {"deployment__engine_gpu_ranks": [0], "evaluation__seed": 1, "node": cluster.settings("engine_nodes")}
    config = write_small_pipeline(tmp_path / "small", **own, **SHORTER)
    code, output = rollouts.run("evaluate", str(config), str(tmp_path / "small" / "base_model"))
    assert code == 0, output


@pytest.mark.matrix
def test_a_machine_of_engines_that_is_lost_is_named_and_the_same_command_completes_when_it_is_back(
    rollouts: Rollouts, cluster: Cluster, tmp_path: Path
) -> None:
    """A request of its engine may take ten minutes; that its machine is gone is known before."""
    longer: dict[str, Any] = {
        **SHORTER,
        "training__rl__num_steps": 60,
        "training__rl__checkpoint_every": 2,
        "training__rl__keep_checkpoints": 2,
        "rollout__engine__start_timeout_s": 60.0,
    }
    config = write_small_pipeline(tmp_path / "small", mode="rl", node=cluster.settings("engine_nodes"), **longer)
    process = rollouts.start("run", str(config))
    wait_for_a_checkpoint(rollouts, cluster, process)
    lost = cluster.further.access.address
    with cluster.further.cut_off(), cluster.link.cut_off():
        assert process.wait(300) == 1, rollouts.said()
        assert f"the jobs on {lost} end by themselves" in rollouts.said()
        assert f"http://{cluster.link.addresses[1]}:" in rollouts.said().partition("end by themselves")[0]
        assert "Traceback" not in rollouts.said()
        wait_until(lambda: not cluster.further.commands(), what="the end of the engine without a lease")
        assert cluster.leader.commands() == []
    code, output = rollouts.run("run", str(config))
    assert code == 0, output
    (rl,) = (path.parent for path in cluster.leader.files("root/stages/rl-*/result.json"))
    assert len(list(rl.glob("exit-*.json"))) == 2
    resumed = [json.loads(line) for line in (rl / "events.jsonl").read_text().splitlines()]
    assert [event["attempt"] for event in resumed if event["event"] == "resumed"] == [2]
    assert cluster.leader.commands() == cluster.further.commands() == []


@pytest.mark.matrix
def test_of_two_machines_of_engines_one_may_be_lost_and_rl_goes_on_with_the_other(
    rollouts: Rollouts, cluster: Cluster, tmp_path: Path
) -> None:
    with (
        separate_node(tmp_path / "second", hidden=[rollouts.store, tmp_path / "small"]) as second,
        private_link(cluster.leader, second) as link,
    ):
        settings = cluster.settings("engine_nodes")
        settings["engine_nodes"].append(further_node_settings(second, link))
        longer = SHORTER | {"training__rl__num_steps": 30, "training__rl__checkpoint_every": 2}
        config = write_small_pipeline(tmp_path / "small", mode="rl", node=settings, **longer)
        process = rollouts.start("run", str(config))
        wait_for_a_checkpoint(rollouts, cluster, process)
        with second.cut_off(), link.cut_off():
            assert process.wait(400) == 0, rollouts.said()
            (said,) = [line for line in rollouts.said().splitlines() if "ends by itself within a minute" in line]
            assert f"http://{link.addresses[1]}:" in said and f"({second.access.address} does not answer" in said
            wait_until(lambda: not second.commands(), what="the end of the engine without a lease")
        assert cluster.leader.commands() == cluster.further.commands() == []
    (rl,) = (path.parent for path in cluster.leader.files("root/stages/rl-*/result.json"))
    assert len(list(rl.glob("exit-*.json"))) == 1


@pytest.mark.matrix
def test_rl_keeps_its_engine_on_another_machine_when_the_command_is_killed(
    rollouts: Rollouts, cluster: Cluster, tmp_path: Path
) -> None:
    """Nobody else renews its lease then."""
    longer = SHORTER | {"training__rl__num_steps": 300, "training__rl__checkpoint_every": 20}
    config = write_small_pipeline(tmp_path / "small", mode="rl", node=cluster.settings("engine_nodes"), **longer)
    process = rollouts.start("run", str(config))
    wait_for_a_checkpoint(rollouts, cluster, process)
    process.kill()
    process.wait()
    wait_until(
        lambda: bool(cluster.leader.files("root/stages/rl-*/exit-1.json")), what="the end of RL", timeout_s=400.0
    )
    assert cluster.leader.files("root/stages/rl-*/result.json")
    code, output = rollouts.run("run", str(config))
    assert code == 0, output
    assert len(cluster.leader.files("root/stages/rl-*/exit-*.json")) == 1
    assert cluster.leader.commands() == cluster.further.commands() == []


def wait_for_a_checkpoint(rollouts: Rollouts, cluster: Cluster, process: subprocess.Popen[bytes]) -> None:
    """Return amid RL."""
    found = "root/stages/rl-*/checkpoints/*/manifest.json"
    wait_until(
        lambda: bool(cluster.leader.files(found)) or process.poll() is not None,
        what="a checkpoint of RL",
        timeout_s=400.0,
    )
    assert process.poll() is None, rollouts.said()


@pytest.mark.matrix
def test_machines_that_do_not_reach_each_other_end_a_run_before_it_trains(
    rollouts: Rollouts, cluster: Cluster, tmp_path: Path
) -> None:
    config = write_small_pipeline(tmp_path / "small", node=cluster.settings("engine_nodes"), **SHORTER)
    with cluster.link.cut_off():
        code, output = rollouts.run("run", str(config))
    assert code == 2, output
    assert f"node.engine_nodes, {cluster.further.access.address}: " in output
    assert "give the address of a shared network, and open all ports between them" in output.replace("\n", " ")
    assert not cluster.leader.files("root/stages/*") and not cluster.further.files("root/stages/*")
    assert cluster.leader.commands() == cluster.further.commands() == []
