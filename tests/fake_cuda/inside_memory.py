"""Run by test_fake_cuda.py in a process with the fake device: what steps allocate, against what the preflight says.

Without it a run could be told that a GPU will do which then runs out of memory, or that it needs one twice as large.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from rollouts_core import PyTorchTrainingBackend, Sample, TrainBatch, build_batch, create_pytorch_backend
from rollouts_core.algorithms.loss import create_cross_entropy_loss
from rollouts_core.checks.activation_needs import Rows
from rollouts_core.config import LoRAConfig, OptimConfig, PolicyConfig
from rollouts_core.model.attention_choice import expected_kernel
from rollouts_core.optimizer_step import update_policy
from tests.fake_cuda.device import fake_cuda, squares
from tests.fake_cuda.models import SHAPES, adapters_in_place, estimate, models_of

TOLERANCE = 0.05
LENGTH, NUM_ROWS = 1920, 4
"""A length that no matrix of the models has: what is as long in both directions is a mask."""
MASK_TOLERANCE = 0.2


def make_batch(*, packed: bool) -> TrainBatch:
    num_samples = 2 if packed else 1
    each = LENGTH // num_samples
    samples = [Sample(tokens=[5] * (each + 1), loss_mask=[0.0] + [1.0] * each)] * num_samples
    with _disable_current_modes():
        return build_batch([samples] * NUM_ROWS, pad_id=0)


def compare(shape: str, policy: PolicyConfig, folder: Path, *, packed: bool) -> tuple[int, int]:
    """Bytes of a step: what the preflight says, and what is traced."""
    kernel = expected_kernel(policy, SHAPES[shape], None)
    resolved = policy.model_copy(update={"attention": kernel})
    rows = Rows(NUM_ROWS * LENGTH, LENGTH, packed and resolved.takes_dense_masks, "the rows of this test")
    with fake_cuda() as trace, models_of(shape, folder) as model:
        backend = create_pytorch_backend(model, OptimConfig(), create_cross_entropy_loss(), num_steps=9, policy=policy)
        fill_gradients(backend)
        asyncio.run(backend.optim_step().result())  # AdamW's moments come with the first step
        trace.start_peak()
        fill_gradients(backend)  # as behind the first micro-batch of a step
        asyncio.run(update_policy(backend, [make_batch(packed=packed)]))
    assert bool(squares(trace, LENGTH)) == rows.has_mask
    return estimate(shape, resolved, rows), trace.peak


def fill_gradients(backend: PyTorchTrainingBackend) -> None:
    for weight in backend.policy.parameters():
        weight.grad = torch.zeros_like(weight) if weight.requires_grad else None


PATHS: dict[str, dict[str, Any]] = {  # Any: settings of the policy
    "all weights": {},
    "a mask": {"attention": "sdpa"},
    "recomputation": {"activation_checkpointing": True},
    "recomputation and a mask": {"activation_checkpointing": True, "attention": "sdpa"},
    "adapters": {"lora": LoRAConfig(rank=16)},
    "adapters and a mask": {"lora": LoRAConfig(rank=16), "attention": "sdpa"},
    "adapters and recomputation": {"lora": LoRAConfig(rank=16), "activation_checkpointing": True},
    "float32": {"precision": "float32"},
    "float32, recomputation": {"precision": "float32", "activation_checkpointing": True},
    "float32, adapters": {"precision": "float32", "lora": LoRAConfig(rank=16)},
}
CHOSEN = [("1.7B", "adapters"), ("8B", "recomputation")]
"""Each takes some seconds, so the other combinations of a size and a path are for the night."""


@pytest.mark.parametrize(
    ("shape", "path"),
    [
        pytest.param(shape, path, marks=[] if (shape, path) in CHOSEN else [pytest.mark.matrix])
        for shape in ("0.6B", "1.7B", "8B")
        for path in PATHS
    ],
)
def test_a_step_takes_what_the_preflight_says(shape: str, path: str, tmp_path: Path) -> None:
    policy = PolicyConfig(**{"precision": "bfloat16", **PATHS[path]})
    with adapters_in_place():
        said, found = compare(shape, policy, tmp_path, packed=shape != "8B" or "mask" in path)
    assert said / found == pytest.approx(1.0, abs=TOLERANCE), f"{said / 2**30:.2f} GiB, {found / 2**30:.2f} GiB traced"


def test_the_preflight_knows_what_a_mask_takes(tmp_path: Path) -> None:
    """Packed rows by a kernel with a mask, against one without."""
    of_kernels = []
    for kernel in ("sdpa", "varlen"):
        policy = PolicyConfig(precision="bfloat16", attention=kernel)
        said, found = compare("0.6B", policy, tmp_path, packed=True)
        assert said / found == pytest.approx(1.0, abs=TOLERANCE), f"{kernel}: {said / found:.3f}"
        of_kernels.append((said, found))
    (said, found), (said_without, found_without) = of_kernels
    assert said - said_without == pytest.approx(found - found_without, rel=MASK_TOLERANCE)
