"""Tokenize an environment's reply inside a running conversation.

A running conversation grows by token ids. Sampled tokens are kept, and a reply adds the tokens that the chat template
writes after an assistant turn. The conversation is never rendered and tokenized as a whole again, because sampled text
could get other tokens.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rollouts_core.data.chat import stop_token_ids
from rollouts_core.data.dialects import ToolCall, count_shared, find_call_end
from rollouts_core.data.plain_text import SPLIT, encode_split, split_special
from rollouts_core.data.rendering import TURN_MARK, render_text
from rollouts_core.data.turns import find_turn_form, is_end
from rollouts_core.errors import DataError
from rollouts_core.types import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SPLIT_IN_JSON = json.dumps(SPLIT)[1:-1]
"""The character SPLIT as ASCII JSON writes it, because some chat templates write replies as JSON."""


class UnseenReplyError(DataError):
    """The chat template omits the text of a reply, so the policy would not see it."""


def tokenize_reply(
    tokenizer: PreTrainedTokenizerBase,
    replies: Sequence[Message],
    sampled: Sequence[int],
    calls: Sequence[ToolCall] = (),
) -> list[int]:
    """Token ids that follow a sampled turn: the turn's end, the replies, and the start of the next assistant turn.

    If the policy already sampled tokens of the turn's end, these tokens are not repeated. Special tokens in a reply's
    text (for example in a fetched page) are encoded as plain text, so they cannot end or begin a turn.

    Many chat templates show a tool's reply only after a turn that calls a tool. Replies of tools are therefore rendered
    after the calls of the turn. If the calls could not be parsed, a call of the tool without arguments is rendered
    instead.

    Args:
        replies: the environment's messages.
        sampled: token ids of the policy's turn.
        calls: the parsed tool calls of the turn.

    Raises:
        UnseenReplyError: the chat template omits the text of a reply.
        DataError: the chat template refuses the replies, or drops the assistant's text.
    """
    answers_calls = any(reply["role"] == "tool" for reply in replies)
    turns = [_calling(calls), _calling(calls[-1:])] if answers_calls and calls else [[]]
    if answers_calls and not calls:
        turns.append(_calling([ToolCall(_tool_name(replies), {})]))
    failure: DataError | None = None
    for each in turns:
        try:
            text, tokens = _render_behind(tokenizer, each, replies, sampled)
            _check_seen(replies, text)
        except DataError as error:
            failure = failure or error
        else:
            return tokens
    assert failure is not None, "each tried turn failed"
    raise failure


def _calling(calls: Sequence[ToolCall]) -> list[dict[str, Any]]:  # Any: JSON
    """Convert tool calls to dictionaries for chat templates. Ids have nine letters and digits, because some
    templates require this."""
    return [
        {"id": f"call{i:05}", "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for i, call in enumerate(calls)
    ]


def _tool_name(replies: Sequence[Message]) -> str:
    return next((str(reply["name"]) for reply in replies if reply.get("name")), "tool")


def _render_behind(
    tokenizer: PreTrainedTokenizerBase,
    calls: Sequence[dict[str, Any]],  # Any: JSON
    replies: Sequence[Message],
    sampled: Sequence[int],
) -> tuple[str, list[int]]:
    """The text that the template writes after a turn with these calls, and its tokens.

    The result omits tokens of the turn's end that the policy already sampled.
    """
    asks: Message = {"role": "user", "content": ""}
    split = split_special(tokenizer, replies)
    if not calls:
        before: list[Message] = [asks, {"role": "assistant", "content": TURN_MARK}]
        text = render_text(tokenizer, [*before, *split], None, add_generation_prompt=True)
        _, mark, rest = text.partition(TURN_MARK)
        if not mark:
            raise DataError("the chat template drops the assistant's text: use another template")
        tokens = encode_split(tokenizer, rest)
        return rest, tokens[_count_sampled(tokenizer, tokens, sampled) :]
    before = [asks, {"role": "assistant", "content": "", "tool_calls": list(calls)}]
    told = [_answer_to(calls, number, reply) for number, reply in enumerate(split)]
    turn = render_text(tokenizer, before, None, add_generation_prompt=False)
    text = render_text(tokenizer, [*before, *told], None, add_generation_prompt=True)
    end = _find_turn(turn, text, calls[-1]["function"]["name"])
    tokens = encode_split(tokenizer, text)
    shared = count_shared(encode_split(tokenizer, text[:end]), tokens)
    return text[end:], tokens[_end_of_turn(tokenizer, tokens, shared, sampled) :]


def _find_turn(turn: str, text: str, name: str) -> int:
    """Position after the first assistant turn in a conversation's text.

    Templates render a last turn differently: Qwen3's template adds empty thoughts, Gemma's template adds another end.

    Args:
        turn: the conversation's text up to this turn, rendered as the last turn.
        text: the conversation's text with the replies.
        name: name of the last tool call in the turn.
    """
    shared = count_shared(turn, text)
    called = turn.rfind(name)
    if called < shared:
        return shared
    whole = next((turn[start:] for start in range(shared, called + 1) if turn[start:] in text), "")
    return text.index(whole) + len(whole) if whole else shared


def _answer_to(calls: Sequence[dict[str, Any]], number: int, reply: Message) -> Message:  # Any: JSON
    """The reply, with the id and name of the call that it answers. Replies of tools have the order of the calls."""
    if reply["role"] != "tool":
        return reply
    call = calls[min(number, len(calls) - 1)]
    return {"name": call["function"]["name"], "tool_call_id": call["id"], **reply}


def _end_of_turn(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int], shared: int, sampled: Sequence[int]) -> int:
    """Number of leading tokens of a conversation that the policy has sampled or read, up to the end of a turn with
    calls.

    Args:
        tokens: tokens of the rendered conversation with its replies.
        shared: number of these tokens up to the end of the turn, where the replies begin.
    """

    def is_space(start: int, end: int) -> bool:
        return not tokenizer.decode(tokens[start:end]).strip()

    if sampled:
        ends = [place for place, token in enumerate(tokens) if token == sampled[-1]]
        inside = [place for place in ends if place < shared and is_space(place + 1, shared)]
        behind = [place for place in ends if place >= shared and is_space(shared, place)]
        if inside or behind:
            return [*behind[:1], *inside[-1:]][-1] + 1
    written = shared
    while written and is_space(written - 1, shared):
        written -= 1
    is_end = bool(written) and tokens[written - 1] in {*stop_token_ids(tokenizer), find_call_end(tokenizer)}
    return written - 1 if is_end else shared


def _check_seen(replies: Sequence[Message], text: str) -> None:
    """Raise UnseenReplyError if the rendered text lacks the text of a reply. White space is ignored."""
    written = _fold(text.replace(SPLIT, "").replace(SPLIT_IN_JSON, ""))
    for reply in replies:
        said: object = reply["content"]
        if not isinstance(said, str):
            continue
        forms = (said, *(json.dumps(said, ensure_ascii=ascii_only)[1:-1] for ascii_only in (False, True)))
        if not any(_fold(form) in written for form in forms):
            raise UnseenReplyError(
                f"the chat template drops text of the role {reply['role']!r}, so the policy would not see this "
                "reply: use another template, or reply in a role that the template writes"
            )


def _fold(text: str) -> str:
    return " ".join(text.split())


def _count_sampled(tokenizer: PreTrainedTokenizerBase, rest: list[int], sampled: Sequence[int]) -> int:
    """Number of tokens at the start of `rest` that repeat the turn's end, which the policy already sampled.

    The sampled end token may differ from the template's: some models have several (gpt-oss: `<|return|>`, `<|call|>`).
    Llama 2's template also writes a space before its end token.
    """
    if not sampled or not is_end(tokenizer, sampled[-1]):
        return 0
    if sampled[-1] in rest:
        num_before = rest.index(sampled[-1])
        return 0 if tokenizer.decode(rest[:num_before]).strip() else num_before + 1
    end = tokenizer.convert_tokens_to_ids(find_turn_form(tokenizer).end_within or tokenizer.eos_token)
    if end not in rest or tokenizer.decode(rest[: rest.index(end)]).strip():
        return 0
    return rest.index(end) + 1
