"""Pins in which dialects tool calls are read, and that a template which none of them reads is refused.

Without it a policy calls tools as its own template teaches, nothing is called, and its conversations end as if it had
answered.
"""

from __future__ import annotations

import json
import re
import time
from contextlib import suppress
from typing import Any

import pytest
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerBase

from rollouts_core.data.dialects import (
    DEFAULT_DIALECT,
    DIALECTS,
    CallError,
    Dialect,
    ToolCall,
    TurnReader,
    find_dialect,
)
from rollouts_core.data.rendering import render_text
from rollouts_core.errors import DataError

HEADER = "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}THOUGHTS{% endif %}"
FOOTER = (
    "{{ m.content }}{% for c in m.tool_calls or [] %}{% set f = c.function %}CALL{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ITEMS = "{% for k, v in f.arguments.items() %}ITEM{% endfor %}"
TAGS = ITEMS.replace("ITEM", "<parameter={{ k }}>\n{{ v if v is string else v | tojson }}\n</parameter>\n")
PAIRS = ITEMS.replace(
    "ITEM", "<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v if v is string else v | tojson }}</arg_value>\n"
)
BARE = ITEMS.replace(
    "ITEM",
    """{{ k }}:{% if v is string %}<|"|>{{ v }}<|"|>{% else %}{{ v | tojson }}{% endif %}"""
    "{{ ',' if not loop.last }}",
)
PYTHON = ITEMS.replace(
    "ITEM", "{{ k }}={% if v is string %}'{{ v }}'{% else %}{{ v }}{% endif %}{{ ', ' if not loop.last }}"
)
JSON_CALL = '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}'
CALLS = {
    "hermes": f"\n<tool_call>\n{JSON_CALL}\n</tool_call>",
    "qwen_xml": f"<tool_call>\n<function={{{{ f.name }}}}>\n{TAGS}</function>\n</tool_call>",
    "glm": f"\n<tool_call>{{{{ f.name }}}}\n{PAIRS}</tool_call>",
    "llama3": JSON_CALL.replace("arguments", "parameters", 1),
    "gpt_oss": "<|channel|>commentary to=functions.{{ f.name }} <|constrain|>json<|message|>{{ f.arguments | tojson }}",
    "deepseek": "<｜tool▁call▁begin｜>{{ f.name }}<｜tool▁sep｜>{{ f.arguments | tojson }}<｜tool▁call▁end｜>",
    "gemma": f"<|tool_call>call:{{{{ f.name + '{{' }}}}{BARE}}}<tool_call|>",
    "lfm2": f"<|tool_call_start|>[{{{{ f.name }}}}({PYTHON})]<|tool_call_end|>",
}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "said": {"type": "string"}, "all": {"type": "array"}},
        },
    },
}


def template_of(name: str, thoughts: str = "") -> str:
    return HEADER.replace("THOUGHTS", thoughts) + FOOTER.replace("CALL", CALLS[name])


def as_written(tokenizer: PreTrainedTokenizerBase, *calls: ToolCall) -> str:
    """What the template writes of the calls, without the end of the turn."""
    turn: Any = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": call.name, "arguments": call.arguments}} for call in calls],
    }
    text = render_text(tokenizer, [turn], None, add_generation_prompt=False)
    return text.removeprefix("<|im_start|>assistant\n").removesuffix("<|im_end|>\n")


THINK_OTHERWISE = {"llama3", "gpt_oss", "gemma"}
"""Dialects of models that do not write their thoughts between <think> and </think>."""


@pytest.mark.parametrize(
    ("name", "thoughts"),
    [
        *((name, "") for name in DIALECTS),
        *((name, "<think>\n\n</think>\n\n") for name in sorted(DIALECTS.keys() - THINK_OTHERWISE)),
    ],
)
def test_the_dialect_of_a_template_is_found(name: str, thoughts: str, byte_tokenizer: PreTrainedTokenizerBase) -> None:
    byte_tokenizer.chat_template = template_of(name, thoughts)
    dialect = find_dialect(byte_tokenizer)
    assert (dialect.name, dialect.ends) == (name, (byte_tokenizer.eos_token_id,))
    call = ToolCall("add", {"a": 12, "said": "7 (seven), or so", "all": [1, 2]})
    assert dialect.read(as_written(byte_tokenizer, call), [ADD]) == [call]
    assert dialect.read("It is 140: add nothing.", [ADD]) == []


@pytest.mark.parametrize("name", sorted(DIALECTS.keys() - {"llama3", "gpt_oss"}))
def test_several_calls_and_words_before_them_are_read(name: str, byte_tokenizer: PreTrainedTokenizerBase) -> None:
    byte_tokenizer.chat_template = template_of(name)
    calls = [ToolCall("add", {"a": 1, "said": "75001"}), ToolCall("add", {"a": -2})]
    assert find_dialect(byte_tokenizer).read(f"I add. {as_written(byte_tokenizer, *calls)}", [ADD]) == calls


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1}</tool_call>'),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1}}'),
        ("qwen_xml", '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'),
        ("qwen_xml", "<tool_call><function=add><parameter=a>1</function></tool_call>"),
        ("qwen_xml", "<tool_call><function=add><parameter=a>1</parameter>"),
        ("glm", '<tool_call>{"name": "add"}</tool_call>'),
        ("glm", "<tool_call>add<arg_key>a</arg_key>1</tool_call>"),
        ("llama3", '{"name": "add", "parameters": {"a": 1}'),
        ("llama3", '{"name": "add", "parameters": "1"}'),
        ("gpt_oss", '<|channel|>commentary to=functions.add<|message|>{"a": 1'),
        ("deepseek", '<｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1<｜tool▁call▁end｜>'),
        ("deepseek", '<｜tool▁call▁begin｜>{"a": 1}<｜tool▁call▁end｜>'),
        ("gemma", '<|tool_call>call:add{a:<|"|>1}<tool_call|>'),
        ("gemma", "<|tool_call>call:add{a:1}"),
        ("lfm2", "<|tool_call_start|>[add(a=1]<|tool_call_end|>"),
        ("lfm2", "<|tool_call_start|>[add(1)]<|tool_call_end|>"),
        ("lfm2", "<|tool_call_start|>[add(a=open)]<|tool_call_end|>"),
    ],
)
def test_a_broken_call_is_told(name: str, text: str) -> None:
    with pytest.raises(CallError):
        Dialect(name=name, template=DIALECTS[name]).read(text, [ADD])


@pytest.mark.parametrize("name", DIALECTS)
def test_a_turn_that_arrives_in_single_characters_is_read_as_a_whole_one(
    name: str, byte_tokenizer: PreTrainedTokenizerBase
) -> None:
    """Otherwise a stream would lose calls whose name is written in several tokens."""
    byte_tokenizer.chat_template = template_of(name)
    call = ToolCall("add", {"a": 1, "said": "7 (seven)"})
    reader = TurnReader(find_dialect(byte_tokenizer), [ADD])
    pieces = [piece for character in as_written(byte_tokenizer, call) for piece in reader.feed(character)]
    assert [piece for piece in pieces + reader.finish() if isinstance(piece, ToolCall)] == [call]


def test_calls_in_thoughts_are_not_made(byte_tokenizer: PreTrainedTokenizerBase) -> None:
    byte_tokenizer.chat_template = template_of("hermes").replace(
        "<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<think>\n{% endif %}"
    )
    call = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    dialect = find_dialect(byte_tokenizer)
    assert dialect.read(f"maybe {call}? no</think>140") == []
    assert dialect.read(f"maybe {call}!</think>{call}") == [ToolCall("add", {})]


def test_python_literals_and_those_of_json_are_read() -> None:
    text = '<|tool_call_start|>[f(a=True, b=null, c={"d": [false, -1.5]}), g()]<|tool_call_end|>'
    assert Dialect(name="lfm2", template=DIALECTS["lfm2"]).read(text) == [
        ToolCall("f", {"a": True, "b": None, "c": {"d": [False, -1.5]}}),
        ToolCall("g", {}),
    ]


UNKNOWN = template_of("hermes").replace("<tool_call>", "<invoke>").replace("</tool_call>", "</invoke>")
OWN = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "tool_calls": {
            "open": "<invoke>",
            "close": "</invoke>",
            "content": "json",
            "repeats": True,
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close": "<|im_end|>"},
    },
}


def test_a_template_whose_calls_nothing_reads_is_refused(byte_tokenizer: PreTrainedTokenizerBase) -> None:
    byte_tokenizer.chat_template = UNKNOWN
    with pytest.raises(DataError, match=re.escape("<invoke>")) as raised:
        find_dialect(byte_tokenizer)
    assert "rollout.multi_turn.response_template" in str(raised.value)


@pytest.mark.parametrize("is_setting", [True, False])
def test_a_response_template_of_the_user_or_of_the_tokenizer_reads_calls(
    is_setting: bool, byte_tokenizer: PreTrainedTokenizerBase
) -> None:
    byte_tokenizer.chat_template = UNKNOWN
    if not is_setting:
        byte_tokenizer.response_template = OWN
    dialect = find_dialect(byte_tokenizer, json.dumps(OWN) if is_setting else "")
    call = ToolCall("add", {"a": 1})
    assert dialect.read(as_written(byte_tokenizer, call)) == [call]


@pytest.mark.parametrize("setting", ["hermes", "qwen3", "{}", "[1]", json.dumps({**OWN, "fields": {}})])
def test_a_setting_that_does_not_fit_is_refused(setting: str, byte_tokenizer: PreTrainedTokenizerBase) -> None:
    byte_tokenizer.chat_template = UNKNOWN
    with pytest.raises(DataError, match=r"rollout\.multi_turn\.response_template"):
        find_dialect(byte_tokenizer, setting)


def test_a_template_that_writes_no_calls_leaves_the_common_dialect(byte_tokenizer: PreTrainedTokenizerBase) -> None:
    byte_tokenizer.chat_template = HEADER.replace("THOUGHTS", "") + "{{ m.content }}<|im_end|>\n{% endfor %}"
    assert find_dialect(byte_tokenizer) == DEFAULT_DIALECT


@pytest.mark.parametrize(
    ("behind", "answered", "end"),
    [("<|call|>", "", "<|call|>"), ("", "<|observation|>", "<|observation|>"), ("</tool_call>", "", "<|im_end|>")],
)
def test_what_ends_a_turn_of_calls_is_known(
    behind: str, answered: str, end: str, byte_tokenizer: PreTrainedTokenizerBase
) -> None:
    """An engine that does not stop there would let the policy answer itself."""
    special = ["<|call|>", "<|observation|>", "<tool_call>", "</tool_call>"]
    byte_tokenizer.add_tokens([AddedToken(each, special=True) for each in special], special_tokens=True)
    turn_end = "<|im_end|>\n" if behind == "</tool_call>" else behind
    byte_tokenizer.chat_template = (
        (
            "{% for m in messages %}{% if m.role == 'tool' %}ANSWERED{{ m.content }}{% elif m.tool_calls %}"
            "{% for c in m.tool_calls %}{% set f = c.function %}CALL{% endfor %}END{% else %}"
            "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
            "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
        )
        .replace("CALL", CALLS["hermes"])
        .replace("END", turn_end)
        .replace("ANSWERED", answered)
    )
    dialect = find_dialect(byte_tokenizer)
    assert dialect.ends == (byte_tokenizer.convert_tokens_to_ids(end),)


@pytest.mark.parametrize("name", DIALECTS)
def test_a_policy_that_repeats_itself_is_read_at_once(name: str) -> None:
    """All other conversations wait meanwhile."""
    dialect = Dialect(name=name, template=DIALECTS[name])
    openings = (
        "<tool_call><function=f>",
        "<tool_call>f",
        '{"name": "f"',
        "<|tool_call>call:f",
        "<｜tool▁call▁begin｜>f",
    )
    for opening in (*openings, "<|tool_call_start|>["):
        for rest in (" " * 10_000, opening * 1000, "<parameter=a>" * 3000, "<arg_key>" * 3000, "[" * 10_000):
            began = time.process_time()
            with suppress(CallError):
                dialect.read(f"{opening}{rest}</function></tool_call>")
            assert time.process_time() - began < 5.0
