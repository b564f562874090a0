"""The RL loop against the embedded engine: what it trains on, and that a stop changes nothing.

Without these tests the averages of a step could depend on how it was cut into micro-batches, and a resumed run could
train on other samples than the run that it continues.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedTokenizerBase

from rollouts_core.checkpoint import step_directory
from rollouts_core.config import (
    ModelConfig,
    RLOptimConfig,
    RLTrainingConfig,
    RolloutConfig,
    SamplingConfig,
)
from rollouts_core.data_buffer import DataBuffer
from rollouts_core.dataset import load_prompts_from_jsonl
from rollouts_core.engines import PublishTarget
from rollouts_core.loss import Metrics, create_policy_loss
from rollouts_core.pytorch_backend import PyTorchTrainingBackend, create_pytorch_backend
from rollouts_core.rl import run_rl_training
from rollouts_core.rl_batch import prepare_grpo_batch
from rollouts_core.rollout import AsyncRolloutManager, convert_to_batch, create_engine_generate_fn
from rollouts_core.types import RolloutBatch, Sample
from tests.rollouts_core.make import make_random_samples
from tests.rollouts_core.served_engine import served_engine

TRAINING = RLTrainingConfig(num_steps=4, checkpoint_every=2, optim=RLOptimConfig(lr=1e-3, schedule="constant"))


def share_of_even_digits(sample: Sample) -> float:
    """A reward that differs within the groups of an untrained model."""
    return sum(character in "02468" for character in sample.response) / 8


ROLLOUT = RolloutConfig(
    batch_size=3, n_samples_per_prompt=4, sampling=SamplingConfig(max_new_tokens=8), reward_fn=share_of_even_digits
)


def train(
    base_model: ModelConfig, tokenizer: PreTrainedTokenizerBase, run_dir: Path, *, num_steps: int
) -> tuple[PyTorchTrainingBackend, list[Metrics], list[RolloutBatch]]:
    """Train in `run_dir` up to `num_steps`, going on from what lies there, with an engine that starts anew."""
    batches: list[RolloutBatch] = []
    config = TRAINING.model_copy(update={"num_steps": num_steps})
    backend = create_pytorch_backend(
        base_model, config.optim, create_policy_loss(config.loss), num_steps=TRAINING.num_steps
    )
    prompts = load_prompts_from_jsonl(Path(base_model.path).parent / "prompts.jsonl")
    target = PublishTarget(
        weights_dir=run_dir / "weights", model_config=Path(base_model.path) / "config.json", prefix="test"
    )
    with served_engine(Path(base_model.path)) as (engine, _):
        data_buffer = DataBuffer(prompts)
        generate_fn = create_engine_generate_fn([engine], tokenizer, ROLLOUT)
        manager = AsyncRolloutManager(data_buffer, ROLLOUT, generate_fn=generate_fn)
        history = asyncio.run(
            run_rl_training(
                backend,
                data_buffer,
                manager,
                [engine],
                config,
                target=target,
                checkpoint_dir=run_dir / "checkpoints",
                on_batch=lambda step, batch: batches.append(batch),
            )
        )
    return backend, history, batches


def without_times(history: list[Metrics]) -> list[Metrics]:
    return [{name: value for name, value in metrics.items() if not name.endswith("_s")} for metrics in history]


def test_a_run_that_was_stopped_equals_one_that_was_not_bit_for_bit(
    base_model: ModelConfig, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    _, straight, straight_batches = train(base_model, tokenizer, tmp_path / "straight", num_steps=4)
    _, first, first_batches = train(base_model, tokenizer, tmp_path / "stopped", num_steps=2)
    _, second, second_batches = train(base_model, tokenizer, tmp_path / "stopped", num_steps=4)
    assert [b.to_json() for b in first_batches + second_batches] == [b.to_json() for b in straight_batches]
    assert without_times(first + second) == without_times(straight)
    for name in ("model.safetensors", "trainer/tensors.safetensors"):
        ours = load_file(step_directory(tmp_path / "stopped/checkpoints", 4) / name)
        theirs = load_file(step_directory(tmp_path / "straight/checkpoints", 4) / name)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_every_sample_of_a_step_comes_from_the_weights_of_the_step_before(
    base_model: ModelConfig, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    backend, history, batches = train(base_model, tokenizer, tmp_path, num_steps=4)
    versions = [{span.version for s in batch.samples for span in s.policy_versions} for batch in batches]
    assert versions == [{0}, {1}, {2}, {3}]
    assert backend.weight_version == 4
    assert all(abs(metrics["kl_rollout_policy"]) < 1e-6 for metrics in history)


def test_only_the_last_published_versions_stay_on_disk(
    base_model: ModelConfig, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    train(base_model, tokenizer, tmp_path, num_steps=4)
    assert sorted(path.name for path in (tmp_path / "weights").iterdir()) == ["test-3", "test-4"]


@pytest.mark.parametrize("max_tokens", [12, 40, 10_000])
def test_totals_of_a_step_do_not_depend_on_its_micro_batches(max_tokens: int) -> None:
    batch = convert_to_batch(graded_samples())
    config = TRAINING.model_copy(update={"max_micro_batch_tokens": max_tokens})
    micro_batches = prepare_grpo_batch(batch, batch.rewards, config)
    num_trained = sum(sum(sample.loss_mask[1:]) for sample in batch.samples)
    assert {m.num_loss_tokens for m in micro_batches} == {num_trained}
    assert {m.num_samples for m in micro_batches} == {len(batch.samples)}


def test_groups_without_signal_give_no_rows_but_count_in_the_average() -> None:
    samples = graded_samples()
    constant = [s if s.group_index else replace(s, reward=1.0) for s in samples]
    batch = convert_to_batch(constant)
    micro_batches = prepare_grpo_batch(batch, batch.rewards, TRAINING)
    assert sum(len(m.inputs_BT) for m in micro_batches) == 8
    assert micro_batches[0].num_samples == 12


def test_a_step_without_any_signal_has_no_batch() -> None:
    batch = convert_to_batch([replace(s, reward=0.0) for s in graded_samples()])
    assert prepare_grpo_batch(batch, batch.rewards, TRAINING) == []


def graded_samples() -> list[Sample]:
    """Three groups of four samples whose rewards differ within each group."""
    return [
        replace(sample, group_index=i // 4, index=i % 4, reward=float(i % 2))
        for i, sample in enumerate(make_random_samples(12))
    ]


def test_a_batch_of_rollouts_survives_json() -> None:
    batch = convert_to_batch(graded_samples(), metadata={"epoch_id": 2})
    assert json.loads(json.dumps(batch.to_json()))["metadata"]["epoch_id"] == 2
