"""Pins the plan that a run opens with: its stages in order, what is reused and why, and how a training is continued.

Without it a run could train for days what is finished, and a raised num_steps begin at step 0 without a word.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollouts.flows.form import Pipeline, load_pipeline
from rollouts.flows.run_plan import describe_plan
from rollouts.infra.ledger import LEDGER_FILE, Ledger
from rollouts.infra.node import SSHNode, no_machine
from rollouts.tasks.plan import plan_selection, plan_training
from rollouts.tasks.records import RunScope, Stage, StageRecord
from rollouts_core.checkpoint import load_manifest, new_checkpoint
from rollouts_core.findings import split_findings
from rollouts_core.metrics import JSONLLogger
from rollouts_core.run_directory import RunDirectory
from rollouts_core.stages.planning import base_model
from tests.kit.small_pipeline import write_small_pipeline


@pytest.fixture(scope="module")
def config_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_pipeline(tmp_path_factory.mktemp("small"))


def plan(pipeline: Pipeline, store: Path) -> tuple[list[str], list[str]]:
    """The lines of the plan, and the warnings."""
    lines, cautions = split_findings(describe_plan(pipeline, pipeline.config, store))
    return list(lines), list(cautions)


def save_checkpoint(stage: Stage, step: int) -> dict[str, Any]:  # Any: JSON
    """Write a checkpoint of a training; returns its entry in the record."""
    path = RunDirectory(Path(stage.run_dir)).checkpoints / f"step_{step:06d}"
    with new_checkpoint(path, step=step) as partial:
        (partial / "model.safetensors").write_bytes(b"weights")
    return {"name": path.name, "step": step, "digest": load_manifest(path).digest}


def finish(stage: Stage, result: dict[str, Any]) -> StageRecord:  # Any: JSON
    """Write what a finished stage leaves."""
    directory = RunDirectory(Path(stage.run_dir))
    directory.root.mkdir(parents=True, exist_ok=True)
    directory.job.write_text(json.dumps(stage.job))
    directory.write_result(result)
    return StageRecord(
        stage=stage.name, fingerprint=stage.fingerprint, run_dir=stage.run_dir, how="ran", seconds=1.0, result=result
    )


@pytest.fixture
def finished(config_path: Path, tmp_path: Path) -> tuple[Path, Stage, Stage]:
    """A store with a finished SFT and its selection."""
    config, store = load_pipeline(config_path).config, tmp_path / "store"
    scope = RunScope(run_id="1", run_name="small", store=str(store))
    sft = plan_training("sft", base_model(config), config, scope, no_machine(str(store)))
    trained = finish(sft, {"checkpoints": [save_checkpoint(sft, 20), save_checkpoint(sft, 40)]})
    selection = plan_selection(trained, config, scope, no_machine(str(store)))
    finish(selection, {"best": "step_000020"})
    with Ledger(store / LEDGER_FILE) as ledger:
        ledger.note_use(Path(sft.run_dir).name, "1" * 32, run="small-11111111", num_steps=40)
    return store, sft, selection


def test_a_first_run_lists_its_stages_and_reads_no_data(config_path: Path, tmp_path: Path) -> None:
    pipeline = load_pipeline(config_path, ["data.sft=nowhere.jsonl", "training.rl.policy.lora.rank=4"])
    pipeline = replace(pipeline, node=SSHNode(host="me@box", python="/python"))
    lines, cautions = plan(pipeline, tmp_path)
    assert [line.partition(": ")[2].partition(":")[0] for line in lines] == [
        "1 of 5, sft",
        "2 of 5, select-sft",
        "3 of 5, rl",
        "4 of 5, select-rl",
        "5 of 5, evaluate",
    ]
    assert lines[0].endswith("sft: 40 steps, trains all weights, on me@box")
    assert lines[2].endswith("rl: 4 steps, trains adapters of rank 4, on me@box")
    assert cautions == []


def test_finished_stages_are_named_with_their_run(config_path: Path, finished: tuple[Path, Stage, Stage]) -> None:
    store, sft, selection = finished
    lines, cautions = plan(load_pipeline(config_path), store)
    name = Path(sft.run_dir).name
    assert lines[0] == f"plan: 1 of 5, sft: reused from {name}, finished before by run small-11111111"
    assert lines[1] == f"plan: 2 of 5, select-sft: reused from {Path(selection.run_dir).name}, finished before"
    assert lines[2] == "plan: 3 of 5, rl: 4 steps, trains all weights, on this machine"
    assert cautions == []


def test_more_steps_name_the_difference_the_time_and_how_to_continue(
    config_path: Path, finished: tuple[Path, Stage, Stage]
) -> None:
    store, sft, _ = finished
    (Path(sft.run_dir) / "metrics.jsonl").write_text(
        "".join(json.dumps({"step": step, "attempt": 1, "time": 3.0 * step}) + "\n" for step in (5, 40))
    )
    lines, [caution] = plan(load_pipeline(config_path, ["training.sft.num_steps=80"]), store)
    name = Path(sft.run_dir).name
    assert f"about 4 min at the pace of {name}; unlike {name}: training.sft.num_steps was 40 and is 80" in lines[0]
    assert f'training.sft.resume_from = "{sft.run_dir}" to continue it' in caution
    changed = ["training.sft.num_steps=80", f"training.sft.resume_from={sft.run_dir}"]
    assert plan(load_pipeline(config_path, changed), store)[1] == []


def test_a_stopped_training_names_its_step_and_a_fresh_stage_the_reason(
    config_path: Path, finished: tuple[Path, Stage, Stage]
) -> None:
    store, sft, _ = finished
    RunDirectory(Path(sft.run_dir)).result.unlink()
    lines, _ = plan(load_pipeline(config_path), store)
    assert lines[0].endswith(f"on this machine; resumes from step 40 of {Path(sft.run_dir).name}")
    lines, _ = plan(load_pipeline(config_path, ['run.fresh=["sft"]']), store)
    assert lines[0].endswith("on this machine; requested by run.fresh")


def test_the_time_of_one_logged_step_is_no_pace(config_path: Path, finished: tuple[Path, Stage, Stage]) -> None:
    store, sft, _ = finished
    with JSONLLogger(RunDirectory(Path(sft.run_dir)).metrics) as metrics:
        metrics.log({"loss": 0.5}, 40)
    lines, _ = plan(load_pipeline(config_path, ["training.sft.num_steps=80"]), store)
    assert "at the pace of" not in lines[0]


def write_run(store: Path, pipeline: Pipeline, name: str, seconds: dict[str, float], **changes: Any) -> None:
    """The record of a run that ran these stages."""
    folder = store / "runs" / name
    folder.mkdir(parents=True)
    stages = [
        {"stage": stage, "how": "ran" if took else "reused", "seconds": took, "finished_early": None}
        for stage, took in seconds.items()
    ]
    record = {"run_name": "small", "config": pipeline.config.model_dump(mode="json"), "stages": stages, **changes}
    (folder / "run.json").write_text(json.dumps(record))


def test_stages_are_estimated_by_the_last_run_of_the_configuration(config_path: Path, tmp_path: Path) -> None:
    pipeline = load_pipeline(config_path)
    times = {"sft": 100.0, "select-sft": 30.0, "rl": 200.0, "select-rl": 40.0, "evaluate": 50.0}
    write_run(tmp_path, pipeline, "small-1", times)
    write_run(tmp_path, pipeline, "other-2", dict.fromkeys(times, 9000.0), run_name="other")
    write_run(tmp_path, pipeline, "small-3", {**times, "sft": 0.0, "rl": 60.0})
    (tmp_path / "runs" / "small-4").mkdir()
    (tmp_path / "runs" / "small-4" / "run.json").write_text('{"run_name": "small"}')
    for number, name in enumerate(("small-1", "small-3", "other-2", "small-4")):  # whatever the disk's clock resolves
        os.utime(tmp_path / "runs" / name / "run.json", (number, number))
    lines, _ = plan(load_pipeline(config_path, ["training.sft.num_steps=80", "training.rl.num_steps=8"]), tmp_path)
    assert [line.partition("on this machine")[2] for line in lines[:5]] == [
        "; about 3 min at the pace of small-1",
        "; about 30 s as in small-3",
        "; about 2 min at the pace of small-3",
        "; about 40 s as in small-3",
        "; about 50 s as in small-3",
    ]
    assert lines[5] == "plan: about 7 min in all"


def test_without_a_time_for_each_stage_there_is_no_total(config_path: Path, tmp_path: Path) -> None:
    pipeline = load_pipeline(config_path)
    write_run(tmp_path, pipeline, "small-1", {"sft": 100.0})
    lines, _ = plan(pipeline, tmp_path)
    assert lines[0].endswith("; about 100 s at the pace of small-1") and len(lines) == 5
