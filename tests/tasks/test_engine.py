"""Pins how long an engine lives: as long as somebody wants it, also while it loads, and not for long after that.

Without it a run that was killed together with its RL leaves an engine on a GPU for ever, or an engine whose model
loads slowly is ended before its first token.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from rollouts.infra.errors import NodeUnreachableError, PermanentInfraError, TransientInfraError
from rollouts.infra.jobs import JobState, cancel_job, job_status, start_or_attach
from rollouts.infra.ledger import Ledger
from rollouts.infra.node import LocalNode, Node, SSHAccess
from rollouts.infra.providers import provision_node
from rollouts.infra.session import LocalSession
from rollouts.infra.supervisor.gpu_slots import GPU_LOCKS_VARIABLE
from rollouts.tasks import engine, leases
from rollouts.tasks.node_job import gpus_of, job_environment, job_spec
from rollouts.tasks.records import EngineRecord, RunScope, Stage
from rollouts.tasks.unit_keys import own_unit_key
from rollouts_core.errors import ConfigError
from rollouts_core.stages.planning import base_model
from tests.infra.shell_jobs import shell_spec
from tests.infra.ssh_server import make_key
from tests.kit.commands import pids_of, processes_of
from tests.kit.small_pipeline import write_small_pipeline
from tests.kit.waiting import wait_until
from tests.tasks.planned import plan_rl

pytestmark = pytest.mark.slow

LEASE_S = 10.0
"""That of a job of a test: renewing one starts a process, which takes a busy machine a while."""
RENEWED_AS_IF_S = 6.0
"""A lease that is renewed as often as one of this length."""
SHORT_LEASE_S = 2.0
"""Shorter than an engine needs to import torch and load a model."""


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return provision_node(LocalNode(), tmp_path / "store")


@pytest.fixture
def scope(tmp_path: Path) -> RunScope:
    return RunScope(run_id="run-a", run_name="small", store=str(tmp_path / "store"))


@pytest.fixture
def rl(tmp_path: Path, scope: RunScope, node: Node) -> Stage:
    from rollouts.flows.form import load_pipeline

    config = load_pipeline(write_small_pipeline(tmp_path / "small", mode="rl")).config
    return plan_rl(base_model(config), config, scope, node)


def test_no_engine_is_launched_for_an_rl_that_another_run_does_elsewhere(
    rl: Stage, scope: RunScope, node: Node
) -> None:
    with Ledger(scope.ledger_path) as ledger:
        ledger.add_lease(f"/elsewhere/stages/{Path(rl.run_dir).name}", "run-b", "elsewhere")
    with pytest.raises(PermanentInfraError, match="rl is running on elsewhere for another run"):
        engine.launch_engine.fn(rl, 0, scope, node)
    assert processes_of(Path(scope.store)) == []


def test_an_engine_survives_its_loading_and_ends_by_itself_when_nobody_renews_its_lease(
    rl: Stage, scope: RunScope, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "LEASE_S", SHORT_LEASE_S)
    monkeypatch.setattr(leases, "LEASE_S", SHORT_LEASE_S / 2)
    session = LocalSession(sys.executable)
    record = engine.launch_engine.fn(rl, 0, scope, node)
    try:
        wait_until(
            lambda: job_status(session, record.run_dir).state is not JobState.RUNNING, what="its end", timeout_s=20
        )
        status = job_status(session, record.run_dir)
        assert status.exit is not None
        assert status.exit.lease_expired
        assert processes_of(Path(scope.store)) == []
    finally:
        cancel_job(session, record.run_dir, 1.0)


def test_a_key_reaches_the_engine_and_those_who_ask_it_and_lies_in_no_file(
    rl: Stage, scope: RunScope, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = "4f2c-known-to-nobody"
    with_key = rl.model_copy(update={"job": deepcopy(rl.job)})
    with_key.job["rollout"]["engine"]["api_key_variable"] = "ENGINE_KEY"
    with pytest.raises(ConfigError, match=r"rollout\.engine: api_key_variable ENGINE_KEY is not set"):
        engine.launch_engine.fn(with_key, 0, scope, node)
    monkeypatch.setenv("ENGINE_KEY", key)
    record = engine.launch_engine.fn(with_key, 0, scope, node)
    try:
        assert httpx.get(f"{record.url}/model_info", timeout=60.0).status_code == 401
        headers = {"Authorization": f"Bearer {key}"}
        assert httpx.get(f"{record.url}/model_info", headers=headers, timeout=60.0).status_code == 200
        assert engine.launch_engine.fn(with_key, 0, scope, node).url == record.url  # attaches
        files = [path for path in Path(scope.store).rglob("*") if path.is_file()]
        assert Path(record.run_dir) / "job.json" in files
        assert not [path for path in files if key.encode() in path.read_bytes()]
        commands = processes_of(Path(scope.store))
        assert commands and not [command for command in commands if key in command]
        assert "ENGINE_KEY" in job_environment(with_key)
    finally:
        cancel_job(LocalSession(sys.executable), record.run_dir, 1.0)


def test_an_engine_holds_the_gpus_of_its_rl_for_it_against_another_run(
    rl: Stage, scope: RunScope, node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(GPU_LOCKS_VARIABLE, str(tmp_path / "locks"))
    session = LocalSession(sys.executable)
    on_gpu = rl.model_copy(update={"job": deepcopy(rl.job)})
    on_gpu.job["deployment"]["trainer_gpu_ranks"] = [0]
    record = engine.launch_engine.fn(on_gpu, 0, scope, node)
    other = shell_spec(tmp_path / "other", "sleep 60", gpus=("0",))
    try:
        waits_for = start_or_attach(session, other).waits_for
        assert f"held by run {scope.output_dir.name} (job {record.run_dir})" in waits_for
        spec = job_spec(on_gpu, session, scope, gpus=gpus_of(on_gpu, node))
        assert start_or_attach(session, spec).waits_for == ""
        cancel_job(session, record.run_dir, 1.0)
        assert f"(job {rl.run_dir})" in job_status(session, other.run_dir).waits_for
        cancel_job(session, rl.run_dir, 1.0)
        wait_until(lambda: job_status(session, other.run_dir).pid is not None, what="the GPU for the other run")
    finally:
        for run_dir in (record.run_dir, rl.run_dir, other.run_dir):
            cancel_job(session, run_dir, 1.0)


def pause(url: str) -> None:
    assert httpx.post(f"{url}/pause_generation", json={"mode": "in_place"}, timeout=60.0).status_code == 200


def is_paused(url: str) -> bool:
    return bool(httpx.get(f"{url}/server_info", timeout=60.0).json()["internal_states"][0]["is_paused"])


def test_a_pause_that_a_killed_trainer_left_behind_is_ended_and_that_of_a_living_one_is_not(
    rl: Stage, scope: RunScope, node: Node
) -> None:
    session = LocalSession(sys.executable)
    first = engine.launch_engine.fn(rl, 0, scope, node)
    try:
        pause(first.url)
        assert engine.launch_engine.fn(rl, 0, scope, node) == first
        assert not is_paused(first.url)

        impatient = {**rl.job["rollout"]["engine"], "start_timeout_s": 1.0}
        job = {**rl.job, "rollout": {**rl.job["rollout"], "engine": impatient}}
        start_or_attach(session, shell_spec(Path(rl.run_dir), "sleep 60"))
        pause(first.url)
        with pytest.raises(TransientInfraError, match="did not generate within 1 s"):
            engine.launch_engine.fn(rl.model_copy(update={"job": job}), 0, scope, node)
        assert is_paused(first.url)
    finally:
        cancel_job(session, rl.run_dir, 1.0)
        cancel_job(session, first.run_dir, 1.0)


@pytest.mark.promise
def test_an_engine_is_shared_by_the_runs_that_want_it_and_ends_with_the_last(
    rl: Stage, scope: RunScope, node: Node
) -> None:
    other = scope.model_copy(update={"run_id": "run-b"})
    session = LocalSession(sys.executable)
    first = engine.launch_engine.fn(rl, 0, scope, node)
    try:
        second = engine.launch_engine.fn(rl, 0, other, node)
        assert second == first
        engine.stop_engine.fn(first, scope, node)
        assert job_status(session, first.run_dir).state is JobState.RUNNING
        engine.stop_engine.fn(first, other, node)
        assert processes_of(Path(scope.store)) == []
    finally:
        cancel_job(session, first.run_dir, 1.0)


def test_an_rl_on_another_machine_is_looked_for_there(rl: Stage, scope: RunScope, node: Node, tmp_path: Path) -> None:
    """Else its pause would count as one that a killed trainer left behind, amid its update of the weights."""
    session = LocalSession(sys.executable)
    far = replace(node, root=str(tmp_path / "far"), mirror=node.root)
    over_there = far.path_on_node(rl.run_dir)
    assert over_there.startswith(far.root)
    assert not engine.is_training(session, rl, far)
    start_or_attach(session, shell_spec(Path(over_there), "sleep 60"))
    try:
        assert engine.is_training(session, rl, far)
    finally:
        cancel_job(session, over_there, 1.0)


def test_an_engine_on_a_machine_that_is_lost_is_no_failure_and_one_beside_the_trainer_is(
    scope: RunScope, node: Node, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_key(tmp_path / "key")
    nobody = SSHAccess(host="127.0.0.1", port=1, user="me", key_file=str(tmp_path / "key"))
    lost = replace(node, name="me@127.0.0.1:1", kind="ssh", access=nobody, address="127.0.0.1")
    record = EngineRecord(url="http://127.0.0.1:2", run_dir="/engine", node=lost.name)
    engine.stop_engine.fn(record, scope, replace(node, engine_nodes=(lost,)))
    said = " ".join(capsys.readouterr().err.split())
    assert "http://127.0.0.1:2 is unreachable, and the engine ends by itself within a minute (me@127.0.0.1:1" in said
    with pytest.raises(NodeUnreachableError):
        engine.stop_engine.fn(record, scope, lost)


def test_an_engine_on_a_node_of_its_own_asks_for_the_stores_key_and_comes_back_on_both_its_ports(
    tmp_path: Path, scope: RunScope, node: Node
) -> None:
    """The nodes are folders of this machine, and their network is its loopback."""
    from rollouts.flows.form import load_pipeline

    far = replace(node, name="far", root=str(tmp_path / "far"), address="127.0.0.1")
    cluster = replace(node, engine_nodes=(far,))
    config = load_pipeline(write_small_pipeline(tmp_path / "small", mode="rl")).config
    rl = plan_rl(base_model(config), config, scope, cluster)
    session = LocalSession(sys.executable)
    record = engine.launch_engine.fn(rl, 0, scope, cluster)
    try:
        assert (record.node, Path(record.run_dir).parents[1]) == ("far", tmp_path / "far")
        key = {"Authorization": f"Bearer {own_unit_key(Path(scope.store))}"}
        assert httpx.get(f"{record.url}/model_info", timeout=60.0).status_code == 401
        assert httpx.post(record.lease_url, timeout=60.0).status_code == 401
        assert httpx.post(record.lease_url, headers=key, timeout=60.0).status_code == 204
        assert engine.launch_engine.fn(rl, 0, scope, cluster) == record  # attaches

        (program,) = servers_of(far)
        os.kill(program, signal.SIGKILL)
        wait_until(lambda: not servers_of(far) <= {program}, what="another process of the engine")
        assert engine.launch_engine.fn(rl, 0, scope, cluster) == record
        assert httpx.post(record.lease_url, headers=key, timeout=60.0).status_code == 204
        engine.stop_engine.fn(record, scope, cluster)
        assert processes_of(tmp_path / "far") == []
    finally:
        cancel_job(session, record.run_dir, 1.0)


def servers_of(node: Node) -> set[int]:
    """The processes of engines on a node."""
    return {pid for pid, command in pids_of(Path(node.root)).items() if " serve " in command}


@pytest.fixture
def lost(node: Node, tmp_path: Path) -> Iterator[Node]:
    """A machine whose port takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        access = SSHAccess(host="127.0.0.1", port=silent.getsockname()[1], user="nobody")
        yield replace(node, name="lost", kind="ssh", mirror=str(tmp_path / "mirror"), access=access)


def test_engines_are_kept_wherever_they_are_as_long_as_the_run_holds_them(
    rl: Stage, scope: RunScope, node: Node, lost: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that is lost does not keep the others from it."""
    monkeypatch.setattr(leases, "LEASE_S", RENEWED_AS_IF_S)
    machines = replace(node, engine_nodes=(lost, replace(node, name="there")))
    session = LocalSession(sys.executable)
    specs = {
        name: shell_spec(tmp_path / f"engine-{name}", "sleep 600", lease_s=LEASE_S)
        for name in ("lost", "there", node.name)
    }
    alive = [specs["there"].run_dir, specs[node.name].run_dir]
    start_or_attach(session, specs["there"])
    start_or_attach(session, specs[node.name])

    def states() -> set[JobState]:
        return {job_status(session, run_dir).state for run_dir in alive}

    def hold() -> None:
        with ExitStack() as stack:
            for name, spec in specs.items():
                record = EngineRecord(url="http://there:1", run_dir=spec.run_dir, node=name)
                stack.enter_context(engine.kept_alive(rl, record, scope, machines))
            time.sleep(1.3 * LEASE_S)
            assert states() == {JobState.RUNNING}
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        hold()
    wait_until(lambda: JobState.RUNNING not in states(), what="the end of the engines")


@pytest.mark.parametrize("end", ["lapse", "kill"])
def test_an_engine_that_lapsed_or_whose_supervisor_was_killed_comes_back_at_its_port(
    end: str,
    rl: Stage,
    scope: RunScope,
    node: Node,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    session = LocalSession(sys.executable)
    with monkeypatch.context() as patched:
        patched.setattr(engine, "LEASE_S", LEASE_S)
        record = engine.launch_engine.fn(rl, 0, scope, node)
    try:
        if end == "kill":
            supervisor = json.loads((Path(record.run_dir) / ".job" / "meta-1.json").read_text())["supervisor_pid"]
            os.kill(supervisor, signal.SIGKILL)
        wait_until(
            lambda: job_status(session, record.run_dir).state is not JobState.RUNNING, what="its end", timeout_s=40
        )
        monkeypatch.setattr(leases, "LEASE_S", SHORT_LEASE_S)
        with engine.kept_alive(rl, record, scope, node) as kept:
            wait_until(lambda: is_answering(record.url), what="the engine at its former port", timeout_s=60)
            assert kept.has_lapsed_within(60.0, session)
            assert not kept.has_lapsed_within(0.0, session)
        said = " ".join(capsys.readouterr().err.split())
        reason = "its lease was not renewed" if end == "lapse" else "its supervisor was killed."
        assert f"{record.url} ended: {reason}" in said
        assert said.count("It is started again") == 1
    finally:
        cancel_job(session, record.run_dir, 1.0)


def is_answering(url: str) -> bool:
    try:
        return httpx.get(f"{url}/model_info", timeout=60.0).status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.matrix
def test_an_engine_that_failed_by_itself_is_named_and_not_started_again(
    rl: Stage,
    scope: RunScope,
    node: Node,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(leases, "LEASE_S", SHORT_LEASE_S)
    spec = shell_spec(tmp_path / "engine", "exit 3", lease_s=LEASE_S)
    start_or_attach(LocalSession(sys.executable), spec)
    record = EngineRecord(url="http://127.0.0.1:1", run_dir=spec.run_dir, node=node.name)
    with engine.kept_alive(rl, record, scope, node):
        wait_until(lambda: "failed by itself" in capsys.readouterr().err, what="the reason")
        time.sleep(3 * SHORT_LEASE_S)
    assert capsys.readouterr().err == ""
    assert job_status(LocalSession(sys.executable), spec.run_dir).attempt == 1
