"""Stages of a store that look finished, and configurations over them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rollouts.tasks.records import StageRecord
from rollouts_core.checkpoint import load_manifest, new_checkpoint
from rollouts_core.config import Config, ModelConfig
from rollouts_core.job import InputModel

DATA = ("sft", "prompts", "selection", "heldout")


def config_at(folder: Path, **changes: dict[str, Any]) -> Config:  # Any: settings of every type
    """A configuration over small files in a folder, with changed sections."""
    (folder / "model").mkdir(parents=True, exist_ok=True)
    (folder / "model/config.json").write_text("{}")
    for name in DATA:
        (folder / f"{name}.jsonl").write_text(f'{{"rows": "{name}"}}\n')
    sections: dict[str, Any] = {  # Any: settings of every type
        "model": {"path": str(folder / "model")},
        "data": {name: str(folder / f"{name}.jsonl") for name in DATA},
    }
    return Config.model_validate(sections | changes)


def checkpoint(folder: Path, weights: bytes) -> InputModel:
    """A model in one of our checkpoints."""
    with new_checkpoint(folder, step=20) as partial:
        (partial / "model.safetensors").write_bytes(weights)
    return InputModel(
        name=folder.name, model=ModelConfig(path=str(folder)), digest=load_manifest(folder).digest, step=20
    )


def finished(stage: str, result: dict[str, Any]) -> StageRecord:  # Any: JSON
    """The record of a stage that ran."""
    return StageRecord(stage=stage, fingerprint="0123", run_dir=f"/s/{stage}", how="ran", seconds=1.0, result=result)
