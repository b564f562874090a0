"""Pins that a stage that two runs need at once is done once: by one job on one node.

Without it a stage is trained twice into the same checkpoints, on two machines that both cost money, or on one that the
second run's copy takes away under the first one's job. The nodes are folders of this machine.
"""

from __future__ import annotations

import fcntl
import io
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rollouts.flows.commands.status import going_jobs
from rollouts.infra.errors import CompletedCommand, TransientInfraError
from rollouts.infra.jobs import JobSpec, JobState, job_status, start_or_attach
from rollouts.infra.ledger import Ledger
from rollouts.infra.locks import is_locked
from rollouts.infra.node import Node
from rollouts.infra.session import LocalSession, Session
from rollouts.tasks import stage as stages
from rollouts.tasks.progress import StageProgress
from rollouts.tasks.provision import give_back
from rollouts.tasks.records import Outcome, RunScope, Stage
from rollouts.tasks.upload_inputs import Placement, bring_earlier_work
from tests.infra.shell_jobs import shell_spec
from tests.kit.waiting import wait_until
from tests.tasks.finished_stages import checkpoint
from tests.tasks.test_stage import with_ranks

pytestmark = pytest.mark.timeout(120)

PROGRAM = "echo $$ >> {pids}; while [ ! -e {end} ]; do sleep 0.05; done; echo '{{}}' > result.json"


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    training = with_ranks("sft", (), (), trainer_processes=2)  # which shares a CPU: it waits for no GPU
    run_dir = str(tmp_path / "store/stages/sft-f")
    job = {**training.job, "model": {"model": {"path": "org/model"}}}
    return training.model_copy(update={"run_dir": run_dir, "timeout_s": 60, "job": job})


@pytest.fixture
def shell_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Stages run a shell program, which ends when the file is there; beside it are the numbers of the processes."""
    end = tmp_path / "end"
    program = PROGRAM.format(pids=tmp_path / "pids", end=end)

    def shell_job(stage: Stage, *ignored: object, **more: object) -> JobSpec:
        return shell_spec(Path(stage.run_dir), program)

    monkeypatch.setattr(stages, "job_spec", shell_job)
    monkeypatch.setattr(stages, "open_session", lambda node: LocalSession(node.python))
    yield end
    end.touch()


def node_called(name: str, tmp_path: Path) -> Node:
    """A machine that shares nothing."""
    root, store = str(tmp_path / name), str(tmp_path / "store")
    return Node(name=name, kind="ssh", root=root, python=sys.executable, mirror=store)


def scope_of(run_id: str, tmp_path: Path) -> RunScope:
    return RunScope(run_id=run_id, run_name="small", store=str(tmp_path / "store"))


def run(stage: Stage, run_id: str, node: Node, said: io.StringIO, tmp_path: Path) -> Outcome:
    with StageProgress(stage.name, num_steps=1, console=Console(file=said, width=200)) as progress:
        return stages.run_on_node(stage, scope_of(run_id, tmp_path), node, progress)


def test_of_two_runs_with_a_machine_each_one_does_a_stage_and_the_other_hears_of_it_at_once(
    stage: Stage, shell_jobs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[Future[Outcome]] = []
    placing: list[str] = []

    def place(session: Session, stage: Stage, node: Node, *, say: Callable[[str], None]) -> Placement:
        placing.append(node.name)
        # It takes as long as the other one needs to come so far, or to its end.
        wait_until(lambda: len(placing) == 2 or any(each.done() for each in runs))
        return Placement(stage.model_copy(update={"run_dir": node.path_on_node(stage.run_dir)}), "")

    monkeypatch.setattr(stages, "place_stage", place)
    with ThreadPoolExecutor(2) as pool:
        for name in ("one", "two"):
            runs.append(pool.submit(run, stage, f"run-{name}", node_called(name, tmp_path), io.StringIO(), tmp_path))
        wait_until(lambda: any(each.done() for each in runs) or (tmp_path / "pids").exists())
        shell_jobs.touch()
    [going] = placing
    refused = [str(each.exception()) for each in runs if each.exception() is not None]
    assert refused == [f"sft is running on {going} for another run: wait until it has finished, or end that run"]
    assert [each.result() for each in runs if each.exception() is None] == ["ran"]
    assert len((tmp_path / "pids").read_text().split()) == 1


@pytest.mark.parametrize(("node_name", "is_told"), [("two", True), ("one", False)])
def test_a_run_is_told_where_a_killed_one_may_have_left_the_same_job(
    stage: Stage, shell_jobs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, node_name: str, is_told: bool
) -> None:
    scope, said = scope_of("run-a", tmp_path), io.StringIO()
    with Ledger(scope.ledger_path) as ledger:
        ledger.add_lease(node_called("one", tmp_path).path_on_node(stage.run_dir), "killed", "one")
    (tmp_path / "store/ledger.runs").mkdir()
    (tmp_path / "store/ledger.runs/killed").touch()  # nobody holds its lock
    monkeypatch.setattr(stages, "place_stage", place_nothing)
    shell_jobs.touch()
    run(stage, "run-a", node_called(node_name, tmp_path), said, tmp_path)
    assert ("a killed run may have left this stage running on one" in said.getvalue()) is is_told


def place_nothing(session: Session, stage: Stage, node: Node, *, say: Callable[[str], None]) -> Placement:
    return Placement(stage.model_copy(update={"run_dir": node.path_on_node(stage.run_dir)}), "")


class FirstSession(LocalSession):
    """Its copy takes as long as another run needs to look what the job is at, or to wait."""

    def __init__(self, python: str, *, until: Callable[[], bool]) -> None:
        super().__init__(python)
        self._until = until
        self.has_started = threading.Event()

    def run(self, argv: Sequence[str], **options: Any) -> CompletedCommand:
        if "commit" in argv:
            wait_until(self._until)
        completed = super().run(argv, **options)
        if "start" in argv:
            self.has_started.set()
        return completed


class SecondSession(LocalSession):
    """Its copy takes until the other run has started the job."""

    def __init__(self, python: str, *, after: FirstSession) -> None:
        super().__init__(python)
        self._first = after
        self.has_looked = threading.Event()

    def run(self, argv: Sequence[str], **options: Any) -> CompletedCommand:
        if "commit" in argv:
            assert self._first.has_started.wait(60)
        completed = super().run(argv, **options)
        if "status" in argv:
            self.has_looked.set()
        return completed


@pytest.mark.slow
def test_two_runs_that_bring_earlier_work_to_one_machine_have_one_job_there(
    stage: Stage, shell_jobs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node, said = node_called("one", tmp_path), io.StringIO()
    first = FirstSession(node.python, until=lambda: second.has_looked.is_set() or "waits for" in said.getvalue())
    second = SecondSession(node.python, after=first)
    sessions: list[Session] = [first, second]
    is_placing = threading.Event()

    def place(session: Session, stage: Stage, node: Node, *, say: Callable[[str], None]) -> Placement:
        is_placing.set()
        run_dir = node.path_on_node(stage.run_dir)
        bring_earlier_work(session, Path(stage.run_dir), run_dir)
        return Placement(stage.model_copy(update={"run_dir": run_dir}), "")

    monkeypatch.setattr(stages, "open_session", lambda node: sessions.pop(0))
    monkeypatch.setattr(stages, "place_stage", place)
    checkpoint(Path(stage.run_dir) / "checkpoints/step_000020", b"of another machine")
    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(run, stage, "run-a", node, io.StringIO(), tmp_path)]
        assert is_placing.wait(60)
        runs.append(pool.submit(run, stage, "run-b", node, said, tmp_path))
        try:
            wait_until(lambda: "attached to the running job" in said.getvalue() or any(each.done() for each in runs))
        finally:
            shell_jobs.touch()
    assert [each.result() for each in runs] == ["ran", "attached"]
    assert "waits for another run that starts the same stage" in said.getvalue()
    assert len((tmp_path / "pids").read_text().split()) == 1


@pytest.mark.parametrize("failure", [TransientInfraError("the connection broke"), KeyboardInterrupt()])
def test_a_run_that_cannot_bring_a_stage_to_its_machine_leaves_it_to_others(
    stage: Stage, shell_jobs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: BaseException
) -> None:
    jobs: list[Any] = []

    def fail(*ignored: object, **more: object) -> Placement:
        with Ledger(scope_of("run-a", tmp_path).ledger_path) as ledger:
            assert ledger.nodes_at_work("sft-f") == {"one"}
        jobs.extend(going_jobs(tmp_path / "store"))
        raise failure

    monkeypatch.setattr(stages, "place_stage", fail)
    with pytest.raises(type(failure)):
        run(stage, "run-a", node_called("one", tmp_path), io.StringIO(), tmp_path)
    with Ledger(scope_of("run-a", tmp_path).ledger_path) as ledger:
        assert ledger.leases() == [] == jobs, "nor is it said to be at work meanwhile"


@pytest.mark.slow
def test_a_run_that_is_interrupted_leaves_what_a_run_of_another_store_does_with_it(
    stage: Stage, shell_jobs: Path, tmp_path: Path
) -> None:
    node = Node(name="local", kind="local", root=str(tmp_path / "shared"), python=sys.executable)
    shared = stage.model_copy(update={"run_dir": f"{node.root}/stages/rl-f"})
    engine = Path(node.root, "stages/engine-f-0")
    ours = scope_of("run-a", tmp_path)
    theirs = ours.model_copy(update={"run_id": "run-b", "store": str(tmp_path / "their store")})

    def follow() -> Outcome:
        with StageProgress("rl", num_steps=1, console=Console(file=io.StringIO(), width=200)) as progress:
            return stages.run_on_node(shared, theirs, node, progress)

    with ThreadPoolExecutor(1) as pool:
        followed = pool.submit(follow)
        wait_until((tmp_path / "pids").exists)
        wait_until(
            lambda: any(is_locked(path, fcntl.LOCK_EX) for path in Path(shared.run_dir, ".job").glob("followed-*"))
        )
        start_or_attach(
            LocalSession(sys.executable), shell_spec(engine, f"while [ ! -e {shell_jobs} ]; do sleep 0.1; done")
        )
        with Ledger(ours.ledger_path) as ledger:
            for directory in (str(engine), shared.run_dir):
                ledger.add_lease(directory, ours.run_id, node.name)
            given_back = give_back(node, ours)
            assert ledger.leases() == []
        assert job_status(LocalSession(sys.executable), str(engine)).state is JobState.RUNNING
        shell_jobs.touch()
        assert followed.result() == "ran"
    assert given_back == [
        f"left the job in {shared.run_dir} running: a run of another store follows it",
        f"left the job in {engine} running; it ends when no run needs it",
        "gave back local node local",
    ]
