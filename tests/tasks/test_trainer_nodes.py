"""Pins when the jobs of further machines that train are begun and ended, as seen from the machine that leads.

Without it a machine could wait for a leader that is no more, hold its GPU for nobody, or be missing when a training is
tried again. The machines are folders of this one; tests/flows/test_trainer_nodes.py has some that share nothing.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from rollouts.infra.jobs import JobState, cancel_job, job_status, start_or_attach
from rollouts.infra.ledger import Ledger
from rollouts.infra.node import Node
from rollouts.infra.session import LocalSession
from rollouts.infra.supervisor.gpu_slots import GPU_LOCKS_VARIABLE
from rollouts.tasks.records import RunScope, Stage
from rollouts.tasks.trainer_nodes import ALONE, start_in_turn, trainers_beside
from rollouts_core.config import DeploymentConfig, ModelConfig, SFTTrainingConfig
from rollouts_core.job import InputDataset, InputModel, SFTJob
from tests.infra.shell_jobs import shell_spec
from tests.kit.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

SESSION = LocalSession(sys.executable)


@pytest.fixture
def scope(tmp_path: Path) -> RunScope:
    return RunScope(run_id="run-a", run_name="small", store=str(tmp_path / "store"))


@pytest.fixture
def node(tmp_path: Path) -> Node:
    """A machine that leads, with a further one."""
    leader = Node(name="leader", kind="local", root=str(tmp_path / "leader"), python=sys.executable)
    second = replace(leader, name="second", root=str(tmp_path / "second"), address="127.0.0.1")
    return replace(leader, trainer_nodes=(second,))


@pytest.fixture
def sft(node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    """A training on GPU 0 of each machine."""
    monkeypatch.setenv(GPU_LOCKS_VARIABLE, str(tmp_path / "locks"))
    job = SFTJob(
        model=InputModel(name="base", model=ModelConfig(path="/model"), digest="d"),
        data=(InputDataset(path="/data.jsonl", digest="d"),),
        training=SFTTrainingConfig(num_steps=1),
        deployment=DeploymentConfig(trainer_gpu_ranks=(0,)),
    )
    run_dir = f"{node.root}/stages/sft-f"
    return Stage(
        name="sft", fingerprint="f", run_dir=run_dir, job=job.model_dump(mode="json"), num_steps=1, timeout_s=60
    )


@pytest.fixture
def follower(node: Node) -> Iterator[str]:
    """Where the further machine's job lies."""
    run_dir = f"{node.trainer_nodes[0].root}/stages/follower-f-1"
    yield run_dir
    cancel_job(SESSION, run_dir, 1.0)


def leases(scope: RunScope) -> list[str]:
    with Ledger(scope.ledger_path) as ledger:
        return [lease.node for lease in ledger.leases_of(scope.run_id)]


def test_a_further_machines_job_waits_beside_the_block_and_ends_with_it(
    sft: Stage, scope: RunScope, node: Node, follower: str
) -> None:
    said: list[str] = []
    with trainers_beside(sft, SESSION, scope, node, said.append) as trainers:
        (named,) = trainers["further_trainers"]
        assert (named["name"], named["host"], named["run_dir"]) == ("second", "127.0.0.1", follower)
        assert job_status(SESSION, follower).state is JobState.RUNNING
        assert leases(scope) == ["second"]
    assert job_status(SESSION, follower).state is JobState.EXITED
    assert leases(scope) == said == []


def test_after_an_error_it_is_left_to_the_training_and_begun_anew_when_that_is_tried_again(
    sft: Stage, scope: RunScope, node: Node, follower: str
) -> None:
    with pytest.raises(KeyboardInterrupt), trainers_beside(sft, SESSION, scope, node, print):
        raise KeyboardInterrupt
    assert job_status(SESSION, follower).state is JobState.RUNNING and leases(scope) == ["second"]
    with trainers_beside(sft, SESSION, scope, node, print):
        assert (job_status(SESSION, follower).state, job_status(SESSION, follower).attempt) == (JobState.RUNNING, 2)


def test_it_is_attached_to_while_the_leader_is_under_way(
    sft: Stage, scope: RunScope, node: Node, follower: str
) -> None:
    with pytest.raises(KeyboardInterrupt), trainers_beside(sft, SESSION, scope, node, print) as trainers:
        spec = shell_spec(Path(sft.run_dir), "sleep 60")
        start_or_attach(SESSION, replace(spec, job={**sft.job, **trainers}))
        raise KeyboardInterrupt
    try:
        with trainers_beside(sft, SESSION, scope, node, print) as found:
            assert found == trainers
            assert job_status(SESSION, follower).attempt == 1
        other = replace(node, trainer_nodes=(replace(node.trainer_nodes[0], name="third"),))
        with trainers_beside(sft, SESSION, scope, other, print) as found:
            assert found == ALONE, "those of another run are not ours to begin"
    finally:
        cancel_job(SESSION, sft.run_dir, 1.0)


def test_of_two_runs_one_starts_them_and_the_other_finds_them_under_way(
    sft: Stage, scope: RunScope, node: Node, follower: str
) -> None:
    """Each would else end what it takes for the rest of an earlier attempt."""
    said: list[str] = []
    found: list[object] = []
    second = scope.model_copy(update={"run_id": "run-b"})

    def attach() -> None:
        with (
            start_in_turn(sft, second, node, said.append) as turn,
            trainers_beside(sft, SESSION, second, node, print) as trainers,
        ):
            turn.close()
            found.append(trainers)

    other = threading.Thread(target=attach)
    try:
        with (
            start_in_turn(sft, scope, node, said.append) as turn,
            trainers_beside(sft, SESSION, scope, node, print) as trainers,
        ):
            other.start()
            wait_until(lambda: bool(said))
            spec = shell_spec(Path(sft.run_dir), "sleep 60")
            start_or_attach(SESSION, replace(spec, job={**sft.job, **trainers}))
            assert found == []
            turn.close()
            wait_until(lambda: bool(found))
            assert found == [trainers] and said == ["waits for another run that starts the same stage"]
            assert job_status(SESSION, follower).attempt == 1
            other.join()
    finally:
        cancel_job(SESSION, sft.run_dir, 1.0)


def test_nobody_is_needed_for_what_is_finished_or_no_training(
    sft: Stage, scope: RunScope, node: Node, follower: str
) -> None:
    evaluation = sft.model_copy(update={"job": {**sft.job, "kind": "eval"}})
    for stage, machine in ((evaluation, node), (sft, replace(node, trainer_nodes=()))):
        with trainers_beside(stage, SESSION, scope, machine, print) as trainers:
            assert trainers == ALONE
    Path(sft.run_dir).mkdir(parents=True)
    Path(sft.run_dir, "result.json").write_text("{}")
    with trainers_beside(sft, SESSION, scope, node, print) as trainers:
        assert trainers == ALONE
    assert job_status(SESSION, follower).state is JobState.ABSENT


def test_the_leader_is_not_begun_while_another_machine_waits_for_its_gpu(
    sft: Stage, scope: RunScope, node: Node, follower: str, tmp_path: Path
) -> None:
    said: list[str] = []
    start_or_attach(SESSION, shell_spec(tmp_path / "holder", "sleep 3", gpus=("0",), run_name="other"))
    with trainers_beside(sft, SESSION, scope, node, said.append):
        assert job_status(SESSION, follower).waits_for == ""
        assert job_status(SESSION, str(tmp_path / "holder")).state is not JobState.RUNNING
    assert len(said) == 1 and said[0].startswith("second waits for GPU 0, held by run other")
