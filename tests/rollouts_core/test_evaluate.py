"""Pins what checkpoints are compared by: the conversations that RL trains on, and the mean reward of all completions.

Without it a policy trained to use tools would be compared by its first turn alone, or checkpoints on different rows.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from rollouts_core.config import ModelConfig, MultiTurnConfig, RolloutConfig, SamplingConfig
from rollouts_core.engines.completion import Completion, GenerationRequest
from rollouts_core.environments import Conversation, Reply
from rollouts_core.errors import RewardError
from rollouts_core.evaluate import ask_engine, generate_samples, scores_by_prompt
from rollouts_core.model.loading import load_tokenizer
from rollouts_core.rewards import grade_group
from rollouts_core.rollout.resolve import resolve_reward_fn
from rollouts_core.types import Message, Prompt, Sample, Status
from tests.rollouts_core.make import make_group
from tests.rollouts_core.scripted import ScriptedEngine


class CountingEnvironment:
    """Says how often the policy has spoken; the reward is the number of turns."""

    async def respond(self, conversation: Conversation) -> Reply:
        return Reply(messages=(Message(role="user", content=str(conversation.num_turns)),))

    def grade(self, sample: Sample) -> float:
        return float(len(sample.metadata["outcomes"]))


PROMPTS = [Prompt(id=text, messages=(Message(role="user", content=text),)) for text in ("1+1", "7", "12-5")]
ROLLOUT = RolloutConfig(
    environment=f"{__name__}:CountingEnvironment",
    n_samples_per_prompt=4,
    sampling=SamplingConfig(max_new_tokens=300),
    multi_turn=MultiTurnConfig(max_turns=2, form="branching"),
)


def evaluate(model: ModelConfig, num_slots: int) -> list[Sample]:
    async def run() -> list[Sample]:
        samples = await generate_samples(model, PROMPTS, ROLLOUT, num_slots=num_slots)
        return await grade_group(samples, resolve_reward_fn(ROLLOUT))

    return asyncio.run(run())


def test_an_evaluation_holds_whole_conversations_one_sample_each(
    base_model: ModelConfig, tokenizer: PreTrainedTokenizerBase
) -> None:
    samples = evaluate(base_model, num_slots=8)
    assert [(sample.group_index, sample.index) for sample in samples] == [(g, i) for g in range(3) for i in range(4)]
    assert max(sample.reward or 0 for sample in samples) == 2.0
    longest = max(samples, key=lambda sample: sample.reward or 0)
    assert "<|end|><|user|>1<|end|><|assistant|>" in tokenizer.decode(longest.tokens)


def test_how_many_decode_at_a_time_changes_nothing(base_model: ModelConfig) -> None:
    few, many = evaluate(base_model, num_slots=2), evaluate(base_model, num_slots=16)
    assert [sample.tokens for sample in few] == [sample.tokens for sample in many]


class InterruptedEngine(ScriptedEngine):
    """Breaks every first completion of a prompt off after one token."""

    async def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """The rest where there is a beginning, else the beginning."""
        completions = await super().generate(requests)
        return [
            replace(each, tokens=each.tokens[:1], logprobs=each.logprobs[:1], status=Status.ABORTED, version_spans=())
            if len(request.prompt_tokens) == 4
            else replace(each, version_spans=())
            for request, each in zip(requests, completions, strict=True)
        ]


def test_an_evaluation_has_completions_that_were_broken_off_completed(
    base_model: ModelConfig, tokenizer: PreTrainedTokenizerBase
) -> None:
    config = RolloutConfig(environment="arithmetic", n_samples_per_prompt=2)
    engine = InterruptedEngine(["3"], tokenizer)
    samples = asyncio.run(ask_engine(engine, base_model, [PROMPTS[1]], config, num_running=2))
    assert [(sample.status, sample.response) for sample in samples] == [(Status.COMPLETED, "33")] * 2


def test_completions_end_where_the_template_ends_a_turn_although_the_model_ends_sequences_otherwise(
    base_model: ModelConfig, tmp_path: Path
) -> None:
    """As with base models: their end of sequence is in no conversation that SFT teaches them."""
    folder = tmp_path / "base"
    shutil.copytree(base_model.path, folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    for name, end in (("config.json", {"eos_token_id": 0}), ("tokenizer_config.json", {"eos_token": "<|pad|>"})):
        settings = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**settings, **end}))
    model = ModelConfig(path=str(folder))
    config = RolloutConfig(n_samples_per_prompt=4, sampling=SamplingConfig(max_new_tokens=300))
    samples = asyncio.run(generate_samples(model, PROMPTS, config, num_slots=8))
    [end_of_turn] = load_tokenizer(model).convert_tokens_to_ids(["<|end|>"])
    assert any(sample.tokens[-1] == end_of_turn for sample in samples)
    for sample in samples:
        completion = [token for token, is_sampled in zip(sample.tokens, sample.loss_mask, strict=True) if is_sampled]
        assert end_of_turn not in completion[:-1]


def test_a_score_is_the_mean_reward_of_a_prompt() -> None:
    second = [replace(sample, group_index=1) for sample in make_group([1.0])]
    assert scores_by_prompt([*make_group([0.0, 0.5]), *second]) == [0.25, 1.0]


def test_an_evaluation_needs_every_reward() -> None:
    group = [replace(sample, metadata={"prompt_id": "p7"}) for sample in make_group([1.0, None])]
    with pytest.raises(RewardError, match="a completion of prompt 'p7' has no reward"):
        scores_by_prompt(group)
