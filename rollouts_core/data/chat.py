"""Turn conversations into token ids and say which tokens belong to which turn.

Not here: what an environment answers (replies.py), reading rows (dataset.py, conversations.py), tensors (batch.py).

The tokenizer's own chat template writes the text; one that writes the day's date writes the same on all days, so that
a training goes on tomorrow with the prompts that it began with, and scores of two days compare.

A template with {% generation %} markers says itself what the assistant wrote. For any other the turn of an assistant is
what the template adds to the conversation before it. That difference is taken on token ids and checked token by token,
so a template whose earlier text changes when a turn is added is an error instead of a wrong mask.

    messages         user 1+1=?             assistant 2
    text             <|user|>1+1=?<|end|><|assistant|>2<|end|>
    tokens           3  14 20 14 25 24 1    4         15 1
    Turn(assistant)                                   [8, 10)

Many conversations are encoded in one call of the tokenizer, whose fixed cost is above that of a short text.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar, cast

from jinja2 import TemplateError

from rollouts_core.config.messages import first_line
from rollouts_core.errors import DataError
from rollouts_core.system.time_limits import OutOfTimeError, interrupt_after_computing
from rollouts_core.types import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TrainOn = Literal["last_assistant", "all_assistant", "everything"]
RenderedT = TypeVar("RenderedT")
CHUNK_TEXTS = 512
MAX_RENDER_S = 10.0
"""How long a chat template may compute for a conversation."""
MAX_TEMPLATE_CHARS, MAX_GROWTH = 1 << 20, 8
"""Characters that a chat template may write by itself, and for each character of a conversation."""
NO_TEMPLATE = "the tokenizer has no chat template: add one to the model's folder"
TURN_MARK = "an assistant said this"
"""Stands for what somebody says where only what a template makes of it is wanted."""
END_OF_THOUGHTS = "</think>"
"""Behind what a turn's text begins with where thoughts lie in it: many templates look for it, and some cut there."""
TODAY = datetime(2024, 7, 26)
"""The date that templates are given: what those of Llama 3 write where there is no clock."""
CLOCK = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")
GENERATION_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")


class Conversation(NamedTuple):
    """Messages, the tools that they may call, and how many of the first ones are given and never trained on."""

    messages: Sequence[Message]
    tools: Sequence[dict[str, Any]] | None = None  # Any: JSON schemas of a user's tools
    num_given: int = 0


class Turn(NamedTuple):
    """The tokens [start, end) that one message of a conversation added."""

    role: str
    start: int
    end: int


class TokenizedConversation(NamedTuple):
    """Token ids of a whole conversation, and those assistant turns of it that `train_on` asks for."""

    tokens: list[int]
    turns: list[Turn]


def tokenize_prompt(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    tools: Sequence[dict[str, Any]] | None = None,  # Any: JSON schemas
) -> list[int]:
    """Token ids of a conversation that waits for the assistant's next turn."""
    return encode_texts(tokenizer, [render_text(tokenizer, messages, tools, add_generation_prompt=True)])[0]


def tokenize_prompts(
    tokenizer: PreTrainedTokenizerBase,
    conversations: Sequence[Sequence[Message]],
    tools: Sequence[dict[str, Any]] | None = None,  # Any: JSON schemas
) -> Iterator[list[int]]:
    """`tokenize_prompt` of each, many in one call of the tokenizer."""
    texts = (render_text(tokenizer, messages, tools, add_generation_prompt=True) for messages in conversations)
    while chunk := list(itertools.islice(texts, CHUNK_TEXTS)):
        yield from encode_texts(tokenizer, chunk)


def stop_token_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """What ends a completion: the tokenizer's end of sequence, and the token that ends a turn in the chat template.

    Base models often have an end of sequence that no template writes; SFT teaches them the one of the template.
    """
    end = find_turn_end(tokenizer)
    return tuple(dict.fromkeys([int(tokenizer.eos_token_id), *([] if end is None else [end])]))


def find_turn_end(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The special token that the chat template writes behind what an assistant said; None where it writes text."""
    special = tokenizer.added_tokens_decoder
    for token in encode_rest_of_turn(tokenizer):
        if token in special:
            return token
        if tokenizer.decode([token]).strip():
            return None
    return None


def leaves_out_role(tokenizer: PreTrainedTokenizerBase, role: str, *, is_first: bool = False) -> bool:
    """Whether the chat template writes nothing of what somebody says; one that refuses to be asked may write it.

    Args:
        is_first: where a conversation begins, else behind what an assistant said or called.
    """
    return _leaves_out_role(tokenizer, json.dumps(tokenizer.chat_template), role, is_first)


@lru_cache(maxsize=64)
def _leaves_out_role(tokenizer: PreTrainedTokenizerBase, _template: str, role: str, is_first: bool) -> bool:
    """Rendering takes longer than tokenizing a reply. A template that is changed is asked anew."""
    function = {"name": "f", "description": "?", "parameters": {"type": "object", "properties": {}}}
    call = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": {}}}
    asks: Message = {"role": "user", "content": "?"}
    says: Message = {"role": role, "content": TURN_MARK, "name": "f", "tool_call_id": "call00000"}
    answers: Message = {"role": "assistant", "content": "!"}
    calls: Message = {"role": "assistant", "content": "", "tool_calls": [call]}
    asked = [[says, asks], [says]] if is_first else [[asks, answers, says], [asks, calls, says]]
    texts: list[str] = []
    for messages in asked:
        with suppress(DataError):
            tools = [{"type": "function", "function": function}] if calls in messages else None
            texts.append(render_text(tokenizer, messages, tools, add_generation_prompt=True))
    return bool(texts) and not any(TURN_MARK in text for text in texts)


def encode_rest_of_turn(tokenizer: PreTrainedTokenizerBase, default: Sequence[int] = ()) -> Sequence[int]:
    """The tokens that the template writes behind what an assistant said, `default` where it does not tell."""
    if tokenizer.chat_template is None:
        return default
    said: list[Message] = [{"role": "user", "content": "?"}, {"role": "assistant", "content": TURN_MARK}]
    try:
        _, mark, rest = render_text(tokenizer, said, None, add_generation_prompt=False).partition(TURN_MARK)
    except DataError:
        return default
    return encode_texts(tokenizer, [rest])[0] if mark else default


def tokenize_conversation(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    *,
    tools: Sequence[dict[str, Any]] | None = None,  # Any: JSON schemas
    train_on: TrainOn = "all_assistant",
) -> TokenizedConversation:
    """Token ids of a whole conversation, and the tokens of those assistant turns that `train_on` asks for.

    Raises:
        DataError: no assistant turn, or a chat template that does not tell the turns apart.
    """
    [outcome] = tokenize_conversations(tokenizer, [Conversation(messages, tools)], train_on=train_on)
    if isinstance(outcome, DataError):
        raise outcome
    return outcome


def tokenize_conversations(
    tokenizer: PreTrainedTokenizerBase, conversations: Sequence[Conversation], *, train_on: TrainOn
) -> list[TokenizedConversation | DataError]:
    """`tokenize_conversation` of each, in one call of the tokenizer; an error takes the place of its conversation."""
    if tokenizer.chat_template is None:
        return [DataError(f"{NO_TEMPLATE}, or use rows with a `text` field") for _ in conversations]
    if train_on != "everything" and has_generation_markers(tokenizer):
        return [_tokenize_marked(tokenizer, each, train_on) for each in conversations]
    texts: list[list[str] | DataError] = []
    for conversation in conversations:
        try:
            texts.append(_render_prefixes(tokenizer, conversation, train_on))
        except DataError as error:
            texts.append(error)
    encoded = iter(
        encode_texts(tokenizer, [text for each in texts if not isinstance(each, DataError) for text in each])
    )
    outcomes: list[TokenizedConversation | DataError] = []
    for each in texts:
        if isinstance(each, DataError):
            outcomes.append(each)
        else:
            outcomes.append(_find_turns(list(itertools.islice(encoded, len(each))), train_on))
    return outcomes


def has_generation_markers(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the chat template itself marks what the assistant wrote."""
    template = tokenizer.chat_template
    return isinstance(template, str) and GENERATION_MARKER.search(template) is not None


def compute_loss_mask(turns: Sequence[Turn], num_tokens: int, train_on: TrainOn) -> list[float]:
    """Per token 1 where it is trained on, else 0; turns that reach past `num_tokens` are cut."""
    if train_on == "everything":
        return [1.0] * num_tokens
    trained = turns[-1:] if train_on == "last_assistant" else turns
    loss_mask = [0.0] * num_tokens
    for turn in trained:
        end = min(turn.end, num_tokens)
        loss_mask[turn.start : end] = [1.0] * (end - turn.start)
    return loss_mask


def encode_texts(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[list[int]]:
    """Token ids of texts in which a template has already written every special token."""
    if not texts:
        return []
    ids: list[list[int]] = tokenizer(texts, add_special_tokens=False, return_attention_mask=False)["input_ids"]
    return ids


def trained_turns(conversation: Conversation, train_on: TrainOn) -> list[int]:
    """The numbers of the messages that are trained on."""
    messages = conversation.messages
    turns = [i for i in range(conversation.num_given, len(messages)) if messages[i]["role"] == "assistant"]
    if not turns:
        roles = ", ".join(dict.fromkeys(message["role"] for message in messages))
        raise DataError(f"the conversation has no assistant turn, only {roles}: there is nothing to learn from it")
    return turns[-1:] if train_on == "last_assistant" else turns


def _render_prefixes(tokenizer: PreTrainedTokenizerBase, conversation: Conversation, train_on: TrainOn) -> list[str]:
    """The conversation before each trained turn, then the one up to it, then the whole one, which may be the last."""
    messages, tools = conversation.messages, conversation.tools
    if train_on == "everything":
        return [render_text(tokenizer, messages, tools, add_generation_prompt=False)]
    turns = trained_turns(conversation, train_on)
    texts = [_render_before(tokenizer, messages, i, tools) for i in turns]
    texts += [render_text(tokenizer, messages[: i + 1], tools, add_generation_prompt=False) for i in turns]
    if turns[-1] != len(messages) - 1:
        texts.append(render_text(tokenizer, messages, tools, add_generation_prompt=False))
    return texts


def _render_before(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    number: int,
    tools: Sequence[dict[str, Any]] | None,  # Any: JSON schemas
) -> str:
    """The conversation before an assistant's turn, up to where its text begins: a first one begins as others do."""
    if number > 0:
        return render_text(tokenizer, messages[:number], tools, add_generation_prompt=True)
    asks: list[Message] = [{"role": "user", "content": "?"}]
    question, asked = (render_text(tokenizer, asks, tools, add_generation_prompt=each) for each in (False, True))
    beginning = asked.removeprefix(question)
    text = render_text(tokenizer, messages[:1], tools, add_generation_prompt=False)
    before, found, _ = text.partition(beginning or asked)
    if not found:
        raise DataError(
            "the conversation begins with a turn of the assistant, and the chat template does not tell where its text "
            "begins: put a turn of the user before it, or use train_on = last_assistant or everything"
        )
    return before + found


def _find_turns(prefixes: list[list[int]], train_on: TrainOn) -> TokenizedConversation | DataError:
    tokens = prefixes[-1]
    if train_on == "everything":
        return TokenizedConversation(tokens, [])
    num_turns = len(prefixes) // 2
    befores, afters = prefixes[:num_turns], prefixes[num_turns : 2 * num_turns]
    unstable = {i for i, prefix in enumerate(prefixes) if tokens[: len(prefix)] != prefix}
    if unstable:
        return _not_prefix_stable(has_stable_last=unstable.isdisjoint((num_turns - 1, 2 * num_turns - 1)))
    turns = [Turn("assistant", len(before), len(after)) for before, after in zip(befores, afters, strict=True)]
    return TokenizedConversation(tokens, turns)


def _not_prefix_stable(*, has_stable_last: bool) -> DataError:
    last = "train_on = last_assistant, " if has_stable_last else ""
    return DataError(
        "the chat template is not prefix-stable: adding a turn changes the tokens before it, so assistant turns "
        f"cannot be told apart; use {last}train_on = everything, or a template with generation markers"
    )


def _tokenize_marked(
    tokenizer: PreTrainedTokenizerBase, conversation: Conversation, train_on: TrainOn
) -> TokenizedConversation | DataError:
    """The turns that a template's own markers name."""
    try:
        num_turns = len(trained_turns(conversation, "all_assistant"))
        text, spans = _render_marked(tokenizer, conversation.messages, conversation.tools)
        if conversation.num_given:
            spans = _without_given(tokenizer, conversation, spans)
        tokens, mask = _encode_marked(tokenizer, text, spans)
    except DataError as error:
        return error
    turns = _marked_turns(mask)
    if not turns:
        return DataError("the chat template's generation markers hold no token: it marks another role or an empty text")
    if train_on == "last_assistant":
        if len(turns) != num_turns:
            return DataError(
                f"the chat template's generation markers give {len(turns)} spans for {num_turns} assistant turns, so "
                "the last turn cannot be told apart; use train_on = all_assistant"
            )
        turns = turns[-1:]
    return TokenizedConversation(tokens, turns)


def _without_given(
    tokenizer: PreTrainedTokenizerBase, conversation: Conversation, spans: list[tuple[int, int]]
) -> list[tuple[int, int]]:
    """The spans of what is not given, of which there is one per turn, or else by where the text of what is given ends.

    A template that forgets earlier thoughts writes them where what is given ends with them: it is longer alone.
    """
    given = conversation.messages[: conversation.num_given]
    num_turns, num_in_given = (
        sum(message["role"] == "assistant" for message in messages) for messages in (conversation.messages, given)
    )
    if len(spans) == num_turns:
        return spans[num_in_given:]
    # Compared as text: the first token of a turn may begin before it.
    num_characters = len(render_text(tokenizer, given, conversation.tools, add_generation_prompt=False))
    return [span for span in spans if span[0] >= num_characters]


def _render_marked(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    tools: Sequence[dict[str, Any]] | None,  # Any: JSON schemas
) -> tuple[str, list[tuple[int, int]]]:
    """A whole conversation, and which of its characters the template's markers hold."""
    from transformers.utils.chat_template_utils import render_jinja_template  # heavy, and only for such templates

    tools_or_none = list(tools) if tools else None

    def render(messages: Sequence[Message]) -> tuple[str, list[tuple[int, int]]]:
        texts, spans = render_jinja_template(
            conversations=[list(messages)],
            tools=tools_or_none,
            chat_template=undated_template(tokenizer, tools_or_none),
            return_assistant_tokens_mask=True,
            **tokenizer.special_tokens_map,
        )
        return texts[0], spans[0]

    return _rendered(render, messages)


def _encode_marked(
    tokenizer: PreTrainedTokenizerBase, text: str, spans: Sequence[tuple[int, int]]
) -> tuple[list[int], list[bool]]:
    """Token ids of a text, and for each whether it holds a character of the spans.

    Not by the mask of transformers: where a span begins or ends with a space that the tokenizer leaves out of its
    offsets, that mask lacks this turn and those behind it, or goes on to the end of the text, over what others said.
    """
    try:
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    except NotImplementedError as error:
        raise DataError("generation markers need a tokenizer of the `tokenizers` library: use a fast one") from error
    is_marked = bytearray(len(text))
    for start, end in spans:
        is_marked[start:end] = b"\1" * (end - start)
    # Of a token that is only space nothing may be left but the place behind it.
    mask = [1 in is_marked[start if start < end else max(0, end - 1) : end] for start, end in encoded["offset_mapping"]]
    return encoded["input_ids"], mask


def _marked_turns(mask: Sequence[bool]) -> list[Turn]:
    """The runs of ones."""
    turns: list[Turn] = []
    start = 0
    for is_marked, run in itertools.groupby(mask):
        end = start + len(list(run))
        if is_marked:
            turns.append(Turn("assistant", start, end))
        start = end
    return turns


def render_text(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    tools: Sequence[dict[str, Any]] | None,  # Any: JSON schemas
    *,
    add_generation_prompt: bool,
) -> str:
    if tokenizer.chat_template is None:
        raise DataError(NO_TEMPLATE)
    tools_or_none = list(tools) if tools else None

    def render(messages: Sequence[Message]) -> str:
        text: str = tokenizer.apply_chat_template(
            list(messages),
            tools=tools_or_none,
            chat_template=undated_template(tokenizer, tools_or_none),
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
        )
        return text

    try:
        with interrupt_after_computing(MAX_RENDER_S):
            text = _rendered(render, messages)
    except OutOfTimeError as error:
        raise DataError(f"the chat template does not end within {MAX_RENDER_S:g} s: take another one") from error
    if len(text) > MAX_TEMPLATE_CHARS:
        given = len(str(list(messages))) + len(str(tools_or_none))
        if len(text) > MAX_TEMPLATE_CHARS + MAX_GROWTH * given:
            raise DataError(
                f"the chat template makes {len(text):,} characters of a conversation of {given:,}: take another one"
            )
    return text


def _rendered(render: Callable[[Sequence[Message]], RenderedT], messages: Sequence[Message]) -> RenderedT:
    """What a chat template makes of messages; of one that joins the arguments of calls to text, with those as JSON.

    DeepSeek's does. Most write an object as JSON themselves, and a text as a quoted one.

    Raises:
        DataError: it refuses them.
    """
    with _named_refusal(messages):
        try:
            return render(messages)
        except TypeError:
            if not any(message.get("tool_calls") for message in messages):
                raise
            return render([_with_arguments_as_text(message) for message in messages])


def _with_arguments_as_text(message: Message) -> Message:
    def as_text(call: dict[str, Any]) -> dict[str, Any]:  # Any: JSON
        function = call.get("function", call)
        function = {**function, "arguments": json.dumps(function.get("arguments", {}), ensure_ascii=False)}
        return {**call, "function": function} if "function" in call else function

    calls = message.get("tool_calls")
    return cast(Message, {**message, "tool_calls": list(map(as_text, calls))}) if calls else message


def undated_template(
    tokenizer: PreTrainedTokenizerBase,
    tools: list[dict[str, Any]] | None = None,  # Any: JSON schemas
) -> str:
    """The chat template for these tools, which writes `TODAY` in the place of the day's date."""
    return _without_clock(tokenizer.get_chat_template(None, tools))


@lru_cache(maxsize=16)
def _without_clock(template: str) -> str:
    return CLOCK.sub(lambda call: json.dumps(TODAY.strftime(call[2])), template)


@contextmanager
def _named_refusal(messages: Sequence[Message]) -> Iterator[None]:
    """Raise DataError for what a chat template raises in the block."""
    try:
        yield
    except (TemplateError, TypeError, ValueError) as error:
        roles = ", ".join(message["role"] for message in messages)
        raise DataError(f"the chat template refuses the turns {roles}: {first_line(error)}") from error
