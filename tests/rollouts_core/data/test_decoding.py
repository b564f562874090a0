"""Pins which special tokens the texts of environments and rewards keep.

Without it a tool is never called, or a tag never found, because the tokenizer has it as a special token.
"""

from __future__ import annotations

import pytest
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerBase

from rollouts_core.data.decoding import decode_turn
from rollouts_core.types import Status

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture
def tagging_tokenizer(byte_tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Has tags, another end and padding as special tokens, as many models have them."""
    special = ["<tool_call>", "</tool_call>", "<answer>", "</answer>", "<|eom_id|>", "<|pad|>"]
    byte_tokenizer.add_tokens([AddedToken(each, special=True) for each in special], special_tokens=True)
    byte_tokenizer.pad_token = "<|pad|>"
    byte_tokenizer.chat_template = CHATML
    return byte_tokenizer


@pytest.mark.parametrize(
    ("written", "status", "text"),
    [
        ("<tool_call>{}</tool_call><|im_end|>", Status.COMPLETED, "<tool_call>{}</tool_call>"),
        ("so <answer>7</answer><|im_end|>", Status.COMPLETED, "so <answer>7</answer>"),
        ("so <answer>7</answer>", Status.COMPLETED, "so <answer>7</answer>"),  # it may end completions
        ("7<|eom_id|>", Status.COMPLETED, "7"),  # the engine's own end
        ("7<|eom_id|>", Status.TRUNCATED, "7<|eom_id|>"),
        ("7<|im_end|><|pad|><|pad|>", Status.COMPLETED, "7"),
        ("<answer>", Status.TRUNCATED, "<answer>"),
    ],
)
def test_special_tokens_are_text_but_for_ends_and_padding(
    written: str, status: Status, text: str, tagging_tokenizer: PreTrainedTokenizerBase
) -> None:
    assert decode_turn(tagging_tokenizer, tagging_tokenizer(written)["input_ids"], status) == text
