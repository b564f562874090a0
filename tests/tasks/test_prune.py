"""Pins what pruning never removes, whatever its age, and what it does.

Without it room is made by deleting the stage that the model in production came from, or one that a run is about to use.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from rollouts.infra.jobs import cancel_job, start_or_attach
from rollouts.infra.ledger import LEDGER_FILE, Ledger
from rollouts.infra.registry import register_model, reject
from rollouts.infra.session import LocalSession
from rollouts.tasks.inputs import bring_input
from rollouts.tasks.prune import DAY_S, FoundFolder, plan_prune, remove_folders
from rollouts.tasks.store_paths import NAMES, newest_first, note_named
from tests.infra.shell_jobs import shell_spec

NOW = 1_000 * DAY_S
SFT, RL, EVALUATE = (f"{stage}-{16 * '0'}" for stage in ("sft", "rl", "evaluate"))
OTHER = f"sft-{16 * '1'}"
RUN, INPUT = "runs/mine-01234567", f"inputs/{16 * '2'}"
SIZE = 1_000
DYING_RUN = """
import os, sys
from pathlib import Path
from rollouts.infra.ledger import Ledger
with Ledger(Path(sys.argv[1])) as ledger, ledger.living_run("dead"):
    ledger.add_lease(sys.argv[2], "dead", "local")
    os.kill(os.getpid(), 9)
"""
"""A run that claims a job and is killed."""
HOLDING = """
import sys
from pathlib import Path
from rollouts.infra.locks import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""
"""A process that fetches, until its input ends."""
PRUNING = f"""
import sys
from pathlib import Path
from rollouts.infra.ledger import LEDGER_FILE, Ledger
from rollouts.tasks.prune import plan_prune, remove_folders
store = Path(sys.argv[1])
with Ledger(store / LEDGER_FILE) as ledger:
    print(len(remove_folders(store, ledger, plan_prune(store, ledger, unused_days=45, now={NOW}))))
"""
"""Another prune."""


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A store with four stages of a thousand bytes, used 10, 20, 30 and 40 days ago; RL began with SFT."""
    for age, name in enumerate((SFT, RL, EVALUATE, OTHER), start=1):
        add_stage(tmp_path, name, days=10 * age)
    start = tmp_path / "stages" / SFT / "checkpoints/step_000020"
    (tmp_path / "stages" / RL / "job.json").write_text(json.dumps({"model": {"model": {"path": str(start)}}}))
    set_age(tmp_path / "stages" / RL, days=20)
    return tmp_path


@pytest.fixture
def ledger(store: Path) -> Iterator[Ledger]:
    with Ledger(store / LEDGER_FILE) as ledger:
        yield ledger


def add_stage(store: Path, name: str, *, days: float) -> None:
    path = store / "stages" / name
    path.mkdir(parents=True)
    (path / "weights").write_bytes(bytes(SIZE))
    set_age(path, days=days)


def add_run(store: Path, place: str = RUN, *, days: float) -> Path:
    """The output of a run as it is: a report, and the copy of its checkpoint."""
    path = store / place
    (path / "checkpoint").mkdir(parents=True)
    (path / "checkpoint/model.safetensors").write_bytes(bytes(SIZE))
    (path / "report.html").write_text("report")
    for each in (path / "report.html", path / "checkpoint", path):
        set_age(each, days=days)
    return path


def add_input(store: Path, place: str = INPUT, *, days: float) -> Path:
    path = store / place
    path.mkdir(parents=True)
    (path / "rows.jsonl").write_bytes(bytes(SIZE))
    set_age(path, days=days)
    return path


def set_age(path: Path, *, days: float) -> None:
    os.utime(path, (NOW - days * DAY_S,) * 2)


def removed(store: Path, ledger: Ledger, *, days: float, max_bytes: int | None = None) -> list[str]:
    plan = plan_prune(store, ledger, unused_days=days, max_bytes=max_bytes, now=NOW)
    there = {f"{kind}/{path.name}" for kind in NAMES for path in (store / kind).glob("*")}
    assert {folder.place for folder in plan.removed + plan.kept} == there
    return names(plan.removed)


def names(folders: Sequence[FoundFolder]) -> list[str]:
    return [folder.place.removeprefix("stages/") for folder in folders]


def test_what_was_not_used_for_long_is_removed_and_nothing_before_it_is_asked_for(store: Path, ledger: Ledger) -> None:
    assert removed(store, ledger, days=25) == [OTHER, EVALUATE]
    assert len(list((store / "stages").iterdir())) == 4
    plan = plan_prune(store, ledger, unused_days=25, now=NOW)
    assert names(remove_folders(store, ledger, plan)) == [OTHER, EVALUATE]
    assert sorted(path.name for path in (store / "stages").iterdir()) == sorted([SFT, RL])


def test_a_use_counts_as_young_as_it_is(store: Path, ledger: Ledger) -> None:
    ledger.note_use(OTHER, "run-a")
    assert removed(store, ledger, days=25) == [EVALUATE]


def test_the_longest_unused_go_first_until_the_rest_fits(store: Path, ledger: Ledger) -> None:
    assert removed(store, ledger, days=100, max_bytes=2 * SIZE + 500) == [OTHER, EVALUATE]
    assert removed(store, ledger, days=100, max_bytes=10 * SIZE) == []


def test_the_folders_of_a_store_are_not_compared_with_each_other(
    store: Path, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thousands of them are millions of pairs."""
    compared: list[object] = []

    def noted(folder: FoundFolder, other: object) -> bool:
        compared.append(other)
        return folder is other

    monkeypatch.setattr(FoundFolder, "__eq__", noted)
    assert removed(store, ledger, days=25) == [OTHER, EVALUATE]
    assert compared == []


def test_the_lineage_of_a_registered_model_stays_also_when_it_was_rejected(store: Path, ledger: Ledger) -> None:
    model = register_model(
        ledger, "a", checkpoint="runs/a", digest="d", run_id="r", stages=[RL, EVALUATE], data={}, by="me"
    )
    reject(ledger, model, by="me", reason="worse")
    assert removed(store, ledger, days=0, max_bytes=0) == [OTHER]  # and not SFT, which RL began with


def test_what_a_living_run_uses_stays_and_what_a_dead_one_used_does_not(store: Path, ledger: Ledger) -> None:
    with ledger.living_run("alive"):
        ledger.note_use(OTHER, "alive")
        ledger.add_lease(str(store / "stages" / EVALUATE), "alive", "local")
        assert set(removed(store, ledger, days=0, max_bytes=0)) == {SFT, RL}
    command = [sys.executable, "-c", DYING_RUN, str(store / LEDGER_FILE), str(store / "stages" / SFT)]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    assert SFT in removed(store, ledger, days=0, max_bytes=0)


def test_a_run_that_began_after_the_look_keeps_its_stage(store: Path, ledger: Ledger) -> None:
    plan = plan_prune(store, ledger, unused_days=25, now=NOW)
    with ledger.living_run("late"):
        ledger.note_use(OTHER, "late")
        assert names(remove_folders(store, ledger, plan)) == [EVALUATE]
    assert (store / "stages" / OTHER / "weights").stat().st_size == SIZE


def test_a_stage_that_a_model_was_registered_from_after_the_look_stays(store: Path, ledger: Ledger) -> None:
    plan = plan_prune(store, ledger, unused_days=25, now=NOW)
    assert set(names(plan.removed)) == {OTHER, EVALUATE}
    register_model(ledger, "a", checkpoint="runs/a", digest="d", run_id="r", stages=[OTHER], data={}, by="me")
    assert names(remove_folders(store, ledger, plan)) == [EVALUATE]
    assert remove_folders(store, ledger, plan) == []


def test_a_job_that_goes_on_keeps_its_stage(store: Path, ledger: Ledger) -> None:
    with LocalSession(sys.executable) as session:
        path = store / "stages" / OTHER
        start_or_attach(session, shell_spec(path, "sleep 600"))
        try:
            set_age(path, days=40)
            assert OTHER not in removed(store, ledger, days=0, max_bytes=0)
        finally:
            cancel_job(session, str(path), 1.0)


def test_what_a_served_configuration_names_stays(store: Path, ledger: Ledger) -> None:
    deployments = store / "prefect/deployments"
    deployments.mkdir(parents=True)
    samples = f"{store}/stages/{OTHER}/samples"
    (deployments / "mine.json").write_text(json.dumps({"parameters": {"config": {"data": {"rollouts": samples}}}}))
    assert OTHER not in removed(store, ledger, days=0, max_bytes=0)


@pytest.mark.parametrize("key", ["model", "against"])
def test_the_models_that_a_served_configuration_scores_stay(key: str, store: Path, ledger: Ledger) -> None:
    """They are named as people call them, not by a path: my-run-5793d50a, sft-<fingerprint>/checkpoints/step_000100."""
    add_run(store, days=50)
    deployments = store / "prefect/deployments"
    deployments.mkdir(parents=True)
    for name, given in (
        ("run", Path(RUN).name),
        ("stage", f"{OTHER}/checkpoints/step_000100"),
        ("alias", "production"),
    ):
        evaluate = {"model": "base", "against": "", key: given}
        (deployments / f"{name}.json").write_text(json.dumps({"parameters": {"evaluate": evaluate}}))
    (deployments / "asked.json").write_text(json.dumps({"parameters": {"config": {}}}))
    (deployments / "torn.json").write_text("{")
    gone = removed(store, ledger, days=0, max_bytes=0)
    assert OTHER not in gone and Path(RUN).name not in gone and RUN not in gone
    assert (store / RUN / "checkpoint").is_dir()


def test_what_is_no_stage_is_not_touched(store: Path, ledger: Ledger) -> None:
    (store / "stages/notes").mkdir()
    plan = plan_prune(store, ledger, unused_days=0, max_bytes=0, now=NOW)
    remove_folders(store, ledger, plan)
    assert [path.name for path in (store / "stages").iterdir()] == ["notes"]


def test_of_a_run_the_checkpoint_goes_and_the_report_stays(store: Path, ledger: Ledger) -> None:
    path = add_run(store, days=50)
    (path / ".checkpoint.incoming-0123").mkdir()  # left by a process that was killed while it copied
    (path / ".checkpoint.incoming-0123/model.safetensors").write_bytes(bytes(SIZE))
    for each in (path / ".checkpoint.incoming-0123", path):
        set_age(each, days=50)
    plan = plan_prune(store, ledger, unused_days=45, now=NOW)
    assert [(folder.name, folder.num_bytes) for folder in plan.removed] == [(f"{RUN}/checkpoint", 2 * SIZE)]
    assert (path / "checkpoint/model.safetensors").is_file(), "a plan removes nothing"
    assert names(remove_folders(store, ledger, plan)) == [RUN]
    assert [each.name for each in path.iterdir()] == ["report.html"]
    assert RUN not in names(plan_prune(store, ledger, unused_days=0, now=NOW).kept), "there is nothing to be removed"


def test_stages_runs_and_inputs_share_the_age_and_the_size(store: Path, ledger: Ledger) -> None:
    add_run(store, days=35)
    add_input(store, days=45)
    assert removed(store, ledger, days=32) == [INPUT, OTHER, RUN]
    assert removed(store, ledger, days=100, max_bytes=3 * SIZE + 500) == [INPUT, OTHER, RUN]
    assert removed(store, ledger, days=100, max_bytes=5 * SIZE + 500) == [INPUT]


def test_a_file_of_two_names_makes_room_only_where_it_goes_last(store: Path, ledger: Ledger) -> None:
    path = add_input(store, days=50)
    (path / "weights").hardlink_to(store / "stages" / OTHER / "weights")  # of a stage used 40 days ago
    set_age(path, days=50)
    found = plan_prune(store, ledger, unused_days=100, now=NOW).kept
    assert {folder.place: folder.num_bytes for folder in found if folder.place in (INPUT, f"stages/{OTHER}")} == {
        INPUT: SIZE,
        f"stages/{OTHER}": SIZE,
    }
    plan = plan_prune(store, ledger, unused_days=45, now=NOW)
    assert names(remove_folders(store, ledger, plan)) == [INPUT]
    assert (store / "stages" / OTHER / "weights").stat().st_size == SIZE


def test_the_checkpoint_of_a_registered_model_stays(store: Path, ledger: Ledger) -> None:
    path, other = add_run(store, days=50), add_run(store, "runs/other-76543210", days=50)
    checkpoint = str((path / "checkpoint").relative_to(store))
    register_model(ledger, "a", checkpoint=checkpoint, digest="d", run_id="r", stages=[], data={}, by="me")
    assert [place for place in removed(store, ledger, days=0) if "runs/" in place] == ["runs/other-76543210"]
    remove_folders(store, ledger, plan_prune(store, ledger, unused_days=0, max_bytes=0, now=NOW))
    assert ((path / "checkpoint/model.safetensors").is_file(), (other / "checkpoint").exists()) == (True, False)


def test_what_the_lineage_of_a_model_began_with_stays_wherever_it_lies(store: Path, ledger: Ledger) -> None:
    start, data = add_run(store, days=50), add_input(store, days=50)
    job = {"model": {"model": {"path": f"{start}/checkpoint"}}, "data": [{"path": f"{data}/rows.jsonl"}]}
    (store / "stages" / SFT / "job.json").write_text(json.dumps(job))
    register_model(ledger, "a", checkpoint="b", digest="d", run_id="r", stages=[RL], data={}, by="me")
    assert set(removed(store, ledger, days=0, max_bytes=0)) == {EVALUATE, OTHER}


def test_a_run_under_way_keeps_its_output_and_what_it_named_before_a_stage_did(store: Path, ledger: Ledger) -> None:
    run, named = add_run(store, days=50), add_run(store, "runs/other-76543210", days=50)
    data, unused = add_input(store, days=50), add_input(store, f"inputs/{16 * '3'}", days=50)
    plan = plan_prune(store, ledger, unused_days=45, now=NOW)
    assert len(plan.removed) == 4
    with ledger.living_run("01234567-89ab"):
        settings = {"model": {"path": f"{named}/checkpoint"}, "data": {"sft": [f"{data}/rows.jsonl"]}}
        note_named(settings, store)
        assert {RUN, "runs/other-76543210", INPUT}.isdisjoint(removed(store, ledger, days=0, max_bytes=0))
        assert names(remove_folders(store, ledger, plan)) == [f"inputs/{16 * '3'}"], "a look before the run began"
    assert all((path / "checkpoint").is_dir() for path in (run, named))
    assert (data.exists(), unused.exists()) == (True, False)


def test_an_input_that_a_run_has_just_looked_for_stays(store: Path, ledger: Ledger, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("row")
    [folder] = {bring_input(f"file://{rows}", store, lambda _: None).parent for _ in range(2)}
    set_age(folder, days=50)
    plan = plan_prune(store, ledger, unused_days=45, now=NOW)
    assert [each.place for each in plan.removed] == [f"inputs/{folder.name}"]
    with ledger.living_run("alive"):
        found = bring_input(f"file://{rows}", store, lambda said: pytest.fail(f"{said}: it is there"))
        assert remove_folders(store, ledger, plan) == []
        assert found.read_text() == "row"
    set_age(folder, days=50)
    assert len(remove_folders(store, ledger, plan)) == 1
    assert bring_input(f"file://{rows}", store, lambda _: None).read_text() == "row", "it is fetched again"


def test_an_input_that_is_being_fetched_stays(store: Path, ledger: Ledger) -> None:
    path = add_input(store, days=50)
    lock = path / ".rows.jsonl.incoming-0123456789abcdef.lock"
    with subprocess.Popen(
        [sys.executable, "-c", HOLDING, str(lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as fetching:
        assert fetching.stdin is not None and fetching.stdout is not None
        assert fetching.stdout.readline() == b"held\n"
        set_age(path, days=50)
        assert INPUT not in removed(store, ledger, days=0, max_bytes=0)
        fetching.stdin.close()
    assert INPUT in removed(store, ledger, days=0, max_bytes=0), "a process that was killed leaves its lock file"


def test_two_at_once_remove_everything_once(store: Path, ledger: Ledger) -> None:
    places = [add_input(store, f"inputs/{number:016x}", days=50) for number in range(200)]
    command = [sys.executable, "-c", PRUNING, str(store)]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    counts = [int(process.communicate()[0]) for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert sum(counts) == len(places)
    assert list((store / "inputs").iterdir()) == []


def test_what_a_killed_prune_moved_away_is_removed_by_the_next_one(store: Path, ledger: Ledger) -> None:
    for parent in (store / "inputs", store / RUN, store / "stages"):
        (parent / ".x.partial-0123").mkdir(parents=True)
    remove_folders(store, ledger, plan_prune(store, ledger, unused_days=100, now=NOW))
    assert list(store.rglob(".x.partial-*")) == []


def test_what_a_run_that_goes_on_is_copying_stays(store: Path, ledger: Ledger) -> None:
    partial = store / RUN / ".checkpoint-small-1.partial-0123"
    partial.mkdir(parents=True)
    with ledger.living_run("01234567-89ab"):
        remove_folders(store, ledger, plan_prune(store, ledger, unused_days=100, now=NOW))
        assert partial.is_dir()
    remove_folders(store, ledger, plan_prune(store, ledger, unused_days=100, now=NOW))
    assert not partial.exists()


def test_a_folder_that_somebody_put_elsewhere_and_linked_is_left_to_them(
    store: Path, ledger: Ledger, tmp_path_factory: pytest.TempPathFactory
) -> None:
    elsewhere = tmp_path_factory.mktemp("disk")
    run = add_run(store, days=50)
    for path in (store / "stages" / OTHER, run / "checkpoint"):
        path.rename(elsewhere / path.name)
        path.symlink_to(elsewhere / path.name)
        set_age(path.parent, days=50)
    plan = plan_prune(store, ledger, unused_days=0, max_bytes=0, now=NOW)
    assert {OTHER, RUN}.isdisjoint(names(plan.removed + plan.kept))
    remove_folders(store, ledger, plan)
    assert (store / "stages" / OTHER / "weights").is_file() and (run / "checkpoint/model.safetensors").is_file()
    assert [path.name for path in (store / "stages").iterdir()] == [OTHER]


def test_a_file_that_another_command_removes_is_left_out_of_a_list_by_age(tmp_path: Path) -> None:
    for age, name in enumerate(("old", "new")):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (age, age))
    gone = tmp_path / "gone"
    assert [path.name for path in newest_first([gone, tmp_path / "old", tmp_path / "new"])] == ["new", "old"]
