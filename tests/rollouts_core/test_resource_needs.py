"""Pins that what a run is said to need at least is what its training really holds.

Without it a machine could be rented that cannot hold the model, or a good one be refused.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch

from rollouts_core.algorithms.loss import create_cross_entropy_loss
from rollouts_core.backends.pytorch import create_pytorch_backend
from rollouts_core.batch import build_batch
from rollouts_core.config import Config, LoRAConfig, ModelConfig, OptimConfig, PolicyConfig
from rollouts_core.model_size import ModelSize, find_model_size
from rollouts_core.resource_needs import (
    checkpoint_disk_bytes,
    least_memory_bytes,
    least_training_bytes,
)
from tests.rollouts_core.make import make_random_samples

BILLION = 10**9


def num_bytes(tensors: Iterable[torch.Tensor | None]) -> int:
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


@pytest.mark.parametrize("with_reference", [False, True])
def test_the_least_memory_is_what_weights_gradients_and_moments_take(
    base_model: ModelConfig, with_reference: bool
) -> None:
    backend = create_pytorch_backend(
        base_model, OptimConfig(), create_cross_entropy_loss(), num_steps=1, with_reference=with_reference, device="cpu"
    )
    batch = build_batch([[sample] for sample in make_random_samples(2)], pad_id=0)
    backend.forward_backward(batch)
    held = num_bytes(backend.model.parameters()) + num_bytes(weight.grad for weight in backend.model.parameters())
    backend.optim_step()
    moments = [value for state in backend.optimizer.state.values() for value in state.values() if value.ndim]
    held += num_bytes(moments)
    if backend.reference is not None:
        held += num_bytes(backend.reference.hf_model.parameters())
    num_parameters = find_model_size(base_model).num_parameters
    assert num_parameters == sum(weight.numel() for weight in backend.model.parameters())
    needed = least_training_bytes(num_parameters, PolicyConfig(), with_reference=with_reference, num_processes=1)
    assert needed == held


def test_adapters_spare_the_optimizer_and_processes_share() -> None:
    lora = PolicyConfig(precision="bfloat16", lora=LoRAConfig(rank=8))
    assert least_training_bytes(8 * BILLION, lora, with_reference=True, num_processes=1) == 16 * BILLION
    full = least_training_bytes(8 * BILLION, PolicyConfig(), with_reference=False, num_processes=8)
    assert full == 16 * BILLION


def test_a_run_needs_what_its_hungriest_stage_does(base_model: ModelConfig) -> None:
    size = find_model_size(base_model)
    settings = {
        "mode": "sft+rl",
        "model": {"path": base_model.path},
        "data": dict.fromkeys(("sft", "prompts", "selection", "heldout"), "x.jsonl"),
        "training": {
            "sft": {"num_steps": 30, "checkpoint_every": 10, "keep_checkpoints": 1, "policy": {"lora": {"rank": 4}}},
            "rl": {"num_steps": 5, "checkpoint_every": 5, "loss": {"kl_coef": 0.1}},
        },
    }
    config = Config.model_validate(settings)
    assert config.training.rl.with_reference
    assert least_memory_bytes(config, size) == size.num_parameters * 20
    kept = config.training.sft.keep_checkpoints + config.training.sft.keep_best
    assert checkpoint_disk_bytes(config, size) == size.num_parameters * (4 * kept + 12)
    assert least_memory_bytes(config, ModelSize()) == checkpoint_disk_bytes(config, ModelSize()) == 0
