"""Parse, check and run the tool calls in a policy's turn, and reply with their results.

The format of tool calls depends on the model's chat template (`data/dialects.py`). Many models use JSON between tags:

    <tool_call>{"name": "calculator", "arguments": {"expression": "57+83"}}</tool_call>
"""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import anyio
from jsonschema.exceptions import SchemaError

from rollouts_core.config.messages import closest_name
from rollouts_core.data.dialects import DEFAULT_DIALECT, CallError, Dialect, ToolCall
from rollouts_core.environments.json_schema import MAX_CHECK_S, SchemaValidator
from rollouts_core.environments.protocol import Outcome, Reply, Tool, ToolError
from rollouts_core.system.time_limits import OutOfTimeError, call_within, interrupt_after_computing

logger = logging.getLogger(__name__)

SEVERITY = (Outcome.OK, Outcome.TOOL_ERROR, Outcome.TIMEOUT, Outcome.PARSE_FAILURE)
TOOL_TIMEOUT_S = 30.0
SCHEMA_TYPES = "array, boolean, integer, null, number, object or string"


_dialect: ContextVar[Dialect] = ContextVar("dialect", default=DEFAULT_DIALECT)
"""The format (dialect) of tool calls in the current asyncio task."""


@contextmanager
def reading_calls_in(dialect: Dialect) -> Iterator[None]:
    """Parse tool calls in this format inside the `with` block. A context variable passes the format to environments,
    because their methods have no argument for the format."""
    before = _dialect.set(dialect)
    try:
        yield
    finally:
        _dialect.reset(before)


async def answer_tool_calls(text: str, tools: Sequence[Tool], *, timeout_s: float = TOOL_TIMEOUT_S) -> Reply:
    """Run the tool calls in `text`; returns a reply with one message per call, in order.

    During a rollout, calls have the format of the policy's chat template. Outside of rollouts, calls are JSON between
    `<tool_call>` and `</tool_call>`.

    Args:
        timeout_s: time limit of each tool call. After this total time, the remaining calls of the turn are not run,
            because a policy may write hundreds of calls. A tool that is not a coroutine function blocks all other
            conversations while it runs.
    """
    try:
        calls = parse_tool_calls(text, tools)
    except ToolError as error:
        return Reply(messages=({"role": "tool", "content": f"error: {error}"},), outcome=Outcome.PARSE_FAILURE)
    by_name = {tool.name: tool for tool in tools}
    answers: list[tuple[str, Outcome]] = []
    began = anyio.current_time()
    for call in calls:
        if anyio.current_time() - began < timeout_s:
            answers.append(await _answer(call, by_name, timeout_s))
        else:
            late = f"error: {call.name} was not called: the calls before it took longer than {timeout_s:g} s"
            answers.append((late, Outcome.TIMEOUT))
    return Reply(
        messages=tuple({"role": "tool", "name": call.name, "content": answers[i][0]} for i, call in enumerate(calls)),
        outcome=max((outcome for _, outcome in answers), key=SEVERITY.index, default=Outcome.OK),
    )


def find_schema_problem(tool: Tool) -> str:
    """Why `tool.parameters` is not a JSON Schema of an object, with the place of the problem; "" if it is valid."""
    schema: object = tool.parameters  # a user's tool may have any value here
    if not isinstance(schema, dict):
        return f": expected an object, found {schema!r}"
    try:
        SchemaValidator.check_schema(schema)
    except SchemaError as error:
        place = "".join(f".{part}" for part in error.absolute_path)
        if error.absolute_path and error.absolute_path[-1] == "type":
            return f"{place}: expected {SCHEMA_TYPES}, found {error.instance!r}"
        return f"{place}: {error.message}"
    return ""


def parse_tool_calls(text: str, tools: Sequence[Tool] = ()) -> list[ToolCall]:
    """Parse the tool calls in the policy's text, in order, in the format of the current conversation.

    Args:
        tools: tools with schemas. In some formats, only a schema tells whether an argument is a number or text.

    Raises:
        ToolError: a call cannot be parsed. The message is sent to the policy.
    """
    try:
        return _dialect.get().read(text, [tool.to_json() for tool in tools])
    except CallError as error:
        raise ToolError(str(error)) from error


async def _answer(call: ToolCall, tools: dict[str, Tool], timeout_s: float) -> tuple[str, Outcome]:
    tool = tools.get(call.name)
    if tool is None:
        return f"error: unknown tool {call.name!r}{closest_name(call.name, list(tools))}", Outcome.TOOL_ERROR
    if problem := _find_problem(call.arguments, tool):
        return f"error: arguments{problem}", Outcome.TOOL_ERROR
    try:
        arguments = _with_whole_numbers(call.arguments, tool.parameters)
        answer = await call_within(timeout_s, partial(tool.function, **arguments))
        return _write_answer(answer), Outcome.OK
    except OutOfTimeError as error:
        logger.warning("tool %s with the arguments %s: %s", call.name, call.arguments, error)
        return f"error: {call.name} took longer than {timeout_s:g} s", Outcome.TIMEOUT
    except ToolError as error:
        return _write_answer(f"error: {error}"), Outcome.TOOL_ERROR


def _write_answer(answer: Any) -> str:  # Any: text or another JSON value
    """Convert the result of a tool to text for the policy.

    Raises:
        ToolError: the result is too long or too nested for JSON. The message is sent to the policy, whose request
            caused it.
    """
    try:
        text = answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False)
    except (ValueError, RecursionError) as error:  # for example an integer of more than 4,300 digits
        raise ToolError(f"its result cannot be written as JSON: {error}") from error
    return text.encode(errors="replace").decode()  # lone surrogates cannot be encoded


def _with_whole_numbers(value: Any, schema: Any) -> Any:  # Any: JSON; the schema was checked
    """Convert 3.0 to 3 if the schema requires an integer. JSON Schema accepts 3.0, but `range` does not."""
    if not isinstance(schema, dict):
        return value
    if isinstance(value, float) and schema.get("type") == "integer":
        return int(value)
    if isinstance(value, dict) and isinstance(properties := schema.get("properties"), dict):
        return {name: _with_whole_numbers(each, properties.get(name)) for name, each in value.items()}
    if isinstance(value, list):
        return [_with_whole_numbers(each, schema.get("items")) for each in value]
    return value


def _find_problem(arguments: dict[str, Any], tool: Tool) -> str:  # Any: JSON that the policy wrote
    """Why the arguments of a tool call are invalid, with the place, as a text for the policy; "" if they are valid.

    A schema permits unknown arguments unless it sets `additionalProperties`, and missing arguments unless it sets
    `required`. Many schemas lack both keywords, so the signature of the tool's function is checked too.
    """
    try:
        with interrupt_after_computing(MAX_CHECK_S):
            problem = next(SchemaValidator(tool.parameters).iter_errors(arguments), None)
    except RecursionError as error:  # nested too deeply to check
        return f": they cannot be checked: {error}"
    except OutOfTimeError:  # matching a pattern of the schema may take years
        return f": they cannot be checked within {MAX_CHECK_S:g} s"
    if problem is not None:
        return "".join(f".{part}" for part in problem.absolute_path) + f": {problem.message}"
    try:
        taken = inspect.signature(tool.function).parameters
    except ValueError:  # functions written in C may have no signature
        return ""
    # If the schema and the function disagree on a name, the tool has a bug, which calling it will report.
    named = tool.parameters.get("properties", {})
    wanted = [name for name, each in taken.items() if each.default is each.empty and name in named]
    if missing := [name for name in wanted if name not in arguments]:
        return f": {missing[0]!r} is a required property"
    if any(each.kind is each.VAR_KEYWORD for each in taken.values()):
        return ""
    unknown = [name for name in arguments if name not in taken and name not in named]
    return f": unknown argument {unknown[0]!r}{closest_name(unknown[0], list(taken))}" if unknown else ""
