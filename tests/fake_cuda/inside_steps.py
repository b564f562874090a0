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
from rollouts_core import batch as batch_module
from rollouts_core.algorithms.loss import LossFn, call_loss, create_cross_entropy_loss, create_policy_loss
from rollouts_core.backends import pytorch
from rollouts_core.backends.snapshot import HostSnapshot
from rollouts_core.batch import with_step_totals
from rollouts_core.config import LoRAConfig, LossConfig, OptimConfig, PolicyConfig, RLTrainingConfig
from rollouts_core.model import policy as policy_module
from rollouts_core.model.varlen import SDPA_BY_ROWS, VARLEN
from rollouts_core.optimizer_step import update_policy
from rollouts_core.rl_batch import prepare_grpo_batch
from rollouts_core.rollout.rollout_batch import convert_to_batch
from tests.fake_cuda.device import Trace, fake_cuda, squares
from tests.fake_cuda.models import adapters_in_place, models_of

NUM_MICRO_BATCHES = 3
LENGTH = 48


@pytest.fixture
def trace() -> Iterator[Trace]:
    with fake_cuda() as device:
        yield device


def create_backend(
    folder: Path,
    *,
    loss_fn: LossFn | None = None,
    everything: bool = False,
    with_reference: bool = False,
    **policy: Any,
) -> PyTorchTrainingBackend:  # Any: settings of the policy
    """A backend of a small model; with `everything` it has a value head and gives entropies."""
    with models_of("small", folder) as model, adapters_in_place():
        return create_pytorch_backend(
            model,
            OptimConfig(),
            loss_fn or create_cross_entropy_loss(),
            num_steps=10,
            policy=PolicyConfig(**policy),
            with_entropies=everything,
            with_values=everything,
            with_reference=with_reference,
            within_tokenizer=everything,
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
SCORES = ("old_logprobs_BT", "ref_logprobs_BT", "old_values_BT", "returns_BT")
"""What a batch of RL may have beside rewards."""
RL = RLTrainingConfig(max_micro_batch_tokens=160)


READS_OF_STEP = 1
"""What the host waits for: all numbers of a step in one transfer, after the whole step was asked for."""


def hold_waits(trace: Trace) -> None:
    assert trace.waits.total() <= READS_OF_STEP, f"at most {READS_OF_STEP}: {dict(trace.waits)}"
    assert trace.uploads == 0, "copies to the device take pinned memory, and the host does not wait for them"


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_a_step_of_sft_stays_on_the_device(trace: Trace, tmp_path: Path, policy: dict[str, Any], packed: bool) -> None:
    backend = create_backend(tmp_path, **policy)
    assert backend.device.type == "cuda"
    trace.start_peak()
    assert "grad_norm" in take_step(backend, sft_batches(packed=packed))
    hold_waits(trace)
    assert {weight.device.type for weight in backend.model.parameters()} == {"cuda"}


@pytest.mark.parametrize("policy", [POLICIES["float32"], POLICIES["bfloat16"]])
def test_a_step_of_rl_stays_on_the_device(trace: Trace, tmp_path: Path, policy: dict[str, Any]) -> None:
    backend = create_backend(tmp_path, loss_fn=create_policy_loss(RL.loss), **policy)
    trace.start_peak()
    assert "grad_norm" in take_step(backend, grpo_batches(RL))
    hold_waits(trace)


LOSSES: dict[str, dict[str, Any]] = {  # Any: settings of the loss
    "gspo": {"objective": "gspo", "aggregation": "sequence_mean", "ratio_base": "old"},
    "dppo": {"objective": "dppo", "drift_mask": 0.1, "ratio_penalty": 0.1, "kl_coef": 0.1, "kl_weight": "ratio"},
    "cispo": {
        "objective": "cispo",
        "ratio_base": "old",
        "mismatch": {"weight": "sequence", "mask": "geometric", "mask_low": 0.5},
    },
    "ppo": {"dual_clip": 3.0, "entropy_coef": 0.1, "kl_coef": 0.1, "kl_weight": "on_policy"},
}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_a_step_of_each_loss_stays_on_the_device(trace: Trace, tmp_path: Path, loss: dict[str, Any]) -> None:
    config = LossConfig.model_validate(loss)
    backend = create_backend(tmp_path, loss_fn=create_policy_loss(config), everything=True)
    scored = []
    for batch in grpo_batches(RL):
        with _disable_current_modes():
            per_token: dict[str, Any] = {name: torch.zeros(batch.inputs_BT.shape) for name in SCORES}
        scored.append(replace(batch, **per_token))
    trace.start_peak()
    assert "value_loss" in take_step(backend, scored)
    hold_waits(trace)


@pytest.mark.parametrize("reference", [False, True])
def test_scores_are_copied_to_the_host_once(trace: Trace, tmp_path: Path, reference: bool) -> None:
    backend = create_backend(tmp_path, with_reference=reference)
    trace.start_peak()
    scores = asyncio.run(backend.score(sft_batches(packed=True)[0], reference=reference).result())
    assert scores.logprobs_BT.device.type == "cpu"
    assert trace.waits == {"copy to the host": 1} and trace.uploads == 0


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
    model = create_backend(tmp_path, precision="bfloat16", attention="sdpa").model
    assert {type(module).__name__ for module in model.modules() if "Norm" in type(module).__name__} == {"Qwen3RMSNorm"}
    assert all(module.forward.__func__ is type(module).forward for module in model.modules())


@pytest.mark.parametrize(
    ("capability", "policy", "kernel"),
    [
        ((8, 0), {"precision": "bfloat16"}, VARLEN),
        ((9, 0), {"precision": "bfloat16"}, VARLEN),
        ((7, 5), {"precision": "bfloat16"}, SDPA_BY_ROWS),
        ((9, 0), {"precision": "bfloat16", "attention": "sdpa"}, SDPA_BY_ROWS),
        ((9, 0), {}, SDPA_BY_ROWS),
    ],
)
@pytest.mark.parametrize("packed", [True, False])
def test_the_device_and_the_precision_choose_the_kernel(
    tmp_path: Path, capability: tuple[int, int], policy: dict[str, Any], kernel: str, packed: bool
) -> None:
    """Only packed rows have a mask of their length squared, and only with sdpa."""
    with fake_cuda(capability=capability) as trace:
        backend = create_backend(tmp_path, **policy)
        assert backend.model.config._attn_implementation == kernel
        trace.start_peak()
        take_step(backend, sft_batches(packed=packed))
    assert bool(squares(trace, LENGTH)) == (packed and kernel == SDPA_BY_ROWS)


# --- mutants: each of the faults that the tests above are for, made on purpose


def hold_found(trace: Trace, folder: Path, sentence: str) -> None:
    """Take a step of SFT, which must fail `hold_waits` with this sentence."""
    backend = create_backend(folder)
    trace.start_peak()
    take_step(backend, sft_batches(packed=True))
    with pytest.raises(AssertionError, match=sentence):
        hold_waits(trace)


def test_a_read_in_the_loop_is_found(trace: Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_loss(*arguments: Any) -> Any:
        loss, metrics = call_loss(*arguments)
        loss.item()
        return loss, metrics

    monkeypatch.setattr(pytorch, "call_loss", read_loss)
    hold_found(trace, tmp_path, "at most")


def test_a_tensor_on_the_cpu_is_found(trace: Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def scatter_on_cpu(values_N: torch.Tensor, batch: TrainBatch) -> torch.Tensor:
        flat = torch.zeros(batch.inputs_BT.numel(), device="cpu")
        return flat.index_copy(0, batch.layout.scored_N, values_N).view(batch.inputs_BT.shape)

    monkeypatch.setattr(policy_module, "_scatter", scatter_on_cpu)
    backend = create_backend(tmp_path)
    with pytest.raises(RuntimeError, match="same device"):
        take_step(backend, sft_batches(packed=True))


def test_an_index_of_a_mask_is_found(trace: Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def scatter_by_mask(values_N: torch.Tensor, batch: TrainBatch) -> torch.Tensor:
        scattered_BT = torch.zeros(batch.inputs_BT.shape, device=values_N.device)
        return scattered_BT.index_put((batch.loss_mask_BT > 0,), values_N)

    monkeypatch.setattr(policy_module, "_scatter", scatter_by_mask)
    hold_found(trace, tmp_path, "by a mask")


@pytest.mark.parametrize("is_pinned", [True, False])
def test_a_copy_that_waits_is_found(
    trace: Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_pinned: bool
) -> None:
    def copy(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        return tensor.pin_memory().to(device) if is_pinned else tensor.to(device, non_blocking=True)

    monkeypatch.setattr(batch_module, "to_device", copy)
    hold_found(trace, tmp_path, "pinned memory")


@pytest.mark.parametrize("packed", [True, False])
def test_a_dense_mask_is_found(trace: Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packed: bool) -> None:
    compute = policy_module.compute_hidden_states

    def compute_with_mask(hf_model: Any, batch: TrainBatch) -> torch.Tensor:
        masked, layout = replace(batch, is_packed=True), replace(batch.layout, shares_prompts=True)
        object.__setattr__(masked, "_layout", layout)
        return compute(hf_model, masked)

    monkeypatch.setattr(policy_module, "compute_hidden_states", compute_with_mask)
    backend = create_backend(tmp_path, precision="bfloat16")
    trace.start_peak()
    take_step(backend, sft_batches(packed=packed))
    assert squares(trace, LENGTH) != []
