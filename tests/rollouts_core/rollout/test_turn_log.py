"""Conversations of a run that was stopped amid them: what the policy had said is not sampled a second time.

Without these tests a restart could ask for said turns again, put old ones behind another answer of the environment, or
carry what one version of the weights said into a group that is to be sampled anew.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from rollouts_core.config import MultiTurnConfig, RolloutConfig, SamplingConfig
from rollouts_core.data.data_buffer import DataBuffer
from rollouts_core.engines.completion import Completion, GenerationRequest
from rollouts_core.environments import Conversation, Reply
from rollouts_core.rollout.generate import build_pending_group, create_conversation_generate_fn
from rollouts_core.rollout.manager import AsyncRolloutManager
from rollouts_core.types import Message, RolloutBatch, Sample, Status
from tests.rollouts_core.make import make_prompts
from tests.rollouts_core.scripted import ScriptedEngine


class Opponent:
    """Answers `says` to the first three turns; may be told to keep some conversations waiting at a turn."""

    def __init__(self, says: str = "1", *, holds: Callable[[Conversation], bool] = lambda conversation: False) -> None:
        self.says = says
        self.holds = holds
        self.is_held = asyncio.Event()
        self.turns_heard: list[str] = []

    async def respond(self, conversation: Conversation) -> Reply:
        self.turns_heard.append(conversation.text)
        if self.holds(conversation):
            self.is_held.set()
            await asyncio.sleep(3600)
        if conversation.num_turns > 3:
            return Reply()
        return Reply(messages=(Message(role="user", content=self.says),))

    def grade(self, sample: Sample) -> float:
        return float(sample.index)


def make_config(**changes: Any) -> RolloutConfig:
    settings = {"batch_size": 1, "n_samples_per_prompt": 2, "max_staleness": 1, **changes}
    return RolloutConfig(multi_turn=MultiTurnConfig(), sampling=SamplingConfig(max_new_tokens=60), **settings)


def manager_of(
    engine: ScriptedEngine, tokenizer: PreTrainedTokenizerBase, environment: Opponent, **changes: Any
) -> AsyncRolloutManager:
    config = make_config(**changes)
    generate = create_conversation_generate_fn([engine], tokenizer, config, environment)
    return AsyncRolloutManager(DataBuffer(make_prompts(4)), config, generate_fn=generate, reward_fn=environment.grade)


async def stop_amid(manager: AsyncRolloutManager, is_there: asyncio.Event) -> list[Any]:
    """What a checkpoint amid a batch says, read back from JSON."""
    async with manager:
        batch = asyncio.create_task(manager.generate_batch())
        await is_there.wait()
        state: list[Any] = json.loads(json.dumps([manager.data_buffer.state_dict(), manager.state_dict()]))
        batch.cancel()
    return state


async def go_on(manager: AsyncRolloutManager, state: Sequence[Any]) -> RolloutBatch:
    manager.data_buffer.load_state_dict(state[0])
    manager.load_state_dict(state[1])
    async with manager:
        return await manager.generate_batch()


def said_of(sample: Sample) -> list[str]:
    return [m["content"] for m in sample.metadata["conversation"] if m["role"] == "assistant"]


def second_waits_at_its_third_turn(conversation: Conversation) -> bool:
    return conversation.sample.index == 1 and conversation.num_turns == 3


def test_what_was_said_before_a_stop_is_said_again_without_the_engine(tokenizer: PreTrainedTokenizerBase) -> None:
    waiting = Opponent(holds=second_waits_at_its_third_turn)

    async def run() -> tuple[list[Any], RolloutBatch, ScriptedEngine]:
        before = manager_of(ScriptedEngine(["7"], tokenizer), tokenizer, waiting)
        state = await stop_amid(before, waiting.is_held)
        engine = ScriptedEngine(["9"], tokenizer)
        return state, await go_on(manager_of(engine, tokenizer, Opponent()), state), engine

    _, batch, engine = asyncio.run(run())
    first, second = batch.samples
    assert said_of(first) == ["7"] * 4, "its conversation was over, and the group still waited for the other"
    assert said_of(second) == ["7", "7", "7", "9"]
    asked = [request for request in engine.requests if request.prompt_tokens == second.tokens[:-2]]
    assert len(asked) == 1
    assert sum(second.loss_mask) == 8
    assert second.rollout_log_probs is not None
    assert [p for p, weight in zip(second.rollout_log_probs, second.loss_mask, strict=True) if weight] == [
        -0.5,
        -0.51,
    ] * 4


def test_from_another_answer_of_the_environment_on_the_policy_is_asked_again(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    waiting = Opponent(holds=second_waits_at_its_third_turn)

    async def run() -> RolloutBatch:
        before = manager_of(ScriptedEngine(["7"], tokenizer), tokenizer, waiting)
        state = await stop_amid(before, waiting.is_held)
        return await go_on(manager_of(ScriptedEngine(["9"], tokenizer), tokenizer, Opponent(says="2")), state)

    for sample in asyncio.run(run()).samples:
        assert said_of(sample) == ["7", "9", "9", "9"], "the first turn read the prompt alone"


def test_a_turn_that_was_begun_is_continued_from_its_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    whole = tokenizer("12345", add_special_tokens=False)["input_ids"]

    class BreaksOff(ScriptedEngine):
        """Gives two tokens of the second turn, then nothing any more."""

        def __init__(self) -> None:
            super().__init__([whole], tokenizer)
            self.is_broken_off = asyncio.Event()

        async def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
            [completion] = await super().generate(requests)
            if len(self.requests) == 1:
                return [completion]
            if len(self.requests) == 2:
                part = replace(completion, tokens=whole[:2], logprobs=completion.logprobs[:2], status=Status.ABORTED)
                return [replace(part, version_spans=(("run-2", 0, 2),))]
            self.is_broken_off.set()
            await asyncio.sleep(3600)
            raise AssertionError("it was to be cancelled")

    async def run() -> tuple[RolloutBatch, ScriptedEngine]:
        broken = BreaksOff()
        before = manager_of(broken, tokenizer, Opponent(), n_samples_per_prompt=1, max_staleness=3)
        state = await stop_amid(before, broken.is_broken_off)
        engine = ScriptedEngine([whole[2:], "9"], tokenizer)
        after = manager_of(engine, tokenizer, Opponent(), n_samples_per_prompt=1, max_staleness=3)
        return await go_on(after, state), engine

    batch, engine = asyncio.run(run())
    [sample] = batch.samples
    assert said_of(sample) == ["12345", "12345", "9", "9"]
    assert engine.requests[0].prompt_tokens[-2:] == whole[:2]


def test_a_group_that_the_next_weights_sample_anew_takes_nothing_from_before(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    waiting = Opponent(holds=lambda conversation: conversation.sample.group_index == 1 and conversation.num_turns == 2)
    engine = ScriptedEngine(["7"], tokenizer)
    manager = manager_of(engine, tokenizer, waiting, max_staleness=0, over_sampling_factor=2)
    asyncio.run(manager.generate_batch())
    assert waiting.is_held.is_set()
    assert manager.state_dict()["generation"] == {"conversations": []}
    waiting.holds, engine.turns = lambda conversation: False, ["9"]
    batch = asyncio.run(manager.generate_batch())
    assert [(sample.group_index, said_of(sample)) for sample in batch.samples] == [(1, ["9"] * 4)] * 2
    assert manager.state_dict()["generation"] == {"conversations": []}, "what is over is not kept"


def test_conversations_that_over_sampling_broke_off_go_on_from_what_was_said(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    waiting = Opponent(holds=lambda conversation: conversation.sample.group_index == 1 and conversation.num_turns == 2)
    engine = ScriptedEngine(["7"], tokenizer)
    settings = {"max_staleness": 0, "over_sampling_factor": 2.0, "max_partial_staleness": 9}
    manager = manager_of(engine, tokenizer, waiting, **settings)
    asyncio.run(manager.generate_batch())
    assert len(manager.state_dict()["generation"]["conversations"]) == 2, "a checkpoint has them"
    waiting.holds, engine.turns = lambda conversation: False, ["9"]
    batch = asyncio.run(manager.generate_batch())
    assert [(sample.group_index, said_of(sample)) for sample in batch.samples] == [(1, ["7", "7", "9", "9"])] * 2


def test_conversations_whose_first_turn_has_become_too_old_begin_anew_and_not_only_at_their_end(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    waiting = Opponent(holds=lambda conversation: conversation.sample.group_index == 1 and conversation.num_turns == 2)

    class OneVersion(ScriptedEngine):
        version = 4

        async def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
            spans = ((f"run-{self.version}", 0, 1),)
            return [replace(completion, version_spans=spans) for completion in await super().generate(requests)]

    engine = OneVersion(["7"], tokenizer)
    settings = {"max_staleness": 0, "over_sampling_factor": 2.0, "max_partial_staleness": 1}
    manager = manager_of(engine, tokenizer, waiting, **settings)
    manager.weights_published(4)
    asyncio.run(manager.generate_batch())
    assert len(manager.state_dict()["generation"]["conversations"]) == 2
    manager.weights_published(5)
    manager.weights_published(6)
    waiting.holds, engine.version, engine.turns, engine.requests = lambda conversation: False, 6, ["9"], []
    batch = asyncio.run(manager.generate_batch())
    assert [(sample.group_index, said_of(sample)) for sample in batch.samples] == [(1, ["9"] * 4)] * 2
    assert batch.metadata["drops"] == {"stale": 1}
    assert [request.affinity for request in engine.requests].count(1) == 8, (
        "nothing was said behind turns that are too old"
    )


def test_what_ended_while_others_were_broken_off_is_kept_by_nobody(tokenizer: PreTrainedTokenizerBase) -> None:
    """Nobody asks for it again, so it would be in every checkpoint from then on."""

    class LateOpponent(Opponent):
        async def respond(self, conversation: Conversation) -> Reply:
            if conversation.num_turns == 4:
                self.is_held.set()
                await is_broken_off.wait()
            return await super().respond(conversation)

    is_broken_off = asyncio.Event()

    async def end_late() -> tuple[list[Sample], dict[str, Any]]:
        late = LateOpponent()
        config = make_config(max_staleness=0, over_sampling_factor=2.0, max_partial_staleness=9)
        generate = create_conversation_generate_fn([ScriptedEngine(["7"], tokenizer)], tokenizer, config, late)
        pending = build_pending_group(make_prompts(1)[0], group_index=0, size=2)
        under_way = asyncio.create_task(generate(pending))
        await late.is_held.wait()
        assert len(generate.state_dict()["conversations"]) == 2
        await generate.break_off()
        is_broken_off.set()
        return await under_way, generate.state_dict()

    samples, state = asyncio.run(end_late())
    assert [said_of(sample) for sample in samples] == [["7"] * 4] * 2
    assert state == {"conversations": []}


def test_a_run_that_is_stopped_twice_takes_all_that_was_said_before_the_first_stop(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    first, second = (
        Opponent(holds=second_waits_at_its_third_turn),
        Opponent(holds=lambda conversation: conversation.num_turns == 1),
    )

    async def run() -> RolloutBatch:
        state = await stop_amid(manager_of(ScriptedEngine(["7"], tokenizer), tokenizer, first), first.is_held)
        again = manager_of(ScriptedEngine(["8"], tokenizer), tokenizer, second)
        again.data_buffer.load_state_dict(state[0])
        again.load_state_dict(state[1])
        state = await stop_amid(again, second.is_held)
        return await go_on(manager_of(ScriptedEngine(["9"], tokenizer), tokenizer, Opponent()), state)

    assert [said_of(sample) for sample in asyncio.run(run()).samples] == [["7"] * 4, ["7", "7", "7", "9"]]
