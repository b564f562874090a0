"""Pins that `validate` suggests a placement for the GPUs of a node, and warns when no placement fits."""

from __future__ import annotations

from pathlib import Path

from rollouts.flows.form import load_pipeline
from rollouts.flows.preflight import suggest_placement
from rollouts.infra.gpu_state import GpuState
from rollouts_core.config import Config
from rollouts_core.findings import Caution
from tests.small_pipeline import write_small_pipeline

H100 = GpuState(name="NVIDIA H100", total_gb=85.5, free_gb=84.9, driver="580.95.05")
L4 = GpuState(name="NVIDIA L4", total_gb=24.1, free_gb=23.6, driver="580.95.05")


def config_of(folder: Path, *ranks: int) -> Config:
    path = write_small_pipeline(folder, mode="rl", rollout__engine__kind="sglang", deployment__trainer_processes=0)
    config = load_pipeline(path).config
    return config.model_copy(update={"deployment": config.deployment.model_copy(update={"engine_gpu_ranks": ranks})})


def test_a_placement_is_suggested_unless_the_settings_name_gpus(tmp_path: Path) -> None:
    [said] = suggest_placement(config_of(tmp_path / "a"), [H100, H100])
    assert said.endswith("apart; as settings of deployment: trainer_gpu_ranks = [0], engine_gpu_ranks = [1]")
    assert suggest_placement(config_of(tmp_path / "b", 1), [H100, H100]) == []
    assert suggest_placement(config_of(tmp_path / "c"), []) == []


def test_unlike_gpus_are_a_warning(tmp_path: Path) -> None:
    [said] = suggest_placement(config_of(tmp_path / "a"), [H100, L4])
    assert isinstance(said, Caution) and "a plan needs GPUs of one size" in said
