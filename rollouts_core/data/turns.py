"""Find where assistant turns begin and end in the text of a chat template.

A turn is the text after the generation prompt, as at inference:

    before    <|user|>1+1=?<|end|><|assistant|>
    turn                                       2<|end|>

Templates differ in four ways. `find_turn_form` detects them by rendering short test conversations:

* The generation prompt contains text that rendered turns omit (DeepSeek: `<think>`).
* The end of a conversation has one more token after the last turn's end (Phi-3: `<|endoftext|>`).
* The header of the next turn ends a turn (GLM-4: `<|user|>`).
* A turn that calls a tool has another end token (gpt-oss: `<|call|>`).
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple, cast

from rollouts_core.data.rendering import PROBE_CALL_ID, TURN_MARK, Tools, probe_call, render_text
from rollouts_core.errors import DataError
from rollouts_core.types import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

END_OF_THOUGHTS = "</think>"
"""Tag that ends the thoughts at the beginning of a message's text. Many templates search for it, and some remove the
text before it."""
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Message keys that templates use for thoughts stored outside of the message's text."""
OPENS_THOUGHTS = re.compile(r"([<\[])([\w:]+)([>\]])\s*\Z")
"""Matches an opening tag at the end of a generation prompt."""

TAG = re.compile(r"[<\[]/?\w+[>\]]")


class TurnForm(NamedTuple):
    """How a chat template begins and ends an assistant turn."""

    is_known: bool = False
    """True if the template writes the assistant's text, which is required to detect the form of turns."""
    cue: str = ""
    """The end of the generation prompt, if turns inside a conversation are rendered without this text."""
    rest: str = ""
    """Text after the assistant's message at the end of a conversation."""
    surplus: str = ""
    """The part of `rest` after the turn's end. The template writes it only at the end of a conversation."""
    end_within: str = ""
    """Special token that ends a turn inside a conversation. Empty if the header of the next turn ends it."""
    end_of_call: str = ""
    """Special token that ends a turn with a tool call."""
    header: str = ""
    """Special token that begins a user turn, if only this header ends an assistant turn."""
    header_of_answer: str = ""
    """Special token that begins a tool's answer, if only this header ends an assistant turn."""


class RenderedTurn(NamedTuple):
    """The text of an assistant turn and of the conversation before it."""

    before: str
    """The conversation before the turn, including the generation prompt."""
    turn: str
    """The text after the generation prompt: the message and the turn's end."""


def find_turn_form(tokenizer: PreTrainedTokenizerBase) -> TurnForm:
    """How the chat template begins and ends turns. Cached until the template or the number of tokens changes."""
    return _find_turn_form(tokenizer, json.dumps(tokenizer.chat_template), len(tokenizer))


def find_turn_ends(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Ids of the special tokens that end assistant turns in the chat template. Empty if turns end with plain text."""
    if tokenizer.chat_template is None:
        return ()
    form = find_turn_form(tokenizer)
    if form.header:
        texts = [form.header, form.header_of_answer]
    else:
        first = find_header(tokenizer, form.rest.strip(), 0)
        texts = [first, form.end_of_call if first else ""]
    ids = tokenizer.get_added_vocab()
    return tuple(dict.fromkeys(ids[text] for text in texts if text))


def is_end(tokenizer: PreTrainedTokenizerBase, token: int) -> bool:
    """True if the token ends a turn or text in this template or in templates of other models.

    Special tokens such as `<|return|>`, `<|eom_id|>` and `<|endoftext|>` count as ends. Tags such as `</answer>` do not
    count.
    """
    key = (json.dumps(tokenizer.chat_template), len(tokenizer), tokenizer.bos_token_id, tokenizer.eos_token_id)
    return token in _find_ends(tokenizer, *key)


def render_turn(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], number: int, tools: Tools
) -> RenderedTurn:
    """Render assistant message `number` as a turn after its generation prompt, without later messages.

    Raises:
        DataError: the template refuses the messages, or renders the text before the turn in two different ways.
    """
    form = find_turn_form(tokenizer)
    before = render_text(tokenizer, messages[:number], tools, add_generation_prompt=True) if number else ""
    written = render_text(tokenizer, messages[: number + 1], tools, add_generation_prompt=False)
    written = written.removesuffix(form.surplus)
    before = before or _render_beginning(tokenizer, tools, written)
    if written.startswith(before):
        return RenderedTurn(before, written[len(before) :])
    shared = before.removesuffix(form.cue)
    if shared == before or not written.startswith(shared):
        raise _not_behind(before, written)
    return RenderedTurn(before, _behind_cue(form.cue, written[len(shared) :], messages[number], before, written))


def find_end_of_given(tokenizer: PreTrainedTokenizerBase, turn: str, content: str, given: str) -> int:
    """Position in a turn's text after the beginning of the message that was given to the model.

    Args:
        turn: text of the turn. The template may have stripped spaces around the message.
        content: the whole message.
        given: the beginning of `content` that was given to the model.

    Raises:
        DataError: the template changes the message's words.
    """
    form = find_turn_form(tokenizer)
    # Search from the end, because the turn's header may contain the letters of a short beginning.
    body = turn.removesuffix(form.rest.removesuffix(form.surplus))
    for words, beginning in ((content, given), (content.strip(), given.lstrip())):
        start = len(body) - len(words) if body.endswith(words) else body.rfind(words)
        if start >= 0:
            return start + min(len(beginning), len(words))
    raise DataError(
        f"the chat template changes the given beginning of the assistant's turn ({given[:60]!r}), so the turn cannot "
        "be continued: remove the beginning, or set model.chat_template_kwargs"
    )


def find_header(tokenizer: PreTrainedTokenizerBase, text: str, start: int) -> str:
    """The special token at position `start` of a text; "" if there is none."""
    found = _special_pattern(tokenizer).match(text, start)
    return found[0] if found else ""


def _behind_cue(cue: str, turn: str, message: Message, before: str, written: str) -> str:
    """Text of a turn after a generation prompt that ends with a cue, although rendered turns omit the cue.

    If the cue opens thoughts, the returned text has the message's thoughts (possibly empty) and the closing tag,
    because a model must close its thoughts before it answers.

    Args:
        turn: the turn as the template renders it.
        before, written: the rendered generation prompt and the rendered conversation with the turn, for the error
            message.
    """
    opening = OPENS_THOUGHTS.search(cue)
    if not opening:
        if END_OF_THOUGHTS in cue and END_OF_THOUGHTS in turn:
            thoughts, _, turn = turn.partition(END_OF_THOUGHTS)
            if thoughts.replace("<think>", "").strip():
                raise _not_behind(before, written)
            turn = turn.lstrip("\n")
        return turn
    closing = f"{opening[1]}/{opening[2]}{opening[3]}"
    # the template has other spaces around the tag than the generation prompt
    if turn.lstrip().startswith(opening[0].strip()):
        return turn.lstrip().removeprefix(opening[0].strip()).lstrip("\n")
    if closing in turn:
        return turn
    thoughts = next((str(message[key]) for key in THOUGHTS if message.get(key)), "")  # type: ignore[literal-required]
    content = message.get("content") or ""
    if not thoughts and closing in content:
        thoughts = content.split(closing)[0].lstrip().removeprefix(opening[0].strip())
    return f"{thoughts.strip()}\n{closing}\n\n" + turn.lstrip("\n")


def _render_beginning(tokenizer: PreTrainedTokenizerBase, tools: Tools, written: str) -> str:
    """The text before an assistant turn that begins a conversation.

    Raises:
        DataError: the beginning of the turn cannot be found in the rendered text.
    """
    asks: list[Message] = [{"role": "user", "content": "?"}]
    question, asked = (render_text(tokenizer, asks, tools, add_generation_prompt=each) for each in (False, True))
    beginning = asked.removeprefix(question)
    before, found, _ = written.partition(beginning or asked)
    if not found:
        raise DataError(
            "the conversation begins with an assistant turn, and the start of its text in the chat template is "
            "ambiguous: put a user turn before it, or use train_on = last_assistant or everything"
        )
    return before + found


def _not_behind(before: str, written: str) -> DataError:
    """Error for a template that renders other text before a turn than its generation prompt.

    Args:
        before: the rendered generation prompt.
        written: the rendered conversation with the turn.
    """
    place = len(_common_prefix(before, written))
    shown, found = (repr(text[place : place + 60]) for text in (before, written))
    return DataError(
        f"the chat template writes {shown} before an assistant turn is sampled, but {found} once the turn is part of "
        "the conversation, so training would differ from inference: set model.chat_template_kwargs so that both agree "
        "(for example enable_thinking = true for rows with thoughts), use train_on = everything, or use a template "
        "with generation markers"
    )


@lru_cache(maxsize=16)
def _find_ends(
    tokenizer: PreTrainedTokenizerBase, _template: str, _num_tokens: int, begin: int | None, end: int | None
) -> frozenset[int]:
    """Ids of the tokens for which `is_end` is true. Cached, because listing special tokens takes longer than
    encoding a text."""
    added = tokenizer.added_tokens_decoder.items()
    special = {token for token, each in added if each.special and not TAG.fullmatch(each.content)} - {begin}
    return frozenset(special | {*find_turn_ends(tokenizer)} | ({end} if end is not None else set()))


@lru_cache(maxsize=64)
def _find_turn_form(tokenizer: PreTrainedTokenizerBase, _template: str, _num_tokens: int) -> TurnForm:
    asks: Message = {"role": "user", "content": "?"}
    says: Message = {"role": "assistant", "content": TURN_MARK}
    calls, tool = probe_call({"said": TURN_MARK})
    answers: Message = {"role": "tool", "content": "?", "name": "f", "tool_call_id": PROBE_CALL_ID}

    def render(*messages: Message, add_generation_prompt: bool = False) -> str:
        tools = [tool] if calls in messages else None
        with suppress(DataError):
            return render_text(tokenizer, messages, tools, add_generation_prompt=add_generation_prompt)
        return ""

    head, mark, rest = render(asks, says).partition(TURN_MARK)
    if not mark:
        return TurnForm()
    asked = render(asks, add_generation_prompt=True)
    cue = "" if head.startswith(asked) else asked[len(_common_prefix(head, asked)) :]
    middle = render(asks, says, asks).partition(TURN_MARK)[2]
    rest_of_call, behind_call = (
        render(*messages).rpartition(TURN_MARK)[2] for messages in ((asks, calls), (asks, calls, answers))
    )
    question = render(asks)
    if not rest.strip():
        header = find_header(tokenizer, middle, 0)
        # A token that also begins assistant turns does not show that a turn has ended.
        if header == find_header(tokenizer, asked.removeprefix(question), 0):
            return TurnForm(True, cue, rest)
        behind = behind_call[len(_common_prefix(behind_call, rest_of_call)) :]
        answer = find_header(tokenizer, behind, 0) if rest_of_call else ""
        return TurnForm(True, cue, rest, header=header, header_of_answer=answer or header)
    between = render(asks, cast(Message, {**calls, "tool_calls": calls["tool_calls"] * 2})).split(TURN_MARK)[1:-1]
    surplus = rest[_end_of_turn(tokenizer, rest, middle) :]
    end_of_call = _end_of_call(tokenizer, rest_of_call, "".join(between))
    # gpt-oss ends the last turn with one token, and earlier turns with the token that also ends user messages.
    behind_question = question.rpartition("?")[2]
    end, *known = (find_header(tokenizer, each.lstrip(), 0) for each in (middle, rest, behind_question))
    return TurnForm(True, cue, rest, surplus, end if end in known else "", end_of_call)


def _end_of_turn(tokenizer: PreTrainedTokenizerBase, rest: str, middle: str) -> int:
    """Length of the turn's end in `rest`, without special tokens that occur only at the end of a conversation."""
    end = 0
    for found in _special_pattern(tokenizer).finditer(rest):
        if not middle.startswith(rest[: found.end()]):
            return found.start() if end and not rest[end : found.start()].strip() else len(rest)
        end = found.end()
    return len(rest)


def _end_of_call(tokenizer: PreTrainedTokenizerBase, rest: str, between: str) -> str:
    """Special token that ends a turn with a tool call. Empty if the same token also separates two calls of a turn."""
    found = [each[0] for each in _special_pattern(tokenizer).finditer(rest)]
    return found[-1] if found and rest.rstrip().endswith(found[-1]) and found[-1] not in between else ""


def _common_prefix(one: str, other: str) -> str:
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return "".join(char for char, _ in same)


def _special_pattern(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str]:
    return _find_special_pattern(tokenizer, len(tokenizer))


@lru_cache(maxsize=16)
def _find_special_pattern(tokenizer: PreTrainedTokenizerBase, _num_tokens: int) -> re.Pattern[str]:
    """Pattern that matches any added token of the tokenizer. Cached, because some tokenizers have hundreds."""
    added = sorted((each.content for each in tokenizer.added_tokens_decoder.values()), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, filter(str.strip, added))) or r"(?!)")
