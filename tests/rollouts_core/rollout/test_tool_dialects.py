"""Holds conversations with tools in the dialects of chat templates; pins that the policy sees what it is answered.

Without these tests a policy whose template hides a tool's answer is trained as if it had read it, and one whose calls
are written otherwise is never answered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerBase

from rollouts_core.algorithms.credit import RolloutScores, assign_credit
from rollouts_core.checks.templates import check_conversation
from rollouts_core.config import MultiTurnConfig, RLTrainingConfig, RolloutConfig, SamplingConfig
from rollouts_core.data.data_buffer import DataBuffer
from rollouts_core.environments import Conversation, Outcome, Reply
from rollouts_core.environments.calculator import CALCULATOR
from rollouts_core.environments.tools import answer_tool_calls
from rollouts_core.errors import DataError
from rollouts_core.rl import check_scored, describe_rollouts
from rollouts_core.rl_batch import prepare_updates
from rollouts_core.rollout.generate import build_pending_group, create_conversation_generate_fn
from rollouts_core.rollout.manager import AsyncRolloutManager
from rollouts_core.rollout.rollout_batch import convert_to_batch
from rollouts_core.rollout.validity import UNSEEN_REPLY, InvalidWatch, mark_foreign_tokens
from rollouts_core.types import Message, Prompt, Sample, Status
from tests.rollouts_core.data.test_dialects import CALLS, template_of
from tests.rollouts_core.make import make_sample
from tests.rollouts_core.scripted import ScriptedEngine

CALL = {
    "hermes": '<tool_call>{"name": "calculator", "arguments": {"expression": "57+83"}}</tool_call>',
    "qwen_xml": "<tool_call><function=calculator><parameter=expression>57+83</parameter></function></tool_call>",
    "glm": "<tool_call>calculator<arg_key>expression</arg_key><arg_value>57+83</arg_value></tool_call>",
    "llama3": '{"name": "calculator", "parameters": {"expression": "57+83"}}',
    "gpt_oss": '<|channel|>commentary to=functions.calculator <|constrain|>json<|message|>{"expression": "57+83"}',
    "deepseek": '<｜tool▁call▁begin｜>calculator<｜tool▁sep｜>{"expression": "57+83"}<｜tool▁call▁end｜>',
    "gemma": '<|tool_call>call:calculator{expression:<|"|>57+83<|"|>}<tool_call|>',
    "lfm2": "<|tool_call_start|>[calculator(expression='57+83')]<|tool_call_end|>",
}
BROKEN = {**{name: call.replace("}", "").replace("</", "<") for name, call in CALL.items()}, "lfm2": CALL["lfm2"][:40]}
BROKEN["gemma"] = CALL["gemma"].replace("}", "")


class CalculatingEnvironment:
    """Has no dialect of its own, as environments of users have none."""

    tools = (CALCULATOR,)

    async def respond(self, conversation: Conversation) -> Reply:
        return await answer_tool_calls(conversation.text, self.tools)

    def grade(self, sample: Sample) -> float:
        return float("140" in sample.response)


def converse(turns: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> tuple[Sample, ScriptedEngine]:
    engine = ScriptedEngine(turns, tokenizer)
    prompt = Prompt(id="p", messages=(Message(role="user", content="57+83"),))
    config = RolloutConfig(sampling=SamplingConfig(max_new_tokens=4000))
    generate = create_conversation_generate_fn([engine], tokenizer, config, CalculatingEnvironment())
    [sample] = asyncio.run(generate(build_pending_group(prompt, group_index=0, size=1)))
    return sample, engine


def add_special(tokenizer: PreTrainedTokenizerBase, *texts: str) -> None:
    tokenizer.add_tokens([AddedToken(text, special=True) for text in texts], special_tokens=True)


ONLY_BEHIND_CALLS = (
    "{% for m in messages if m.role != 'tool' %}<|im_start|>{{ m.role }}\n"
    "{% for c in m.tool_calls or [] %}{% set f = c.function %}CALL{% endfor %}"
    "{% set said = namespace(n=0, open=true) %}"
    "{% if m.tool_calls %}{% for t in messages[loop.index:] %}"
    "{% if t.role == 'tool' and said.open %}<|response>{{ t.content }}<response|>{% set said.n = 1 %}"
    "{% else %}{% set said.open = false %}{% endif %}{% endfor %}{% endif %}{{ m.content }}"
    "{% if m.tool_calls and not said.n %}<|response>{% elif not said.n %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt and messages[-1].role != 'tool' %}<|im_start|>assistant\n{% endif %}"
)
"""As Gemma's of 2026: a tool's answer goes on in the turn that called, and is written behind calls alone."""
LATER_TURNS_WITHOUT_THOUGHTS = template_of("hermes", "{% if loop.last %}<think>\n\n</think>\n\n{% endif %}")
TEMPLATES = {
    **{name: template_of(name) for name in CALL},
    "behind": ONLY_BEHIND_CALLS.replace("CALL", CALLS["gemma"]),
    "thoughts": LATER_TURNS_WITHOUT_THOUGHTS,
}


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("is_broken", [False, True])
def test_a_tool_is_called_and_its_answer_seen(
    template: str, is_broken: bool, byte_tokenizer: PreTrainedTokenizerBase
) -> None:
    add_special(byte_tokenizer, "<|response>", "<response|>")
    byte_tokenizer.chat_template = TEMPLATES[template]
    name = {"behind": "gemma", "thoughts": "hermes"}.get(template, template)
    sample, engine = converse([(BROKEN if is_broken else CALL)[name], "140"], byte_tokenizer)
    assert len(engine.requests) == 2
    outcome = Outcome.PARSE_FAILURE if is_broken else Outcome.OK
    assert (sample.status, sample.metadata["outcomes"]) == (Status.COMPLETED, [outcome, "ok"])
    said, answered = sample.metadata["conversation"][1:3]
    assert said["content"] == (BROKEN if is_broken else CALL)[name], "the text is kept"
    read = byte_tokenizer.decode(engine.requests[1].prompt_tokens)
    assert answered["content"] in read
    assert read.count(said["content"]) == 1, "the call is not written a second time"
    check_conversation(byte_tokenizer, RolloutConfig(environment="calculator"))


def test_several_answers_are_seen_in_order(byte_tokenizer: PreTrainedTokenizerBase) -> None:
    add_special(byte_tokenizer, "<|response>", "<response|>")
    byte_tokenizer.chat_template = TEMPLATES["behind"]
    _, engine = converse([CALL["gemma"] + CALL["gemma"].replace("83", "1"), "140"], byte_tokenizer)
    assert byte_tokenizer.decode(engine.requests[1].prompt_tokens).endswith(
        "<|response>140<response|><|response>58<response|>"
    )


def test_calls_between_special_tokens_are_made(byte_tokenizer: PreTrainedTokenizerBase) -> None:
    """As in tokenizers of Qwen and others, which would leave them out of a text."""
    add_special(byte_tokenizer, "<tool_call>", "</tool_call>")
    byte_tokenizer.chat_template = template_of("hermes")
    sample, engine = converse([CALL["hermes"], "140"], byte_tokenizer)
    assert (len(engine.requests), sample.response, sample.metadata["outcomes"]) == (2, "140", ["ok", "ok"])


HIDES = template_of("hermes").replace("{% for m in messages %}", "{% for m in messages if m.role != 'tool' %}")
CUTS = template_of("hermes").replace("{{ m.content }}", "{{ m.content[:1] if m.role == 'tool' else m.content }}")
REFUSES = template_of("hermes").replace(
    "{% for m in messages %}", "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no') }}{% endif %}"
)
ESCAPES = template_of("hermes").replace(
    "{{ m.content }}", "{{ m.content | tojson if m.role == 'tool' else m.content }}"
)


@pytest.mark.parametrize("template", [HIDES, CUTS, REFUSES])
def test_a_template_that_hides_answers_is_refused_and_makes_samples_invalid(
    template: str, byte_tokenizer: PreTrainedTokenizerBase
) -> None:
    byte_tokenizer.chat_template = template
    with pytest.raises(DataError, match=r"text of the role 'tool'|refuses the turns"):
        check_conversation(byte_tokenizer, RolloutConfig(environment="calculator"))
    sample, engine = converse([CALL["hermes"], "140"], byte_tokenizer)
    assert (sample.status, sample.finish_reason, len(engine.requests)) == (Status.INVALID, UNSEEN_REPLY, 1)


def test_an_answer_may_be_written_as_json(byte_tokenizer: PreTrainedTokenizerBase) -> None:
    byte_tokenizer.chat_template = ESCAPES
    check_conversation(byte_tokenizer, RolloutConfig(environment="calculator"))
    sample, _ = converse([CALL["hermes"], "140"], byte_tokenizer)
    assert sample.status is Status.COMPLETED


def test_a_run_of_invalid_samples_ends_with_the_reason(byte_tokenizer: PreTrainedTokenizerBase) -> None:
    byte_tokenizer.chat_template = HIDES
    config = RolloutConfig(
        batch_size=1, n_samples_per_prompt=4, sampling=SamplingConfig(max_new_tokens=4000), multi_turn=MultiTurnConfig()
    )
    environment = CalculatingEnvironment()
    engine = ScriptedEngine([CALL["hermes"]], byte_tokenizer)
    generate = create_conversation_generate_fn([engine], byte_tokenizer, config, environment)
    prompts = [Prompt(id="p", messages=(Message(role="user", content="57+83"),))]

    async def run() -> None:
        manager = AsyncRolloutManager(
            DataBuffer(prompts, seed=0), config, generate_fn=generate, reward_fn=environment.grade
        )
        async with manager:
            await manager.generate_batch()

    with pytest.raises(DataError, match=r"4 of the last 4 samples are invalid, more than 5%.*text of the role 'tool'"):
        asyncio.run(run())


def sample_of(status: Status, reward: float | None, index: int) -> Sample:
    tokens = make_sample([3, 5, 7 + index], [0, 1, 1], [0, -1, -1])
    fields: dict[str, Any] = {"status": status, "reward": reward, "index": index, "finish_reason": UNSEEN_REPLY}
    return Sample(
        tokens=tokens.tokens, loss_mask=tokens.loss_mask, rollout_log_probs=tokens.rollout_log_probs, **fields
    )


def test_an_invalid_sample_is_no_part_of_a_step() -> None:
    """Its group is that of the others; the step counts it, and learns nothing from it."""
    valid = [sample_of(Status.COMPLETED, reward, i) for i, reward in enumerate((0.0, 1.0))]
    samples = [*valid, sample_of(Status.INVALID, None, 2)]
    config = RLTrainingConfig()
    check_scored(samples, config)
    batches = [convert_to_batch(each, metadata={}) for each in (valid, samples)]
    alone, beside = (assign_credit(b.samples, b.rewards, config, RolloutScores()).advantages for b in batches)
    assert beside == [*alone, 0.0]
    [[update], [other]] = [prepare_updates(b, b.rewards, config, num_updates=1)[0] for b in batches]
    assert other.num_loss_tokens == update.num_loss_tokens == 4
    metrics = describe_rollouts(batches[1])
    assert (metrics["invalid/unseen_reply"], metrics["num_unscored"], metrics["reward"]) == (1.0, 0.0, 0.5)


@pytest.mark.parametrize(
    ("num_valid", "num_invalid", "ends"),
    [(38, 2, False), (0, 2, False), (37, 3, True), (190, 10, False), (189, 11, True)],
)
def test_a_share_above_one_in_twenty_ends_a_run(num_valid: int, num_invalid: int, ends: bool) -> None:
    watch = InvalidWatch()
    assert watch.note([sample_of(Status.COMPLETED, 0.0, 0)] * num_valid) is None
    assert (watch.note([sample_of(Status.INVALID, None, 0)] * num_invalid) is not None) is ends


def test_a_sample_of_ids_that_the_tokenizer_lacks_is_invalid() -> None:
    sample = make_sample([3, 9, 7, 8], [0, 0, 1, 1])
    assert mark_foreign_tokens(sample, 9) is sample
    marked = mark_foreign_tokens(sample, 8)
    assert (marked.status, marked.finish_reason) == (Status.INVALID, "foreign_tokens")
    assert "token id 8" in marked.metadata["invalid"]
