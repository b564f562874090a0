"""Pins what checkpoints are compared by: the conversations that RL trains on, and the mean reward of all completions.

Without it a policy trained to use tools would be compared by its first turn alone, or checkpoints on different rows;
and a short outage of what answers or grades would end a stage that has all but one completion.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerBase

from rollouts_core.config import ModelConfig, MultiTurnConfig, RolloutConfig, SamplingConfig
from rollouts_core.engines.completion import Completion, GenerationRequest
from rollouts_core.environments import Conversation, Reply
from rollouts_core.errors import DivergedError, EnvironmentOutageError, EnvironmentUnavailableError, RewardError
from rollouts_core.evaluate import ask_engine, generate_samples, grade_completions, scores_by_prompt
from rollouts_core.model.loading import load_tokenizer
from rollouts_core.rewards import grade_group
from rollouts_core.rollout import outage
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


def test_weights_that_compute_no_numbers_are_told_from_other_failures_in_conversations_too(
    base_model: ModelConfig, tmp_path: Path
) -> None:
    folder = tmp_path / "diverged"
    shutil.copytree(base_model.path, folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][2:] = 3e38
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(DivergedError, match=r"diverged give no finite numbers: they are damaged"):
        asyncio.run(generate_samples(ModelConfig(path=str(folder)), PROMPTS, ROLLOUT, num_slots=8))


def test_a_score_is_the_mean_reward_of_a_prompt() -> None:
    second = [replace(sample, group_index=1) for sample in make_group([1.0])]
    assert scores_by_prompt([*make_group([0.0, 0.5]), *second]) == [0.25, 1.0]


def test_an_evaluation_needs_every_reward() -> None:
    group = [replace(sample, metadata={"prompt_id": "p7"}) for sample in make_group([1.0, None])]
    with pytest.raises(RewardError, match="a completion of prompt 'p7' has no reward"):
        scores_by_prompt(group)


ENVIRONMENT_AWAY = "the sandboxes are away"
failures_left: list[int] = [0]
"""How many further calls of those below find something away."""


def fail_while_it_is_away() -> None:
    """Raise what an outage raises, as often as `failures_left` says."""
    failures_left[0] -= 1
    if failures_left[0] >= 0:
        raise EnvironmentUnavailableError(ENVIRONMENT_AWAY)


class AwayEnvironment(CountingEnvironment):
    """Is away for the first answers."""

    async def respond(self, conversation: Conversation) -> Reply:
        """The number of turns, once it is there."""
        fail_while_it_is_away()
        return await super().respond(conversation)


async def grade_when_there(sample: Sample) -> float:
    """Is away for the first grades."""
    fail_while_it_is_away()
    return 1.0


def test_an_evaluation_waits_for_the_end_of_an_outage_of_its_environment(
    base_model: ModelConfig, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outage, "FIRST_PAUSE_S", 0.01)
    changes = {"environment": f"{__name__}:AwayEnvironment", "max_environment_retries": 0, "n_samples_per_prompt": 1}
    failures_left[0] = 7
    engine = ScriptedEngine(["3"], tokenizer)
    config = ROLLOUT.model_copy(update=changes)
    samples = asyncio.run(ask_engine(engine, base_model, PROMPTS, config, num_running=4))
    assert [(sample.group_index, len(sample.metadata["outcomes"])) for sample in samples] == [(0, 2), (1, 2), (2, 2)]


def test_an_evaluation_waits_for_what_grades_and_asks_only_for_what_has_no_grade(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(outage, "FIRST_PAUSE_S", 0.01)
    failures_left[0] = 9
    config = RolloutConfig(reward_fn=grade_when_there)
    samples = asyncio.run(grade_completions([Sample(response=str(i), group_index=i) for i in range(6)], config))
    assert [(sample.response, sample.reward) for sample in samples] == [(str(i), 1.0) for i in range(6)]
    assert failures_left[0] == -6, "a sample that had its grade was graded again"
    assert len(caplog.records) == 2, "samples that failed together share a pause, and the line that tells of it"


def test_an_outage_that_lasts_ends_an_evaluation_with_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outage, "FIRST_PAUSE_S", 0.02)
    failures_left[0] = 1000
    config = RolloutConfig(reward_fn=grade_when_there, max_outage_minutes=0.001)
    with pytest.raises(EnvironmentOutageError, match=r"pauses of 0\.0 minutes .*every prompt.* the sandboxes are away"):
        asyncio.run(grade_completions([Sample(response="1")], config))
    assert 1000 - failures_left[0] == 3, "asked at once, after 0.02 s and after 0.04 s"
