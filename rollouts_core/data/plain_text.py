"""Tokenize conversations so that texts of a policy or an environment cannot contain special tokens.

The policy may write a string like `<|end|>`. Encoded as a special token, it would end the turn and could start a
turn of any role, in a policy's input from its environment or in a judge's input from a policy.
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
"""Private-use character that marks where a text is split before tokenizing, to break special tokens in it."""
KNOWN_MARKS = re.compile(
    r"(?=<[|｜][^<>|｜]{1,60}[|｜]>"
    r"|</?(?:s|bos|eos|pad|unk|sop|eop|start_of_turn|end_of_turn|start_of_image|image_soft_token|begin_of_text)>"
    r"|<<?/?SYS>>?|\[/?(?:INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_CALLS|TOOL_RESULTS|TOOL_CONTENT|gMASK|sMASK)\])(.)",
    re.IGNORECASE,
)
"""Matches the first letter of a marker that begins or ends turns in templates of published models."""
INVISIBLE = "\u200b"


def split_special(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> list[Message]:
    """Insert SPLIT into every special token in the messages' texts, and nowhere else.

    A tokenizer that normalizes texts may read `<|END|>` or `<| end |>` as `<|end|>`. A text that becomes a special
    token by normalization is split after each character.
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
    """Token ids of a rendered text; the parts between SPLIT are tokenized separately."""
    return list(itertools.chain(*encode_texts(tokenizer, text.split(SPLIT))))


def tokenize_plainly(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], *, add_generation_prompt: bool
) -> list[int]:
    """Token ids of a conversation that contains no special tokens besides the chat template's."""
    split = split_special(tokenizer, messages)
    return encode_split(tokenizer, render_text(tokenizer, split, None, add_generation_prompt=add_generation_prompt))


def hide_known_marks(text: str) -> str:
    """Insert an invisible character into special tokens of common models.

    For servers that tokenize text themselves: their tokenizer is unknown, and they encode special tokens in any text.
    """
    return KNOWN_MARKS.sub(rf"\1{INVISIBLE}", text)


@lru_cache(maxsize=16)
def _special_tokens(
    tokenizer: PreTrainedTokenizerBase, num_tokens: int, is_normalized: bool = False
) -> re.Pattern[str]:
    """A pattern for the first character of the tokenizer's special tokens; `num_tokens` is part of the cache key.

    Cached, because listing them takes twice as long as tokenizing a reply: some tokenizers reserve hundreds.

    Args:
        is_normalized: match normalized texts, for tokens that the tokenizer finds after normalization.
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
