"""Pins what is said of a chat template before any training: what it leaves out.

Without it a model would learn from conversations of which it sees a part, or never learn to end a turn.
"""

import pytest
from transformers import PreTrainedTokenizerBase

from rollouts_core.checks.templates import (
    UnwrittenRoles,
    find_unwritten,
    warn_of_endless_turns,
    warn_of_unseen_tools,
)
from rollouts_core.data.turns import THOUGHTS
from rollouts_core.environments.calculator import CALCULATOR
from rollouts_core.types import Message
from tests.rollouts_core.data.test_chat import (
    CUTS_THOUGHTS,
    FORGETS_THOUGHTS,
    KNOWS_THREE_ROLES,
    WITH_TOOLS,
    write_behind_turns,
)

CALLS = ("tool_calls", "function_call")


@pytest.mark.parametrize(
    ("behind", "said"),
    [("", "nothing after an"), ("###\n", "'###\\n' after an assistant"), ("<|im_end|>", ""), ("###<|endoftext|>", "")],
)
def test_a_template_that_no_completion_can_end_by_is_told(
    behind: str, said: str, byte_tokenizer: PreTrainedTokenizerBase
) -> None:
    write_behind_turns(byte_tokenizer, behind)
    warnings = warn_of_endless_turns(byte_tokenizer)
    assert [f"the chat template writes {said}" in warning for warning in warnings] == [True] * bool(said)


@pytest.mark.parametrize("template", [None, "{{ raise_exception('no') }}", "{{ messages[0].content }}"])
def test_a_template_that_does_not_tell_how_turns_end_is_not_warned_of(
    template: str | None, byte_tokenizer: PreTrainedTokenizerBase
) -> None:
    byte_tokenizer.chat_template = template
    assert warn_of_endless_turns(byte_tokenizer) == []


@pytest.mark.parametrize(
    ("shows", "num_warnings"), [("", 1), ("{% for t in tools or [] %}{{ t['function']['name'] }}{% endfor %}", 0)]
)
def test_a_template_that_leaves_tools_out_is_said(
    byte_tokenizer: PreTrainedTokenizerBase, shows: str, num_warnings: int
) -> None:
    byte_tokenizer.chat_template = shows + "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{% endfor %}"
    warnings = warn_of_unseen_tools(byte_tokenizer, [CALCULATOR.to_json()])
    assert len(warnings) == num_warnings
    assert all("(calculator)" in sentence for sentence in warnings)
    assert warn_of_unseen_tools(byte_tokenizer, []) == []


@pytest.mark.parametrize(
    ("template", "unwritten"),
    [
        (KNOWS_THREE_ROLES, [*CALLS, *THOUGHTS]),
        (WITH_TOOLS, ["function_call", *THOUGHTS]),
        (FORGETS_THOUGHTS, [*CALLS]),
        (CUTS_THOUGHTS, [*CALLS]),  # a turn's thoughts are written where the generation prompt opens them
        (CUTS_THOUGHTS.replace("<think>", ""), [*CALLS, *THOUGHTS, "</think>"]),
        (
            KNOWS_THREE_ROLES.replace("m.content", "m.content if m.role == 'user'"),
            ["content", *CALLS, *THOUGHTS, "</think>"],
        ),
        ("{{ raise_exception('no') }}", []),
    ],
)
def test_a_template_is_asked_what_it_leaves_out_of_an_assistants_turn(
    byte_tokenizer: PreTrainedTokenizerBase, template: str, unwritten: list[str]
) -> None:
    byte_tokenizer.chat_template = template
    found = find_unwritten(byte_tokenizer)
    if template == FORGETS_THOUGHTS:  # transformers gives thoughts several names, from some version on
        found = [key for key in found if key not in ("reasoning", "thinking")]
    assert found == unwritten


def test_a_tokenizer_without_a_template_leaves_nothing_out(byte_tokenizer: PreTrainedTokenizerBase) -> None:
    byte_tokenizer.chat_template = None
    assert find_unwritten(byte_tokenizer) == []


def test_rows_of_which_the_template_leaves_out_a_message_are_counted(byte_tokenizer: PreTrainedTokenizerBase) -> None:
    byte_tokenizer.chat_template = KNOWS_THREE_ROLES
    asked: Message = {"role": "user", "content": "1+1=?"}
    said: Message = {"role": "assistant", "content": "2"}
    told: Message = {"role": "human", "content": "1+1=?"}
    unwritten = UnwrittenRoles(byte_tokenizer)
    for number, messages in enumerate([[asked, said], [told, said, told], [asked, said, told, said]], start=1):
        unwritten.note(number, messages)
    [warning] = unwritten.warn("a.jsonl", 3)
    assert warning.startswith("a.jsonl: in 2 of 3 rows (row 2 first) the chat template leaves out the")
    byte_tokenizer.chat_template = None
    unwritten = UnwrittenRoles(byte_tokenizer)
    unwritten.note(1, [told, said])
    assert unwritten.warn("a.jsonl", 1) == []
