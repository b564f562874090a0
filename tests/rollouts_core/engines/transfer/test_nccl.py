"""What a trainer and an engine must have alike before NCCL connects them; no GPU is needed to ask for it.

Without it the first publication hangs or fails inside NCCL, after the engine was loaded and the first step sampled.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from rollouts_core.config import DeploymentConfig, EngineConfig, ModelConfig
from rollouts_core.engines import launch
from rollouts_core.engines.launch import exec_engine
from rollouts_core.engines.transfer.nccl import check_version, nccl_version, share_memory_as
from rollouts_core.errors import ConfigError
from rollouts_core.job import InputModel, ServeJob


def interpreter_with(nccl: str, folder: Path) -> str:
    """A program that answers as an interpreter whose torch has this NCCL."""
    program = folder / "python"
    program.write_text(f'#!/bin/sh\necho "{nccl}"\n')
    program.chmod(0o700)
    return str(program)


@pytest.mark.parametrize(
    ("engine", "found", "expected"),
    [
        ({"kind": "sglang", "weight_transfer": "nccl"}, None, "0"),
        ({"kind": "sglang", "weight_transfer": "nccl"}, "1", "1"),  # the engine inherits what the user set, too
        ({"kind": "sglang", "weight_transfer": "gloo"}, None, None),
        ({"kind": "vllm", "weight_transfer": "nccl"}, None, None),
        ({"kind": "embedded"}, None, None),
    ],
)
def test_the_trainer_hands_memory_over_as_sglang_does(
    engine: dict[str, Any], found: str | None, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", found or "")  # so that whatever is set below is taken back
    if found is None:
        monkeypatch.delenv("NCCL_CUMEM_ENABLE")
    share_memory_as(EngineConfig.model_validate(engine))
    assert os.environ.get("NCCL_CUMEM_ENABLE") == expected


def test_another_nccl_is_refused_before_the_model_is_loaded(
    quickstart_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "nccl_version", lambda: "2.29.7")
    job = ServeJob(
        model=InputModel(name="base", model=ModelConfig(path=str(quickstart_dir / "base_model")), digest=""),
        port=30000,
        context_length=900,
        engine=EngineConfig(
            kind="sglang", weight_transfer="nccl", python=interpreter_with(nccl="2.27.5", folder=tmp_path)
        ),
        deployment=DeploymentConfig(),
    )
    with pytest.raises(ConfigError, match=r"torch has NCCL 2\.27\.5 and the trainer's 2\.29\.7.*\"gloo\""):
        exec_engine(job, tmp_path)


def test_an_interpreter_that_has_the_same_or_says_nothing_is_left_alone(tmp_path: Path) -> None:
    check_version(interpreter_with("2.29.7", tmp_path), os.environ, own="2.29.7")
    check_version(interpreter_with("2.27.5", tmp_path), os.environ, own="")
    check_version(str(tmp_path / "nowhere"), os.environ, own="2.29.7")


def test_real_interpreters_can_be_asked() -> None:
    check_version(sys.executable, os.environ, own=nccl_version())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rollouts_core.engines.transfer.nccl._ASK", "print('0.0.1')")
        with pytest.raises(ConfigError, match=r"NCCL 0\.0\.1"):
            check_version(sys.executable, os.environ, own="2.29.7")
