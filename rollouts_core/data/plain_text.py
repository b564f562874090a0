"""Token ids of conversations in which texts of a policy or of an environment are text alone.

Such a text may hold what looks like a special token, as `<|end|>`. Encoded as one it would end a turn, and begin a turn
of any role: in what a policy reads of its environment, and in what a judge or a classifier reads of a policy.

Not here: whole conversations that are trusted, as prompts of data are (chat.py).
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
"""Of Unicode's private use: where a text is cut before it is tokenized, so that what it holds is no special token."""
KNOWN_MARKS = re.compile(
    r"(?=<[|｜][^<>|｜]{1,60}[|｜]>"
    r"|</?(?:s|bos|eos|pad|unk|sop|eop|start_of_turn|end_of_turn|start_of_image|image_soft_token|begin_of_text)>"
    r"|<<?/?SYS>>?|\[/?(?:INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_CALLS|TOOL_RESULTS|TOOL_CONTENT|gMASK|sMASK)\])(.)",
    re.IGNORECASE,
)
"""The first letter of what ends or begins turns in the templates of published models."""
INVISIBLE = "\u200b"


def split_special(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> list[Message]:
    """The messages with SPLIT within every special token that their texts hold, and nowhere else.

    A tokenizer that normalizes texts may read `<|END|>` or `<| end |>` as `<|end|>`. A text that becomes a special
    token in this way is split after each character.
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
    """Token ids of a rendered text, each part between two SPLIT by itself."""
    return list(itertools.chain(*encode_texts(tokenizer, text.split(SPLIT))))


def tokenize_plainly(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], *, add_generation_prompt: bool
) -> list[int]:
    """Token ids of a conversation whose only special tokens are those of the chat template."""
    split = split_special(tokenizer, messages)
    return encode_split(tokenizer, render_text(tokenizer, split, None, add_generation_prompt=add_generation_prompt))


def hide_known_marks(text: str) -> str:
    """The text with an invisible character in what is a special token for many models.

    For a server that makes token ids of text by itself: its tokenizer is not known here, and it takes a special token
    wherever it is written.
    """
    return KNOWN_MARKS.sub(rf"\1{INVISIBLE}", text)


@lru_cache(maxsize=16)
def _special_tokens(
    tokenizer: PreTrainedTokenizerBase, num_tokens: int, is_normalized: bool = False
) -> re.Pattern[str]:
    """What finds the first character of its special tokens, of which one that is added later makes another number.

    Listing them takes twice as long as tokenizing a reply: some tokenizers reserve hundreds.

    Args:
        is_normalized: find in normalized texts the tokens that the tokenizer looks for there.
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
