"""Pins: an answer that must call a tool is a call in the model's dialect, with arguments that follow the tool's schema.

Without it an agent that requires a call would get text, or arguments that its tool refuses.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anthropic
import httpx
import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerBase

from rollouts_core.data.chat import stop_token_ids
from rollouts_core.data.dialects import DIALECTS, ToolCall, find_dialect
from rollouts_core.embedded.forced_calls import CallForm, find_call_form
from rollouts_core.embedded.scheduler import RequestError
from tests.rollouts_core.data.test_dialects import as_written, template_of
from tests.rollouts_core.embedded.scripted_model import NAME, TIMEOUT_S, served
from tests.rollouts_core.embedded.tiny_models import make_model, save_model

UNFORCED = ("gemma", "lfm2")
FORCED = sorted(DIALECTS.keys() - {*UNFORCED})
CHOICE = {"enum": ["yes", "no", 'it\'s "so"']}
ADD: Any = {
    "type": "object",
    "properties": {
        "a": {"type": "integer", "minimum": -99, "maximum": 99},
        "said": {"type": "string", **CHOICE},
        "all": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["a", "said"],
    "additionalProperties": False,
}
NOW: Any = {"type": "object", "properties": {}, "additionalProperties": False}
SCHEMAS = {"add": ADD, "time.now": NOW}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": own}} for name, own in SCHEMAS.items()]
SPECIAL = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_value>", "<|channel|>", "<|message|>", "</think>")


def form_of(tokenizer: PreTrainedTokenizerBase, template: str) -> CallForm | None:
    tokenizer.chat_template = template
    stop_ids = stop_token_ids(tokenizer)
    has_thoughts = "</think>" in template
    return find_call_form(tokenizer, find_dialect(tokenizer), stop_ids=stop_ids, has_thoughts=has_thoughts)


def follows(tokenizer: PreTrainedTokenizerBase, grammar: str, text: str) -> bool:
    matcher = LLMatcher(
        LLTokenizer(tokenizer.backend_tokenizer.to_str(), len(tokenizer), [tokenizer.eos_token_id]),
        LLMatcher.grammar_from_lark(grammar),
    )
    assert not matcher.is_error(), matcher.get_error()
    ids = tokenizer.encode(text, add_special_tokens=False)
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


@pytest.mark.parametrize("is_special", [False, True])
@pytest.mark.parametrize("name", FORCED)
def test_the_grammar_permits_what_the_template_writes(
    name: str, is_special: bool, byte_tokenizer: PreTrainedTokenizerBase
) -> None:
    if is_special:
        byte_tokenizer.add_tokens([AddedToken(each, normalized=False) for each in SPECIAL])
    form = form_of(byte_tokenizer, template_of(name))
    assert form is not None
    calls = [ToolCall("add", {"a": -7, "said": 'it\'s "so"', "all": [True]}), ToolCall("time.now", {})]
    once, often = (form.grammar(TOOLS, is_single=is_single) for is_single in (True, False))
    for call in calls:
        assert follows(byte_tokenizer, once, as_written(byte_tokenizer, call))
    both = as_written(byte_tokenizer, *calls)
    assert not follows(byte_tokenizer, once, both)
    assert follows(byte_tokenizer, often, both) == (name not in ("llama3", "gpt_oss"))
    for wrong in (ToolCall("add", {"a": 100, "said": "no"}), ToolCall("add", {"a": 1}), ToolCall("sub", {})):
        assert not follows(byte_tokenizer, once, as_written(byte_tokenizer, wrong))
    assert not follows(byte_tokenizer, once, "")


@pytest.mark.parametrize("name", UNFORCED)
def test_calls_that_are_neither_json_nor_tags_have_no_grammar(
    name: str, byte_tokenizer: PreTrainedTokenizerBase
) -> None:
    assert form_of(byte_tokenizer, template_of(name)) is None


OPENED = "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
CALL = ToolCall("time.now", {})


@pytest.mark.parametrize("is_special", [False, True])
@pytest.mark.parametrize(
    ("template", "permitted", "forbidden"),
    [
        (template_of("qwen_xml"), ["CALL"], ["<think>hm</think>CALL"]),
        (
            template_of("qwen_xml", "{{ '<think>\\n\\n</think>\\n\\n' }}"),
            ["CALL", "<think>\nhm <b>\n</think>\n\nCALL", "<think></think>CALL"],
            ["<think>hm", "<think>hm</think></think>CALL", "hm</think>CALL"],
        ),
        (
            template_of("hermes", "{{ '<think>\\n\\n</think>\\n\\n' }}").partition("{% if add_generation")[0] + OPENED,
            ["hm\n</think>\n\nCALL", "</think>CALL"],
            ["CALL", "<think>CALL"],
        ),
    ],
    ids=["none", "may think", "thinks"],
)
def test_thoughts_may_come_before_a_call_if_the_template_knows_thoughts(
    template: str, permitted: list[str], forbidden: list[str], is_special: bool, byte_tokenizer: PreTrainedTokenizerBase
) -> None:
    if is_special:
        byte_tokenizer.add_tokens([AddedToken(each, normalized=False) for each in SPECIAL])
    form = form_of(byte_tokenizer, template)
    assert form is not None
    call = as_written(byte_tokenizer, CALL).rpartition("</think>")[2].lstrip()
    grammar = form.grammar(TOOLS, is_single=False)
    for is_permitted, texts in ((True, permitted), (False, forbidden)):
        assert [follows(byte_tokenizer, grammar, text.replace("CALL", call)) for text in texts] == [is_permitted] * len(
            texts
        )


def tool_of(**properties: Any) -> dict[str, Any]:
    return {"function": {"name": "add", "parameters": {"type": "object", "properties": properties}}}


@pytest.mark.parametrize(
    ("own", "value", "wrong"),
    [
        ({"type": "string"}, "a < b\n</parameters> </function", "<parameter=b>"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}], "default": None}, "null", "</function>"),
        ({"type": ["number", "null"]}, 1.5, "x"),
        ({"$ref": "#/$defs/none", "type": "object"}, {"b": [1, "x"]}, {"b": 1}),
        ({"const": "yes"}, "yes", "no"),
    ],
)
def test_values_between_tags_follow_their_schema(
    own: Any, value: Any, wrong: Any, byte_tokenizer: PreTrainedTokenizerBase
) -> None:
    form = form_of(byte_tokenizer, template_of("qwen_xml"))
    assert form is not None
    tool = tool_of(a=own)
    tool["function"]["parameters"]["$defs"] = {"none": {"properties": {"b": {"type": "array"}}}}
    grammar = form.grammar([tool], is_single=True)
    assert follows(byte_tokenizer, grammar, as_written(byte_tokenizer, ToolCall("add", {"a": value})))
    assert not follows(byte_tokenizer, grammar, as_written(byte_tokenizer, ToolCall("add", {"a": wrong})))


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"properties": {"a": {"type": "string", "maxLength": 3}}}, "'a' in the parameters of add cannot be forced"),
        ({"properties": {"a": {"$ref": "#/$defs/b"}}}, "'a' in the parameters"),
        ({"properties": {"a": {"enum": [1, 2]}}}, "'a' in the parameters"),
        ({"properties": {"a>b": {"type": "string"}}}, "'a>b' in the parameters"),
        ({"required": ["b"]}, "'b' in the parameters"),
        ({"minProperties": 1}, "'minProperties' in the parameters"),
        ({"type": "array"}, "the parameters of add are not the schema of an object"),
        ({"properties": []}, "are not the schema of an object"),
    ],
)
def test_a_schema_that_text_between_tags_cannot_follow_is_refused(
    parameters: Any, words: str, byte_tokenizer: PreTrainedTokenizerBase
) -> None:
    form = form_of(byte_tokenizer, template_of("glm"))
    assert form is not None
    with pytest.raises(RequestError, match=words):
        form.grammar([{"function": {"name": "add", "parameters": parameters}}], is_single=True)


@contextmanager
def serving(tokenizer: PreTrainedTokenizerBase, template: str, directory: Path) -> Iterator[str]:
    """The address of a server of a random model, whose tokens are bytes."""
    tokenizer.chat_template = template
    tokenizer.save_pretrained(directory)
    save_model(make_model(vocab_size=len(tokenizer) + 8, eos_token_id=tokenizer.eos_token_id), directory)
    with served(directory, name=NAME) as (url, _):
        yield url


def ask(url: str, **asked: Any) -> httpx.Response:
    body = {"model": NAME, "messages": [{"role": "user", "content": "?"}], "tools": TOOLS, "max_tokens": 1000, **asked}
    return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=TIMEOUT_S)


def read_calls(answer: httpx.Response) -> list[list[tuple[str, Any]]]:
    """The names and arguments of the calls of each choice; also of a stream."""
    assert answer.status_code == 200, answer.text
    if not answer.headers["content-type"].startswith("text/event-stream"):
        pieces = [(each["index"], each["message"], each["finish_reason"]) for each in answer.json()["choices"]]
    else:
        events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
        choices = [choice for event in events for choice in event["choices"]]
        pieces = [(each["index"], each["delta"], each["finish_reason"]) for each in choices]
    found: dict[int, list[tuple[str, Any]]] = {}
    reasons = {}
    for index, piece, reason in pieces:
        assert not piece.get("content")
        reasons[index] = reason
        calls = [call["function"] for call in piece.get("tool_calls") or []]
        found.setdefault(index, []).extend((call["name"], json.loads(call["arguments"])) for call in calls)
    assert set(reasons.values()) == {"tool_calls"}
    return [found[index] for index in sorted(found)]


@pytest.mark.slow
@pytest.mark.parametrize("name", FORCED)
def test_a_random_model_calls_a_tool_with_arguments_that_follow_its_schema(
    name: str, byte_tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    ends = {"logit_bias": {byte_tokenizer.eos_token_id: 100.0}}  # else a random model goes on calling
    with serving(byte_tokenizer, template_of(name), tmp_path) as url:
        for is_stream in (False, True):
            answers = read_calls(ask(url, n=2, seed=1, tool_choice="required", stream=is_stream, **ends))
            assert len(answers) == 2 and all(answers)
            for called, arguments in (call for calls in answers for call in calls):
                jsonschema.validate(arguments, SCHEMAS[called])
        choice = {"type": "function", "function": {"name": "add"}}
        [[(called, arguments)]] = read_calls(ask(url, seed=1, tool_choice=choice, parallel_tool_calls=False))
        jsonschema.validate(arguments, ADD)
        assert called == "add"


@pytest.mark.slow
@pytest.mark.parametrize("is_stream", [False, True])
def test_anthropics_choices_require_a_call(
    is_stream: bool, byte_tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    tools: Any = [{"name": name, "input_schema": own} for name, own in SCHEMAS.items()]
    with serving(byte_tokenizer, template_of("hermes"), tmp_path) as url:
        client = anthropic.Anthropic(base_url=url, api_key="none", timeout=TIMEOUT_S, max_retries=0)
        for choice in ({"type": "any"}, {"type": "tool", "name": "add", "disable_parallel_tool_use": True}):
            asked: Any = {"model": NAME, "max_tokens": 1000, "messages": [{"role": "user", "content": "?"}]}
            asked |= {"tools": tools, "tool_choice": choice}
            if is_stream:
                with client.messages.stream(**asked) as stream:
                    answer: Any = stream.get_final_message()
            else:
                answer = client.messages.create(**asked)
            assert answer.stop_reason == "tool_use" and {block.type for block in answer.content} == {"tool_use"}
            for block in answer.content:
                jsonschema.validate(block.input, SCHEMAS[block.name])
        assert [block.name for block in answer.content] == ["add"]


@pytest.mark.slow
def test_a_call_that_cannot_be_required_is_refused(byte_tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    with serving(byte_tokenizer, template_of("gemma"), tmp_path) as url:
        required: dict[str, Any] = {"tool_choice": "required"}
        for asked, words in (
            (required, "calls in the form of this model's chat template (gemma) cannot be forced: use auto."),
            (required | {"tools": []}, "tools does not have the required function"),
            ({"tool_choice": {"type": "function", "function": {"name": "sub"}}}, "does not have the required function"),
            ({"tool_choice": "always"}, "tool_choice"),
        ):
            refused = ask(url, **asked)
            assert (refused.status_code, words in refused.json()["error"]["message"]) == (400, True), refused.text
        assert ask(url, max_tokens=3).status_code == 200


@pytest.mark.slow
def test_a_call_is_not_required_beside_another_constraint_or_by_a_wrong_schema(
    byte_tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    wonder = {"function": {"name": "add", "parameters": {"properties": {"a": {"type": "wonder"}}}}, "type": "function"}
    with serving(byte_tokenizer, template_of("hermes"), tmp_path) as url:
        for asked, words in (
            ({"regex": "a"}, "Only one of json_schema, regex and a required tool call can be set"),
            ({"tools": [wonder]}, "A tool for a required call is not supported"),
            ({"tools": [{**wonder, "function": {"name": "a b"}}]}, "'a b' has characters besides letters"),
        ):
            refused = ask(url, tool_choice="required", **asked)
            assert (refused.status_code, words in refused.json()["error"]["message"]) == (400, True), refused.text
