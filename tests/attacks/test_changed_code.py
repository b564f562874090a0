"""Pins that a checkpoint runs no code but that of the model from which its training started.

With `model.trust_remote_code` a model's folder brings code. A checkpoint may come from another machine. Without these
tests that machine could choose the code that the next machine, or this one, runs when the checkpoint is loaded.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from rollouts.tasks.plan import checkpoints_of
from rollouts.tasks.records import Stage, StageRecord
from rollouts.tasks.stage import check_code_to_resume
from rollouts_core.config import Config, DataConfig, ModelConfig
from rollouts_core.errors import CheckpointError
from rollouts_core.model.loading import load_hf_model
from tests.rollouts_core.make import write_model_with_own_code


@pytest.fixture
def start(model_dir: Path, tmp_path: Path) -> ModelConfig:
    return write_model_with_own_code(ModelConfig(path=str(model_dir)), tmp_path / "start")


@pytest.fixture
def checkpoint(start: ModelConfig, tmp_path: Path) -> Path:
    """A checkpoint of this model as transformers saves it, in the directory of a stage."""
    folder = tmp_path / "sft-1/checkpoints/step_000010"
    load_hf_model(start, device="cpu").save_pretrained(folder)
    assert (folder / "modeling_own.py").is_file()
    return folder


def edit_code(folder: Path) -> None:
    with (folder / "modeling_own.py").open("a") as file:
        file.write("raise SystemExit('this ran')\n")


def add_code(folder: Path) -> None:
    (folder / "further").mkdir()
    (folder / "further/modeling.py").write_text("raise SystemExit('this ran')\n")


def name_code_of_the_hub(folder: Path) -> None:
    settings = json.loads((folder / "config.json").read_text())
    settings["auto_map"]["AutoConfig"] = "stranger/repository--modeling.OwnConfig"
    (folder / "config.json").write_text(json.dumps(settings))


def name_a_tokenizer_of_the_hub(folder: Path) -> None:
    settings = {"auto_map": {"AutoTokenizer": [None, "stranger/repository--tokenizer.Fast"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


@pytest.mark.parametrize("change", [edit_code, add_code, name_code_of_the_hub, name_a_tokenizer_of_the_hub])
def test_a_checkpoint_with_other_code_is_not_loaded(
    start: ModelConfig, checkpoint: Path, change: Callable[[Path], None]
) -> None:
    stage_folder = checkpoint.parents[1]
    data = DataConfig(sft="a", selection="b", heldout="c")
    config = Config(mode="sft", model=start, data=data)
    entry = {"name": checkpoint.name, "digest": "d", "step": 10}
    record = StageRecord(
        stage="sft", fingerprint="1", run_dir=str(stage_folder), how="ran", seconds=0.0, result={"checkpoints": [entry]}
    )
    job = {"kind": "sft", "model": {"model": start.model_dump()}}
    stage = Stage(name="sft", fingerprint="1", run_dir=str(stage_folder), job=job, num_steps=10, timeout_s=60)
    assert [model.name for model in checkpoints_of(record, config)] == [checkpoint.name]
    check_code_to_resume(stage)
    change(checkpoint)
    for load in (lambda: checkpoints_of(record, config), lambda: check_code_to_resume(stage)):
        with pytest.raises(CheckpointError, match=r"model\.trust_remote_code"):
            load()
