"""Token ids of what an environment answers in the middle of a conversation.

Not here: whole conversations (chat.py), holding one (rollout/conversation.py).

A conversation that the policy is in the middle of grows by token ids: what it sampled stays as it is, and what an
environment answers is what the template writes behind an assistant's turn. It is never rendered from the start again,
because a text that a policy sampled may be tokenized into other tokens than those.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, cast

from rollouts_core.data.chat import encode_texts, leaves_out_role
from rollouts_core.data.rendering import TURN_MARK, render_text
from rollouts_core.data.turns import find_turn_form, is_end
from rollouts_core.errors import DataError
from rollouts_core.types import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SPLIT = "\ue000"
"""Of Unicode's private use: where a text is cut before it is tokenized, so that what it holds is no special token."""


def tokenize_reply(tokenizer: PreTrainedTokenizerBase, replies: Sequence[Message], sampled: Sequence[int]) -> list[int]:
    """Token ids of what follows a turn that the policy sampled: its end, the replies, the start of its next turn.

    The end of the turn is left out as far as the policy has sampled it, which it has when it stopped by itself. What
    looks like a special token in a reply, as in a page that a tool fetched, is text: it neither ends nor begins a turn.

    Args:
        replies: what an environment answers.
        sampled: the tokens of the policy's turn.

    Raises:
        DataError: a chat template that refuses the replies, or that loses what they or an assistant say.
    """
    for role in dict.fromkeys(reply["role"] for reply in replies):
        if leaves_out_role(tokenizer, role):
            raise DataError(
                f"the chat template writes nothing of what the role {role!r} says, so the policy would not see what it "
                "is answered: use another template, or answer in a role that it writes"
            )
    before: list[Message] = [{"role": "user", "content": ""}, {"role": "assistant", "content": TURN_MARK}]
    text = render_text(tokenizer, [*before, *_split_special(tokenizer, replies)], None, add_generation_prompt=True)
    _, mark, rest = text.partition(TURN_MARK)
    if not mark:
        raise DataError("the chat template does not write what an assistant said: use another template")
    tokens = list(itertools.chain(*encode_texts(tokenizer, rest.split(SPLIT))))
    return tokens[_count_sampled(tokenizer, tokens, sampled) :]


def _count_sampled(tokenizer: PreTrainedTokenizerBase, rest: list[int], sampled: Sequence[int]) -> int:
    """How much of what the template writes behind a turn is left out: its end, if the policy has sampled one.

    The policy need not sample the template's own end: models have several (gpt-oss: `<|return|>`, `<|call|>`), and
    Llama 2's template writes a space before its end.
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


def _split_special(tokenizer: PreTrainedTokenizerBase, replies: Sequence[Message]) -> list[Message]:
    """The replies with SPLIT within every special token that their texts hold, and nowhere else."""
    is_special = _special_tokens(tokenizer, len(tokenizer))

    def split(text: str) -> str:
        return is_special.sub(lambda found: found[0][0] + SPLIT + found[0][1:], text.replace(SPLIT, ""))

    return [cast("Message", {k: split(v) if isinstance(v, str) else v for k, v in reply.items()}) for reply in replies]


@lru_cache(maxsize=16)
def _special_tokens(tokenizer: PreTrainedTokenizerBase, num_tokens: int) -> re.Pattern[str]:
    """What finds its special tokens, of which one that is added later makes another number of tokens.

    Listing them takes twice as long as tokenizing a reply: some tokenizers reserve hundreds.
    """
    special = sorted((each.content for each in tokenizer.added_tokens_decoder.values() if each.special), key=len)
    return re.compile("|".join(re.escape(each) for each in reversed(special) if len(each) > 1) or r"(?!)")
