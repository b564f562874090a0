"""Read the tool calls in what the policy said, check and do them, and word the answers.

Not here: tools themselves (calculator.py, or a user's), the conversation (conversation.py).

How a policy writes a call is up to its chat template (data/dialects.py). Many write JSON between two marks:

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
"""How the policy writes calls to which an environment answers in this task."""


@contextmanager
def reading_calls_in(dialect: Dialect) -> Iterator[None]:
    """Within the block the policy's calls are read in this dialect, also by environments, which know none."""
    before = _dialect.set(dialect)
    try:
        yield
    finally:
        _dialect.reset(before)


async def answer_tool_calls(text: str, tools: Sequence[Tool], *, timeout_s: float = TOOL_TIMEOUT_S) -> Reply:
    """The answers of the tools that `text` calls, one message each, in order; without a call no message.

    In a conversation calls are read in the dialect of the policy's chat template, elsewhere as JSON between
    `<tool_call>` and `</tool_call>`.

    Args:
        timeout_s: how long each tool may take, a plain function of which holds up all other conversations meanwhile;
            and after how long together no further one is called: a policy may write hundreds of calls in a turn.
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
    """Where and why the `parameters` of a tool are no JSON Schema of an object; empty where they are one."""
    schema: object = tool.parameters  # whatever a user wrote
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
    """The calls in what the policy said, in order, read in the dialect of the conversation under way.

    Args:
        tools: their schemas tell numbers from texts in dialects that do not.

    Raises:
        ToolError: one that cannot be read; the sentence is for the policy.
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
    """What a tool returned as text that can be tokenized: templates join texts.

    Raises:
        ToolError: it is longer or deeper than can be written, which is up to what the policy asked for.
    """
    try:
        text = answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False)
    except (ValueError, RecursionError) as error:  # a whole number of more than 4,300 digits, for one
        raise ToolError(f"what it returned cannot be written: {error}") from error
    return text.encode(errors="replace").decode()  # half of an emoji is no text


def _with_whole_numbers(value: Any, schema: Any) -> Any:  # Any: JSON, of which the schema has been checked
    """The value with 3 for 3.0 where the schema wants an integer: JSON Schema takes both, and `range` does not."""
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
    """Where and why a tool cannot take these arguments, for the policy; empty where it can.

    A schema lets through what it does not name unless it forbids that (`additionalProperties`), and lets out what it
    does not ask for (`required`), and many do neither.
    """
    try:
        with interrupt_after_computing(MAX_CHECK_S):
            problem = next(SchemaValidator(tool.parameters).iter_errors(arguments), None)
    except RecursionError as error:  # nested deeper than can be checked
        return f": they cannot be checked: {error}"
    except OutOfTimeError:  # a text that a pattern of the schema takes years for
        return f": they cannot be checked within {MAX_CHECK_S:g} s"
    if problem is not None:
        return "".join(f".{part}" for part in problem.absolute_path) + f": {problem.message}"
    try:
        taken = inspect.signature(tool.function).parameters
    except ValueError:  # a function of C that does not say what it takes
        return ""
    # What the schema alone names, or the function alone wants, is a mistake of the tool's, which calling it shows.
    named = tool.parameters.get("properties", {})
    wanted = [name for name, each in taken.items() if each.default is each.empty and name in named]
    if missing := [name for name in wanted if name not in arguments]:
        return f": {missing[0]!r} is a required property"
    if any(each.kind is each.VAR_KEYWORD for each in taken.values()):
        return ""
    unknown = [name for name in arguments if name not in taken and name not in named]
    return f": unknown argument {unknown[0]!r}{closest_name(unknown[0], list(taken))}" if unknown else ""
