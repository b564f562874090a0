"""Pins what is said and done when the nodes of a run are given back, with a machine of engines that is lost, too.

Without it the jobs of a run go on for want of one machine that does not answer, and its error hides why the run failed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from rollouts.infra.errors import NodeUnreachableError, TransientInfraError
from rollouts.infra.jobs import JobState, cancel_job, job_status, start_or_attach
from rollouts.infra.ledger import LEDGER_FILE, Ledger
from rollouts.infra.node import Node, SSHAccess
from rollouts.infra.providers.runpod import RunPod
from rollouts.infra.session import LocalSession
from rollouts.tasks.provision import give_back, release_now
from rollouts.tasks.records import RunScope
from tests.infra.fake_cloud import KEY
from tests.infra.fake_runpod import FakeRunPod
from tests.infra.shell_jobs import shell_spec, wait_for_end
from tests.infra.ssh_server import make_key
from tests.kit.mounts import fill, mounted_tmpfs
from tests.kit.renting import REQUEST, World

pytestmark = pytest.mark.timeout(120)


def test_a_job_that_had_failed_by_itself_is_not_said_to_be_ended(tmp_path: Path) -> None:
    node = Node(name="local", kind="local", root=str(tmp_path), python=sys.executable)
    scope = RunScope(run_id="run-a", run_name="small", store=str(tmp_path / "store"))
    session = LocalSession(sys.executable)
    with Ledger(scope.ledger_path) as ledger:
        for directory, script in (("rl-1", "exit 1"), ("engine-1-0", "sleep 60")):
            ledger.add_lease(str(tmp_path / directory), scope.run_id, node.name)
            start_or_attach(session, shell_spec(tmp_path / directory, script))
        wait_for_end(session, tmp_path / "rl-1")
        said = give_back(node, scope)
    assert said == [f"ended the job in {tmp_path / 'engine-1-0'}", "gave back local node local"]


@pytest.mark.slow
def test_jobs_end_on_each_machine_of_the_unit_and_one_that_is_lost_is_named(tmp_path: Path) -> None:
    node = Node(name="trainer", kind="local", root=str(tmp_path), python=sys.executable)
    make_key(tmp_path / "key")
    nobody = SSHAccess(host="127.0.0.1", port=1, user="me", key_file=str(tmp_path / "key"))
    engines = replace(node, name="engines", address="127.0.0.1")
    lost = replace(node, name="me@127.0.0.1:1", kind="ssh", mirror=str(tmp_path / "store"), access=nobody)
    scope = RunScope(run_id="run-a", run_name="small", store=str(tmp_path / "store"))
    session = LocalSession(sys.executable)
    with Ledger(scope.ledger_path) as ledger:
        for directory, name in (("rl-1", "trainer"), ("engine-1-0", "engines"), ("engine-1-1", lost.name)):
            ledger.add_lease(str(tmp_path / directory), scope.run_id, name)
        for directory in ("rl-1", "engine-1-0"):
            start_or_attach(session, shell_spec(tmp_path / directory, "sleep 60"))
        said = give_back(replace(node, engine_nodes=(engines, lost)), scope)
        assert ledger.leases_of(scope.run_id) == []
    for directory in ("rl-1", "engine-1-0"):
        assert job_status(session, str(tmp_path / directory)).state is not JobState.RUNNING
        assert f"ended the job in {tmp_path / directory}" in said
    (about_the_lost,) = [sentence for sentence in said if "by themselves" in sentence]
    assert about_the_lost.startswith("the jobs on me@127.0.0.1:1 end by themselves within a minute (")
    assert "me@127.0.0.1:1 does not answer" in about_the_lost
    assert [sentence for sentence in said if sentence.startswith("gave back")] == [
        "gave back local node engines",
        "gave back ssh node me@127.0.0.1:1",
        "gave back local node trainer",
    ]


@pytest.mark.slow
def test_a_job_that_could_not_be_ended_is_still_known_and_can_be_ended_later(tmp_path: Path) -> None:
    make_key(tmp_path / "key")
    nobody = SSHAccess(host="127.0.0.1", port=1, user="me", key_file=str(tmp_path / "key"))
    here = Node(name="me@127.0.0.1:1", kind="local", root=str(tmp_path), python=sys.executable)
    away = replace(here, kind="ssh", mirror=str(tmp_path / "store"), access=nobody)
    scope = RunScope(run_id="run-a", run_name="small", store=str(tmp_path / "store"))
    run_dir = str(tmp_path / "sft-1")
    start_or_attach(LocalSession(sys.executable), shell_spec(Path(run_dir), "sleep 60"))
    with Ledger(scope.ledger_path) as ledger:
        ledger.add_lease(run_dir, scope.run_id, away.name)
        with pytest.raises(NodeUnreachableError):
            give_back(away, scope)
        assert [(lease.run_dir, lease.node) for lease in ledger.leases()] == [(run_dir, away.name)]
    assert give_back(here, scope)[0] == f"ended the job in {run_dir}"


@pytest.mark.slow
def test_what_is_beside_jobs_that_cannot_be_seen_to_is_left_to_end_by_itself(tmp_path: Path) -> None:
    """A run of another store may train on there, and need it."""
    make_key(tmp_path / "key")
    nobody = SSHAccess(host="127.0.0.1", port=1, user="me", key_file=str(tmp_path / "key"))
    here = Node(name="beside", kind="local", root=str(tmp_path), python=sys.executable, address="127.0.0.1")
    away = replace(here, name="me@127.0.0.1:1", kind="ssh", mirror=str(tmp_path / "store"), access=nobody)
    scope = RunScope(run_id="run-a", run_name="small", store=str(tmp_path / "store"))
    session, beside = LocalSession(sys.executable), str(tmp_path / "follower-1-1")
    start_or_attach(session, shell_spec(Path(beside), "sleep 60"))
    with Ledger(scope.ledger_path) as ledger:
        ledger.add_lease(str(tmp_path / "sft-1"), scope.run_id, away.name)
        ledger.add_lease(beside, scope.run_id, here.name)
        with pytest.raises(NodeUnreachableError):
            give_back(replace(away, trainer_nodes=(here,)), scope)
        assert [lease.node for lease in ledger.leases()] == [away.name]
    assert job_status(session, beside).state is JobState.RUNNING
    cancel_job(session, beside, 1.0)


@contextmanager
def rented(store: Path, monkeypatch: pytest.MonkeyPatch, fake: FakeRunPod) -> Iterator[tuple[Node, RunScope]]:
    """A run with a machine of RunPod's that does not answer; the run wants a job there."""
    nobody = SSHAccess(host="127.0.0.1", port=1, user="me", key_file=str(store / "no key"))
    with fake.served() as url, RunPod(KEY, url) as cloud:
        monkeypatch.setenv("RUNPOD_API_KEY", KEY)
        monkeypatch.setenv("RUNPOD_API_URL", url)
        rental = World(fake, cloud, store / LEDGER_FILE).rent()
        node = Node(
            name=rental.name,
            kind="rented",
            root="/root/rollouts",
            python="/usr/bin/python3",
            mirror=str(store),
            access=nobody,
            is_rented=True,
        )
        scope = RunScope(run_id=REQUEST.run_id, run_name="small", store=str(store))
        with Ledger(scope.ledger_path) as ledger:
            ledger.add_lease("/root/rollouts/stages/rl-1", scope.run_id, rental.name)
        yield node, scope


@pytest.mark.slow
def test_a_rented_machine_is_given_back_although_the_disk_of_the_store_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeRunPod()
    with (
        mounted_tmpfs(tmp_path / "store", "size=2m") as store,
        rented(store, monkeypatch, fake) as (node, scope),
    ):
        fill(store)
        with pytest.raises(TransientInfraError, match=f"{node.name} at runpod is given back, but the ledger"):
            give_back(node, scope, keep_minutes=30)
        assert fake.alive() == []


@pytest.mark.slow
def test_a_machine_that_appeared_while_its_run_had_another_one_is_given_back_with_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = FakeRunPod()
    fake.faults.drop_creates = 1
    fake.faults.list_lag_s = 3.0
    with rented(tmp_path, monkeypatch, fake) as (node, scope):
        late, used = fake.alive()
        assert used.name == node.name
        fake.faults.list_lag_s = 0.0
        release_now(node, scope)
        assert fake.alive() == [] and f"gave back {late.name} at runpod" in capsys.readouterr().err
