"""The models, batches and steps that the checks share, made from configurations and seeds.

Not here: what is checked about them.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

from inputs import MEAN_LENGTH, PAD_ID, SIZES, ModelSize, as_samples, make_documents, write_model
from torch import Tensor

from gpu_parts.checking import Place, hold
from rollouts_core import PyTorchTrainingBackend, Sample, TrainBatch, build_batch, create_pytorch_backend
from rollouts_core.algorithms.loss import LossFn, Metrics, create_cross_entropy_loss, create_policy_loss
from rollouts_core.backends.protocol import TrainingBackend
from rollouts_core.batch import with_step_totals
from rollouts_core.config import ModelConfig, OptimConfig, PolicyConfig, RLTrainingConfig
from rollouts_core.data.packing import pack_rows
from rollouts_core.optimizer_step import update_policy
from rollouts_core.rl_batch import prepare_grpo_batch
from rollouts_core.rollout.rollout_batch import convert_to_batch

VOCABULARY = 512
SMALL = ModelSize(
    vocab_size=VOCABULARY, hidden_size=256, num_layers=4, num_heads=4, num_kv_heads=2, intermediate_size=768
)
"""Small enough for a CPU to compute the same; its heads of 64 suit every attention kernel."""
TINY = ModelSize(vocab_size=VOCABULARY, hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=1, intermediate_size=64)
"""For rehearsals."""
ROW_LENGTH = 256
OPTIM = OptimConfig(lr=1e-3, schedule="constant", weight_decay=0.1, max_grad_norm=1.0)
RL = RLTrainingConfig(max_micro_batch_tokens=1024)
GROUPS, GROUP_SIZE = 4, 4


def write_small_model(place: Place) -> ModelConfig:
    """A small model with random weights, and its tokenizer."""
    return ModelConfig(path=str(write_model(place.folder / "small", place.choose(SMALL, TINY))))


def write_sized_model(place: Place, name: str) -> ModelConfig:
    """A model of SIZES with random weights, once for all checks of a part."""
    folder = place.models / name
    if not folder.exists():
        write_model(folder, SIZES[name], device=place.device)
    return ModelConfig(path=str(folder))


def packed_rows(*, num_rows: int, row_length: int, vocab_size: int = VOCABULARY) -> list[TrainBatch]:
    """A step of one micro-batch whose rows are full of documents."""
    documents = make_documents(vocab_size, count=4 * num_rows * row_length // MEAN_LENGTH)
    rows = list(itertools.islice(pack_rows(as_samples(documents), max_length=row_length + 1), num_rows))
    batch = build_batch(rows, pad_id=PAD_ID)
    return with_step_totals([batch], [sample for row in rows for sample in row])


def create_backend(
    model: ModelConfig, device: str, *, loss_fn: LossFn | None = None, **policy: Any
) -> PyTorchTrainingBackend:  # Any: settings of the policy
    """A backend of one process with these settings of its policy."""
    return create_pytorch_backend(
        model,
        OPTIM,
        loss_fn or create_cross_entropy_loss(),
        num_steps=100,
        policy=PolicyConfig(**policy),
        device=device,
    )


def create_rl_backend(model: ModelConfig, device: str, **policy: Any) -> PyTorchTrainingBackend:  # Any: as above
    """The same with the loss of RL."""
    return create_backend(model, device, loss_fn=create_policy_loss(RL.loss), **policy)


def sft_step(
    seed: int, *, packed: bool = True, num_documents: int = 12, vocab_size: int = VOCABULARY
) -> list[TrainBatch]:
    """Two micro-batches of one step over the same documents, in packed rows or a row each."""
    samples = as_samples(make_documents(vocab_size, count=num_documents, seed=seed))
    rows = list(pack_rows(samples, max_length=ROW_LENGTH)) if packed else [[sample] for sample in samples]
    half = (len(rows) + 1) // 2
    batches = [build_batch(part, pad_id=PAD_ID) for part in (rows[:half], rows[half:]) if part]
    return with_step_totals(batches, samples)


def graded_groups(
    seed: int,
    *,
    groups: int = GROUPS,
    size: int = GROUP_SIZE,
    prompt: int = 24,
    completion: int = 40,
    vocab_size: int = VOCABULARY,
) -> list[Sample]:
    """Groups of completions of one prompt each, with log-probs and rewards that differ within each group."""
    numbers = random.Random(seed)
    samples = []
    for group in range(groups):
        prompt_ids = [numbers.randrange(2, vocab_size) for _ in range(prompt)]
        for index in range(size):
            num_new = numbers.randint(completion // 2, completion)
            tokens = prompt_ids + [numbers.randrange(2, vocab_size) for _ in range(num_new)]
            samples.append(
                Sample(
                    tokens=tokens,
                    loss_mask=[0.0] * prompt + [1.0] * num_new,
                    rollout_log_probs=[0.0] * prompt + [-numbers.uniform(4.0, 7.0) for _ in range(num_new)],
                    reward=numbers.random(),
                    group_index=group,
                    index=index,
                )
            )
    return samples


def grpo_step(seed: int, config: RLTrainingConfig = RL, **sizes: int) -> list[TrainBatch]:
    """The micro-batches of one GRPO update."""
    batch = convert_to_batch(graded_groups(seed, **sizes))
    return prepare_grpo_batch(batch, batch.rewards, config, pad_id=PAD_ID)


def take_step(backend: TrainingBackend, micro_batches: Sequence[TrainBatch]) -> Metrics:
    """One optimizer step, as the loops of SFT and RL take it."""
    return asyncio.run(update_policy(backend, micro_batches))


def add_gradients(backend: TrainingBackend, micro_batches: Sequence[TrainBatch]) -> float:
    """The loss of a step; its gradient stays in the parameters."""
    return sum(asyncio.run(backend.forward_backward(batch).result())["loss"] for batch in micro_batches)


def gradients_of(backend: PyTorchTrainingBackend) -> dict[str, Tensor]:
    """The gradients by name, in float64 on the CPU; they are cleared."""
    named = backend.model.named_parameters()
    found = {name: weight.grad.double().cpu() for name, weight in named if weight.grad is not None}
    backend.optimizer.zero_grad(set_to_none=True)
    return found


def largest_difference(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> tuple[float, str]:
    """The largest |difference| of a tensor as a share of its norm, and which tensor it is; NaN if any share is."""
    hold(found.keys() == expected.keys(), f"the tensors differ: {sorted(found.keys() ^ expected.keys())[:4]}")
    shares = {
        name: float((found[name] - value).norm() / value.norm().clamp_min(1e-12)) for name, value in expected.items()
    }
    worst = max(shares, key=lambda name: (math.isnan(shares[name]), shares[name]))  # max alone passes over NaN
    return shares[worst], worst


def weights_of(backend: TrainingBackend) -> dict[str, Tensor]:
    """Copies of the weights in float64 on the CPU."""
    weights = asyncio.run(backend.get_weights().result())
    return {name: value.double().cpu().clone() for name, value in weights.items()}


def with_settings(config: RLTrainingConfig, **changes: Any) -> RLTrainingConfig:  # Any: settings
    """The settings with some changed."""
    return config.model_copy(update=changes)
