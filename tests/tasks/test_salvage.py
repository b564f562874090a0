"""Pins what is said and fetched before a machine is given back. The node is another folder of this machine.

Without it the last checkpoint of a training that was stopped goes down with the machine, or a dead connection keeps the
machine rented.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rollouts.infra.jobs import JobState, job_status, start_or_attach
from rollouts.infra.ledger import Ledger
from rollouts.infra.node import Node
from rollouts.infra.session import LocalSession
from rollouts.tasks import salvage as salvages
from rollouts.tasks.records import RunScope
from rollouts.tasks.salvage import salvage
from tests.infra.shell_jobs import shell_spec
from tests.kit.waiting import wait_until


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    node = Node(name="a", kind="ssh", root=str(tmp_path / "node"), python=sys.executable, mirror=str(tmp_path))
    monkeypatch.setattr(salvages, "open_session", lambda node: LocalSession(node.python))
    return node


@pytest.fixture
def scope(tmp_path: Path) -> RunScope:
    scope = RunScope(run_id="run-a", run_name="small", store=str(tmp_path / "store"))
    Path(scope.store).mkdir()
    return scope


def checkpoint_there(node: Node, stage: str, step: int) -> None:
    """A job on the node that wrote a checkpoint and failed."""
    folder = f"checkpoints/step_{step:06d}"
    script = (
        f"mkdir -p {folder}; head -c {step} /dev/zero > {folder}/weights; echo '{{}}' > {folder}/manifest.json; exit 3"
    )
    session, run_dir = LocalSession(node.python), f"{node.root}/stages/{stage}"
    start_or_attach(session, shell_spec(Path(run_dir), script))
    wait_until(lambda: job_status(session, run_dir).state is JobState.EXITED, timeout_s=60.0)


def used_here(scope: RunScope, stage: str, *, run_id: str = "run-a") -> Path:
    here = Path(scope.store) / "stages" / stage
    here.mkdir(parents=True, exist_ok=True)
    with Ledger(scope.ledger_path) as ledger:
        ledger.note_use(stage, run_id)
    return here


@pytest.mark.slow
def test_what_unfinished_stages_of_the_run_have_is_fetched_and_nothing_else(scope: RunScope, node: Node) -> None:
    for stage in ("sft-1", "rl-2", "rl-3"):
        checkpoint_there(node, stage, 20)
    finished, unfinished = used_here(scope, "sft-1"), used_here(scope, "rl-2")
    (finished / "result.json").write_text("{}")
    of_others = used_here(scope, "rl-3", run_id="run-b")
    with Ledger(scope.ledger_path) as ledger:
        ledger.note_use("select-4", "run-a")  # planned, and never begun there
    assert salvage(scope, node) == [f"step_000020 is the last checkpoint in {unfinished}"]
    assert (unfinished / "checkpoints/step_000020/weights").read_bytes() == bytes(20)
    assert not (finished / "checkpoints").exists() and not (of_others / "checkpoints").exists()
    assert not (Path(scope.store) / "stages/select-4").exists()


def test_a_stage_that_left_nothing_is_not_spoken_of(scope: RunScope, node: Node) -> None:
    used_here(scope, "rl-2")
    assert salvage(scope, node) == []


@pytest.mark.parametrize("record", ["", "[" * 100_000], ids=["cut", "nonsense"])
def test_a_stage_whose_record_cannot_be_read_is_fetched_as_one_without(
    scope: RunScope, node: Node, record: str
) -> None:
    checkpoint_there(node, "rl-2", 20)
    here = used_here(scope, "rl-2")
    (here / "result.json").write_text(record)
    assert salvage(scope, node) == [f"step_000020 is the last checkpoint in {here}"]


def test_what_another_machine_took_further_is_not_replaced(scope: RunScope, node: Node) -> None:
    checkpoint_there(node, "sft-1", 20)
    here = used_here(scope, "sft-1")
    (here / "checkpoints/step_000040").mkdir(parents=True)
    (here / "checkpoints/step_000040/manifest.json").write_text("{}")
    (here / "log.txt").write_text("of the other machine")
    assert salvage(scope, node) == [f"step_000040 is the last checkpoint in {here}"]
    assert (here / "log.txt").read_text() == "of the other machine"
    assert [path.name for path in (here / "checkpoints").iterdir()] == ["step_000040"]


def test_the_machine_is_not_kept_longer_than_allowed(scope: RunScope, node: Node) -> None:
    checkpoint_there(node, "rl-2", 20)
    here = used_here(scope, "rl-2")
    [said] = salvage(scope, node, timeout_s=0)
    assert said == f"not all of {node.root}/stages/rl-2 could be fetched (it took longer than 0 s)"
    assert not (here / "result.json").exists()


def test_a_file_that_cannot_be_written_is_said_with_what_is_here(scope: RunScope, node: Node) -> None:
    checkpoint_there(node, "rl-2", 20)
    here = used_here(scope, "rl-2")
    assert salvage(scope, node)
    (Path(node.root) / "stages/rl-2" / "router.txt").write_text("of the job")
    (here / "router.txt" / "of another program").mkdir(parents=True)
    [said] = salvage(scope, node)
    assert "not all of" in said and f"; step_000020 is the last checkpoint in {here}" in said
