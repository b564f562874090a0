"""Pins that bfloat16 on a CPU without instructions for it is told with its cost.

Without it a run takes 30 times as long.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from rollouts_core.checks import cpu_formats
from rollouts_core.checks.cpu_formats import describe_slow_training, read_flags, warn_of_slow_bfloat16
from rollouts_core.config import Config, DeploymentConfig, EngineConfig, ModelConfig, PolicyConfig
from rollouts_core.engines.launch import describe_slow_engine
from rollouts_core.model.loading import load_hf_model
from tests.rollouts_core.served_engine import served_engine


def config_with(precision: str) -> Config:
    data = {"sft": "a", "selection": "b", "heldout": "c"}
    training = {"sft": {"policy": {"precision": precision}}}
    return Config.model_validate({"mode": "sft", "model": {"path": "m"}, "data": data, "training": training})


@pytest.mark.parametrize(
    ("flags", "words"), [({"avx2"}, "neither AVX512-BF16 nor AMX"), ({"amx_bf16"}, "although it has instructions")]
)
def test_slow_bfloat16_is_told_with_its_factor(flags: set[str], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(cpu_formats, "measure_factor", lambda: 32.0)
    [said] = warn_of_slow_bfloat16(config_with("bfloat16"), flags)
    assert "training.sft.policy.precision" in said and "about 32 times slower" in said and words in said
    assert 'set precision = "float32"' in said
    assert warn_of_slow_bfloat16(config_with("float32"), flags) == []
    monkeypatch.setattr(cpu_formats, "measure_factor", lambda: 0.6)
    assert warn_of_slow_bfloat16(config_with("bfloat16"), flags) == []


@pytest.mark.parametrize(("num_processes", "is_told"), [(0, False), (1, False), (2, True)])
def test_on_a_machine_with_gpus_processes_that_share_its_cpu_are_told(
    num_processes: int, is_told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(cpu_formats, "measure_factor", lambda: 32.0)
    deployment = DeploymentConfig(trainer_processes=num_processes)
    assert bool(describe_slow_training("rl", PolicyConfig(precision="bfloat16"), deployment)) is is_told


@pytest.mark.parametrize(
    ("engine", "stored", "is_told"),
    [
        (EngineConfig(kind="vllm"), "bfloat16", True),
        (EngineConfig(kind="vllm"), "float32", False),
        (EngineConfig(kind="sglang", dtype="bfloat16"), "float32", True),
        (EngineConfig(kind="sglang", dtype="float32"), "bfloat16", False),
        (EngineConfig(kind="embedded"), "bfloat16", False),
    ],
)
def test_engines_that_compute_in_slow_bfloat16_are_told(
    engine: EngineConfig, stored: str, is_told: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(cpu_formats, "measure_factor", lambda: 32.0)
    (tmp_path / "config.json").write_text(json.dumps({"dtype": stored}))
    said = describe_slow_engine(engine, tmp_path)
    assert bool(said) is is_told
    assert not said or 'rollout.engine.dtype "bfloat16" is about 32 times slower' in said


def test_the_embedded_engine_and_losses_of_an_evaluation_compute_in_float32(
    base_model: ModelConfig, tmp_path: Path
) -> None:
    """They need no warning, whatever the number format of a model's files is."""
    AutoModelForCausalLM.from_pretrained(base_model.path, dtype=torch.bfloat16).save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    with served_engine(tmp_path) as (engine, _):
        assert asyncio.run(engine.weights_dtype()) == torch.float32
    assert load_hf_model(ModelConfig(path=str(tmp_path))).dtype == torch.float32


@pytest.mark.slow
def test_the_factor_is_that_of_the_instructions_that_torch_may_use() -> None:
    code = "from rollouts_core.checks.cpu_formats import measure_factor; print(measure_factor())"
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert float(done.stdout) > cpu_formats.MIN_FACTOR, done.stderr


def test_flags_are_read_where_the_system_has_them(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nflags\t\t: fpu avx2 amx_bf16\nprocessor\t: 1\nflags\t\t: none\n")
    assert read_flags(tmp_path / "cpuinfo") == {"fpu", "avx2", "amx_bf16"}
    assert read_flags(tmp_path / "none") == frozenset()
