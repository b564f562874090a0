"""Pins what a row of demonstrations may look like, and that any other is refused with a reason.

Without it a row of a common shape would be unusable, or one with a misspelt field trained on as something else.
"""

import re
from typing import Any

import pytest

from rollouts_core.data.chat import Conversation
from rollouts_core.data.conversations import MAX_SHOWN_KEYS, describe_keys, read_demonstration, read_messages
from rollouts_core.errors import DataError
from rollouts_core.types import Message

ASK: Message = {"role": "user", "content": "1+1?"}
ANSWER: Message = {"role": "assistant", "content": "2"}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
TOOL = {"type": "function", "function": {"name": "add"}}


@pytest.mark.parametrize(
    ("row", "num_given"),
    [
        ({"messages": [ASK, ANSWER]}, 0),
        ({"prompt": "1+1?", "completion": "2"}, 1),
        ({"prompt": "1+1?", "response": "2"}, 1),
        ({"prompt": [ASK], "completion": [ANSWER]}, 1),
        ({"prompt": "1+1?", "completion": "2", "messages": None, "text": None}, 1),
        ({"messages": [ASK, ANSWER], "prompt": "other", "text": "other", "id": 7}, 0),
    ],
)
def test_every_shape_of_a_conversation_reads_the_same(row: dict[str, Any], num_given: int) -> None:
    assert read_demonstration(row) == Conversation([ASK, ANSWER], None, num_given)


def test_a_text_row_is_its_text() -> None:
    assert read_demonstration({"text": "abc", "messages": None}) == "abc"


def test_further_keys_of_a_message_reach_the_template_and_nulls_do_not() -> None:
    message = {"role": "assistant", "content": "2", "reasoning_content": "easy", "name": None, "tool_calls": None}
    assert read_messages([message]) == [{"role": "assistant", "content": "2", "reasoning_content": "easy"}]


def test_content_may_be_null_beside_tool_calls() -> None:
    [message] = read_messages([{"role": "assistant", "content": None, "tool_calls": [CALL]}])
    assert message == {"role": "assistant", "content": "", "tool_calls": [CALL]}


@pytest.mark.parametrize(("arguments", "parsed"), [('{"a": 1}', {"a": 1}), ("", {}), ({"a": 1}, {"a": 1})])
def test_arguments_of_a_call_become_an_object(arguments: object, parsed: object) -> None:
    call = {"function": {"name": "add", "arguments": arguments}}
    [message] = read_messages([{"role": "assistant", "tool_calls": [call]}])
    assert message["tool_calls"] == [{"function": {"name": "add", "arguments": parsed}}]


def test_a_call_without_the_function_around_it_is_taken_as_it_is() -> None:
    [message] = read_messages([{"role": "assistant", "tool_calls": [{"name": "add", "arguments": "{}"}]}])
    assert message["tool_calls"] == [{"name": "add", "arguments": {}}]


def test_parts_of_text_are_joined() -> None:
    parts = [{"type": "text", "text": "1+"}, {"type": "text", "text": "1?"}]
    assert read_messages([{"role": "user", "content": parts}]) == [ASK]


@pytest.mark.parametrize("tools", [[TOOL], '[{"type": "function", "function": {"name": "add"}}]'])
def test_tools_are_a_list_or_the_json_text_of_one(tools: object) -> None:
    demonstration = read_demonstration({"messages": [ASK, ANSWER], "tools": tools})
    assert isinstance(demonstration, Conversation)
    assert demonstration.tools == [TOOL]


@pytest.mark.parametrize("tools", [None, [], "", " "])
def test_no_tools_are_none(tools: object) -> None:
    demonstration = read_demonstration({"messages": [ASK, ANSWER], "tools": tools})
    assert isinstance(demonstration, Conversation)
    assert demonstration.tools is None


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "x", "answer": "y"}, r"found answer, prompt; answer may be the completion: rename it"),
        (
            {"question": "x", "answer": "y"},
            r"did you mean prompt\? rename question to prompt; answer may be the completion: rename it",
        ),
        ({"instruction": "x", "input": "", "output": "y"}, r"rename `output` to `completion`$"),
        ({"mesages": []}, r"expected `messages`.*; found mesages; did you mean messages\?"),
        ({"prompt": "x", "completoin": "y"}, r"found completoin, prompt; did you mean completion\?"),
        (
            {"conversations": [{"from": "human", "value": "1+1?"}], "id": "7"},
            r"expected `messages`, or `prompt` and `completion`.* found conversations, id; ShareGPT's `conversations` "
            r"\(`from`, `value`\) must be converted to `messages` \(`role`, `content`\)$",
        ),
        ({"instruction": "x", "input": "y", "output": "z"}, "join Alpaca's `instruction` and `input` to"),
        ({"prompt": "x", "chosen": "y", "rejected": "z"}, "found chosen, prompt, rejected; SFT uses the chosen"),
        ({"chosen": [ASK, ANSWER], "rejected": [ASK, ANSWER]}, "rename chosen to messages if it is the whole"),
        ({"prompt": "x", "completion": None}, r"found prompt, completion \(null\)"),
        ({"messages": {"role": "user"}}, "`messages` must be a list"),
        ({"prompt": [], "completion": "x"}, "`prompt` must be a list with at least one"),
        ({"prompt": "x", "completion": [3]}, "message 0 must have"),
        ({"prompt": "x", "completion": 3}, "`completion` must be text, found int"),
        ({"text": ["x"]}, "`text` must be text, found list"),
        ({"messages": [{"role": "user", "content": None}]}, "message 0 must have `role` and `content`"),
        ({"messages": [{"role": 3, "content": "x"}]}, "message 0 must have `role`"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "content other than text"),
        ({"messages": [{"role": "assistant", "tool_calls": "add"}]}, "`tool_calls` of message 0 must be a list"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "x"}]}]}, "must name a `function`"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
            "`arguments` of a tool call of message 0 must be JSON",
        ),
        ({"messages": [ASK, ANSWER], "tools": {"name": "add"}}, "`tools` must be a list of JSON schemas"),
        ({"messages": [ASK, ANSWER], "tools": ["add"]}, "`tools` must be a list of JSON schemas"),
        ({"messages": [ASK, ANSWER], "tools": "[{"}, "`tools` must be JSON"),
    ],
)
def test_a_row_that_does_not_fit_is_refused_with_the_reason(row: dict[str, Any], reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        read_demonstration(row)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"arguments": '{"a": 1, "a": 2}'}, "of message 0 must be JSON (the key 'a' occurs twice"),
        ({"arguments": '{"a": NaN}'}, "must be JSON (NaN is not a JSON value"),
        ({"arguments": '{"a": "\\ud83d"}'}, r"must be JSON ('\ud83d' is half of a character)"),
        ({"arguments": '"{}"'}, "must be a JSON object, found {}"),
        ({"arguments": [1]}, "must be a JSON object, found [1]"),
        ({"parameters": {"a": 1}}, "are missing, found `parameters`: rename it"),
        ({"input": {"a": 1}}, "are missing, found `input`: rename it"),
    ],
)
def test_a_call_whose_arguments_would_be_lost_or_changed_is_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError, match=re.escape(words)):
        read_messages([{"role": "assistant", "tool_calls": [{"function": {"name": "f", **given}}]}])


def test_of_a_row_of_very_many_fields_the_first_are_named() -> None:
    row = {f"k{number:05}": 1 for number in range(200)}
    first = ", ".join(f"k{number:05}" for number in range(MAX_SHOWN_KEYS))
    assert describe_keys(row) == f"{first}, 180 more"
    assert describe_keys(row | {"question": "?"}).endswith("181 more; did you mean prompt? rename question to prompt")


def test_an_empty_row_has_no_field_at_all() -> None:
    assert describe_keys({}) == "no field at all"
