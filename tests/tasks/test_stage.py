"""Pins with which variables a stage's process starts: its GPUs, its keys, and the allocator that it needs.

Without it a stage would compute on another's GPU, or train a fifth slower without anybody noticing.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rollouts_core.backends.allocator import KEPT_MEMORY
from tasks.records import Stage
from tasks.stage import job_environment


def stage(kind: str, *, engine: str = "embedded", data: str = "/data.jsonl", **deployment: tuple[int, ...]) -> Stage:
    ranks = {"trainer_gpu_ranks": (), "engine_gpu_ranks": (), **deployment}
    return Stage(
        name=kind,
        fingerprint="f",
        run_dir="/nowhere",
        job={"kind": kind, "deployment": ranks, "engine": {"kind": engine}, "data": [{"path": data}]},
        num_steps=1,
        timeout_s=1,
    )


@pytest.mark.parametrize(
    ("kind", "gpus"), [("sft", "0,1"), ("rl", "0,1"), ("evaluate", "0,1"), ("select", "0,1"), ("serve", "2")]
)
def test_a_stage_sees_its_own_gpus(kind: str, gpus: str) -> None:
    found = job_environment(stage(kind, trainer_gpu_ranks=(0, 1), engine_gpu_ranks=(2,)))
    assert found["CUDA_VISIBLE_DEVICES"] == gpus
    assert "CUDA_VISIBLE_DEVICES" not in job_environment(stage(kind))


def test_the_hubs_token_goes_only_to_a_job_that_reads_from_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "token")
    assert job_environment(stage("sft", data="team/private"))["HF_TOKEN"] == "token"
    assert "HF_TOKEN" not in job_environment(stage("sft")) | job_environment(stage("rl"))
    monkeypatch.delenv("HF_TOKEN")
    assert "HF_TOKEN" not in job_environment(stage("sft", data="team/private"))


@pytest.mark.parametrize(("kind", "expected"), [("sft", True), ("rl", True), ("evaluate", False), ("serve", True)])
def test_trainers_and_the_embedded_engine_keep_freed_memory(kind: str, expected: bool) -> None:
    assert (job_environment(stage(kind)).items() >= KEPT_MEMORY.items()) is expected


def test_an_engine_of_others_gets_memory_as_it_is_used_to() -> None:
    assert not job_environment(stage("serve", engine="vllm"))


@pytest.mark.skipif(not Path("/proc/self/status").exists() or os.confstr("CS_GNU_LIBC_VERSION") is None, reason="glibc")
def test_glibc_understands_the_allocator_settings() -> None:
    program = (
        "import torch, re; torch.set_num_threads(1)\n"
        "resident = lambda: int(re.search(r'VmRSS:\\s+(\\d+)', open('/proc/self/status').read())[1]) // 1024\n"
        "before = resident(); pieces = [torch.zeros(1 << 20) for _ in range(64)]; del pieces\n"
        "print(resident() - before)"
    )
    kept = [
        int(subprocess.check_output([sys.executable, "-c", program], env={**os.environ, **variables}))
        for variables in ({}, KEPT_MEMORY)
    ]
    assert kept[0] < 64 < 200 < kept[1]
