"""Tokenize conversations, and find the tokens of each assistant turn.

If a chat template has {% generation %} markers, the markers define the assistant's text. With other templates, a turn
is the text after its generation prompt. A token belongs to a turn if all characters of the token do.

    messages         user 1+1=?             assistant 2
    text             <|user|>1+1=?<|end|><|assistant|>2<|end|>
    tokens           3  14 20 14 25 24 1    4         15 1
    Turn(assistant)                                   [8, 10)

One text contains all turns if each turn, with the text before it, is a prefix of the rendered conversation. Templates
of reasoning models render earlier turns differently from the last turn. A turn that the template renders differently
after later messages gets a text of its own:

    tokens           <|user|>a<|assistant|><think>x</think>b<|end|>
    Turn                                  [                       )
    then             <|user|>a<|assistant|>b<|end|><|user|>c<|assistant|><think>y</think>d<|end|>
    Turn                                                                [                       )

Many conversations are encoded in one call of the tokenizer, because a call costs more than encoding a short text.
"""

from __future__ import annotations

import copy
import itertools
import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, NamedTuple

from rollouts_core.data.rendering import (
    NO_TEMPLATE,
    PROBE_CALL_ID,
    TURN_MARK,
    Tools,
    probe_call,
    render_marked,
    render_text,
)
from rollouts_core.data.turns import find_end_of_given, find_header, find_turn_ends, find_turn_form, render_turn
from rollouts_core.errors import DataError
from rollouts_core.types import Message

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

TrainOn = Literal["last_assistant", "all_assistant", "everything"]
Span = tuple[int, int]
"""(start, end): positions of the first character or token, and of the first one after the span."""
CHUNK_TEXTS = 512
GENERATION_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")


class Conversation(NamedTuple):
    """A conversation to tokenize: its messages, and the schemas of its tools.

    The first `num_given` messages are only context and never trained on.
    """

    messages: Sequence[Message]
    tools: Tools = None
    num_given: int = 0
    prefill: str = ""
    """Beginning of message number `num_given` that is also only context: training starts after this text."""


class Turn(NamedTuple):
    """Token indices [start, end) of one message in a tokenized conversation."""

    role: str
    start: int
    end: int
    text_start: int = 0
    """Index of the first token of the text that contains this turn."""


class TokenizedConversation(NamedTuple):
    """Token ids of a whole conversation, and the assistant turns that `train_on` selects.

    If turns need separate texts, `tokens` contains the texts one after another. `split_texts` separates them.
    """

    tokens: list[int]
    turns: list[Turn]


def tokenize_prompt(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], tools: Tools = None) -> list[int]:
    """Token ids of a conversation up to the beginning of the assistant's next turn.

    If the last message is the assistant's, the tokens end with its content, so that the policy continues this message.
    """
    return encode_texts(tokenizer, [render_prompt(tokenizer, messages, tools)])[0]


def tokenize_prompts(
    tokenizer: PreTrainedTokenizerBase, conversations: Sequence[Sequence[Message]], tools: Tools = None
) -> Iterator[list[int]]:
    """Yield the result of `tokenize_prompt` for many conversations, with few calls of the tokenizer."""
    texts = (render_prompt(tokenizer, messages, tools) for messages in conversations)
    while chunk := list(itertools.islice(texts, CHUNK_TEXTS)):
        yield from encode_texts(tokenizer, chunk)


def render_prompt(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], tools: Tools = None) -> str:
    """The text that `tokenize_prompt` encodes."""
    if not is_prefill(messages):
        return render_text(tokenizer, messages, tools, add_generation_prompt=True)
    before, turn = render_turn(tokenizer, messages, len(messages) - 1, tools)
    given = messages[-1]["content"]
    return before + turn[: find_end_of_given(tokenizer, turn, given, given)]


def is_prefill(messages: Sequence[Message]) -> bool:
    """True if the last message is an assistant message without tool calls, which the policy is to continue."""
    return bool(messages) and messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls")


def stop_token_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Ids of tokens that end a completion: the tokenizer's end-of-sequence token, and the turn ends of the chat
    template.

    Both kinds of tokens are needed: a base model's end-of-sequence token often differs from the turn end that SFT
    teaches.
    """
    return tuple(dict.fromkeys([int(tokenizer.eos_token_id), *find_turn_ends(tokenizer)]))


def leaves_out_role(tokenizer: PreTrainedTokenizerBase, role: str, *, is_first: bool = False) -> bool:
    """True if the chat template omits messages of this role. False if the template refuses the test conversations.

    Args:
        is_first: test the role at the start of a conversation, instead of after an assistant message or tool call.
    """
    return _leaves_out_role(tokenizer, json.dumps(tokenizer.chat_template), role, is_first)


@lru_cache(maxsize=64)
def _leaves_out_role(tokenizer: PreTrainedTokenizerBase, _template: str, role: str, is_first: bool) -> bool:
    """Cached, because rendering takes longer than tokenizing a reply. `_template` is only part of the cache key."""
    calls, tool = probe_call({})
    asks: Message = {"role": "user", "content": "?"}
    says: Message = {"role": role, "content": TURN_MARK, "name": "f", "tool_call_id": PROBE_CALL_ID}
    answers: Message = {"role": "assistant", "content": "!"}
    asked = [[says, asks], [says]] if is_first else [[asks, answers, says], [asks, calls, says]]
    texts: list[str] = []
    for messages in asked:
        with suppress(DataError):
            tools = [tool] if calls in messages else None
            texts.append(render_text(tokenizer, messages, tools, add_generation_prompt=True))
    return bool(texts) and not any(TURN_MARK in text for text in texts)


def tokenize_conversation(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    *,
    tools: Tools = None,
    train_on: TrainOn = "all_assistant",
) -> TokenizedConversation:
    """Tokenize a whole conversation, and find the tokens of the assistant turns that `train_on` selects.

    Raises:
        DataError: there is no assistant turn, or the assistant turns cannot be located in the chat template's text.
    """
    [outcome] = tokenize_conversations(tokenizer, [Conversation(messages, tools)], train_on=train_on)
    if isinstance(outcome, DataError):
        raise outcome
    return outcome


def tokenize_conversations(
    tokenizer: PreTrainedTokenizerBase, conversations: Sequence[Conversation], *, train_on: TrainOn
) -> list[TokenizedConversation | DataError]:
    """Tokenize many conversations in one call of the tokenizer. A conversation that fails gives a DataError instead
    of tokens."""
    if tokenizer.chat_template is None:
        return [DataError(f"{NO_TEMPLATE}, or use rows with a `text` field") for _ in conversations]
    is_marked = train_on != "everything" and has_generation_markers(tokenizer)
    render = _render_marked if is_marked else _render_turns
    rendered: list[list[_Text] | DataError] = []
    for conversation in conversations:
        try:
            rendered.append(render(tokenizer, conversation, train_on))
        except DataError as error:
            rendered.append(error)
    texts = [text for each in rendered if not isinstance(each, DataError) for text in each]
    located = iter(_locate_spans(tokenizer, texts))
    outcomes: list[TokenizedConversation | DataError] = []
    for each in rendered:
        found = [] if isinstance(each, DataError) else list(itertools.islice(located, len(each)))
        outcomes.append(each if isinstance(each, DataError) else _join_texts(found))
    return outcomes


def split_texts(tokenized: TokenizedConversation) -> list[TokenizedConversation]:
    """Split a tokenized conversation into its texts, each with the turns inside it."""
    starts = sorted({0, *(turn.text_start for turn in tokenized.turns)})
    ends = [*starts[1:], len(tokenized.tokens)]
    return [
        TokenizedConversation(
            tokenized.tokens[start:end],
            [Turn(t.role, t.start - start, t.end - start) for t in tokenized.turns if t.text_start == start],
        )
        for start, end in zip(starts, ends, strict=True)
    ]


def has_generation_markers(tokenizer: PreTrainedTokenizerBase) -> bool:
    """True if the chat template marks the assistant's text with {% generation %}."""
    template = tokenizer.chat_template
    return isinstance(template, str) and GENERATION_MARKER.search(template) is not None


def compute_loss_mask(turns: Sequence[Turn], num_tokens: int, train_on: TrainOn) -> list[float]:
    """Loss mask of the first `num_tokens` tokens: 1 for trained tokens, 0 for all other tokens."""
    if train_on == "everything":
        return [1.0] * num_tokens
    trained = turns[-1:] if train_on == "last_assistant" else turns
    loss_mask = [0.0] * num_tokens
    for turn in trained:
        end = min(turn.end, num_tokens)
        loss_mask[turn.start : end] = [1.0] * (end - turn.start)
    return loss_mask


def encode_texts(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[list[int]]:
    """Token ids of texts. No special tokens are added, because the texts already contain them."""
    if not texts:
        return []
    ids: list[list[int]] = tokenizer(texts, add_special_tokens=False, return_attention_mask=False)["input_ids"]
    return ids


def trained_turns(conversation: Conversation, train_on: TrainOn) -> list[int]:
    """Indices of the messages to train on.

    Raises:
        DataError: the conversation has no assistant message after its context.
    """
    messages = conversation.messages
    turns = [i for i in range(conversation.num_given, len(messages)) if messages[i]["role"] == "assistant"]
    if not turns:
        roles = ", ".join(dict.fromkeys(message["role"] for message in messages))
        raise DataError(f"the conversation has no assistant turn, only {roles}: SFT needs at least one")
    return turns[-1:] if train_on == "last_assistant" else turns


class _Text(NamedTuple):
    """A rendered text, and the character spans of its trained turns."""

    text: str
    spans: list[Span]


def _render_turns(tokenizer: PreTrainedTokenizerBase, conversation: Conversation, train_on: TrainOn) -> list[_Text]:
    """Render a conversation as one text, or as several texts if the template renders a turn differently after later
    messages."""
    messages, tools = conversation.messages, conversation.tools
    if train_on == "everything":
        return [_Text(render_text(tokenizer, messages, tools, add_generation_prompt=False), [])]
    numbers = trained_turns(conversation, train_on)
    texts: list[_Text] = []
    for number in numbers:
        before, turn = render_turn(tokenizer, messages, number, tools)
        num_given = 0
        if conversation.prefill and number == conversation.num_given:
            num_given = find_end_of_given(tokenizer, turn, messages[number]["content"], conversation.prefill)
        text = before + turn
        is_same = bool(texts) and before.startswith(texts[-1].text)
        earlier = texts.pop().spans if is_same else []
        texts.append(_Text(text, [*earlier, (len(before) + num_given, len(text))]))
    form = find_turn_form(tokenizer)
    if numbers[-1] != len(messages) - 1 or form.surplus:
        whole = render_text(tokenizer, messages, tools, add_generation_prompt=False)
        if whole.startswith(texts[-1].text):
            texts[-1] = texts[-1]._replace(text=whole)
    if form.header:
        is_call = bool(messages[numbers[-1]].get("tool_calls"))
        texts = [_with_headers(tokenizer, each, form.header_of_answer if is_call else form.header) for each in texts]
    return texts


def _with_headers(tokenizer: PreTrainedTokenizerBase, text: _Text, last: str) -> _Text:
    """Extend each turn's span by the header of the next turn, which ends the turn in some templates.

    Args:
        last: header to append if the text ends with a turn.
    """
    whole = text.text if text.spans[-1][1] < len(text.text) else text.text + last
    return _Text(whole, [(start, end + len(find_header(tokenizer, whole, end))) for start, end in text.spans])


def _render_marked(tokenizer: PreTrainedTokenizerBase, conversation: Conversation, train_on: TrainOn) -> list[_Text]:
    """Render a conversation, with the spans inside the template's own generation markers."""
    num_turns = len(trained_turns(conversation, "all_assistant"))
    text, spans = render_marked(tokenizer, conversation.messages, conversation.tools)
    if conversation.num_given:
        spans = _without_given(tokenizer, conversation, spans)
    spans = [(start, end) for start, end in spans if start < end]
    if not spans:
        raise DataError(
            "the chat template's generation markers contain no token: they must surround the assistant's text"
        )
    if conversation.prefill:
        start, end = spans[0]
        content = conversation.messages[conversation.num_given]["content"]
        start += find_end_of_given(tokenizer, text[start:end], content, conversation.prefill)
        spans = [(start, end), *spans[1:]]
    if train_on == "last_assistant":
        if len(spans) != num_turns:
            raise DataError(
                f"the chat template's generation markers give {len(spans)} spans for {num_turns} assistant turns, so "
                "the last turn cannot be identified; use train_on = all_assistant"
            )
        spans = spans[-1:]
    return [_Text(text, spans)]


def _without_given(tokenizer: PreTrainedTokenizerBase, conversation: Conversation, spans: list[Span]) -> list[Span]:
    """Drop the spans of messages that are only context.

    If there is one span per assistant message, the first spans are dropped, one for each assistant message of the
    context. Otherwise, spans that start within the rendered context are dropped. This rule may drop too many spans: a
    template that removes earlier thoughts keeps the thoughts of the last message, so the context rendered alone can be
    longer.
    """
    given = conversation.messages[: conversation.num_given]
    num_turns, num_in_given = (
        sum(message["role"] == "assistant" for message in messages) for messages in (conversation.messages, given)
    )
    if len(spans) == num_turns:
        return spans[num_in_given:]
    # Compare character positions, because the first token of a turn may begin before the turn.
    num_characters = len(render_text(tokenizer, given, conversation.tools, add_generation_prompt=False))
    return [span for span in spans if span[0] >= num_characters]


def _join_texts(texts: Sequence[TokenizedConversation]) -> TokenizedConversation:
    """Concatenate the tokenized texts of a conversation, and shift the turns accordingly."""
    tokens: list[int] = []
    turns: list[Turn] = []
    for each in texts:
        start = len(tokens)
        turns += [Turn(turn.role, turn.start + start, turn.end + start, start) for turn in each.turns]
        tokens += each.tokens
    return TokenizedConversation(tokens, turns)


def _locate_spans(tokenizer: PreTrainedTokenizerBase, texts: Sequence[_Text]) -> list[TokenizedConversation]:
    """Tokenize texts. Each character span becomes a turn with the tokens that lie completely inside it."""
    if not texts:
        return []
    if not any(each.spans for each in texts):
        return [TokenizedConversation(tokens, []) for tokens in encode_texts(tokenizer, [each.text for each in texts])]
    located: list[TokenizedConversation] = []
    for (_, spans), (tokens, offsets) in zip(texts, _encode_with_offsets(tokenizer, texts), strict=True):
        starts, ends = ([offset[i] for offset in offsets] for i in (0, 1))
        turns = [Turn("assistant", bisect_left(starts, start), bisect_right(ends, end)) for start, end in spans]
        turns = [turn._replace(end=max(turn.start, turn.end)) for turn in turns]
        located.append(TokenizedConversation(tokens, turns))
    return located


def _encode_with_offsets(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[_Text]
) -> list[tuple[list[int], list[Span]]]:
    """Token ids of texts, and the character span of each token."""
    if not tokenizer.is_fast:
        return [_encode_between_borders(tokenizer, each) for each in texts]
    whole = [each.text for each in texts]
    if (untrimmed := _untrimmed(tokenizer)) is not None:
        encodings = untrimmed.encode_batch(whole, add_special_tokens=False)
        return [(encoding.ids, encoding.offsets) for encoding in encodings]
    encoded = tokenizer(whole, add_special_tokens=False, return_attention_mask=False, return_offsets_mapping=True)
    return list(zip(encoded["input_ids"], encoded["offset_mapping"], strict=True))


def _encode_between_borders(tokenizer: PreTrainedTokenizerBase, text: _Text) -> tuple[list[int], list[Span]]:
    """Encode a text with a tokenizer that does not report character positions (a slow tokenizer).

    The text is cut at the borders of its spans. Each token gets the character span of its part.

    Raises:
        DataError: a token crosses a border.
    """
    borders = sorted({0, *itertools.chain(*text.spans), len(text.text)})
    prefixes = encode_texts(tokenizer, [text.text[:border] for border in borders[1:]])
    tokens, offsets = prefixes[-1], list[Span]()
    for span, prefix in zip(itertools.pairwise(borders), prefixes, strict=True):
        if tokens[: len(prefix)] != prefix:
            raise DataError(
                "a token has characters of two turns, but this slow tokenizer does not report the characters of "
                "each token: use a fast tokenizer"
            )
        offsets += [span] * (len(prefix) - len(offsets))
    return tokens, offsets


def _untrimmed(tokenizer: PreTrainedTokenizerBase) -> Tokenizer | None:
    """A copy of the tokenizer that includes spaces in the reported character positions; None if the tokenizer includes
    them.

    A tokenizer that trims spaces would report a token of two line breaks as if it contained only the second line break.
    """
    processor = tokenizer.backend_tokenizer.post_processor
    if processor is None or b'"trim_offsets":true' not in processor.__getstate__():
        return None
    return _copy_untrimmed(tokenizer, len(tokenizer))


@lru_cache(maxsize=4)
def _copy_untrimmed(tokenizer: PreTrainedTokenizerBase, _num_tokens: int) -> Tokenizer:
    backend: Tokenizer = copy.deepcopy(tokenizer.backend_tokenizer)
    backend.post_processor = None
    backend.no_truncation()
    backend.no_padding()
    return backend
