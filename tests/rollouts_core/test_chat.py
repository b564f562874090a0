"""Pins which tokens of a conversation belong to the assistant, and therefore enter the loss.

Without it a mask that is one token off would train the model on the user's words, or never on its own end token.
"""

import pytest
from transformers import PreTrainedTokenizerBase

from rollouts_core.chat import Turn, compute_loss_mask, tokenize_conversation, tokenize_prompt
from rollouts_core.config import ModelConfig
from rollouts_core.errors import DataError
from rollouts_core.model import load_tokenizer
from rollouts_core.types import Message

TWO_TURNS = [
    Message(role="system", content="+"),
    Message(role="user", content="1+1=?"),
    Message(role="assistant", content="2"),
    Message(role="user", content="7"),
    Message(role="assistant", content="14"),
]
RENDERED = "<|system|>+<|end|><|user|>1+1=?<|end|><|assistant|>2<|end|><|user|>7<|end|><|assistant|>14<|end|>"
DROPS_EARLIER_ANSWERS = (
    "{% for m in messages %}{% if m['role'] != 'assistant' or loop.last %}"
    "<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture
def own_tokenizer(base_model: ModelConfig) -> PreTrainedTokenizerBase:
    """A tokenizer that a test may change."""
    return load_tokenizer(base_model)


def select_trained_text(tokenizer: PreTrainedTokenizerBase, messages: list[Message], train_on: str) -> str:
    """The text of the tokens that enter the loss."""
    tokens, turns = tokenize_conversation(tokenizer, messages)
    loss_mask = compute_loss_mask(turns, len(tokens), train_on)
    return tokenizer.decode([token for token, weight in zip(tokens, loss_mask, strict=True) if weight])


def test_a_conversation_has_the_tokens_of_its_template(tokenizer: PreTrainedTokenizerBase) -> None:
    tokens, _ = tokenize_conversation(tokenizer, TWO_TURNS)
    assert tokenizer.decode(tokens) == RENDERED


def test_a_prompt_ends_where_the_assistant_begins(tokenizer: PreTrainedTokenizerBase) -> None:
    text = tokenizer.decode(tokenize_prompt(tokenizer, TWO_TURNS[:2]))
    assert text == "<|system|>+<|end|><|user|>1+1=?<|end|><|assistant|>"


def test_a_conversation_begins_with_the_tokens_of_its_prompt(tokenizer: PreTrainedTokenizerBase) -> None:
    tokens, turns = tokenize_conversation(tokenizer, TWO_TURNS)
    assert tokens[: turns[-1].start] == tokenize_prompt(tokenizer, TWO_TURNS[:-1])


@pytest.mark.parametrize(
    ("train_on", "expected"),
    [("all_assistant", "2<|end|>14<|end|>"), ("last_assistant", "14<|end|>"), ("everything", RENDERED)],
)
def test_the_trained_text_is_what_the_setting_says(
    tokenizer: PreTrainedTokenizerBase, train_on: str, expected: str
) -> None:
    assert select_trained_text(tokenizer, TWO_TURNS, train_on) == expected


def test_a_conversation_that_ends_with_the_user_trains_on_the_answers_before(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    assert select_trained_text(tokenizer, TWO_TURNS[:-1], "last_assistant") == "2<|end|>"


def test_two_assistant_turns_in_a_row_are_both_trained_on(tokenizer: PreTrainedTokenizerBase) -> None:
    messages = [Message(role="user", content="1"), *[Message(role="assistant", content=c) for c in "23"]]
    assert select_trained_text(tokenizer, messages, "all_assistant") == "2<|end|>3<|end|>"


def test_an_empty_answer_trains_on_the_end_token(tokenizer: PreTrainedTokenizerBase) -> None:
    messages = [Message(role="user", content="1"), Message(role="assistant", content="")]
    assert select_trained_text(tokenizer, messages, "all_assistant") == "<|end|>"


@pytest.mark.parametrize(
    ("num_tokens", "train_on", "expected"),
    [
        (4, "all_assistant", [0, 1, 1, 0]),
        (6, "all_assistant", [0, 1, 1, 0, 0, 1]),
        (6, "last_assistant", [0, 0, 0, 0, 0, 1]),
        (2, "last_assistant", [0, 0]),
        (3, "everything", [1, 1, 1]),
        (0, "all_assistant", []),
    ],
)
def test_a_mask_is_cut_where_the_tokens_are_cut(num_tokens: int, train_on: str, expected: list[int]) -> None:
    turns = [Turn("assistant", 1, 3), Turn("assistant", 5, 8)]
    assert compute_loss_mask(turns, num_tokens, train_on) == expected


def test_a_conversation_without_an_assistant_is_an_error(tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(DataError, match="no assistant turn"):
        tokenize_conversation(tokenizer, TWO_TURNS[:2])


def test_a_template_that_changes_earlier_turns_is_an_error(own_tokenizer: PreTrainedTokenizerBase) -> None:
    own_tokenizer.chat_template = DROPS_EARLIER_ANSWERS
    with pytest.raises(DataError, match="not prefix-stable"):
        tokenize_conversation(own_tokenizer, TWO_TURNS)


def test_a_template_that_changes_earlier_turns_still_serves_a_single_turn(
    own_tokenizer: PreTrainedTokenizerBase,
) -> None:
    own_tokenizer.chat_template = DROPS_EARLIER_ANSWERS
    assert select_trained_text(own_tokenizer, TWO_TURNS[:3], "all_assistant") == "2<|end|>"


def test_a_tokenizer_without_a_chat_template_is_an_error(own_tokenizer: PreTrainedTokenizerBase) -> None:
    own_tokenizer.chat_template = None
    with pytest.raises(DataError, match="no chat template"):
        tokenize_conversation(own_tokenizer, TWO_TURNS)
