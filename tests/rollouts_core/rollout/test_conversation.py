"""Conversations of the policy with an environment: token for token what was sampled, every budget, every failure.

Without these tests a conversation could be trained on tokens that nobody sampled, never end, or be punished with a
reward of 0 for a broken sandbox.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from rollouts_core.batch import build_batch
from rollouts_core.config import ModelConfig, MultiTurnConfig, RolloutConfig, SamplingConfig
from rollouts_core.data.chat import tokenize_prompt
from rollouts_core.data.data_buffer import DataBuffer
from rollouts_core.engines.completion import Completion, GenerationRequest
from rollouts_core.environments import CalculatorEnvironment, Conversation, Outcome, Reply
from rollouts_core.errors import DataError, EnvironmentOutageError, EnvironmentUnavailableError, RewardError
from rollouts_core.model.loading import load_hf_model
from rollouts_core.model.policy import compute_logprobs
from rollouts_core.rl import describe_rollouts
from rollouts_core.rollout import conversation
from rollouts_core.rollout.agent import AgentTurn, Trajectory, agent_integration
from rollouts_core.rollout.generate import build_pending_group, create_conversation_generate_fn
from rollouts_core.rollout.manager import AsyncRolloutManager
from rollouts_core.rollout.rollout_batch import convert_to_batch
from rollouts_core.types import Message, Prompt, RolloutBatch, Sample, Status, VersionSpan
from tests.rollouts_core.scripted import ScriptedEngine
from tests.rollouts_core.served_engine import served_engine


class EchoEnvironment:
    """Answers "1" to everything but a colon, which ends the conversation with the reward 1."""

    def __init__(self, answer: Callable[[Conversation], Any] | None = None) -> None:
        self.answer = answer
        self.closed: list[int] = []

    async def respond(self, conversation: Conversation) -> Reply:
        if self.answer:
            outcome = self.answer(conversation)
            return await outcome if asyncio.iscoroutine(outcome) else outcome
        conversation.metadata["heard"] = conversation.num_turns
        return Reply() if conversation.text == ":" else say("1")

    async def close(self, conversation: Conversation) -> None:
        self.closed.append(conversation.num_turns)

    def grade(self, sample: Sample) -> float:
        return float(sample.response == ":")


def say(text: str, outcome: Outcome = Outcome.OK) -> Reply:
    return Reply(messages=(Message(role="user", content=text),), outcome=outcome)


def make_config(**changes: Any) -> RolloutConfig:
    limits = {name: changes.pop(name) for name in list(changes) if name in MultiTurnConfig.model_fields}
    settings = {"max_environment_retries": 0, "sampling": SamplingConfig(max_new_tokens=40), **changes}
    return RolloutConfig(multi_turn=MultiTurnConfig(**limits), **settings)


def converse(
    turns: Sequence[str | list[int]],
    tokenizer: PreTrainedTokenizerBase,
    environment: EchoEnvironment | None = None,
    **changes: Any,
) -> tuple[list[Sample], ScriptedEngine]:
    """The samples of one conversation in which the policy says `turns`, and the engine that said them."""
    engine = ScriptedEngine(turns, tokenizer)
    [pending] = build_pending_group(ask("2", "p7"), group_index=3, size=1)
    generate = create_conversation_generate_fn(
        [engine], tokenizer, make_config(**changes), environment or EchoEnvironment()
    )
    return asyncio.run(generate([pending])), engine


def ask(text: str, name: str = "p") -> Prompt:
    return Prompt(id=name, messages=(Message(role="user", content=text),))


def test_a_conversation_is_one_sample_with_the_environments_tokens_masked(tokenizer: PreTrainedTokenizerBase) -> None:
    [sample], _ = converse(["3", ":"], tokenizer)
    whole = "<|user|>2<|end|><|assistant|>3<|end|><|user|>1<|end|><|assistant|>:<|end|>"
    assert tokenizer.decode(sample.tokens) == whole
    assert sample.loss_mask == [0] * 4 + [1] * 2 + [0] * 4 + [1] * 2
    assert sample.rollout_log_probs == [0] * 4 + [-0.5, -0.51] + [0] * 4 + [-0.5, -0.51]
    assert sample.policy_versions == (VersionSpan(1, 4, 6), VersionSpan(2, 10, 12))
    assert (sample.response, sample.status, sample.finish_reason) == (":", Status.COMPLETED, "stop")
    assert [m["content"] for m in sample.metadata["conversation"]] == ["2", "3", "1", ":"]
    assert sample.metadata["outcomes"] == ["ok", "ok"]
    assert (sample.group_index, sample.metadata["prompt_id"], sample.metadata["heard"]) == (3, "p7", 2)


def test_a_turn_that_the_prompt_has_begun_goes_on(tokenizer: PreTrainedTokenizerBase) -> None:
    messages = (Message(role="user", content="2"), Message(role="assistant", content="4"))
    [pending] = build_pending_group(Prompt(id="p", messages=messages), group_index=0, size=1)
    engine = ScriptedEngine(["3", ":"], tokenizer)
    generate = create_conversation_generate_fn([engine], tokenizer, make_config(), EchoEnvironment())
    [sample] = asyncio.run(generate([pending]))
    assert tokenizer.decode(sample.tokens).startswith("<|user|>2<|end|><|assistant|>43<|end|><|user|>1<|end|>")
    assert [m["content"] for m in sample.metadata["conversation"]] == ["2", "43", "1", ":"]


def test_all_turns_of_a_group_ask_for_the_engine_that_has_them_in_its_cache(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    _, engine = converse(["3", "4", ":"], tokenizer)
    assert [request.affinity for request in engine.requests] == [3, 3, 3], "the number of the group"


def test_each_turn_reads_exactly_the_tokens_before_it_and_has_a_seed_of_its_own(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    [sample], engine = converse(["3", "4", ":"], tokenizer)
    for request in engine.requests:
        assert sample.tokens[: len(request.prompt_tokens)] == request.prompt_tokens
    assert len({request.seed for request in engine.requests}) == 3
    assert [request.sampling.max_new_tokens for request in engine.requests] == [40, 34, 28]


def test_a_turn_ends_where_the_template_ends_it(byte_tokenizer: PreTrainedTokenizerBase) -> None:
    byte_tokenizer.add_special_tokens({"eos_token": "<|endoftext|>"})
    byte_tokenizer.chat_template = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    _, engine = converse([":"], byte_tokenizer)
    ends = byte_tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"])
    assert [request.stop_token_ids for request in engine.requests] == [tuple(ends)]


def test_with_branching_each_turn_is_a_sample_that_ends_with_it(tokenizer: PreTrainedTokenizerBase) -> None:
    samples, engine = converse(["3", ":"], tokenizer, form="branching")
    assert [sample.turn for sample in samples] == [0, 1]
    assert [sample.tokens for sample in samples] == [
        [*r.prompt_tokens, *t]
        for r, t in zip(
            engine.requests,
            [
                tokenizer("3<|end|>", add_special_tokens=False)["input_ids"],
                tokenizer(":<|end|>", add_special_tokens=False)["input_ids"],
            ],
            strict=True,
        )
    ]
    assert [sum(sample.loss_mask) for sample in samples] == [2, 2]
    assert {(sample.group_index, sample.index, sample.response) for sample in samples} == {(3, 0, ":")}


@pytest.fixture
def merging_tokenizer() -> PreTrainedTokenizerBase:
    """One token for `ab` besides those for its letters: a policy may sample the letters, text gives the pair."""
    vocabulary = {token: i for i, token in enumerate(["a", "b", "c", "ab"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("a", "b")]))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True), AddedToken("<|say|>", special=True)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")
    fast.chat_template = (
        "{% for m in messages %}<|say|>{{ m['content'] }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|say|>{% endif %}"
    )
    return fast


def test_training_sees_the_tokens_that_were_sampled_where_their_text_would_give_others(
    merging_tokenizer: PreTrainedTokenizerBase,
) -> None:
    sampled = [0, 1]
    text = merging_tokenizer.decode(sampled)
    assert merging_tokenizer(text, add_special_tokens=False)["input_ids"] == [3], "the trap: text gives other tokens"
    tokenizer = merging_tokenizer
    environment = EchoEnvironment(lambda conversation: say("c") if conversation.num_turns == 1 else Reply())
    [pending] = build_pending_group(ask("c"), group_index=0, size=1)
    engine = ScriptedEngine([sampled, [2]], tokenizer)
    generate = create_conversation_generate_fn([engine], tokenizer, make_config(), environment)
    [sample] = asyncio.run(generate([pending]))
    trained = [token for token, weight in zip(sample.tokens, sample.loss_mask, strict=True) if weight]
    assert trained == [0, 1, 4, 2, 4]
    again = tokenize_prompt(tokenizer, sample.metadata["conversation"][:3])
    assert again != engine.requests[1].prompt_tokens


def test_an_agent_that_tokenizes_its_text_again_is_refused_with_the_place(
    merging_tokenizer: PreTrainedTokenizerBase,
) -> None:
    def completion(tokens: list[int]) -> Completion:
        return Completion(
            tokens=tokens,
            logprobs=[-1.0] * len(tokens),
            status=Status.COMPLETED,
            finish_reason="stop",
            version_spans=(),
        )

    read_again = merging_tokenizer("<|say|>c<|end|><|say|>ab<|end|><|say|>c<|end|><|say|>")["input_ids"]
    turns = (
        AgentTurn(prompt_tokens=[5, 2, 4, 5], completion=completion([0, 1, 4])),
        AgentTurn(prompt_tokens=read_again, completion=completion([2, 4])),
    )
    trajectory = Trajectory(turns=turns, messages=(), status=Status.COMPLETED, finish_reason="stop")
    with pytest.raises(DataError, match=r"prompt 'p1'.*turn 1 must begin .*differs at token 4:.*branching"):
        agent_integration(trajectory, Sample(metadata={"prompt_id": "p1"}))
    branches = agent_integration(trajectory, form="branching")
    assert [branch.tokens[-3:] for branch in branches] == [[0, 1, 4], [5, 2, 4]]


def test_the_trainer_gives_every_sampled_token_the_log_prob_that_the_engine_measured(
    base_model: ModelConfig, tokenizer: PreTrainedTokenizerBase
) -> None:
    environment = EchoEnvironment(lambda conversation: say("12"))
    config = make_config(max_turns=3, max_tokens_per_turn=200, sampling=SamplingConfig(max_new_tokens=400))
    group = build_pending_group(ask("3"), group_index=0, size=8)
    with served_engine(Path(base_model.path)) as (engine, _):
        samples = asyncio.run(create_conversation_generate_fn([engine], tokenizer, config, environment)(group))
    longest = max(samples, key=lambda sample: len(sample.metadata["outcomes"]))
    assert len(longest.metadata["outcomes"]) > 1, "no conversation came to a second turn"
    batch = build_batch([[longest]], pad_id=0)
    with torch.no_grad():
        [ours] = compute_logprobs(load_hf_model(base_model).eval(), batch).tolist()
    assert longest.rollout_log_probs is not None
    for here, there, weight in zip(ours, longest.rollout_log_probs[1:], longest.loss_mask[1:], strict=False):
        if weight:
            assert here == pytest.approx(there, abs=1e-4)


@pytest.mark.parametrize(
    ("changes", "num_turns", "reason"),
    [
        ({"max_turns": 3}, 3, "max_turns"),
        ({"sampling": SamplingConfig(max_new_tokens=12)}, 2, "max_new_tokens"),
        ({"sampling": SamplingConfig(max_new_tokens=7)}, 2, "length"),
        ({"max_tokens_per_turn": 1}, 1, "length"),
    ],
)
def test_a_conversation_that_never_ends_is_cut_by_each_budget(
    tokenizer: PreTrainedTokenizerBase, changes: dict[str, Any], num_turns: int, reason: str
) -> None:
    environment = EchoEnvironment()
    [sample], _ = converse(["3"], tokenizer, environment, **changes)
    assert (sample.status, sample.finish_reason) == (Status.TRUNCATED, reason)
    assert len(sample.metadata["outcomes"]) == num_turns
    num_prompt_tokens = 4
    assert len(sample.tokens) <= num_prompt_tokens + changes.get("sampling", SamplingConfig()).max_new_tokens
    assert sample.loss_mask[-1] == 1, "nothing follows the last thing that the policy said"
    assert environment.closed == [num_turns]


@pytest.mark.slow
def test_a_conversation_that_takes_too_long_is_cut(tokenizer: PreTrainedTokenizerBase) -> None:
    async def answer_slowly(conversation: Conversation) -> Reply:
        await asyncio.sleep(0.4)
        return say("1")

    [sample], _ = converse(
        ["3"], tokenizer, EchoEnvironment(answer_slowly), timeout_s=1.0, sampling=SamplingConfig(max_new_tokens=999)
    )
    assert (sample.status, sample.finish_reason) == (Status.TRUNCATED, "timeout_s")


def test_an_environment_that_is_amid_an_answer_when_its_time_is_over_is_not_waited_for(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    environment = EchoEnvironment(never_answer)
    [sample], _ = converse(["3"], tokenizer, environment, timeout_s=0.05)
    assert (sample.status, sample.finish_reason, sample.metadata["outcomes"]) == (Status.TRUNCATED, "timeout_s", ["ok"])
    assert environment.closed == [1]


@pytest.mark.slow
def test_the_time_that_an_engine_takes_is_not_the_conversations(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    say_at_once = ScriptedEngine.generate

    async def say_after_an_outage(engine: ScriptedEngine, requests: Sequence[GenerationRequest]) -> list[Completion]:
        await asyncio.sleep(0.6)
        return await say_at_once(engine, requests)

    monkeypatch.setattr(ScriptedEngine, "generate", say_after_an_outage)
    [sample], _ = converse(["3", "4", ":"], tokenizer, timeout_s=1.5)
    assert (sample.status, len(sample.metadata["outcomes"])) == (Status.COMPLETED, 3)


def test_what_became_of_each_turn_is_kept_and_counted(tokenizer: PreTrainedTokenizerBase) -> None:
    outcomes = [Outcome.PARSE_FAILURE, Outcome.TOOL_ERROR, Outcome.TIMEOUT]
    environment = EchoEnvironment(
        lambda conversation: Reply() if conversation.text == ":" else say("1", outcomes[conversation.num_turns - 1])
    )
    [sample], _ = converse(["3", "4", "5", ":"], tokenizer, environment)
    assert sample.metadata["outcomes"] == ["parse_failure", "tool_error", "timeout", "ok"]
    batch = convert_to_batch([Sample(**{**sample.to_json(), "reward": 1.0})])
    metrics = describe_rollouts(batch)
    shares = [metrics[f"{outcome}_share"] for outcome in outcomes]
    assert (metrics["num_turns"], shares) == (4, [0.25, 0.25, 0.25])


def raise_error(error: Exception) -> Callable[[Conversation], Reply]:
    def answer(conversation: Conversation) -> Reply:
        raise error

    return answer


async def block() -> None:
    """A coroutine function that never waits."""
    while True:
        pass


async def never_answer(conversation: Conversation) -> Reply:
    await asyncio.sleep(3600)
    return Reply()


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (raise_error(EnvironmentUnavailableError("no sandbox")), "on prompt 'p7' failed: no sandbox"),
        (raise_error(ConnectionRefusedError("refused")), "on prompt 'p7' failed: refused"),
        (raise_error(httpx.ConnectError("no route")), "on prompt 'p7' failed: no route"),
        (lambda conversation: say("x", Outcome.INFRASTRUCTURE_ERROR), "on prompt 'p7' failed: .*x"),
        (never_answer, "on prompt 'p7' did not answer within 0.05 s"),
    ],
)
def test_a_failure_of_the_machinery_is_no_sample(
    tokenizer: PreTrainedTokenizerBase, answer: Callable[[Conversation], Any], sentence: str
) -> None:
    environment = EchoEnvironment(answer)
    with pytest.raises(EnvironmentUnavailableError, match=sentence):
        converse(["3"], tokenizer, environment, reply_timeout_s=0.05)
    assert environment.closed == [1]


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (raise_error(KeyError("board")), "EchoEnvironment on prompt 'p7' raised KeyError: 'board'"),
        (lambda conversation: "1", "EchoEnvironment on prompt 'p7' answered '1': expected a Reply"),
        (
            lambda conversation: block(),
            "EchoEnvironment on prompt 'p7' blocked the event loop, and so all other conversations: it did not "
            "return within 0.1 s; it was in block, test_conversation.py line",
        ),
    ],
)
def test_a_mistake_in_an_environment_ends_the_run_and_names_the_prompt(
    tokenizer: PreTrainedTokenizerBase, answer: Callable[[Conversation], Any], sentence: str
) -> None:
    with pytest.raises(RewardError, match=sentence):
        converse(["3"], tokenizer, EchoEnvironment(answer), reply_timeout_s=0.1)


@pytest.fixture
def no_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollouts_core.rollout.generate.FIRST_BACKOFF_S", 0.0)


@pytest.mark.usefixtures("no_backoff")
def test_a_conversation_is_begun_again_after_a_failure(
    tokenizer: PreTrainedTokenizerBase, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[int] = []

    def fail_twice(conversation: Conversation) -> Reply:
        calls.append(conversation.num_turns)
        if len(calls) <= 2:
            raise OSError("gone")
        return Reply()

    with caplog.at_level(logging.WARNING):
        [sample], _ = converse(["3"], tokenizer, EchoEnvironment(fail_twice), max_environment_retries=2)
    assert (sample.status, calls) == (Status.COMPLETED, [1, 1, 1])
    assert len(caplog.records) == 2


def generate_batch(
    environment: EchoEnvironment, tokenizer: PreTrainedTokenizerBase, turns: Sequence[str] = ("3", ":"), **changes: Any
) -> RolloutBatch:
    config = make_config(batch_size=4, n_samples_per_prompt=2, max_refills=30, **changes)

    class Speaker(ScriptedEngine):
        """Says the turn of the script that belongs to the place in the conversation."""

        def _say(self, request: Any) -> Completion:
            end = int(tokenizer.eos_token_id)
            number = (request.prompt_tokens.count(end) - 1) // 2
            self.requests = [request] * min(number, len(self.turns) - 1)
            return super()._say(request)

    generate = create_conversation_generate_fn([Speaker(turns, tokenizer)], tokenizer, config, environment)
    manager = AsyncRolloutManager(
        DataBuffer([ask("2", f"p{i}") for i in range(40)]),
        config,
        generate_fn=generate,
        reward_fn=environment.grade,
    )
    return asyncio.run(manager.generate_batch())


def test_groups_that_the_machinery_failed_are_dropped_counted_and_never_graded(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    def fail_on_p0(conversation: Conversation) -> Reply:
        if conversation.sample.group_index == 1:
            raise OSError("gone")
        return Reply() if conversation.text == ":" else say("1")

    batch = generate_batch(EchoEnvironment(fail_on_p0), tokenizer)
    assert [group[0].group_index for group in batch.groups] == [0, 2, 3, 4]
    assert batch.rewards == [1.0] * 8
    assert batch.metadata["drops"] == {"environment_unavailable": 1}


def test_too_many_failures_end_the_run_with_a_sentence(tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(EnvironmentOutageError, match=r"6 of the last 6 groups .* on prompt 'p\d+' failed: gone"):
        generate_batch(EchoEnvironment(raise_error(OSError("gone"))), tokenizer, max_outage_minutes=0.0)


def test_a_grader_whose_machinery_fails_drops_the_group(tokenizer: PreTrainedTokenizerBase) -> None:
    class NoGrader(EchoEnvironment):
        def grade(self, sample: Sample) -> float:
            raise EnvironmentUnavailableError("the grader is down")

    with pytest.raises(EnvironmentOutageError, match=r"on prompt 'p\d+': the grader is down"):
        generate_batch(NoGrader(), tokenizer, max_outage_minutes=0.0)


def test_an_os_error_of_a_grader_is_a_mistake(tokenizer: PreTrainedTokenizerBase) -> None:
    class Broken(EchoEnvironment):
        def grade(self, sample: Sample) -> float:
            raise FileNotFoundError("no answers.db")

    with pytest.raises(RewardError, match=r"Broken.grade on prompt 'p\d+' raised FileNotFoundError: no answers.db"):
        generate_batch(Broken(), tokenizer)


def test_the_turns_of_a_branching_conversation_share_one_reward(tokenizer: PreTrainedTokenizerBase) -> None:
    grades: list[str] = []

    class Counting(EchoEnvironment):
        def grade(self, sample: Sample) -> float:
            grades.append(sample.response)
            return float(sample.index)

    batch = generate_batch(Counting(), tokenizer, form="branching")
    assert len(grades) == 8
    assert batch.rewards == [0.0, 0.0, 1.0, 1.0] * 4
    assert describe_rollouts(batch)["reward"] == 0.5


async def never_close() -> None:
    await asyncio.sleep(3600)


async def fail_to_close(error: Exception) -> None:
    raise error


@pytest.mark.parametrize(
    ("close", "sentence"),
    [
        (lambda: fail_to_close(OSError("gone")), "on prompt 'p7' could not be closed: gone"),
        (lambda: fail_to_close(httpx.ConnectError("no route")), "on prompt 'p7' could not be closed: no route"),
        (lambda: fail_to_close(EnvironmentUnavailableError("no box")), "on prompt 'p7' could not be closed: no box"),
        (
            never_close,
            "on prompt 'p7' was not closed in time, so its resources may stay open: it did not return within",
        ),
        (block, "on prompt 'p7' was not closed in time, so its resources may stay open: it did not return within"),
    ],
)
def test_an_environment_that_cannot_be_closed_is_a_warning_and_the_conversation_stays(
    tokenizer: PreTrainedTokenizerBase,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    close: Callable[[], Awaitable[None]],
    sentence: str,
) -> None:
    class Unclosable(EchoEnvironment):
        async def close(self, conversation: Conversation) -> None:
            await close()

    monkeypatch.setattr(conversation, "CLOSE_TIMEOUT_S", 0.05)
    with caplog.at_level(logging.WARNING):
        [sample], _ = converse(["3", ":"], tokenizer, Unclosable())
    assert (sample.status, sample.response) == (Status.COMPLETED, ":")
    assert [sentence in record.message for record in caplog.records] == [True]


def test_a_mistake_of_an_environment_is_not_hidden_by_its_close(tokenizer: PreTrainedTokenizerBase) -> None:
    class Unclosable(EchoEnvironment):
        async def close(self, conversation: Conversation) -> None:
            raise OSError("gone")

    with pytest.raises(RewardError, match="raised KeyError: 'board'"):
        converse(["3"], tokenizer, Unclosable(raise_error(KeyError("board"))))


def test_cancelling_closes_the_conversation(tokenizer: PreTrainedTokenizerBase) -> None:
    environment = EchoEnvironment(never_answer)
    engine = ScriptedEngine(["3"], tokenizer)
    generate = create_conversation_generate_fn([engine], tokenizer, make_config(), environment)
    group = build_pending_group(ask("2"), group_index=0, size=3)

    async def cancel_soon() -> None:
        with anyio.move_on_after(0.1):
            await generate(group)

    asyncio.run(cancel_soon())
    assert environment.closed == [1, 1, 1]


WITH_TOOLS = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_a_policy_is_told_of_its_tools_and_calls_one_in_json(byte_tokenizer: PreTrainedTokenizerBase) -> None:
    byte_tokenizer.chat_template = WITH_TOOLS
    call = '<tool_call>{"name": "calculator", "arguments": {"expression": "57+83"}}</tool_call>'
    engine = ScriptedEngine([call, ":140"], byte_tokenizer)
    pending = build_pending_group(replace(ask("57+83=?"), answer="140"), group_index=0, size=1)
    config = make_config(sampling=SamplingConfig(max_new_tokens=400))
    generate = create_conversation_generate_fn([engine], byte_tokenizer, config, CalculatorEnvironment())
    [sample] = asyncio.run(generate(pending))
    described, _, conversation = byte_tokenizer.decode(sample.tokens).partition("<|im_end|>\n")
    assert '"name": "calculator"' in described
    turns = ["user\n57+83=?", f"assistant\n{call}", "tool\n140", "assistant\n:140"]
    assert conversation == "\n".join(f"<|im_start|>{turn}<|im_end|>" for turn in turns)
    trained = [token for token, weight in zip(sample.tokens, sample.loss_mask, strict=True) if weight]
    assert byte_tokenizer.decode(trained) == f"{call}<|im_end|>:140<|im_end|>"
    assert CalculatorEnvironment().grade(sample) == 1.0
