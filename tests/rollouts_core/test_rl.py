"""The RL loop against the embedded engine: what it trains on, and that a stop changes nothing.

Without these tests the averages of a step could depend on how it was cut into micro-batches, and a resumed run could
train on other samples than the run that it continues.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rollouts_core.algorithms.loss import LossFn, LossMetrics, Metrics, TokenScores, create_policy_loss, policy_loss
from rollouts_core.backends.pytorch import PyTorchTrainingBackend, create_pytorch_backend
from rollouts_core.batch import TrainBatch
from rollouts_core.checkpoint import list_checkpoints, load_manifest, step_directory
from rollouts_core.config import (
    ModelConfig,
    MultiTurnConfig,
    RLOptimConfig,
    RLTrainingConfig,
    RolloutConfig,
    SamplingConfig,
)
from rollouts_core.data.data_buffer import DataBuffer
from rollouts_core.data.dataset import load_prompts_from_jsonl
from rollouts_core.engines import Completion, GenerationRequest, PublishTarget, SGLangEngine
from rollouts_core.engines.client import EngineClient
from rollouts_core.environments import Conversation, Reply
from rollouts_core.errors import CheckpointError, ConfigError, DataError, NonFiniteError, RewardError
from rollouts_core.metrics import EventLog
from rollouts_core.model.loading import load_hf_model
from rollouts_core.rewards import RewardFn
from rollouts_core.rl import check_logprobs, describe_rollouts, run_rl_training, score_rollouts, train_on_rollouts
from rollouts_core.rl_batch import prepare_grpo_batch
from rollouts_core.rollout.generate import create_engine_generate_fn
from rollouts_core.rollout.manager import AsyncRolloutManager
from rollouts_core.rollout.rollout_batch import convert_to_batch
from rollouts_core.types import RolloutBatch, Sample
from tests.rollouts_core.histories import without_times
from tests.rollouts_core.make import make_prompts, make_random_samples
from tests.rollouts_core.served_engine import served_engine

TRAINING = RLTrainingConfig(num_steps=4, checkpoint_every=2, optim=RLOptimConfig(lr=1e-3, schedule="constant"))


def share_of_even_digits(sample: Sample) -> float:
    """A reward that differs within the groups of an untrained model."""
    return sum(character in "02468" for character in sample.response) / 8


ROLLOUT = RolloutConfig(
    batch_size=3, n_samples_per_prompt=4, sampling=SamplingConfig(max_new_tokens=8), reward_fn=share_of_even_digits
)


def train(
    base_model: ModelConfig,
    tokenizer: PreTrainedTokenizerBase,
    run_dir: Path,
    *,
    num_steps: int,
    training: RLTrainingConfig = TRAINING,
    rollout: RolloutConfig = ROLLOUT,
) -> tuple[PyTorchTrainingBackend, list[Metrics], list[RolloutBatch]]:
    """Train in `run_dir` up to `num_steps`, going on from what lies there, with an engine that starts anew."""
    batches: list[RolloutBatch] = []
    config = training.model_copy(update={"num_steps": num_steps})
    backend = make_backend(base_model, training)
    prompts = load_prompts_from_jsonl(Path(base_model.path).parent / "prompts.jsonl")
    target = PublishTarget(
        weights_dir=run_dir / "weights", model_config=Path(base_model.path) / "config.json", prefix="test"
    )
    with served_engine(Path(base_model.path)) as (engine, _):
        data_buffer = DataBuffer(prompts)
        generate_fn = create_engine_generate_fn([engine], tokenizer, rollout)
        manager = AsyncRolloutManager(data_buffer, rollout, generate_fn=generate_fn)
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


def make_backend(base_model: ModelConfig, config: RLTrainingConfig) -> PyTorchTrainingBackend:
    """What the settings need of a backend."""
    return create_pytorch_backend(
        base_model,
        config.optim,
        create_policy_loss(config.loss),
        num_steps=config.num_optim_steps,
        with_entropies=True,
        with_values=config.with_values,
        with_reference=config.with_reference,
    )


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


@pytest.mark.parametrize("filter_fn", ["", "reward_nonzero_std"])
def test_checkpoints_are_ranked_by_what_their_weights_sampled_before_the_filter(
    base_model: ModelConfig, tokenizer: PreTrainedTokenizerBase, tmp_path: Path, filter_fn: str
) -> None:
    """Of the groups that are left where solved ones are dropped, the mean reward falls as the policy gets better."""
    training = TRAINING.model_copy(update={"checkpoint_every": 1, "keep_checkpoints": 1, "keep_best": 1})
    rollout = ROLLOUT.model_copy(update={"filter_fn": filter_fn})
    _, history, _ = train(base_model, tokenizer, tmp_path, num_steps=5, training=training, rollout=rollout)
    metric = "reward_unfiltered" if filter_fn else "reward"
    of_checkpoints = {step: metrics[metric] for step, metrics in enumerate(history) if step}
    best = max(of_checkpoints, key=lambda step: (of_checkpoints[step], -step))
    kept = [load_manifest(path).step for path in list_checkpoints(tmp_path / "checkpoints")]
    assert kept == [best, 5]


def test_a_rule_rolls_the_training_back_to_the_checkpoint_with_the_best_reward(
    base_model: ModelConfig, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    """The rewards collapse after ten steps."""
    num_graded = itertools.count()

    def collapse(sample: Sample) -> float:
        return share_of_even_digits(sample) + (next(num_graded) < 10 * 12)

    kept = {"checkpoint_every": 3, "keep_checkpoints": 1, "keep_best": 1}
    training = TRAINING.model_copy(update={**kept, "roll_back_on": ("reward_halved",)})
    rollout = ROLLOUT.model_copy(update={"reward_fn": collapse})
    _, history, _ = train(base_model, tokenizer, tmp_path, num_steps=30, training=training, rollout=rollout)
    assert 20 <= len(history) < 30
    rewards = {step: history[step]["reward"] for step in range(3, len(history), 3)}
    best = max(rewards, key=rewards.__getitem__)
    saved = [load_manifest(path).step for path in list_checkpoints(tmp_path / "checkpoints")]
    assert saved[0] == best < 10 and saved[-1] == len(history)
    assert train(base_model, tokenizer, tmp_path, num_steps=30, training=training, rollout=rollout)[1] == []


class TwoTurns:
    """Asks the policy once more, whatever it said."""

    async def respond(self, conversation: Conversation) -> Reply:
        return Reply() if conversation.num_turns == 2 else Reply(messages=({"role": "user", "content": "12"},))

    def grade(self, sample: Sample) -> float:
        return share_of_even_digits(sample)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["interleaved", "branching"])
def test_a_run_in_conversations_trains_and_goes_on_like_one_that_was_not_stopped(
    base_model: ModelConfig,
    tokenizer: PreTrainedTokenizerBase,
    tmp_path: Path,
    form: Literal["interleaved", "branching"],
) -> None:
    rollout = ROLLOUT.model_copy(
        update={
            "environment": f"{__name__}:TwoTurns",
            "reward_fn": "",
            "sampling": SamplingConfig(max_new_tokens=100),
            "multi_turn": MultiTurnConfig(max_tokens_per_turn=45, form=form),
        }
    )
    straight, metrics, batches = train(base_model, tokenizer, tmp_path / "a", num_steps=4, rollout=rollout)
    train(base_model, tokenizer, tmp_path / "b", num_steps=2, rollout=rollout)
    resumed, _, _ = train(base_model, tokenizer, tmp_path / "b", num_steps=4, rollout=rollout)
    assert max(step["num_turns"] for step in metrics) > 1, "no conversation came to a second turn"
    assert all(abs(step["kl_rollout_policy"]) < 1e-6 for step in metrics if not step["skipped"])
    assert any(len(batch.samples) > 12 for batch in batches) == (form == "branching")
    for ours, theirs in zip(straight.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_an_environment_is_given_as_an_object(
    base_model: ModelConfig, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    turns = MultiTurnConfig(max_tokens_per_turn=20)
    changes = {"environment": TwoTurns(), "reward_fn": "", "sampling": SamplingConfig(max_new_tokens=60)}
    rollout = ROLLOUT.model_copy(update={**changes, "multi_turn": turns})
    _, [metrics], [batch] = train(base_model, tokenizer, tmp_path, num_steps=1, rollout=rollout)
    assert metrics["num_turns"] > 1 and all(sample.reward is not None for sample in batch.samples)


def test_every_sample_of_a_step_comes_from_the_weights_of_the_step_before(
    base_model: ModelConfig, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    backend, history, batches = train(base_model, tokenizer, tmp_path, num_steps=4)
    versions = [{span.version for s in batch.samples for span in s.policy_versions} for batch in batches]
    assert versions == [{0}, {1}, {2}, {3}]
    assert backend.weight_version == 4
    assert all(abs(metrics["kl_rollout_policy"]) < 1e-6 for metrics in history)


def test_only_the_last_published_versions_stay_on_disk(
    base_model: ModelConfig, tokenizer: PreTrainedTokenizerBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SGLangEngine, "segment_access", EngineClient.segment_access)
    train(base_model, tokenizer, tmp_path, num_steps=4)
    assert sorted(path.name for path in (tmp_path / "weights").iterdir()) == ["test-3", "test-4"]


async def train_without_a_target(
    base_model: ModelConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    checkpoint_dir: Path | None = None,
    has_segments: bool = True,
) -> tuple[PyTorchTrainingBackend, str, list[Completion]]:
    """Two steps with nothing said about where weights go; then the engine's version, and completions of it."""
    config = TRAINING.model_copy(update={"num_steps": 2})
    backend = make_backend(base_model, config)
    data_buffer = DataBuffer(load_prompts_from_jsonl(Path(base_model.path).parent / "prompts.jsonl"))
    with served_engine(Path(base_model.path)) as (engine, _), pytest.MonkeyPatch.context() as patch:
        if not has_segments:
            patch.setattr(SGLangEngine, "segment_access", EngineClient.segment_access)
        manager = AsyncRolloutManager(
            data_buffer, ROLLOUT, generate_fn=create_engine_generate_fn([engine], tokenizer, ROLLOUT)
        )
        await run_rl_training(backend, data_buffer, manager, [engine], config, checkpoint_dir=checkpoint_dir)
        request = GenerationRequest(prompt_tokens=[4, 8, 1], sampling=ROLLOUT.sampling, stop_token_ids=(1,), seed=0)
        return backend, await engine.weight_version(), await engine.generate([request])


@pytest.mark.parametrize("has_segments", [True, False])
def test_without_a_target_the_engines_follow_and_nothing_stays(
    base_model: ModelConfig,
    tokenizer: PreTrainedTokenizerBase,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    has_segments: bool,
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    run = train_without_a_target(base_model, tokenizer, has_segments=has_segments)
    backend, version, [completion] = asyncio.run(run)
    assert version.endswith(f"-{backend.weight_version}")
    assert {served for served, _, _ in completion.version_spans} == {version}
    assert list(tmp_path.iterdir()) == []


def test_without_a_target_two_trainings_share_no_version(
    base_model: ModelConfig, tokenizer: PreTrainedTokenizerBase
) -> None:
    versions = [asyncio.run(train_without_a_target(base_model, tokenizer))[1] for _ in range(2)]
    assert versions[0] != versions[1]


def test_without_a_target_published_weights_lie_beside_the_checkpoints_and_load_as_a_model(
    base_model: ModelConfig, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    run = train_without_a_target(base_model, tokenizer, checkpoint_dir=tmp_path, has_segments=False)
    backend, version, _ = asyncio.run(run)
    published = load_hf_model(ModelConfig(path=str(tmp_path / "weights" / version)))
    for ours, theirs in zip(backend.model.parameters(), published.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_without_a_target_a_backend_must_know_the_configuration_of_its_model(base_model: ModelConfig) -> None:
    class OwnBackend:
        weight_version = 0

    with (
        served_engine(Path(base_model.path)) as (engine, _),
        pytest.raises(ConfigError, match=r"OwnBackend has no .*target="),
    ):
        manager = AsyncRolloutManager(DataBuffer(make_prompts(1)), ROLLOUT, generate_fn=list)
        asyncio.run(run_rl_training(OwnBackend(), None, manager, [engine], TRAINING))  # type: ignore[arg-type]


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
    assert sum(len(m.sample_ids) for m in micro_batches) == 8
    assert micro_batches[0].num_samples == 12


def test_a_step_without_any_signal_has_no_batch() -> None:
    batch = convert_to_batch([replace(s, reward=0.0) for s in graded_samples()])
    assert prepare_grpo_batch(batch, batch.rewards, TRAINING) == []


SEVERAL_UPDATES = {"num_minibatches": 3, "num_epochs": 2, "loss": {"ratio_base": "old", "clip_high": 0.28}}
PPO = {
    "num_minibatches": 2,
    "advantage": {"estimator": "gae", "whiten": True, "gae_lambda": 0.95},
    "reward_shaping": {"kl_coef": 0.05},
    "loss": {"ratio_base": "old", "entropy_coef": 0.01, "kl_coef": 0.01},
}


def with_settings(settings: dict[str, object]) -> RLTrainingConfig:
    return RLTrainingConfig.model_validate({**TRAINING.model_dump(), **settings})


@pytest.mark.slow
@pytest.mark.parametrize("settings", [SEVERAL_UPDATES, PPO], ids=["several updates", "ppo"])
def test_a_stop_changes_nothing_with_several_updates_values_and_a_reference(
    base_model: ModelConfig, tokenizer: PreTrainedTokenizerBase, tmp_path: Path, settings: dict[str, object]
) -> None:
    config = with_settings(settings)
    _, straight, _ = train(base_model, tokenizer, tmp_path / "straight", num_steps=4, training=config)
    _, first, _ = train(base_model, tokenizer, tmp_path / "stopped", num_steps=2, training=config)
    _, second, _ = train(base_model, tokenizer, tmp_path / "stopped", num_steps=4, training=config)
    assert without_times(first + second) == without_times(straight)
    assert all(metrics["num_updates"] > 1 for metrics in straight)


def test_the_trainer_scores_before_the_first_update_of_a_step(base_model: ModelConfig) -> None:
    config = with_settings(SEVERAL_UPDATES)
    backend, batch = make_backend(base_model, config), convert_to_batch(graded_samples())
    scores = asyncio.run(score_rollouts(backend, batch, config, pad_id=0))
    [micro_batch] = prepare_grpo_batch(batch, batch.rewards, config, scores=scores)
    now_BT = asyncio.run(backend.score(micro_batch).result()).logprobs_BT
    is_trained_BT = micro_batch.loss_mask_BT > 0
    assert micro_batch.old_logprobs_BT is not None
    assert torch.allclose(micro_batch.old_logprobs_BT[is_trained_BT], now_BT[is_trained_BT], atol=1e-5)


def test_one_update_with_scores_from_before_equals_one_without_them(base_model: ModelConfig) -> None:
    batch = convert_to_batch(graded_samples())
    loss = {"ratio_base": "old", "mismatch": {"weight": "token", "mask": "geometric", "mask_low": 0.01}}
    free, scored = with_settings({"loss": loss}), with_settings({"loss": loss, "reward_shaping": {"kl_coef": 1e-12}})
    assert not free.needs_old_scores
    results = []
    for config in (free, scored):
        backend = make_backend(base_model, config)
        metrics = asyncio.run(train_on_rollouts(backend, batch, config, pad_id=0))
        results.append((metrics["grad_norm"], metrics["mismatch_kl"]))
    assert results[0] == pytest.approx(results[1], rel=1e-5)


@pytest.mark.parametrize("ratio_base", ["rollout", "old"])
def test_the_mismatch_of_a_step_does_not_grow_with_what_its_updates_learned(
    base_model: ModelConfig, ratio_base: str
) -> None:
    batch = convert_to_batch(graded_samples())
    results = []
    for num_epochs in (1, 3):
        config = with_settings({"num_epochs": num_epochs, "loss": {"ratio_base": ratio_base}})
        backend = make_backend(base_model, config)
        metrics = asyncio.run(train_on_rollouts(backend, batch, config, pad_id=0))
        results.append((metrics["mismatch_kl"], metrics["mismatch_ratio_max"]))
    assert results[0] == pytest.approx(results[1], rel=1e-5)


def test_the_reference_is_the_model_that_training_started_from(base_model: ModelConfig) -> None:
    config = with_settings({"loss": {"kl_coef": 0.1}})
    backend, batch = make_backend(base_model, config), convert_to_batch(graded_samples())
    before = asyncio.run(score_rollouts(backend, batch, config, pad_id=0)).ref_logprobs
    metrics = [asyncio.run(train_on_rollouts(backend, batch, config, pad_id=0)) for _ in range(3)]
    after = asyncio.run(score_rollouts(backend, batch, config, pad_id=0)).ref_logprobs
    assert all(torch.equal(before[place], after[place]) for place in before)
    assert metrics[0]["kl_reference"] == pytest.approx(0.0, abs=1e-6)
    assert metrics[2]["kl_reference"] > 1e-6


def test_later_updates_of_a_step_see_a_ratio_to_the_first(base_model: ModelConfig) -> None:
    config = with_settings({"num_epochs": 4, "loss": {"ratio_base": "old", "clip_low": 1e-4, "clip_high": 1e-4}})
    backend = make_backend(base_model, config)
    metrics = asyncio.run(train_on_rollouts(backend, convert_to_batch(graded_samples()), config, pad_id=0))
    assert metrics["num_updates"] == 4
    assert metrics["clip_share"] > 0.1


def test_the_value_head_learns_what_the_rewards_are(base_model: ModelConfig) -> None:
    config = with_settings({"advantage": {"estimator": "gae"}, "loss": {"value_coef": 1.0, "value_clip": 0.0}})
    backend, batch = make_backend(base_model, config), convert_to_batch(graded_samples())
    losses = [asyncio.run(train_on_rollouts(backend, batch, config, pad_id=0))["value_loss"] for _ in range(30)]
    # the head starts at 0, so the first loss is half the mean square of the returns over tokens
    tokens = [(sum(s.loss_mask), s.reward or 0.0) for s in batch.samples]
    expected = 0.5 * sum(n * reward**2 for n, reward in tokens) / sum(n for n, _ in tokens)
    assert losses[0] == pytest.approx(expected, rel=1e-5)
    assert losses[-1] < 0.75 * losses[0]


def nan_for(sample_id: str, calls: list[int], config: RLTrainingConfig) -> LossFn:
    """The policy loss, but NaN where a batch holds this sample."""

    def loss_fn(scores: TokenScores, batch: TrainBatch) -> tuple[Tensor, LossMetrics]:
        calls.append(len(batch.sample_ids))
        loss, metrics = policy_loss(scores, batch, config.loss)
        return (loss, {**metrics, "loss": math.nan}) if sample_id in batch.sample_ids else (loss, metrics)

    return loss_fn


def test_a_loss_that_is_not_finite_stops_training_and_names_its_samples(base_model: ModelConfig) -> None:
    config = with_settings({"num_minibatches": 3})
    backend = create_pytorch_backend(base_model, config.optim, nan_for("1/2", [], config), num_steps=10)
    with pytest.raises(NonFiniteError, match=r"loss became nan after 1 optimizer steps.*\b1/2\b"):
        asyncio.run(train_on_rollouts(backend, convert_to_batch(graded_samples()), config, pad_id=0))


def test_a_loss_that_is_not_finite_may_skip_its_update(base_model: ModelConfig) -> None:
    config = with_settings({"num_minibatches": 3, "max_micro_batch_tokens": 12, "on_nonfinite": "skip"})
    batch = convert_to_batch(graded_samples())
    backend = create_pytorch_backend(base_model, config.optim, nan_for("1/2", [], config), num_steps=10)
    metrics = asyncio.run(train_on_rollouts(backend, batch, config, pad_id=0))
    assert (metrics["num_updates"], metrics["num_nonfinite"], metrics["skipped"]) == (2.0, 1.0, 0.0)
    # as if the group had given no gradient
    without = [replace(s, reward=0.0) if s.group_index == 1 else s for s in batch.samples]
    other = create_pytorch_backend(base_model, config.optim, create_policy_loss(config.loss), num_steps=10)
    asyncio.run(train_on_rollouts(other, convert_to_batch(without), config, pad_id=0))
    ours, theirs = (asyncio.run(b.get_weights().result()) for b in (backend, other))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_step_of_which_every_update_is_skipped_counts_as_skipped(base_model: ModelConfig) -> None:
    config = with_settings({"on_nonfinite": "skip"})
    backend = create_pytorch_backend(base_model, config.optim, nan_for("1/2", [], config), num_steps=10)
    metrics = asyncio.run(train_on_rollouts(backend, convert_to_batch(graded_samples()), config, pad_id=0))
    assert metrics == {"skipped": 1.0, "without_signal": 0.0, "num_updates": 0.0, "num_nonfinite": 1.0}
    assert backend.weight_version == 0


async def generate_unusable(group: Sequence[Sample]) -> list[Sample]:
    """Completions whose log-probs are no numbers, and with them the loss."""
    arrays: dict[str, Any] = {
        "tokens": [1, 2, 3],
        "loss_mask": [0, 1, 1],
        "rollout_log_probs": [0.0, math.nan, math.nan],
    }
    return [replace(sample, response="12"[sample.index % 2], **arrays) for sample in group]


def test_a_run_that_only_skips_ends_at_the_limit_also_when_it_was_resumed(
    base_model: ModelConfig, tmp_path: Path
) -> None:
    prompts = load_prompts_from_jsonl(Path(base_model.path).parent / "prompts.jsonl")

    def run(num_steps: int) -> list[Metrics]:
        config = with_settings({"num_steps": num_steps, "on_nonfinite": "skip", "max_skipped_updates": 2})
        data_buffer = DataBuffer(prompts)
        manager = AsyncRolloutManager(data_buffer, ROLLOUT, generate_fn=generate_unusable)
        target = PublishTarget(
            weights_dir=tmp_path / "weights", model_config=Path(base_model.path) / "config.json", prefix="test"
        )
        backend, checkpoints = make_backend(base_model, config), tmp_path / "checkpoints"
        return asyncio.run(
            run_rl_training(backend, data_buffer, manager, [], config, target=target, checkpoint_dir=checkpoints)
        )

    assert [metrics["num_nonfinite"] for metrics in run(2)] == [1.0, 1.0]
    with pytest.raises(NonFiniteError, match=r"^step 3: 3 updates in a row were skipped"):
        run(4)


async def generate_alike(group: Sequence[Sample]) -> list[Sample]:
    """Completions of which every other one is rewarded."""
    arrays: dict[str, Any] = {"tokens": [1, 2, 3], "loss_mask": [0, 1, 1], "rollout_log_probs": [0.0, -1.0, -1.0]}
    return [replace(sample, response="12"[sample.index % 2], **arrays) for sample in group]


def nothing(sample: Sample) -> float:
    """No completion is ever right."""
    return 0.0


def ten_points(sample: Sample) -> float:
    """Every other completion is right."""
    return 10.0 * (sample.response == "1")


def one_point(sample: Sample) -> float:
    """Every other completion is right up to the second step, and all from then on."""
    return float(sample.response == "1" or sample.group_index >= 2 * ROLLOUT.batch_size)


@pytest.mark.parametrize(("former", "latter", "num_former"), [(ten_points, one_point, 1), (nothing, ten_points, 2)])
def test_a_run_that_goes_on_with_another_reward_counts_its_steps_without_signal_anew(
    base_model: ModelConfig, tmp_path: Path, former: RewardFn, latter: RewardFn, num_former: int
) -> None:
    """A smaller scale would never be solved, and a reward that replaces a useless one would end at once."""

    def run(num_steps: int, reward_fn: RewardFn) -> list[Metrics]:
        settings = {"num_steps": num_steps, "max_steps_without_signal": 2, "allow_changed": ["rollout.reward_fn"]}
        config = with_settings(settings)
        data_buffer = DataBuffer(make_prompts(7))
        rollout = ROLLOUT.model_copy(update={"reward_fn": reward_fn})
        manager = AsyncRolloutManager(data_buffer, rollout, generate_fn=generate_alike)
        target = PublishTarget(
            weights_dir=tmp_path / "weights", model_config=Path(base_model.path) / "config.json", prefix="test"
        )
        backend, checkpoints = make_backend(base_model, config), tmp_path / "checkpoints"
        return asyncio.run(
            run_rl_training(backend, data_buffer, manager, [], config, target=target, checkpoint_dir=checkpoints)
        )

    run(num_former, former)
    assert len(run(num_former + 4, latter)) == 4


@pytest.mark.parametrize("allowed", [True, False])
def test_a_run_that_may_go_on_with_other_prompts_begins_them(
    base_model: ModelConfig, tmp_path: Path, allowed: bool
) -> None:
    def run(num_steps: int, num_prompts: int) -> list[int]:
        config = with_settings({"num_steps": num_steps, "allow_changed": ["data"] * allowed})
        data_buffer = DataBuffer(make_prompts(num_prompts))
        manager = AsyncRolloutManager(data_buffer, ROLLOUT, generate_fn=generate_alike)
        target = PublishTarget(
            weights_dir=tmp_path / "weights", model_config=Path(base_model.path) / "config.json", prefix="test"
        )
        firsts: list[int] = []
        training = run_rl_training(
            make_backend(base_model, config),
            data_buffer,
            manager,
            [],
            config,
            target=target,
            checkpoint_dir=tmp_path / "checkpoints",
            inputs={"data": f"of {num_prompts} prompts"},
            on_batch=lambda step, batch: firsts.append(batch.samples[0].group_index),
        )
        asyncio.run(training)
        return firsts

    assert run(2, num_prompts=7) == [0, 3]
    if not allowed:
        with pytest.raises(CheckpointError, match='data was "of 7 prompts" and is "of 5 prompts"'):
            run(4, num_prompts=5)
        return
    assert run(4, num_prompts=5) == [0, 3]
    assert run(5, num_prompts=5) == [6]  # a place in these prompts does mean something


def test_what_an_outage_dropped_of_other_prompts_drops_none_of_these(base_model: ModelConfig, tmp_path: Path) -> None:
    """Groups are numbered from 0 again: group 4 of these prompts is not the one that the log names."""

    def run(num_steps: int, num_prompts: int) -> list[RolloutBatch]:
        config = with_settings({"num_steps": num_steps, "allow_changed": ["data"]})
        rollout = ROLLOUT.model_copy(update={"over_sampling_factor": 2.0})
        data_buffer = DataBuffer(make_prompts(num_prompts))
        manager = AsyncRolloutManager(data_buffer, rollout, generate_fn=generate_alike)
        batches: list[RolloutBatch] = []
        training = run_rl_training(
            make_backend(base_model, config),
            data_buffer,
            manager,
            [],
            config,
            checkpoint_dir=tmp_path / "checkpoints",
            inputs={"data": f"of {num_prompts} prompts"},
            events=events,
            on_batch=lambda step, batch: batches.append(batch),
        )
        asyncio.run(training)
        return batches

    with EventLog(tmp_path / "events.jsonl") as events:
        run(1, num_prompts=7)
        events.write("rollouts_scheduled", step=2, completed=[3, 4, 5, 6], unavailable=[4])
        [batch] = run(2, num_prompts=5)
    assert (batch.metadata["drops"], batch.metadata["unavailable"]) == ({}, [])


@pytest.mark.parametrize(
    ("loss", "is_needed"),
    [
        ({}, True),
        ({"objective": "reinforce"}, False),
        ({"objective": "reinforce", "mismatch": {"weight": "token"}}, True),
        ({"ratio_base": "old"}, False),
        ({"ratio_base": "old", "mismatch": {"mask": "geometric", "mask_low": 0.5}}, True),
    ],
)
def test_samples_that_do_not_say_how_likely_they_were_are_refused_where_the_loss_compares_with_that(
    base_model: ModelConfig, loss: dict[str, object], is_needed: bool
) -> None:
    """Taken for certain, tokens with a negative advantage would have no gradient, and the others a small one."""
    training = RLTrainingConfig.model_validate({"loss": loss})
    silent = [
        replace(sample, rollout_log_probs=None, group_index=0, index=index, reward=float(index))
        for index, sample in enumerate(make_random_samples(2))
    ]
    backend = create_pytorch_backend(base_model, training.optim, create_policy_loss(training.loss), num_steps=1)
    trained = train_on_rollouts(backend, convert_to_batch(silent), training, pad_id=0)
    if is_needed:
        with pytest.raises(DataError, match=r"2 of 2 completions have no rollout_log_probs .* must set the log-prob"):
            asyncio.run(trained)
    else:
        metrics = asyncio.run(trained)
        assert metrics["num_updates"] == 1
        assert not {"kl_rollout_policy", "mismatch_kl", "mismatch_mean", "mismatch_p99_max"} & metrics.keys()


def weighs_by_ratio(scores: TokenScores, batch: TrainBatch) -> tuple[Tensor, LossMetrics]:
    ratio_BT = (scores.logprobs_BT - batch.rollout_logprobs_BT).exp()
    loss = -(ratio_BT * batch.advantages_BT * batch.loss_mask_BT).sum() / batch.num_loss_tokens
    return loss, {"loss": loss}


def drops_moved_tokens(scores: TokenScores, batch: TrainBatch) -> tuple[Tensor, LossMetrics]:
    kept_BT = ((scores.logprobs_BT - batch.rollout_logprobs_BT).abs() < 2) * batch.loss_mask_BT
    loss = -(scores.logprobs_BT * batch.advantages_BT * kept_BT).sum() / batch.num_loss_tokens
    return loss, {"loss": loss}


def reads_no_engine(scores: TokenScores, batch: TrainBatch) -> tuple[Tensor, LossMetrics]:
    loss = -(scores.logprobs_BT * batch.advantages_BT * batch.loss_mask_BT).sum() / batch.num_loss_tokens
    return loss, {"loss": loss}


@pytest.mark.parametrize("ratio_base", ["rollout", "old"])
@pytest.mark.parametrize(
    ("function", "is_needed"), [(weighs_by_ratio, True), (drops_moved_tokens, True), (reads_no_engine, False)]
)
def test_a_users_loss_decides_itself_whether_samples_need_log_probs(
    function: LossFn, is_needed: bool, ratio_base: str
) -> None:
    training = RLTrainingConfig.model_validate(
        {"loss_fn": f"{__name__}:{function.__name__}", "loss": {"ratio_base": ratio_base}}
    )
    silent = [replace(sample, rollout_log_probs=None) for sample in make_random_samples(2)]
    if is_needed:
        with pytest.raises(
            DataError, match=rf"or change .*{function.__name__}, which reads batch\.rollout_logprobs_BT"
        ):
            check_logprobs(silent, training)
    else:
        check_logprobs(silent, training)


EXCLUDE: dict[str, object] = {"advantage": {"unscored": "exclude"}}


def test_a_completion_that_could_not_be_scored_stops_the_step_and_names_its_prompt(base_model: ModelConfig) -> None:
    samples = [replace(s, metadata={"prompt_id": f"p{s.group_index}"}) for s in graded_samples()]
    samples[5] = replace(samples[5], reward=None)
    with pytest.raises(RewardError, match=r"1 of 12 completions have no reward \(first: prompt 'p1'\).*exclude"):
        asyncio.run(
            train_on_rollouts(make_backend(base_model, TRAINING), convert_to_batch(samples), TRAINING, pad_id=0)
        )


def test_excluded_completions_train_as_if_their_group_had_been_smaller(base_model: ModelConfig) -> None:
    config = with_settings({**EXCLUDE, "loss": {"aggregation": "constant_length", "constant_length": 10}})
    samples = graded_samples()
    unscored = [replace(s, reward=None) if s.index == 0 else s for s in samples]
    # what is left out still counts as a completion, so a sample that gives no gradient stands in for it
    smaller = [replace(s, group_index=99 + i, reward=0.0) if s.index == 0 else s for i, s in enumerate(samples)]
    weights, norms = [], []
    for batch in (convert_to_batch(unscored), convert_to_batch(smaller)):
        backend = make_backend(base_model, config)
        norms.append(asyncio.run(train_on_rollouts(backend, batch, config, pad_id=0))["grad_norm"])
        weights.append(asyncio.run(backend.get_weights().result()))
    assert norms[0] == norms[1] > 0
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


@pytest.mark.parametrize("filter_fn", ["", "reward_nonzero_std"])
def test_a_run_with_a_judge_that_fails_now_and_then_trains_and_counts_it(
    base_model: ModelConfig, tmp_path: Path, filter_fn: str
) -> None:
    def judge(sample: Sample) -> float | None:
        return None if sample.index == 0 or sample.group_index == 1 else share_of_even_digits(sample)

    def generate(group: Sequence[Sample]) -> list[Sample]:
        return [
            replace(
                s, response="2" * s.index, tokens=[1, 2, 3], loss_mask=[0, 1, 1], rollout_log_probs=[0.0, -3.0, -3.0]
            )
            for s in group
        ]

    rollout = ROLLOUT.model_copy(update={"reward_fn": judge, "filter_fn": filter_fn})
    data_buffer = DataBuffer(load_prompts_from_jsonl(Path(base_model.path).parent / "prompts.jsonl"))
    manager = AsyncRolloutManager(data_buffer, rollout, generate_fn=generate)
    target = PublishTarget(
        weights_dir=tmp_path / "weights", model_config=Path(base_model.path) / "config.json", prefix="test"
    )
    config = with_settings({**EXCLUDE, "num_steps": 1})
    backend = make_backend(base_model, config)
    [metrics] = asyncio.run(run_rl_training(backend, data_buffer, manager, [], config, target=target))
    assert metrics["num_updates"] == 1
    assert metrics["num_unscored"] == (3 if filter_fn else 6)  # 1 of each group, and without a filter all of group 1
    assert metrics["reward"] == pytest.approx((1 + 2 + 3) / 3 / 8)
    assert metrics["signal_share"] == pytest.approx(1.0 if filter_fn else 2 / 3)


def test_a_step_that_could_not_be_scored_at_all_has_no_reward_and_no_update(base_model: ModelConfig) -> None:
    batch, config = convert_to_batch([replace(s, reward=None) for s in graded_samples()]), with_settings(EXCLUDE)
    metrics = asyncio.run(train_on_rollouts(make_backend(base_model, config), batch, config, pad_id=0))
    described = describe_rollouts(batch)
    assert metrics["skipped"] == 1.0
    assert described["num_unscored"] == 12
    assert "reward" not in described


def test_samples_with_several_trained_spans_are_trained_on_all_of_them(base_model: ModelConfig) -> None:
    config = with_settings({"loss": {"ratio_base": "old"}})
    samples = [
        replace(s, tokens=[*s.tokens, 3, 4, 5], loss_mask=[*s.loss_mask, 0.0, 1.0, 1.0], rollout_log_probs=None)
        for s in graded_samples()
    ]
    backend, batch = make_backend(base_model, config), convert_to_batch(samples)
    [micro_batch] = prepare_grpo_batch(batch, batch.rewards, config)
    assert micro_batch.num_loss_tokens == sum(sum(s.loss_mask[1:]) for s in samples)
    before = asyncio.run(backend.score(micro_batch).result()).logprobs_BT
    for _ in range(3):
        asyncio.run(train_on_rollouts(backend, batch, config, pad_id=0))
    change_BT = asyncio.run(backend.score(micro_batch).result()).logprobs_BT - before
    # on the whole, good samples became likelier and bad ones did not
    assert float((change_BT * micro_batch.advantages_BT * micro_batch.loss_mask_BT).sum()) > 0


def graded_samples() -> list[Sample]:
    """Three groups of four samples whose rewards differ within each group."""
    return [
        replace(sample, group_index=i // 4, index=i % 4, reward=float(i % 2))
        for i, sample in enumerate(make_random_samples(12))
    ]


def test_a_batch_of_rollouts_survives_json() -> None:
    batch = convert_to_batch(graded_samples(), metadata={"epoch_id": 2})
    assert json.loads(json.dumps(batch.to_json()))["metadata"]["epoch_id"] == 2
