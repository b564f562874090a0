"""Tokenize conversations so that texts of a policy or environment cannot inject special tokens.

A policy may write a text such as `<|end|>`. If the tokenizer read this text as a special token, the text would end the
turn, and could begin a turn of any role. The protection covers an environment's text in the policy's input, and a
policy's text in a judge's input.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, cast

from rollouts_core.data.chat import encode_texts
from rollouts_core.data.rendering import render_text
from rollouts_core.types import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SPLIT = "\ue000"
"""Private-use character that marks a place at which a text is divided before tokenizing, to break up special tokens."""
KNOWN_MARKS = re.compile(
    r"(?=<[|｜][^<>|｜]{1,60}[|｜]>"
    r"|</?(?:s|bos|eos|pad|unk|sop|eop|start_of_turn|end_of_turn|start_of_image|image_soft_token|begin_of_text)>"
    r"|<<?/?SYS>>?|\[/?(?:INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_CALLS|TOOL_RESULTS|TOOL_CONTENT|gMASK|sMASK)\])(.)",
    re.IGNORECASE,
)
"""Matches the first character of special tokens that begin or end turns in published chat templates."""
INVISIBLE = "\u200b"


def split_special(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> list[Message]:
    """Insert SPLIT after the first character of each special token in the texts of messages.

    A tokenizer with a normalizer may also read `<|END|>` or `<| end |>` as `<|end|>`. A text that contains a special
    token after normalization gets SPLIT between all characters.
    """
    is_special = _special_tokens(tokenizer, len(tokenizer))
    normalizer = getattr(getattr(tokenizer, "backend_tokenizer", None), "normalizer", None)

    def split(text: str) -> str:
        parts = is_special.sub(rf"\1{SPLIT}", text.replace(SPLIT, "")).split(SPLIT)
        if normalizer is not None:
            becomes_special = _special_tokens(tokenizer, len(tokenizer), is_normalized=True)
            parts = [
                SPLIT.join(each) if becomes_special.search(normalizer.normalize_str(each)) else each for each in parts
            ]
        return SPLIT.join(parts)

    return [cast("Message", {k: split(v) if isinstance(v, str) else v for k, v in each.items()}) for each in messages]


def encode_split(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of a rendered text. The parts between SPLIT characters are tokenized separately."""
    return list(itertools.chain(*encode_texts(tokenizer, text.split(SPLIT))))


def tokenize_plainly(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], *, add_generation_prompt: bool
) -> list[int]:
    """Token ids of a conversation. Only the chat template can write special tokens; the messages' texts cannot."""
    split = split_special(tokenizer, messages)
    return encode_split(tokenizer, render_text(tokenizer, split, None, add_generation_prompt=add_generation_prompt))


def hide_known_marks(text: str) -> str:
    """Insert an invisible character into the special tokens of common models.

    Used for servers that tokenize texts themselves: their tokenizer is unknown, and they read special tokens in any
    text.
    """
    return KNOWN_MARKS.sub(rf"\1{INVISIBLE}", text)


@lru_cache(maxsize=16)
def _special_tokens(
    tokenizer: PreTrainedTokenizerBase, num_tokens: int, is_normalized: bool = False
) -> re.Pattern[str]:
    """A pattern that matches the first character of each special token of the tokenizer.

    Cached, because some tokenizers have hundreds of special tokens: listing them takes twice as long as tokenizing a
    reply.

    Args:
        num_tokens: only part of the cache key.
        is_normalized: match special tokens that the tokenizer finds after normalizing a text.
    """
    added = [each for each in tokenizer.added_tokens_decoder.values() if each.special]
    normalizer = tokenizer.backend_tokenizer.normalizer if is_normalized else None
    contents = (
        {each.content for each in added}
        if normalizer is None
        else {normalizer.normalize_str(each.content) for each in added if each.normalized}
    )
    special = sorted(contents, key=len)
    listed = "|".join(re.escape(each) for each in reversed(special) if len(each) > 1) or r"(?!)"
    return re.compile(rf"(?=(?:{listed}))(.)", re.DOTALL)
