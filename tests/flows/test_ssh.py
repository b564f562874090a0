"""Pins that a run on a node over SSH ends as a run on this machine does, and leaves nothing behind there.

Without it a setting, an input or a result could quietly come from the wrong machine. The node is this machine, under
another folder: its jobs must name no path of ours.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rollouts_core.checkpoint import list_checkpoints, verify_checkpoint
from rollouts_core.metrics import read_metrics
from tests.flows.test_cancel import run_that_holds
from tests.infra.ssh_server import SSHServer
from tests.kit.commands import ROOT, Rollouts, clean_environment, join_home, processes_of
from tests.kit.small_pipeline import OWN_REWARD, write_own_reward, write_small_pipeline
from tests.kit.ssh_nodes import SHORTER, node_settings, stages_of
from tests.kit.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.matrix
def test_the_pipeline_over_ssh_ends_as_on_this_machine(
    rollouts: Rollouts, served_home: Path, ssh_server: SSHServer, node_root: Path, tmp_path: Path
) -> None:
    """Its rewards are those of a module beside the configuration, which is on no path of Python's."""
    settings = {**SHORTER, "rollout__reward_fn": OWN_REWARD}
    config = write_small_pipeline(tmp_path / "small", node=node_settings(ssh_server, node_root), **settings)
    write_own_reward(tmp_path / "small")
    code, output = rollouts.run("run", str(config))
    assert code == 0, output
    (run,) = (rollouts.store / "runs").iterdir()
    assert (run / "report.html").is_file()
    over_ssh = verify_checkpoint(run / "checkpoint")
    assert [stage["how"] for stage in json.loads((run / "run.json").read_text())["stages"]] == ["ran"] * 5
    for job in node_root.glob("stages/*/job.json"):
        assert str(rollouts.store) not in job.read_text() and str(config.parent) not in job.read_text()
    for name, mirror in stages_of(rollouts.store).items():
        there = stages_of(node_root)[name]
        for file in ("result.json", "metrics.jsonl", "events.jsonl"):
            assert (mirror / file).read_bytes() == (there / file).read_bytes()
    assert processes_of(node_root) == []

    # Here everything is finished already: neither the node nor its server is needed for the results.
    local = write_small_pipeline(tmp_path / "small", **settings)
    write_own_reward(tmp_path / "small")
    code, output = rollouts.run("run", str(local))
    assert code == 0 and "reused" in output, output

    local_only = Rollouts(store=tmp_path / "other-store", output=tmp_path / "other-output")
    join_home(served_home, local_only.store)
    code, output = local_only.run("run", str(local))
    assert code == 0, output
    (run,) = (local_only.store / "runs").iterdir()
    assert verify_checkpoint(run / "checkpoint").digest == over_ssh.digest


def test_a_module_of_the_users_that_the_machine_cannot_import_is_told_before_anything_is_trained(
    rollouts: Rollouts, ssh_server: SSHServer, node_root: Path, tmp_path: Path
) -> None:
    own = tmp_path / "own" / "graders_of_a_test"
    own.mkdir(parents=True)
    (own / "words.txt").write_text("a b")
    (own / "words.py").write_text("import pathlib\nWORDS = pathlib.Path(__file__).with_name('words.txt').read_text()\n")
    (own / "score.py").write_text("from graders_of_a_test.words import WORDS\n\n\ndef score(sample): return 1.0\n")
    config = write_small_pipeline(
        tmp_path / "small",
        node=node_settings(ssh_server, node_root),
        rollout__reward_fn="graders_of_a_test.score:score",
    )
    ended = subprocess.run(
        [sys.executable, "-m", "rollouts.flows.cli", "run", str(config), "--store", str(rollouts.store)],
        cwd=ROOT,
        env=clean_environment() | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{own.parent}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=400,
        check=False,
        text=True,
    )
    said = " ".join(ended.stdout.split())
    assert ended.returncode == 2 and ", graders_of_a_test (2 files, 0 kB)" in said, said
    assert "rollout.reward_fn: " in said and "cannot import graders_of_a_test.score (FileNotFoundError: " in said, said
    assert not (node_root / "stages").exists()


@pytest.mark.matrix
def test_a_run_on_a_node_is_cancelled_saves_its_last_step_there_and_goes_on_from_it(
    rollouts: Rollouts, ssh_server: SSHServer, node_root: Path, tmp_path: Path
) -> None:
    rare = SHORTER | {"training__sft__num_steps": 400, "training__sft__checkpoint_every": 400}
    rare["training__sft__log_every"] = 1
    config = write_small_pipeline(tmp_path / "small", mode="sft", node=node_settings(ssh_server, node_root), **rare)
    process = rollouts.start("run", str(config))

    def has_steps() -> bool:
        return any(len(read_metrics(path)) >= 3 for path in node_root.glob("stages/sft-*/metrics.jsonl"))

    wait_until(lambda: has_steps() or process.poll() is not None, what="three steps on the node", timeout_s=120.0)
    other = Rollouts(rollouts.store, tmp_path / "other.txt")
    code, output = other.run("cancel", f"small-{run_that_holds(rollouts)[:8]}")
    assert code == 0, output + rollouts.said()
    assert process.wait(60) == 130, rollouts.said()
    [there] = node_root.glob("stages/sft-*")
    ended = json.loads((there / "exit-1.json").read_text())
    assert ended["cancelled"] and ended["saved_step"] >= 3
    assert verify_checkpoint(list_checkpoints(there / "checkpoints")[-1]).step == ended["saved_step"]
    assert f"step {ended['saved_step']} is saved" in rollouts.said()
    wait_until(lambda: processes_of(node_root) == [], what="the end of the job on the node")

    code, output = rollouts.run("run", str(config))
    assert code == 0, output
    assert f"resumes from step {ended['saved_step']}" in output
    assert [line["step"] for line in read_metrics(there / "metrics.jsonl")] == list(range(1, 401))


@pytest.mark.matrix
def test_a_run_survives_cuts_of_its_connections(
    rollouts: Rollouts, ssh_server: SSHServer, node_root: Path, tmp_path: Path
) -> None:
    config = write_small_pipeline(tmp_path / "small", mode="sft", node=node_settings(ssh_server, node_root), **SHORTER)
    process = rollouts.start("run", str(config))
    for sentence in ("sft            started", "select-sft     started"):
        rollouts.wait_until_said(sentence, process)
        assert ssh_server.signal_sessions(signal.SIGKILL) > 0
    assert process.wait(240) == 0, rollouts.said()
    (run,) = (rollouts.store / "runs").iterdir()
    verify_checkpoint(run / "checkpoint")
    assert len(list(node_root.glob("stages/sft-*/exit-*.json"))) == 1
