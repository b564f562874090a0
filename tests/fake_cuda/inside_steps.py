"""Run by test_fake_cuda.py in a process with the fake device: steps of SFT and RL as a GPU gets them.

Without it a step could leave a tensor on the CPU, make the host wait for the GPU, or build a mask that no kernel needs;
all three would show on a GPU alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from rollouts_core import PyTorchTrainingBackend, Sample, TrainBatch, build_batch, create_pytorch_backend
from rollouts_core.algorithms.loss import LossFn, call_loss, create_cross_entropy_loss, create_policy_loss
from rollouts_core.backends import pytorch
from rollouts_core.backends.snapshot import HostSnapshot
from rollouts_core.batch import with_step_totals
from rollouts_core.config import LoRAConfig, OptimConfig, PolicyConfig, RLTrainingConfig
from rollouts_core.model import policy as policy_module
from rollouts_core.rl_batch import prepare_grpo_batch
from rollouts_core.rollout.rollout_batch import convert_to_batch
from rollouts_core.update import update_policy
from tests.fake_cuda.device import Trace, fake_cuda, squares
from tests.fake_cuda.models import adapters_in_place, models_of

NUM_MICRO_BATCHES = 3
LENGTH = 48


@pytest.fixture
def trace() -> Iterator[Trace]:
    with fake_cuda() as device:
        yield device


def create_backend(
    folder: Path, *, shape: str = "small", loss_fn: LossFn | None = None, **policy: Any
) -> PyTorchTrainingBackend:  # Any: settings of the policy
    with models_of(shape, folder) as model, adapters_in_place():
        return create_pytorch_backend(
            model, OptimConfig(), loss_fn or create_cross_entropy_loss(), num_steps=10, policy=PolicyConfig(**policy)
        )


def sft_batches(*, packed: bool) -> list[TrainBatch]:
    length = LENGTH // 2 if packed else LENGTH
    samples = [Sample(tokens=[5] * (length + 1), loss_mask=[0.0] + [1.0] * length) for _ in range(2 if packed else 1)]
    with _disable_current_modes():
        batches = [build_batch([samples, samples], pad_id=0) for _ in range(NUM_MICRO_BATCHES)]
        return with_step_totals(batches, samples * 2 * NUM_MICRO_BATCHES)


def grpo_batches(config: RLTrainingConfig) -> list[TrainBatch]:
    samples = [
        Sample(
            tokens=[5] * LENGTH,
            loss_mask=[0.0] * 16 + [1.0] * (LENGTH - 16),
            rollout_log_probs=[-1.0] * LENGTH,
            reward=float(number % 2),
            group_index=number // 4,
            index=number % 4,
        )
        for number in range(4 * NUM_MICRO_BATCHES)
    ]
    batch = convert_to_batch(samples)
    with _disable_current_modes():
        batches = prepare_grpo_batch(batch, batch.rewards, config, pad_id=0)
    assert len(batches) == NUM_MICRO_BATCHES
    return batches


def take_step(backend: PyTorchTrainingBackend, batches: Sequence[TrainBatch]) -> dict[str, float]:
    return asyncio.run(update_policy(backend, batches))


POLICIES: dict[str, dict[str, Any]] = {  # Any: settings of the policy
    "float32": {},
    "bfloat16": {"precision": "bfloat16"},
    "recomputed": {"precision": "bfloat16", "activation_checkpointing": True},
    "adapters": {"precision": "bfloat16", "lora": LoRAConfig(rank=4)},
}
RL = RLTrainingConfig(max_micro_batch_tokens=160)


# What a step may make the host wait for, at most: to be lowered with each wait that is taken out.
READS_OF_STEP = 1
"""The norm of the gradient."""
READS_OF_MICRO_BATCH = {"sft": 1, "sft unpacked": 2, "rl": 6}
"""The loss, and the metrics of RL; for rows of one sample transformers looks whether they are packed."""
MASKS_OF_MICRO_BATCH = 3
"""Indexing by the mask of scored positions: of hidden states, forward and backward, and of targets."""
UPLOADS_OF_MICRO_BATCH = 8
"""The tensors of a batch, which are copied from memory that is not pinned."""


def hold_waits(trace: Trace, kind: str) -> None:
    allowed = READS_OF_STEP + NUM_MICRO_BATCHES * (READS_OF_MICRO_BATCH[kind] + MASKS_OF_MICRO_BATCH)
    assert trace.waits.total() <= allowed, f"at most {allowed}: {dict(trace.waits)}"
    assert trace.uploads <= NUM_MICRO_BATCHES * UPLOADS_OF_MICRO_BATCH


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_a_step_of_sft_stays_on_the_device(trace: Trace, tmp_path: Path, policy: dict[str, Any], packed: bool) -> None:
    backend = create_backend(tmp_path, **policy)
    assert backend.device.type == "cuda"
    trace.start_peak()
    assert "grad_norm" in take_step(backend, sft_batches(packed=packed))
    hold_waits(trace, "sft" if packed else "sft unpacked")
    assert {weight.device.type for weight in backend.model.parameters()} == {"cuda"}


@pytest.mark.parametrize("policy", [POLICIES["float32"], POLICIES["bfloat16"]])
def test_a_step_of_rl_stays_on_the_device(trace: Trace, tmp_path: Path, policy: dict[str, Any]) -> None:
    backend = create_backend(tmp_path, loss_fn=create_policy_loss(RL.loss), **policy)
    trace.start_peak()
    assert "grad_norm" in take_step(backend, grpo_batches(RL))
    hold_waits(trace, "rl")


def test_scores_are_copied_to_the_host_once(trace: Trace, tmp_path: Path) -> None:
    backend = create_backend(tmp_path)
    trace.start_peak()
    scores = asyncio.run(backend.score(sft_batches(packed=True)[0]).result())
    assert scores.logprobs_BT.device.type == "cpu"
    assert trace.waits["copy to the host"] == 1


def test_a_checkpoint_is_copied_to_pinned_memory_without_a_wait(trace: Trace, tmp_path: Path) -> None:
    backend = create_backend(tmp_path)
    trace.start_peak()
    # Of each shape one: fake tensors have no addresses, by which the copy finds what shares memory.
    weights = {str(value.shape): value.detach() for value in backend.model.parameters()}
    copied = HostSnapshot().take(weights)
    assert {value.device.type for value in copied.values()} == {"cpu"}
    assert trace.num_pinned == len(copied) > 0
    assert not trace.waits


def test_the_kernels_of_the_cpu_are_not_taken(trace: Trace, tmp_path: Path) -> None:
    model = create_backend(tmp_path, precision="bfloat16").model
    assert model.config._attn_implementation == "sdpa"
    assert {type(module).__name__ for module in model.modules() if "Norm" in type(module).__name__} == {"Qwen3RMSNorm"}
    assert all(module.forward.__func__ is type(module).forward for module in model.modules())


def test_rows_of_one_sample_need_no_mask(trace: Trace, tmp_path: Path) -> None:
    backend = create_backend(tmp_path, precision="bfloat16")
    trace.start_peak()
    take_step(backend, sft_batches(packed=False))
    assert squares(trace, LENGTH) == []


# --- mutants: each of the faults that the tests above are for, made on purpose


def test_a_read_in_the_loop_is_found(trace: Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_loss(*arguments: Any) -> Any:
        loss, metrics = call_loss(*arguments)
        loss.item()
        return loss, metrics

    monkeypatch.setattr(pytorch, "call_loss", read_loss)
    backend = create_backend(tmp_path)
    trace.start_peak()
    take_step(backend, sft_batches(packed=True))
    with pytest.raises(AssertionError, match="at most"):
        hold_waits(trace, "sft")


def test_a_tensor_on_the_cpu_is_found(trace: Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def scatter_on_cpu(values_N: torch.Tensor, at_BT: torch.Tensor) -> torch.Tensor:
        return torch.zeros(at_BT.shape, device="cpu").masked_scatter(at_BT, values_N)

    monkeypatch.setattr(policy_module, "_scatter", scatter_on_cpu)
    backend = create_backend(tmp_path)
    with pytest.raises(RuntimeError, match="same device"):
        take_step(backend, sft_batches(packed=True))


def test_a_dense_mask_is_found(trace: Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compute = policy_module.compute_hidden_states

    def compute_with_mask(hf_model: Any, batch: TrainBatch) -> torch.Tensor:
        return compute(hf_model, replace(batch, is_packed=True))

    monkeypatch.setattr(policy_module, "compute_hidden_states", compute_with_mask)
    backend = create_backend(tmp_path, precision="bfloat16")
    trace.start_peak()
    take_step(backend, sft_batches(packed=False))
    assert squares(trace, LENGTH) != []
