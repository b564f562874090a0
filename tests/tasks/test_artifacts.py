"""Pins what counts as damage of a finished stage, and what is set aside so that it is made again.

Without it a checkpoint that somebody deleted is missing in the choice of the best one, and nobody notices.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rollouts.tasks.artifacts import find_damage, is_finished, set_damage_aside
from rollouts.tasks.records import Stage
from rollouts_core.checkpoint import load_manifest, new_checkpoint
from rollouts_core.run_directory import RunDirectory


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    """A finished stage with checkpoints of the steps 20, 40 and 60."""
    directory = RunDirectory(tmp_path / "sft-0123")
    entries = []
    for step in (20, 40, 60):
        path = directory.checkpoints / f"step_{step:06d}"
        with new_checkpoint(path, step=step) as partial:
            (partial / "model.safetensors").write_bytes(b"weights of step %d" % step)
        entries.append({"name": path.name, "step": step, "digest": load_manifest(path).digest})
    directory.write_result({"checkpoints": entries})
    return Stage(name="sft", fingerprint="0123", run_dir=str(directory.root), job={}, num_steps=60, timeout_s=1.0)


def change(path: Path) -> None:
    (path / "model.safetensors").write_bytes(b"weights of step 99")


def cut(path: Path) -> None:
    (path / "model.safetensors").write_bytes(b"weights")


def lose_manifest(path: Path) -> None:
    (path / "manifest.json").unlink()


def replace_by_another(path: Path) -> None:
    with new_checkpoint(path, step=40) as partial:
        (partial / "model.safetensors").write_bytes(b"whole, but of another run")


def test_a_whole_stage_is_finished_and_left_alone(stage: Stage) -> None:
    assert is_finished(stage)
    assert set_damage_aside(stage) == ""
    assert is_finished(stage)


def test_a_stage_without_a_record_is_unfinished_and_not_damaged(stage: Stage) -> None:
    RunDirectory(Path(stage.run_dir)).result.unlink()
    assert not is_finished(stage)
    assert find_damage(stage) == ""
    assert set_damage_aside(stage) == ""


@pytest.mark.parametrize("harm", [change, cut, lose_manifest, shutil.rmtree])
def test_everything_from_the_first_harmed_checkpoint_on_is_set_aside(
    stage: Stage, harm: Callable[[Path], None]
) -> None:
    directory = RunDirectory(Path(stage.run_dir))
    harm(directory.checkpoints / "step_000040")
    assert "step_000040" in find_damage(stage)
    assert not is_finished(stage)

    assert "step_000040" in set_damage_aside(stage)
    assert [path.name for path in directory.checkpoints.iterdir()] == ["step_000020"]
    assert not directory.result.exists()
    assert (directory.root / "damaged-1/step_000060").is_dir()
    assert (directory.root / "damaged-1/result.json").is_file()


def test_a_checkpoint_that_is_whole_but_not_the_listed_one_is_set_aside_too(stage: Stage) -> None:
    directory = RunDirectory(Path(stage.run_dir))
    replace_by_another(directory.checkpoints / "step_000040")
    assert "does not have the digest" in set_damage_aside(stage)
    assert [path.name for path in directory.checkpoints.iterdir()] == ["step_000020"]


@pytest.mark.parametrize(
    "content", ["{", "", "[]", '{"checkpoints": [{"digest": "x"}]}', '{"checkpoints": 3}', "[" * 100_000]
)
def test_a_record_that_is_none_is_set_aside_and_whole_checkpoints_stay(stage: Stage, content: str) -> None:
    directory = RunDirectory(Path(stage.run_dir))
    directory.result.write_text(content)
    assert "result.json" in set_damage_aside(stage)
    assert len(list(directory.checkpoints.iterdir())) == 3
    assert not directory.result.exists()


@pytest.mark.parametrize("is_absolute", [True, False])
def test_a_record_that_names_other_folders_as_checkpoints_moves_none_of_them(
    stage: Stage, tmp_path: Path, is_absolute: bool
) -> None:
    directory = RunDirectory(Path(stage.run_dir))
    precious = tmp_path / "home"
    precious.mkdir()
    (precious / "id_ed25519").write_text("a key")
    record = json.loads(directory.result.read_text())
    name = str(precious) if is_absolute else "../../home"
    directory.write_result({"checkpoints": [*record["checkpoints"], {"name": name, "step": 80, "digest": "0"}]})

    assert "is not the name of a checkpoint" in set_damage_aside(stage)
    assert (precious / "id_ed25519").read_text() == "a key"
    assert len(list(directory.checkpoints.iterdir())) == 3


def test_scores_of_an_evaluation_are_no_checkpoints_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text(json.dumps({"checkpoints": [{"name": "step_000020", "scores": [1.0]}]}))
    stage = Stage(name="evaluate", fingerprint="0123", run_dir=str(tmp_path), job={}, num_steps=1, timeout_s=1.0)
    assert is_finished(stage)


def test_a_second_damage_has_a_folder_of_its_own(stage: Stage) -> None:
    directory = RunDirectory(Path(stage.run_dir))
    result = directory.result.read_text()
    shutil.rmtree(directory.checkpoints / "step_000060")
    set_damage_aside(stage)
    directory.result.write_text(result)  # listing step 60, which is not there again
    set_damage_aside(stage)
    assert (directory.root / "damaged-2/result.json").is_file()


def test_what_is_left_of_earlier_damage_is_in_nobodys_way(stage: Stage) -> None:
    directory = RunDirectory(Path(stage.run_dir))
    (directory.root / "damaged-2").mkdir()  # somebody has deleted damaged-1
    change(directory.checkpoints / "step_000060")
    assert "step_000060" in set_damage_aside(stage)
    assert not is_finished(stage) and list(directory.root.glob("damaged-*/result.json"))
    assert not any((directory.root / "damaged-2").iterdir())


def test_of_many_runs_that_find_the_damage_one_sets_it_aside(stage: Stage) -> None:
    change(Path(stage.run_dir, "checkpoints/step_000020"))
    with ThreadPoolExecutor(8) as threads:
        said = list(threads.map(set_damage_aside, [stage] * 8))
    assert len([damage for damage in said if damage]) == 1
    assert len(list(Path(stage.run_dir).glob("damaged-*"))) == 1
