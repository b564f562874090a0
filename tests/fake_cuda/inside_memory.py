"""Run by test_fake_cuda.py in a process with the fake device: what steps allocate, against what the preflight says.

Without it a run could be told that a GPU will do which then runs out of memory, or that it needs one twice as large.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from torch.utils._python_dispatch import _disable_current_modes

from rollouts_core import Sample, TrainBatch, build_batch, create_pytorch_backend
from rollouts_core.algorithms.loss import create_cross_entropy_loss
from rollouts_core.checks.activation_needs import Rows
from rollouts_core.config import OptimConfig, PolicyConfig
from rollouts_core.update import update_policy
from tests.fake_cuda.device import fake_cuda
from tests.fake_cuda.models import estimate, models_of

TOLERANCE = 0.1
LENGTH, NUM_ROWS = 2048, 4
BFLOAT16: dict[str, Any] = {"precision": "bfloat16"}  # Any: settings of the policy


def make_batch(*, packed: bool, num_rows: int = NUM_ROWS, length: int = LENGTH) -> TrainBatch:
    num_samples = 2 if packed else 1
    each = length // num_samples
    samples = [Sample(tokens=[5] * (each + 1), loss_mask=[0.0] + [1.0] * each)] * num_samples
    with _disable_current_modes():
        return build_batch([samples] * num_rows, pad_id=0)


@pytest.mark.parametrize(
    ("shape", "settings", "packed"),
    [
        ("0.6B", BFLOAT16, True),
        ("0.6B", {**BFLOAT16, "activation_checkpointing": True}, True),
        ("1.7B", BFLOAT16, False),
        ("8B", BFLOAT16, False),
    ],
)
def test_a_step_takes_what_the_preflight_says(
    shape: str, settings: dict[str, Any], packed: bool, tmp_path: Path
) -> None:
    policy = PolicyConfig(**settings)
    rows = Rows(NUM_ROWS * LENGTH, LENGTH, packed, "the rows of this test")
    with fake_cuda() as trace, models_of(shape, tmp_path) as model:
        backend = create_pytorch_backend(model, OptimConfig(), create_cross_entropy_loss(), num_steps=9, policy=policy)
        small = make_batch(packed=packed, num_rows=1, length=16)
        asyncio.run(update_policy(backend, [small]))  # AdamW's moments come with the first step
        trace.start_peak()
        asyncio.run(update_policy(backend, [small, make_batch(packed=packed)]))  # gradients come with the first pass
    said, found = estimate(shape, policy, rows), trace.peak
    assert said / found == pytest.approx(1.0, abs=TOLERANCE), f"{said / 2**30:.2f} GiB, {found / 2**30:.2f} GiB traced"
