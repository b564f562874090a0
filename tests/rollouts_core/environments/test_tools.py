"""Pins how tool calls are read, checked and answered.

Without it a malformed call could crash a run, or a tool would run with arguments that its schema forbids.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from rollouts_core.data.dialects import ToolCall
from rollouts_core.environments.calculator import CALCULATOR
from rollouts_core.environments.protocol import Outcome, Reply, Tool
from rollouts_core.environments.tools import answer_tool_calls, find_schema_problem, parse_tool_calls


def call(name: str = "calculator", **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def answer(text: str, *tools: Tool, timeout_s: float = 1.0) -> Reply:
    return asyncio.run(answer_tool_calls(text, tools or (CALCULATOR,), timeout_s=timeout_s))


def contents(reply: Reply) -> list[str]:
    return [message["content"] for message in reply.messages]


def nest(depth: int) -> list[Any]:
    nested: list[Any] = []
    for _ in range(depth):
        nested = [nested]
    return nested


def test_calls_are_read_in_order_wherever_they_stand() -> None:
    text = f"first {call('add', a=1)} then\n{call('sub', b=[2])}"
    assert parse_tool_calls(text) == [ToolCall("add", {"a": 1}), ToolCall("sub", {"b": [2]})]


@pytest.mark.parametrize("text", ["<tool_call>" + "\n" * 20_000, "<tool_call>" * 20_000])
def test_a_policy_that_repeats_itself_is_answered_at_once(text: str) -> None:
    """All other conversations wait meanwhile, and one that takes too long ends the run."""
    began = time.perf_counter()
    assert answer(text).outcome is Outcome.PARSE_FAILURE
    assert time.perf_counter() - began < 5.0


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        (CALCULATOR.parameters, ""),
        ({"type": "object", "properties": {"a": {"type": "int"}}}, ".properties.a.type: expected array, boolean, int"),
        (
            {"type": "function", "function": {"name": "add"}},
            ".type: expected array, boolean, integer, null, number, obj",
        ),
        ({"properties": ["a"]}, ".properties: ['a'] is not of type 'object'"),
        (None, ": expected an object, found None"),
    ],
)
def test_a_schema_that_is_none_is_told_by_its_place(schema: Any, problem: str) -> None:
    found = find_schema_problem(replace(CALCULATOR, parameters=schema))
    assert found.startswith(problem) if problem else not found


def test_each_call_gets_an_answer_in_order() -> None:
    reply = answer(call(expression="57+83") + call(expression="2*3"))
    assert (contents(reply), reply.outcome) == (["140", "6"], Outcome.OK)
    assert [message["role"] for message in reply.messages] == ["tool", "tool"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (140, "140"),
        ({"sum": [1, None]}, '{"sum": [1, null]}'),
        ("140", "140"),
        (["Zürich", "東京"], '["Zürich", "東京"]'),
    ],
)
def test_what_is_no_text_is_read_as_json(value: Any, text: str) -> None:
    tool = Tool(name="calculator", description="", parameters={"type": "object"}, function=lambda: value)
    assert contents(answer(call(), tool)) == [text]


@pytest.mark.parametrize("value", [pytest.param(10**5000, id="long"), pytest.param(nest(100_000), id="deep")])
def test_what_cannot_be_written_is_explained_to_the_policy(value: Any) -> None:
    """The policy asked for it, as by `pow(10, 5000)`, so it must not end the run."""
    tool = Tool(name="calculator", description="", parameters={"type": "object"}, function=lambda: value)
    reply = answer(call(), tool)
    assert reply.outcome is Outcome.TOOL_ERROR
    assert contents(reply)[0].startswith("error: its result cannot be written as JSON: ")


@pytest.mark.parametrize(("value", "text"), [("a\ud83d", "a?"), (["\ud83d"], '["?"]')])
def test_half_of_an_emoji_is_no_text_to_tokenize(value: Any, text: str) -> None:
    tool = Tool(name="calculator", description="", parameters={"type": "object"}, function=lambda: value)
    assert contents(answer(call(), tool)) == [text]


def test_without_a_call_there_is_nothing_to_answer() -> None:
    assert answer("it is 140").messages == ()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("<tool_call>{}</tool_call>", '"name" and "arguments"'),
        ("<tool_call>[1]</tool_call>", '"name" and "arguments"'),
        ('<tool_call>{"name": "calculator", "arguments": "1+1"}</tool_call>', "must be an object"),
        ("<tool_call>{expression: 1}</tool_call>", "not valid JSON"),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", "not valid JSON"),
        ('<tool_call>{"name": "calculator"', "has no closing </tool_call>"),
        (call(expression="half an emoji: \ud83d"), "not valid JSON: 'utf-8' codec can't encode character"),
        (call("\ud83d"), "not valid JSON"),
        (call(expression=float("nan")), "not valid JSON: Out of range float values"),
    ],
)
def test_a_call_that_cannot_be_read_is_explained_to_the_policy(text: str, sentence: str) -> None:
    reply = answer(text)
    assert reply.outcome is Outcome.PARSE_FAILURE
    assert sentence in contents(reply)[0]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (call("calculater", expression="1"), "unknown tool 'calculater'; did you mean calculator?"),
        (call(), "'expression' is a required property"),
        (call(expression=1), "arguments.expression: 1 is not of type 'string'"),
        (call(expression="1", digits=2), "Additional properties are not allowed"),
        (call(expression="1/0"), "division by zero"),
    ],
)
def test_what_a_tool_refuses_is_explained_to_the_policy(text: str, sentence: str) -> None:
    reply = answer(text)
    assert reply.outcome is Outcome.TOOL_ERROR
    assert sentence in contents(reply)[0]


ADD = Tool(
    name="add",
    description="Add two numbers.",
    parameters={"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    function=lambda a, b=0: a + b,
)


def test_an_argument_that_neither_schema_nor_function_names_is_explained_to_the_policy() -> None:
    reply = answer(call("add", a=1, b=2, unit="cm"), ADD)
    assert reply.outcome is Outcome.TOOL_ERROR
    assert contents(reply) == ["error: arguments: unknown argument 'unit'; known are a, b"]
    takes_none = replace(ADD, parameters={"type": "object"}, function=lambda: 0)
    assert contents(answer(call("add", a=1), takes_none)) == ["error: arguments: unknown argument 'a'"]


@pytest.mark.parametrize(
    ("schema", "value", "given"),
    [
        ({"type": "integer"}, 3.0, 3),
        ({"type": "number"}, 3.0, 3.0),
        ({"type": "array", "items": {"type": "integer"}}, [1, 2.0], [1, 2]),
        ({"type": "object", "properties": {"n": {"type": "integer"}}}, {"n": 4.0, "x": 4.0}, {"n": 4, "x": 4.0}),
    ],
)
def test_what_a_schema_wants_as_an_integer_is_given_as_one(schema: dict[str, Any], value: Any, given: Any) -> None:
    """A whole number with a point keeps to the schema, and a tool that counts or indexes by it would end the run."""
    tool = Tool(name="show", description="", parameters={"properties": {"a": schema}}, function=lambda a: repr(a))
    assert contents(answer(call("show", a=value), tool)) == [repr(given)]


def test_arguments_that_cannot_be_checked_are_explained_to_the_policy() -> None:
    tool = replace(ADD, parameters={"type": "object", "properties": {"a": {"items": {"$ref": "#/properties/a"}}}})
    reply = answer(call("add", a=json.loads("[" * 400 + "]" * 400)), tool)
    assert reply.outcome is Outcome.TOOL_ERROR
    assert contents(reply)[0].startswith("error: arguments: they cannot be checked: ")


@pytest.mark.parametrize("amount", [19.99, int("1" * 400)])
def test_an_amount_in_cents_is_a_multiple_of_a_cent(amount: float) -> None:
    schema = {"properties": {"a": {"type": "number", "multipleOf": 0.01}}}
    assert contents(answer(call("add", a=amount), replace(ADD, parameters=schema))) == [str(amount)]


@pytest.mark.parametrize("function", [lambda a, b: a + b, lambda *, a, b, **others: a + b])
def test_an_argument_that_is_missing_where_the_schema_does_not_ask_for_it_is_explained_to_the_policy(
    function: Callable[..., int],
) -> None:
    reply = answer(call("add", a=1), replace(ADD, function=function))
    assert reply.outcome is Outcome.TOOL_ERROR
    assert contents(reply) == ["error: arguments: 'b' is a required property"]


def test_a_function_that_takes_any_argument_gets_it() -> None:
    takes_all = replace(ADD, function=lambda **given: sum(given.values()))
    assert contents(answer(call("add", a=1, b=2, c=3), takes_all)) == ["6"]


def test_an_argument_that_the_schema_alone_names_or_the_function_alone_wants_is_a_mistake_of_the_tool() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'b'"):
        answer(call("add", a=1, b=2), replace(ADD, function=lambda a: a))
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'c'"):
        answer(call("add", a=1, b=2), replace(ADD, function=lambda a, b, c: a))


async def sleep_and_wait(seconds: float) -> str:
    await asyncio.sleep(seconds)
    return "awake"


def sleep_and_block(seconds: float) -> str:
    time.sleep(seconds)
    return "awake"


@pytest.mark.parametrize("sleep", [sleep_and_wait, sleep_and_block])
def test_a_tool_that_takes_too_long_is_left(sleep: Callable[[float], Any]) -> None:
    slow = Tool(name="sleep", description="Sleep.", parameters={"type": "object"}, function=sleep)
    reply = answer(call("sleep", seconds=0) + call("sleep", seconds=60), slow, timeout_s=0.4)
    assert contents(reply) == ["awake", "error: sleep took longer than 0.4 s"]
    assert reply.outcome is Outcome.TIMEOUT


def test_hundreds_of_slow_calls_do_not_take_the_time_of_the_environment() -> None:
    """An environment that does not answer in time is taken for an outage, for which groups are dropped."""
    slow = Tool(name="sleep", description="Sleep.", parameters={"type": "object"}, function=sleep_and_wait)
    began = time.monotonic()
    reply = answer(call("sleep", seconds=0.1) * 300, slow, timeout_s=0.25)
    assert time.monotonic() - began < 5.0
    assert len(reply.messages) == 300
    assert contents(reply)[0] == "awake"
    assert contents(reply)[-1] == "error: sleep was not called: the calls before it took longer than 0.25 s"
    assert reply.outcome is Outcome.TIMEOUT


def test_a_tool_is_described_as_chat_templates_take_it() -> None:
    described = CALCULATOR.to_json()
    assert described["type"] == "function"
    assert described["function"]["parameters"]["required"] == ["expression"]
