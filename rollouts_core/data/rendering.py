r"""Render messages to text with a tokenizer's chat template.

Chat templates expect messages in different forms. `find_form` tests each template once:

    content      "text"                   or   [{"type": "text", "text": "text"}]      idefics, LLaVA
    no content   ""                       or   null, in a turn with tool calls          DeepSeek-R1's distilled models
    arguments    {"a": 1}                 or   "{\"a\": 1}" (JSON text)                   DeepSeek

Templates that write the current date get a fixed date instead. A resumed training therefore sees the same prompts, and
scores of different days are comparable.
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
"""Limits of a rendered text: characters that the template may add itself, and output characters per input character."""
NO_TEMPLATE = "the tokenizer has no chat template: add one to the model's folder"
TURN_MARK = "an assistant said this"
"""Placeholder for the assistant's text in tests of a chat template."""
QUESTION_MARK = "a user asked this"
"""Placeholder for the user's text in tests of a chat template."""
PROBE_CALL_ID = "call00000"
"""Id of the tool call in tests of a chat template. Mistral's templates require nine letters and digits."""
TODAY = datetime(2024, 7, 26)
"""Date that templates get instead of the current date. Llama 3's templates have the same default."""
CLOCK = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")

Tools = Sequence[dict[str, Any]] | None  # Any: JSON schemas of a user's tools


class MessageForm(NamedTuple):
    """The form in which a chat template expects messages."""

    has_user_parts: bool = False
    """True if the content of all roles except the assistant must be a list of parts."""
    has_assistant_parts: bool = False
    """True if the content of assistant messages must be a list of parts."""
    has_null_content: bool = False
    """True if the content of an assistant message that only calls tools must be null."""
    has_text_arguments: bool = False
    """True if the arguments of tool calls must be JSON text instead of an object."""


def render_text(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], tools: Tools, *, add_generation_prompt: bool
) -> str:
    """Render a conversation with the tokenizer's chat template.

    Args:
        tools: JSON schemas of the available tools.

    Raises:
        DataError: the tokenizer has no chat template, or the template refuses the messages.
    """
    if tokenizer.chat_template is None:
        raise DataError(NO_TEMPLATE)
    prepared = prepare_messages(tokenizer, messages)
    with _named_refusal(messages):
        return _render(tokenizer, prepared, tools, add_generation_prompt=add_generation_prompt)[0]


def render_marked(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], tools: Tools
) -> tuple[str, list[tuple[int, int]]]:
    """Render a conversation. Returns the text, and the character spans inside the template's {% generation %}
    markers."""
    prepared = prepare_messages(tokenizer, messages)
    with _named_refusal(messages):
        return _render(tokenizer, prepared, tools, has_spans=True)


def prepare_messages(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> list[Message]:
    """Convert messages to the form that the chat template expects. A tool call without arguments gets an empty
    object."""
    form = find_form(tokenizer)
    return [_in_form(form, message) for message in messages]


def find_form(tokenizer: PreTrainedTokenizerBase) -> MessageForm:
    """The form in which the chat template expects messages. The result is cached per template."""
    return _find_form(tokenizer, json.dumps(tokenizer.chat_template))


def probe_call(arguments: Mapping[str, Any], **fields: object) -> tuple[Message, dict[str, Any]]:  # Any: JSON
    """An assistant message that calls a tool, and the schema of this tool, for tests of chat templates.

    Args:
        arguments: arguments of the call.
        fields: additional fields of the message.
    """
    function = {"name": "f", "description": "?", "parameters": {"type": "object", "properties": {}}}
    call = {"id": PROBE_CALL_ID, "type": "function", "function": {"name": "f", "arguments": dict(arguments)}}
    turn = {"role": "assistant", "content": "", "tool_calls": [call], **fields}
    return cast(Message, turn), {"type": "function", "function": function}


def with_template_values(
    template: str | dict[str, str] | None,
    values: Mapping[str, Any],  # Any: JSON
) -> str | dict[str, str] | None:
    """Prepend default values of template variables to a chat template, so that a saved template keeps these defaults.

    A value passed at rendering takes precedence over a default. A default added later takes precedence over an earlier
    default.
    """
    # The template engine's trim_blocks drops the line break after the statement, so the template's own first line still
    # begins a line.
    lines = [
        f"{{%- set {name} = {name} if {name} is defined else {_literal(value)} %}}\n" for name, value in values.items()
    ]
    head = "".join(lines)
    if isinstance(template, dict):
        return {name: each if each.startswith(head) else head + each for name, each in template.items()}
    return template if template is None or template.startswith(head) else head + template


def _literal(value: Any) -> str:  # Any: JSON
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_literal(key)}: {_literal(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_literal, value)) + "]"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


def undated_template(
    tokenizer: PreTrainedTokenizerBase,
    tools: list[dict[str, Any]] | None = None,  # Any: JSON schemas
) -> str:
    """The chat template for these tools, with the fixed date `TODAY` instead of the current date."""
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
    """Render a conversation. With `has_spans`, also return the spans inside the template's generation markers.

    The tokenizer's `apply_chat_template` is not used, because it drops null content.
    """
    from transformers.utils.chat_template_utils import render_jinja_template  # slow to import

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
    """Render placeholders in each form. The first form whose output contains the placeholders is the template's
    form."""
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
        # In a wrong form, a template writes the word null or None, or an object in Python syntax.
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
    """Convert exceptions of a chat template to DataError that names the roles of the messages."""
    try:
        yield
    except (TemplateError, TypeError, ValueError) as error:
        roles = ", ".join(message["role"] for message in messages)
        raise DataError(f"the chat template refuses the turns {roles}: {first_line(error)}") from error
