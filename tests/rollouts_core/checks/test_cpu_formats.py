"""Pins that bfloat16 on a CPU without instructions for it is told with its cost.

Without it a run takes 30 times as long.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rollouts_core.checks import cpu_formats
from rollouts_core.checks.cpu_formats import read_flags, warn_of_slow_bfloat16
from rollouts_core.config import Config


def config_with(precision: str) -> Config:
    data = {"sft": "a", "selection": "b", "heldout": "c"}
    training = {"sft": {"policy": {"precision": precision}}}
    return Config.model_validate({"mode": "sft", "model": {"path": "m"}, "data": data, "training": training})


@pytest.mark.parametrize(
    ("flags", "words"), [({"avx2"}, "neither AVX512-BF16 nor AMX"), ({"amx_bf16"}, "as far as torch")]
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


def test_the_factor_is_that_of_the_instructions_that_torch_may_use() -> None:
    code = "from rollouts_core.checks.cpu_formats import measure_factor; print(measure_factor())"
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert float(done.stdout) > cpu_formats.MIN_FACTOR, done.stderr


def test_flags_are_read_where_the_system_has_them(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nflags\t\t: fpu avx2 amx_bf16\nprocessor\t: 1\nflags\t\t: none\n")
    assert read_flags(tmp_path / "cpuinfo") == {"fpu", "avx2", "amx_bf16"}
    assert read_flags(tmp_path / "none") == frozenset()
