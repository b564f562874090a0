"""Apply a model's chat template: messages to token ids, and an assistant's turn to answer, thoughts and tool calls.

Not here: rendering templates (data/rendering.py), formats of tool calls (data/dialects.py), JSON of APIs.

transformers is imported at the first chat. The import takes seconds, and engines of training runs do not need it.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from rollouts_core.embedded.forced_calls import CallForm, find_call_form
from rollouts_core.embedded.protocol import MAX_CHARS_PER_TOKEN
from rollouts_core.embedded.scheduler import RequestError
from rollouts_core.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rollouts_core.data.dialects import Dialect, Piece
    from rollouts_core.types import Message

MAX_FORMS = 16
"""Highest number of cached `ChatForm` objects, one for each set of template values."""
MAX_VALUES_CHARS = 4096
"""Limit of characters of `chat_template_kwargs` as JSON."""
RESERVED_VALUES = ("messages", "tools", "documents", "add_generation_prompt")
PARTS = re.compile(r"<[^<]*|[^<]+")
"""Splits a text before each `<`, where a tool call may begin."""
THOUGHT_MARKS = ("</think>", "reasoning_content", "<|channel")
"""Texts that show that a chat template supports thoughts. Thoughts are separated from the answer if the template has
one of these texts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatForm:
    """A model's chat template with one set of template values."""

    tokenizer: PreTrainedTokenizerBase
    """Tokenizer with the chat template and these template values."""
    dialect: Dialect
    """The format in which the model writes tool calls and thoughts."""
    stop_ids: tuple[int, ...]
    """Ids of the tokens that end an assistant's turn."""
    has_thoughts: bool
    """True if the template supports thoughts."""
    call_form: CallForm | None
    """The text around a tool call, to force calls; None if calls of this template cannot be forced."""

    def encode(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]],  # Any: JSON schemas
        *,
        context_length: int,
    ) -> list[int]:
        """The token ids of a conversation, as a prompt for the assistant's next turn.

        Raises:
            RequestError: the template refuses the conversation, or the conversation exceeds the context length.
        """
        from rollouts_core.data.chat import encode_texts, render_prompt  # slow to import

        try:
            text = render_prompt(self.tokenizer, messages, tools or None)
        except DataError as error:
            raise RequestError(f"{error}.") from error
        if len(text) > (most := context_length * MAX_CHARS_PER_TOKEN):
            raise RequestError(
                f"The input ({len(text)} characters) is longer than the model's context length ({context_length} "
                f"tokens): at most {most} characters are permitted."
            )
        return encode_texts(self.tokenizer, [text])[0]


class ChatModel:
    """Loads the chat template of a model directory at the first chat. Thread-safe."""

    def __init__(self, model_dir: Path) -> None:
        self._model_dir = model_dir
        self._lock = Lock()
        self._forms: dict[str, ChatForm] = {}
        self._tokenizer: PreTrainedTokenizerBase | None = None

    def form(self, values: Mapping[str, Any]) -> ChatForm:  # Any: JSON
        """The chat template with these template values.

        Raises:
            RequestError: the model has no chat template, or a name is not permitted for a template value.
        """
        key = json.dumps(values, sort_keys=True)
        if len(key) > MAX_VALUES_CHARS:
            raise RequestError(f"chat_template_kwargs may have at most {MAX_VALUES_CHARS} characters as JSON.")
        if wrong := [name for name in values if not name.isidentifier() or name in RESERVED_VALUES]:
            raise RequestError(f"chat_template_kwargs: {wrong[0][:80]!r} cannot be the name of a template's value.")
        with self._lock:
            if key not in self._forms:
                if len(self._forms) == MAX_FORMS:
                    self._forms.pop(next(iter(self._forms)))
                self._forms[key] = self._make_form(values)
            return self._forms[key]

    def _make_form(self, values: Mapping[str, Any]) -> ChatForm:  # Any: JSON
        from rollouts_core.config import ModelConfig
        from rollouts_core.data.chat import stop_token_ids  # slow to import
        from rollouts_core.data.dialects import DEFAULT_DIALECT, find_dialect
        from rollouts_core.data.rendering import NO_TEMPLATE, with_template_values
        from rollouts_core.model.loading import load_tokenizer

        try:
            self._tokenizer = self._tokenizer or load_tokenizer(ModelConfig(path=str(self._model_dir)))
        except DataError as error:
            raise RequestError(f"Chats need a tokenizer: {error}.") from error
        if self._tokenizer.chat_template is None:
            raise RequestError(f"{NO_TEMPLATE}; /v1/completions and /generate need no chat template.")
        tokenizer = copy.copy(self._tokenizer)
        tokenizer.chat_template = (
            with_template_values(tokenizer.chat_template, values) if values else tokenizer.chat_template
        )
        try:
            dialect = find_dialect(tokenizer)
        except DataError:  # the format of tool calls is unknown, so calls remain text of the answer
            dialect = DEFAULT_DIALECT
        template = json.dumps(tokenizer.chat_template)
        stop_ids = tuple(dict.fromkeys([*stop_token_ids(tokenizer), *dialect.ends]))
        has_thoughts = any(mark in template for mark in THOUGHT_MARKS)
        return ChatForm(
            tokenizer=tokenizer,
            dialect=dialect,
            stop_ids=stop_ids,
            has_thoughts=has_thoughts,
            call_form=find_call_form(tokenizer, dialect, stop_ids=stop_ids, has_thoughts=has_thoughts),
        )


class AnswerReader:
    """Splits an assistant's turn, while it grows, into answer, thoughts and tool calls without surrounding white space.

    Args:
        form: the model's chat template. With None, the whole text is the answer.
        tools: JSON schemas of the tools that the model may call.
        calls_once: drop the tool calls after the first.
    """

    def __init__(
        self,
        form: ChatForm | None,
        tools: Sequence[dict[str, Any]] = (),  # Any: JSON schemas
        *,
        calls_once: bool = False,
    ) -> None:
        from rollouts_core.data.dialects import TurnReader  # slow to import

        self._calls_once = calls_once
        self._reader = None if form is None else TurnReader(form.dialect, tools)
        self._held: dict[type[Piece], str] = {}
        self._begun: set[type[Piece]] = set()

    def read(self, text: str) -> list[Piece]:
        """Read the next part of the text; returns the pieces that are now complete."""
        from rollouts_core.data.dialects import CallError, Said

        if not text:
            return []
        if self._reader is None:
            return [Said(text)]
        pieces: list[Piece] = []
        parts = PARTS.findall(text)
        for number, part in enumerate(parts):
            try:
                pieces += self._trim(self._reader.feed(part))
            except CallError:
                return [*pieces, *self._give_up(), *map(Said, parts[number + 1 :])]
        return pieces

    def finish(self, text: str) -> list[Piece]:
        """Read the last part of the text; returns the remaining pieces of the turn."""
        from rollouts_core.data.dialects import CallError, Said

        pieces = self.read(text)
        if self._reader is None:
            return pieces
        try:
            pieces += self._trim(self._reader.finish())
        except CallError:
            return pieces + self._give_up()
        # A turn without thoughts and tool calls keeps its white space.
        is_alone = self._begun <= {Said}
        return pieces + ([Said(self._held[Said])] if is_alone and self._held.get(Said) else [])

    def _give_up(self) -> list[Piece]:
        """Treat an unreadable tool call, and all text after it, as part of the answer."""
        from rollouts_core.data.dialects import Said

        assert self._reader is not None, "only a reader of tool calls gives up"
        unread, self._reader = self._reader.unread(), None
        return [Said(self._held.pop(Said, "") + unread)]

    def _trim(self, pieces: Sequence[Piece]) -> list[Piece]:
        from rollouts_core.data.dialects import Said, ToolCall

        trimmed: list[Piece] = []
        for piece in pieces:
            kind = type(piece)
            if isinstance(piece, ToolCall):
                if not (self._calls_once and ToolCall in self._begun):
                    trimmed.append(piece)
            else:
                is_alone = kind is Said and not self._begun - {Said}
                text = self._held.pop(kind, "") + piece.text
                text = text if kind in self._begun or is_alone else text.lstrip()
                shown = text.rstrip()
                self._held[kind] = text[len(shown) :]
                if not shown:
                    continue
                trimmed.append(piece._replace(text=shown))
            self._begun.add(kind)
        return trimmed


def join_pieces(pieces: Sequence[Piece]) -> list[Piece]:
    """Join adjacent pieces of text of the same kind (answer or thoughts)."""
    from rollouts_core.data.dialects import ToolCall

    joined: list[Piece] = []
    for piece in pieces:
        last = joined[-1] if joined else None
        if isinstance(piece, ToolCall) or isinstance(last, ToolCall) or type(last) is not type(piece):
            joined.append(piece)
        else:
            assert last is not None, "the last piece has the same type"
            joined[-1] = piece._replace(text=last.text + piece.text)
    return joined
