"""Render messages to text with a tokenizer's chat template.

Templates accept messages in several forms. `find_form` tests a template once:

    content      "text"                   or   [{"type": "text", "text": "text"}]      idefics, LLaVA
    no content   ""                       or   null, beside tool calls                 DeepSeek-R1's distilled models
    arguments    {"a": 1}                 or   "{\\"a\\": 1}", to join with other text    DeepSeek

Templates that write the current date get a fixed one, so that a resumed training sees the same prompts, and scores of
different days are comparable.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from jinja2 import TemplateError

from rollouts_core.config.messages import first_line
from rollouts_core.errors import DataError
from rollouts_core.system.time_limits import OutOfTimeError, interrupt_after_computing
from rollouts_core.types import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_RENDER_S = 10.0
"""Time limit for rendering one conversation, seconds."""
MAX_TEMPLATE_CHARS, MAX_GROWTH = 1 << 20, 8
"""Limit of a template's own characters, and of its output per input character."""
NO_TEMPLATE = "the tokenizer has no chat template: add one to the model's folder"
TURN_MARK = "an assistant said this"
"""Placeholder for a message's text when testing a template."""
QUESTION_MARK = "a user asked this"
"""Placeholder for a question when testing a template."""
PROBE_CALL_ID = "call00000"
"""Nine letters and digits, as Mistral's templates require."""
TODAY = datetime(2024, 7, 26)
"""The fixed date, which Llama 3's templates also use as their default."""
CLOCK = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")

Tools = Sequence[dict[str, Any]] | None  # Any: JSON schemas of a user's tools


class MessageForm(NamedTuple):
    """The form of messages that a chat template accepts."""

    has_user_parts: bool = False
    """Content is a list of parts for all roles except the assistant."""
    has_assistant_parts: bool = False
    """Content of the assistant's turns is a list of parts."""
    has_null_content: bool = False
    """Content is null in a turn that only calls tools."""
    has_text_arguments: bool = False
    """Arguments of calls are JSON text."""


def render_text(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], tools: Tools, *, add_generation_prompt: bool
) -> str:
    """Render a conversation.

    Raises:
        DataError: there is no template, or it refuses the messages.
    """
    if tokenizer.chat_template is None:
        raise DataError(NO_TEMPLATE)
    prepared = prepare_messages(tokenizer, messages)
    with _named_refusal(messages):
        return _render(tokenizer, prepared, tools, add_generation_prompt=add_generation_prompt)[0]


def render_marked(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], tools: Tools
) -> tuple[str, list[tuple[int, int]]]:
    """Render a whole conversation; also returns the spans inside the template's generation markers."""
    prepared = prepare_messages(tokenizer, messages)
    with _named_refusal(messages):
        return _render(tokenizer, prepared, tools, has_spans=True)


def prepare_messages(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> list[Message]:
    """Convert messages to the template's form. A call without arguments gets an empty object."""
    form = find_form(tokenizer)
    return [_in_form(form, message) for message in messages]


def find_form(tokenizer: PreTrainedTokenizerBase) -> MessageForm:
    """The form of messages that the chat template accepts; cached per template."""
    return _find_form(tokenizer, json.dumps(tokenizer.chat_template))


def probe_call(arguments: Mapping[str, Any], **fields: object) -> tuple[Message, dict[str, Any]]:  # Any: JSON
    """A turn of the assistant that calls a tool, and that tool, for tests of templates.

    Args:
        fields: further fields of the turn.
    """
    function = {"name": "f", "description": "?", "parameters": {"type": "object", "properties": {}}}
    call = {"id": PROBE_CALL_ID, "type": "function", "function": {"name": "f", "arguments": dict(arguments)}}
    turn = {"role": "assistant", "content": "", "tool_calls": [call], **fields}
    return cast(Message, turn), {"type": "function", "function": function}


def with_template_values(
    template: str | dict[str, str] | None,
    values: Mapping[str, Any],  # Any: JSON
) -> str | dict[str, str] | None:
    """Add default values for variables to a chat template, so that they also apply when the template is saved.

    Values given when rendering, and values added later, take precedence.
    """
    # trim_blocks drops the line break after the statement, so the template's first line still begins a line.
    lines = [
        f"{{%- set {name} = {name} if {name} is defined else {_literal(value)} %}}\n" for name, value in values.items()
    ]
    head = "".join(lines)
    if isinstance(template, dict):
        return {name: each if each.startswith(head) else head + each for name, each in template.items()}
    return template if template is None or template.startswith(head) else head + template


def _literal(value: Any) -> str:  # Any: JSON
    """A JSON value in the syntax of Jinja."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_literal(key)}: {_literal(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_literal, value)) + "]"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


def undated_template(
    tokenizer: PreTrainedTokenizerBase,
    tools: list[dict[str, Any]] | None = None,  # Any: JSON schemas
) -> str:
    """The chat template for these tools, with `TODAY` in place of the current date."""
    return _without_clock(tokenizer.get_chat_template(None, tools))


@lru_cache(maxsize=16)
def _without_clock(template: str) -> str:
    return CLOCK.sub(lambda call: json.dumps(TODAY.strftime(call[2])), template)


def _render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    tools: Tools,
    *,
    add_generation_prompt: bool = False,
    has_spans: bool = False,
) -> tuple[str, list[tuple[int, int]]]:
    """Render a conversation, and return the spans of its generation markers if requested.

    The tokenizer's own method is not used because it drops null content.
    """
    from transformers.utils.chat_template_utils import render_jinja_template  # heavy

    tools_or_none = list(tools) if tools else None
    try:
        with interrupt_after_computing(MAX_RENDER_S):
            texts, spans = render_jinja_template(
                conversations=[list(messages)],
                tools=tools_or_none,
                chat_template=undated_template(tokenizer, tools_or_none),
                add_generation_prompt=add_generation_prompt,
                return_assistant_tokens_mask=has_spans,
                **tokenizer.special_tokens_map,
            )
    except OutOfTimeError as error:
        raise DataError(f"the chat template did not end within {MAX_RENDER_S:g} s: use another template") from error
    if len(texts[0]) > MAX_TEMPLATE_CHARS:
        given = len(str(list(messages))) + len(str(tools_or_none))
        if len(texts[0]) > MAX_TEMPLATE_CHARS + MAX_GROWTH * given:
            raise DataError(
                f"the chat template writes {len(texts[0]):,} characters for a conversation of {given:,}: use another "
                "template"
            )
    return texts[0], spans[0] if has_spans else []


@lru_cache(maxsize=64)
def _find_form(tokenizer: PreTrainedTokenizerBase, _template: str) -> MessageForm:
    """Render placeholders in each form; the first form whose output contains them is used."""
    asks: Message = {"role": "user", "content": QUESTION_MARK}
    answers: Message = {"role": "assistant", "content": TURN_MARK}
    calls, tool = probe_call({"said": TURN_MARK})

    def writes(form: MessageForm, turn: Message, *refused: str) -> bool:
        messages = [_in_form(form, asks), _in_form(form, turn)]
        try:
            text, _ = _render(tokenizer, messages, [tool] if turn is calls else None)
        except (TemplateError, TypeError, ValueError):
            return False
        return QUESTION_MARK in text and TURN_MARK in text and not any(each in text for each in refused)

    contents = [MessageForm(*parts) for parts in ((False, False), (True, True), (True, False), (False, True))]
    content = next((form for form in contents if writes(form, answers)), MessageForm())
    for has_null, has_text in ((True, False), (True, True), (False, False), (False, True)):
        form = content._replace(has_null_content=has_null, has_text_arguments=has_text)
        # A template that expects another form writes the word null, or an object in Python's syntax.
        if writes(form, calls, *(("None", "null") if has_null else ("{'said'",))):
            return form
    return content


def _in_form(form: MessageForm, message: Message) -> Message:
    is_assistant = message["role"] == "assistant"
    changed: dict[str, object] = {}
    if calls := message.get("tool_calls"):
        changed["tool_calls"] = [_call_in_form(call, is_text=form.has_text_arguments) for call in calls]
    content = message.get("content")
    if calls and not content and form.has_null_content:
        changed["content"] = None
    elif isinstance(content, str) and (form.has_assistant_parts if is_assistant else form.has_user_parts):
        changed["content"] = [{"type": "text", "text": content}]
    return cast(Message, {**message, **changed}) if changed else message


def _call_in_form(call: dict[str, Any], *, is_text: bool) -> dict[str, Any]:  # Any: JSON
    function = call.get("function", call)
    arguments = function.get("arguments")
    if arguments is None:
        arguments = {}
    if is_text and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    function = {**function, "arguments": arguments}
    return {**call, "function": function} if "function" in call else function


@contextmanager
def _named_refusal(messages: Sequence[Message]) -> Iterator[None]:
    """Turn a chat template's exceptions into DataError."""
    try:
        yield
    except (TemplateError, TypeError, ValueError) as error:
        roles = ", ".join(message["role"] for message in messages)
        raise DataError(f"the chat template refuses the turns {roles}: {first_line(error)}") from error
