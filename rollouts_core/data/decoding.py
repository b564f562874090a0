"""Decode sampled token ids to text for environments, rewards and reports."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from rollouts_core.data.chat import stop_token_ids
from rollouts_core.types import Status

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def decode_turn(
    tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int], status: Status, *, ends: Collection[int] = ()
) -> str:
    """The text of a completion without end-of-turn and padding tokens, but with all other special tokens.

    Special tokens are kept because many tokenizers use them for tags that tools and graders search for, such as
    `<tool_call>`.

    Args:
        status: status of the completion. The last token of a completed turn is an end token, even if only the engine
            knows this.
        ends: additional token ids that end a turn.
    """
    left_out = {*_ends_and_padding(tokenizer, json.dumps(tokenizer.chat_template)), *ends}
    kept = list(tokens)
    if status is Status.COMPLETED and kept and kept[-1] not in left_out:
        last = tokenizer.added_tokens_decoder.get(kept[-1])
        # A closing tag such as </answer> is kept: it belongs to the answer even if the user set it as a stop token.
        kept = kept[:-1] if last is not None and last.special and not last.content.startswith("</") else kept
    text: str = tokenizer.decode([token for token in kept if token not in left_out], skip_special_tokens=False)
    return text


@lru_cache(maxsize=16)
def _ends_and_padding(tokenizer: PreTrainedTokenizerBase, _template: str) -> frozenset[int]:
    """Ids of end-of-turn and padding tokens. Cached, because finding them renders the template. The cache key has
    the template."""
    padding = [] if tokenizer.pad_token_id is None else [int(tokenizer.pad_token_id)]
    return frozenset([*stop_token_ids(tokenizer), *padding])
