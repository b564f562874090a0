"""Pins that a checkpoint is used only when every byte is as it was written, and that the newest is found by number.

Without it a run would go on from cut weights, or from step 999999 for ever.
"""

import json
import logging
import os
import shutil
import time
from pathlib import Path

import pytest

from rollouts_core import checkpoint as checkpoint_module
from rollouts_core.checkpoint import (
    adopt_checkpoint,
    find_checkpoint,
    latest_intact_checkpoint,
    list_checkpoints,
    load_manifest,
    new_checkpoint,
    prune_checkpoints,
    set_damaged_aside,
    step_directory,
    verify_checkpoint,
)
from rollouts_core.errors import CheckpointError
from rollouts_core.roll_back import ROLLED_BACK, RollBack
from rollouts_core.run_directory import RunDirectory


def write_checkpoint(parent: Path, step: int, weights: str = "weights", trainer: str = "state") -> Path:
    """A checkpoint of two small files."""
    path = step_directory(parent, step)
    with new_checkpoint(path, step=step) as directory:
        (directory / "model.safetensors").write_text(weights)
        (directory / "trainer").mkdir()
        (directory / "trainer" / "state.json").write_text(trainer)
    return path


def test_the_manifest_lists_size_and_sha256_of_every_other_file(tmp_path: Path) -> None:
    manifest = load_manifest(write_checkpoint(tmp_path, 7, weights="abc"))
    assert manifest.step == 7
    assert sorted(manifest.files) == ["model.safetensors", "trainer/state.json"]
    assert manifest.files["model.safetensors"].size == 3
    # sha256("abc"), FIPS 180-2 appendix B.1
    expected = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert manifest.files["model.safetensors"].sha256 == expected


def test_a_whole_checkpoint_verifies(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, 7)
    assert verify_checkpoint(path) == load_manifest(path)


def test_the_digest_of_a_model_does_not_depend_on_the_trainers_state(tmp_path: Path) -> None:
    paths = [write_checkpoint(tmp_path, step, trainer=f"state {step}") for step in (1, 2)]
    assert len({load_manifest(path).digest for path in paths}) == 1


def test_the_digest_of_a_model_depends_on_its_weights(tmp_path: Path) -> None:
    paths = [write_checkpoint(tmp_path, step, weights=f"weights {step}") for step in (1, 2)]
    assert len({load_manifest(path).digest for path in paths}) == 2


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        ("truncated", r"model\.safetensors has 6 bytes, its manifest says 7: truncated or changed"),
        ("tampered", r"model\.safetensors does not have the content that its manifest lists"),
        ("missing", r"lacks model\.safetensors"),
        ("trainer", r"trainer/state\.json does not have the content"),
        ("no manifest", r"is not a whole checkpoint: no readable manifest\.json"),
        ("cut manifest", r"is not a whole checkpoint: no readable manifest\.json"),
        ("empty manifest", r"is not a whole checkpoint: no readable manifest\.json"),
        ("endless manifest", r"is not a whole checkpoint: no readable manifest\.json"),
        ("added code", r"modeling\.py is not in the manifest of its checkpoint: remove the added file"),
        ("added weights", r"model-2\.safetensors is not in the manifest"),
        ("later format", r"has manifest format 2, this version reads 1"),
    ],
)
def test_a_damaged_checkpoint_is_one_sentence(tmp_path: Path, damage: str, sentence: str) -> None:
    path = write_checkpoint(tmp_path, 7)
    damage_checkpoint(path, damage)
    with pytest.raises(CheckpointError, match=sentence):
        verify_checkpoint(path)


def damage_checkpoint(path: Path, damage: str) -> None:
    """Change one file of a checkpoint of `write_checkpoint`."""
    manifest = path / "manifest.json"
    if damage == "missing":
        (path / "model.safetensors").unlink()
    elif damage == "no manifest":
        manifest.unlink()
    else:
        name, content = {
            "truncated": ("model.safetensors", "weight"),
            "tampered": ("model.safetensors", "wEights"),
            "trainer": ("trainer/state.json", "stOte"),
            "cut manifest": ("manifest.json", manifest.read_text()[:-20]),
            "empty manifest": ("manifest.json", "[]"),
            "endless manifest": ("manifest.json", "[" * 100_000),
            "added code": ("modeling.py", "import os"),
            "added weights": ("model-2.safetensors", "more"),
            "later format": ("manifest.json", json.dumps({**json.loads(manifest.read_text()), "format": 2})),
        }[damage]
        (path / name).write_text(content)


def test_a_crash_while_saving_leaves_no_step_directory(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), new_checkpoint(step_directory(tmp_path, 3), step=3) as directory:
        (directory / "model.safetensors").write_text("half")
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_of_the_same_step_replaces_a_damaged_one(tmp_path: Path) -> None:
    damage_checkpoint(write_checkpoint(tmp_path, 7), "truncated")
    write_checkpoint(tmp_path, 7)
    verify_checkpoint(step_directory(tmp_path, 7))


def test_checkpoints_are_ordered_by_number_also_past_the_padding(tmp_path: Path) -> None:
    steps = [999_999, 1_000_000, 2, 10_000_000]
    for step in steps:
        write_checkpoint(tmp_path, step)
    assert [load_manifest(path).step for path in list_checkpoints(tmp_path)] == sorted(steps)


def test_only_names_of_steps_are_checkpoints(tmp_path: Path) -> None:
    for name in ("step_12", "step_000001.old", ".step_000002.partial-x", "best", "step_000003"):
        (tmp_path / name).mkdir()
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step_000003"]


def test_a_run_without_a_checkpoint_folder_has_no_checkpoints(tmp_path: Path) -> None:
    assert list_checkpoints(tmp_path / "none") == []
    assert latest_intact_checkpoint(tmp_path / "none") is None


def test_damaged_newest_checkpoints_are_passed_over_loudly(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    paths = [write_checkpoint(tmp_path, step) for step in (1, 2, 3)]
    damage_checkpoint(paths[2], "tampered")
    damage_checkpoint(paths[1], "no manifest")
    with caplog.at_level(logging.WARNING):
        assert latest_intact_checkpoint(tmp_path) == paths[0]
    assert len(caplog.records) == 2


def test_when_every_checkpoint_is_damaged_there_is_none(tmp_path: Path) -> None:
    damage_checkpoint(write_checkpoint(tmp_path, 1), "truncated")
    assert latest_intact_checkpoint(tmp_path) is None


@pytest.mark.parametrize(("keep", "kept"), [(1, [1_000_000]), (2, [999_999, 1_000_000]), (9, [5, 999_999, 1_000_000])])
def test_pruning_keeps_the_newest(tmp_path: Path, keep: int, kept: list[int]) -> None:
    for step in (1_000_000, 5, 999_999):
        write_checkpoint(tmp_path, step)
    prune_checkpoints(tmp_path, newest=step_directory(tmp_path, 1_000_000), keep=keep)
    assert [load_manifest(path).step for path in list_checkpoints(tmp_path)] == kept


@pytest.mark.parametrize(
    ("keep", "best", "kept"),
    [(1, [], [6]), (1, [3], [3, 6]), (2, [3, 2], [2, 3, 5, 6]), (3, [6], [4, 5, 6]), (1, [7], [6])],
)
def test_pruning_keeps_the_best_besides_the_newest(tmp_path: Path, keep: int, best: list[int], kept: list[int]) -> None:
    for step in range(1, 7):
        write_checkpoint(tmp_path, step)
    prune_checkpoints(tmp_path, newest=step_directory(tmp_path, 6), keep=keep, best=best)
    assert [load_manifest(path).step for path in list_checkpoints(tmp_path)] == kept


def test_a_kill_while_pruning_leaves_no_half_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2):
        write_checkpoint(tmp_path, step)

    def die(path: Path) -> None:
        (path / "manifest.json").unlink()
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", die)
    with pytest.raises(KeyboardInterrupt):
        prune_checkpoints(tmp_path, newest=step_directory(tmp_path, 2), keep=1)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step_000002"]


def count_hashed(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that are read for their digest from now on."""
    hashed: list[Path] = []
    really_hash = checkpoint_module._hash_file

    def hash_noted(path: Path) -> str:
        hashed.append(path)
        return really_hash(path)

    monkeypatch.setattr(checkpoint_module, "_hash_file", hash_noted)
    return hashed


def test_an_untouched_checkpoint_is_read_once_by_a_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_checkpoint(tmp_path, 7)
    monkeypatch.setattr(checkpoint_module, "SETTLED_NS", 0)
    time.sleep(0.02)  # longer than the clock tick of a file system
    hashed = count_hashed(monkeypatch)
    verify_checkpoint(path)
    verify_checkpoint(path)
    assert len(hashed) == 2  # its two files, once each


def test_a_remembered_digest_does_not_hide_a_change_that_sets_the_old_time_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_checkpoint(tmp_path, 7)
    monkeypatch.setattr(checkpoint_module, "SETTLED_NS", 0)
    time.sleep(0.02)
    verify_checkpoint(path)
    before = (path / "model.safetensors").stat()
    damage_checkpoint(path, "tampered")
    os.utime(path / "model.safetensors", ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(CheckpointError, match="does not have the content"):
        verify_checkpoint(path)


def test_a_file_that_just_changed_is_not_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_checkpoint(tmp_path, 7)
    hashed = count_hashed(monkeypatch)
    verify_checkpoint(path)
    verify_checkpoint(path)
    assert len(hashed) == 4


def test_of_the_checkpoints_of_a_run_only_the_newest_whole_one_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten checkpoints of a large model are a terabyte, which a GPU would wait for."""
    paths = [write_checkpoint(tmp_path, step) for step in (1, 2, 3, 4)]
    damage_checkpoint(paths[3], "tampered")
    hashed = count_hashed(monkeypatch)
    [moved] = set_damaged_aside(tmp_path)
    assert moved.name.startswith("damaged_step_000004_")
    assert list_checkpoints(tmp_path) == paths[:3]
    assert {path.parent for path in hashed if path.name == "model.safetensors"} == {paths[3], paths[2]}


@pytest.mark.parametrize("damage", ["truncated", "missing", "no manifest", "added code"])
def test_an_older_checkpoint_that_is_seen_to_be_damaged_is_set_aside_too(tmp_path: Path, damage: str) -> None:
    """The record at the end of a run lists every checkpoint that stayed."""
    paths = [write_checkpoint(tmp_path, step) for step in (1, 2, 3)]
    damage_checkpoint(paths[0], damage)
    assert [path.name.rpartition("_")[0] for path in set_damaged_aside(tmp_path)] == ["damaged_step_000001"]
    assert list_checkpoints(tmp_path) == paths[1:]


def test_a_path_means_a_checkpoint_or_the_newest_of_a_run(tmp_path: Path) -> None:
    for step in (2, 10):
        write_checkpoint(tmp_path / "run" / "checkpoints", step)
    newest = tmp_path / "run" / "checkpoints" / "step_000010"
    assert find_checkpoint(tmp_path / "run") == find_checkpoint(newest.parent) == find_checkpoint(newest) == newest
    with pytest.raises(CheckpointError, match=r"there is no checkpoint at .*nothing"):
        find_checkpoint(tmp_path / "nothing")


def test_the_folder_of_a_run_that_was_rolled_back_names_its_best_checkpoint(tmp_path: Path) -> None:
    """Without it the next training, or an evaluation, would start from the collapsed weights."""
    best, newest = (write_checkpoint(tmp_path / "checkpoints", step) for step in (2, 10))
    roll_back = RollBack(rule="loss_risen", from_step=10, num_steps=20, step=2, metric="eval_loss", value=1.5)
    RunDirectory(tmp_path).write_result({ROLLED_BACK: roll_back.model_dump()})
    assert (find_checkpoint(tmp_path), find_checkpoint(newest)) == (best, newest)
    (tmp_path / "result.json").write_text("[]")
    assert find_checkpoint(tmp_path) == newest


def test_an_adopted_checkpoint_is_the_runs_own(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "first", 7)
    adopted = adopt_checkpoint(source, tmp_path / "second")
    shutil.rmtree(tmp_path / "first")
    assert adopted == step_directory(tmp_path / "second", 7)
    assert verify_checkpoint(adopted).step == 7


def test_a_checkpoint_of_links_is_adopted_with_the_files_that_they_lead_to(tmp_path: Path) -> None:
    """In the cache of the Hugging Face hub every file is a link to a place beside the folder."""
    written = write_checkpoint(tmp_path / "blobs", 7)
    snapshot = tmp_path / "snapshots" / "3f1c"
    for name in ("manifest.json", "model.safetensors", "trainer/state.json"):
        (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
        (snapshot / name).symlink_to(os.path.relpath(written / name, (snapshot / name).parent))
    adopted = adopt_checkpoint(snapshot, tmp_path / "run")
    shutil.rmtree(tmp_path / "blobs")
    assert verify_checkpoint(adopted).step == 7


def test_a_damaged_checkpoint_is_not_adopted(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "first", 7)
    damage_checkpoint(source, "truncated")
    with pytest.raises(CheckpointError, match="has 6 bytes"):
        adopt_checkpoint(source, tmp_path / "second")
    assert list_checkpoints(tmp_path / "second") == []


def test_pruning_does_not_count_what_an_abandoned_attempt_left_beyond(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        write_checkpoint(tmp_path, step)
    damage_checkpoint(write_checkpoint(tmp_path, 9), "truncated")
    prune_checkpoints(tmp_path, newest=step_directory(tmp_path, 3), keep=2)
    assert [load_manifest(path).step for path in list_checkpoints(tmp_path)] == [2, 3]


def test_a_copied_checkpoint_verifies_elsewhere(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, 7)
    copy = shutil.copytree(path, tmp_path / "elsewhere")
    assert verify_checkpoint(copy) == load_manifest(path)
