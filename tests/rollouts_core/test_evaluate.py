"""Pins that checkpoints are evaluated in the same conversations that RL trains on.

Without it a policy trained to use tools would be compared by its first turn alone.
"""

from __future__ import annotations

import asyncio

from transformers import PreTrainedTokenizerBase

from rollouts_core.config import ModelConfig, MultiTurnConfig, RolloutConfig, SamplingConfig
from rollouts_core.environments import Conversation, Reply
from rollouts_core.evaluate import generate_samples
from rollouts_core.rewards import grade_group
from rollouts_core.rollout import resolve_reward_fn
from rollouts_core.types import Message, Prompt, Sample


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
