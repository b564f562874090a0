"""Token ids of what an environment answers in the middle of a conversation.

Not here: whole conversations (chat.py), holding one (rollout/conversation.py).

A conversation that the policy is in the middle of grows by token ids: what it sampled stays as it is, and what an
environment answers is what the template writes behind an assistant's turn. It is never rendered from the start again,
because a text that a policy sampled may be tokenized into other tokens than those.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rollouts_core.data.chat import TURN_MARK, leaves_out_role, render_text
from rollouts_core.data.plain_text import encode_split, split_special
from rollouts_core.errors import DataError
from rollouts_core.types import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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
    text = render_text(tokenizer, [*before, *split_special(tokenizer, replies)], None, add_generation_prompt=True)
    _, mark, rest = text.partition(TURN_MARK)
    if not mark:
        raise DataError("the chat template does not write what an assistant said: use another template")
    tokens = encode_split(tokenizer, rest)
    return tokens[_count_sampled(tokenizer, tokens, sampled) :]


def _count_sampled(tokenizer: PreTrainedTokenizerBase, rest: list[int], sampled: Sequence[int]) -> int:
    """How much of what the template writes behind a turn came with it: all up to its last token, but for spaces.

    Llama 2's writes a space before its end of turn, which a policy need not sample.
    """
    if not sampled or sampled[-1] not in rest:
        return 0
    num_before = rest.index(sampled[-1])
    return 0 if tokenizer.decode(rest[:num_before]).strip() else num_before + 1
