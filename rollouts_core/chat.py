"""Turn conversations into token ids and say which tokens belong to which turn.

Not here: reading rows (dataset.py), tensors (batch.py).

The tokenizer's own chat template writes the text; the turn of an assistant is what the template adds to the
conversation before it. That difference is taken on token ids and checked token by token, so a template whose
earlier text changes when a turn is added is an error instead of a wrong mask.

    messages         user 1+1=?             assistant 2
    text             <|user|>1+1=?<|end|><|assistant|>2<|end|>
    tokens           3  14 20 14 25 24 1    4         15 1
    Turn(assistant)                                   [8, 10)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

from jinja2 import TemplateError

from rollouts_core.errors import DataError
from rollouts_core.messages import first_line
from rollouts_core.types import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TrainOn = Literal["last_assistant", "all_assistant", "everything"]


class Turn(NamedTuple):
    """The tokens [start, end) that one message of a conversation added."""

    role: str
    start: int
    end: int


def tokenize_prompt(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> list[int]:
    """Token ids of a conversation that waits for the assistant's next turn."""
    return _encode(tokenizer, [_render(tokenizer, messages, add_generation_prompt=True)])[0]


def tokenize_conversation(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]
) -> tuple[list[int], list[Turn]]:
    """Token ids of a whole conversation, and the tokens of each assistant turn.

    Raises:
        DataError: no assistant turn, or a chat template that is not prefix-stable.
    """
    assistant_turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not assistant_turns:
        roles = ", ".join(dict.fromkeys(message["role"] for message in messages))
        raise DataError(f"the conversation has no assistant turn, only {roles}: there is nothing to learn from it")
    texts = [_render(tokenizer, messages[:i], add_generation_prompt=True) for i in assistant_turns]
    texts += [_render(tokenizer, messages[: i + 1], add_generation_prompt=False) for i in assistant_turns]
    if assistant_turns[-1] != len(messages) - 1:
        texts.append(_render(tokenizer, messages, add_generation_prompt=False))
    prefixes = _encode(tokenizer, texts)
    tokens = prefixes[-1]
    for prefix in prefixes:
        if tokens[: len(prefix)] != prefix:
            raise DataError(
                "the chat template is not prefix-stable: adding a turn changes the tokens before it, so "
                "assistant turns cannot be told apart; use a template that only appends, or train_on = everything"
            )
    befores, afters = prefixes[: len(assistant_turns)], prefixes[len(assistant_turns) :]
    return tokens, [Turn("assistant", len(before), len(after)) for before, after in zip(befores, afters, strict=False)]


def tokenize_whole_conversation(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> list[int]:
    """Token ids of a whole conversation, whatever its template does to earlier turns."""
    return _encode(tokenizer, [_render(tokenizer, messages, add_generation_prompt=False)])[0]


def compute_loss_mask(turns: Sequence[Turn], num_tokens: int, train_on: TrainOn) -> list[float]:
    """Per token 1 where it is trained on, else 0; turns that reach past `num_tokens` are cut."""
    if train_on == "everything":
        return [1.0] * num_tokens
    trained = turns[-1:] if train_on == "last_assistant" else turns
    loss_mask = [0.0] * num_tokens
    for turn in trained:
        for t in range(turn.start, min(turn.end, num_tokens)):
            loss_mask[t] = 1.0
    return loss_mask


def _render(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
    if tokenizer.chat_template is None:
        raise DataError(
            "the tokenizer has no chat template: add one to the model's folder, or use rows with a `text` field"
        )
    try:
        text: str = tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=add_generation_prompt
        )
    except (TemplateError, TypeError) as error:
        roles = ", ".join(message["role"] for message in messages)
        raise DataError(f"the chat template refuses the turns {roles}: {first_line(error)}") from error
    return text


def _encode(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[list[int]]:
    ids: list[list[int]] = tokenizer(texts, add_special_tokens=False)["input_ids"]
    return ids
