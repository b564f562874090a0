"""Where a stage lies that one run had end early: there for that run, elsewhere for all others.

Without these tests a run could take half a training for a whole one, or train into a directory that another run reads.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from rollouts.infra.node import LocalNode
from rollouts.infra.providers import provision_node
from rollouts.tasks.early_end import (
    EndedForAnotherRunError,
    begin_with_earlier,
    check_own_end,
    read_early_end,
)
from rollouts.tasks.records import RunScope, Stage
from rollouts_core.checkpoint import adopt_checkpoint, list_checkpoints, new_checkpoint
from rollouts_core.run_directory import RunDirectory
from tests.tasks.finished_stages import config_at
from tests.tasks.planned import plan_sft


def scope_of(tmp_path: Path, run_id: str, **options: Any) -> RunScope:  # Any: fields of every type
    return RunScope(run_id=run_id, run_name="small", store=str(tmp_path / "store"), **options)


def planned(tmp_path: Path, run_id: str, **options: Any) -> Stage:  # Any: fields of every type
    """The SFT stage of a run; every run has the same settings."""
    node = provision_node(LocalNode(), tmp_path / "store")
    return plan_sft(config_at(tmp_path / "inputs"), scope_of(tmp_path, run_id, **options), node)


def train(stage: Stage, *steps: int, ended_by: str = "") -> None:
    """Checkpoints of these steps and a record; all steps of the stage, unless a run ended it at the last one."""
    directory = RunDirectory(Path(stage.run_dir))
    for step in steps:
        with new_checkpoint(directory.checkpoints / f"step_{step:06d}", step=step) as partial:
            (partial / "model.safetensors").write_text(f"weights {step}")
    early = {"step": steps[-1], "num_steps": 40, "asked_by": ended_by}
    directory.write_result({"checkpoints": [], **({"finished_early": early} if ended_by else {})})


def test_a_shortened_stage_is_finished_for_the_run_that_asked_and_lies_elsewhere_for_others(tmp_path: Path) -> None:
    first = planned(tmp_path, "first")
    train(first, 20, 27, ended_by="first")
    assert planned(tmp_path, "first") == first
    second = planned(tmp_path, "second")
    assert second.begins_with == first.run_dir != second.run_dir
    assert planned(tmp_path, "third") == second
    train(second, 20, 31, ended_by="second")
    third = planned(tmp_path, "third")
    assert third.begins_with == second.run_dir
    train(third, 20, 40)
    assert planned(tmp_path, "fourth") == third
    assert [planned(tmp_path, run) for run in ("first", "second")] == [first, second]


def test_the_whole_training_is_found_when_the_shortened_one_is_gone(tmp_path: Path) -> None:
    first = planned(tmp_path, "first")
    train(first, 20, 27, ended_by="first")
    second = planned(tmp_path, "second")
    train(second, 20, 40)
    shutil.rmtree(first.run_dir)
    assert planned(tmp_path, "third").run_dir == second.run_dir


def test_a_fresh_stage_has_nothing_of_the_shortened_one(tmp_path: Path) -> None:
    train(planned(tmp_path, "first"), 20, 27, ended_by="first")
    assert planned(tmp_path, "second", fresh=("sft",)).begins_with == ""


def test_a_stage_begins_with_the_whole_checkpoints_of_the_shortened_one_once(tmp_path: Path) -> None:
    first = planned(tmp_path, "first")
    train(first, 20, 27, 30, ended_by="first")
    (Path(first.run_dir) / "metrics.jsonl").write_text('{"step": 20}\n')
    (Path(first.run_dir) / "checkpoints/step_000030/model.safetensors").write_text("other weights")
    second = planned(tmp_path, "second")
    said = begin_with_earlier(second)
    assert said == f"starts from step_000027 in {first.run_dir}, a stage that ended early"
    own = RunDirectory(Path(second.run_dir))
    assert [path.name for path in list_checkpoints(own.checkpoints)] == ["step_000020", "step_000027"]
    assert own.metrics.read_text() == '{"step": 20}\n'
    shutil.rmtree(own.checkpoints / "step_000020")
    assert begin_with_earlier(second) == ""  # it has some of its own by now
    assert len(list_checkpoints(RunDirectory(Path(first.run_dir)).checkpoints)) == 3
    assert begin_with_earlier(first) == ""


def test_a_start_that_is_broken_off_leaves_no_checkpoint_without_the_metrics_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = planned(tmp_path, "first")
    train(first, 20, 27, ended_by="first")
    (Path(first.run_dir) / "metrics.jsonl").write_text('{"step": 20}\n')
    second = planned(tmp_path, "second")
    own = RunDirectory(Path(second.run_dir))

    def adopt_one(source: Path, parent: Path) -> Path:
        if list_checkpoints(parent):
            raise KeyboardInterrupt
        return adopt_checkpoint(source, parent)

    monkeypatch.setattr("rollouts.tasks.early_end.adopt_checkpoint", adopt_one)
    with pytest.raises(KeyboardInterrupt):
        begin_with_earlier(second)
    begin_with_earlier(second)
    assert [path.name for path in list_checkpoints(own.checkpoints)] == ["step_000020"]
    assert own.metrics.read_text() == '{"step": 20}\n', "nobody logs these steps again"


def test_who_attached_to_a_job_that_ended_for_another_run_is_told(tmp_path: Path) -> None:
    stage = planned(tmp_path, "first")
    check_own_end(stage, scope_of(tmp_path, "second"))
    train(stage, 20, 27, ended_by="first")
    check_own_end(stage, scope_of(tmp_path, "first"))
    words = "sft finished early at step 27 of 40 at the request of run first, which trained the same stage"
    with pytest.raises(EndedForAnotherRunError, match=words):
        check_own_end(stage, scope_of(tmp_path, "second"))


def test_a_record_that_is_damaged_says_nothing_of_an_end(tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text('{"finished_ear')
    assert read_early_end(tmp_path) is None
