"""Find the parts of conversations that a model's chat template leaves out, such as tool calls or whole messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

from rollouts_core.config import RolloutConfig
from rollouts_core.data.chat import encode_texts, leaves_out_role
from rollouts_core.data.conversations import SYSTEM_FIELDS, TEMPLATE_FIELD, find_unread
from rollouts_core.data.dialects import PROBE_ARGUMENTS, ToolCall, render_probe
from rollouts_core.data.rendering import TURN_MARK, probe_call, render_text
from rollouts_core.data.replies import tokenize_reply
from rollouts_core.data.turns import END_OF_THOUGHTS, THOUGHTS, find_turn_ends, find_turn_form, render_turn
from rollouts_core.environments.protocol import describe_tools, is_multi_turn
from rollouts_core.errors import DataError
from rollouts_core.findings import Caution
from rollouts_core.rollout.conversation import policy_dialect
from rollouts_core.rollout.resolve import resolve_environment
from rollouts_core.types import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ANSWER = "a tool said this\nin two lines"


def warn_of_endless_turns(tokenizer: PreTrainedTokenizerBase) -> list[Caution]:
    """Warn if the chat template writes no end-of-turn token, so that SFT does not teach the model to stop."""
    if tokenizer.chat_template is None or not (form := find_turn_form(tokenizer)).is_known:
        return []
    if find_turn_ends(tokenizer) or tokenizer.eos_token in form.rest:
        return []
    found = f"{form.rest!r} after an assistant's message, and no special token"
    if not form.rest:
        found = "nothing after an assistant's message"
    return [
        Caution(
            f"the chat template writes {found}: only {tokenizer.eos_token!r} ends a completion, but SFT on "
            "conversations does not teach this token: change the template so that it writes the token after the "
            "message"
        )
    ]


def warn_of_unseen_tools(
    tokenizer: PreTrainedTokenizerBase,
    tools: Sequence[dict[str, Any]],  # Any: JSON schemas
) -> list[Caution]:
    """Warn if the chat template does not write the descriptions of the environment's tools into the prompt."""
    if not tools:
        return []
    asked: list[Message] = [{"role": "user", "content": "?"}]
    shown, hidden = (render_text(tokenizer, asked, each, add_generation_prompt=True) for each in (tools, None))
    if shown != hidden:
        return []
    names = ", ".join(str(tool["function"]["name"]) for tool in tools)
    return [
        Caution(
            f"the chat template leaves out the tools that the environment has ({names}): the policy does not see "
            "them, unless prompts or demonstrations describe them"
        )
    ]


def check_conversation(tokenizer: PreTrainedTokenizerBase, rollout: RolloutConfig) -> None:
    """Render a test conversation between the policy and the environment with the chat template.

    Tool calls of the policy must be parsable, and replies of the environment must appear in the prompt.

    Raises:
        DataError: no known format parses the calls that the chat template writes, or the template drops or rejects a
            reply.
    """
    environment = resolve_environment(rollout)
    if not is_multi_turn(environment):
        return
    answer: Message = {"role": "user", "content": ANSWER}
    calls: list[ToolCall] = []
    said = ""
    if describe_tools(environment):
        policy_dialect(tokenizer, environment, rollout)
        answer = {"role": "tool", "content": ANSWER}
        if probe := render_probe(tokenizer):
            calls, said = [ToolCall("compute", dict(PROBE_ARGUMENTS))], probe.text.rstrip()
    tokenize_reply(tokenizer, [answer], encode_texts(tokenizer, [said])[0], calls)


def find_unwritten(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Find the keys of an assistant's message that the chat template does not write: text, tool calls, thoughts.

    Thoughts may have their own key, or be in the text before `END_OF_THOUGHTS`. If the template fails on a test
    message, its key counts as written.
    """
    calls, tool = probe_call({"said": TURN_MARK})
    asked: Message = {"role": "user", "content": "?"}
    said: dict[str, dict[str, Any]] = {
        "content": {"content": TURN_MARK},
        "tool_calls": {"tool_calls": calls["tool_calls"]},
        "function_call": {"function_call": calls["tool_calls"][0]["function"]},
        **{key: {key: TURN_MARK} for key in THOUGHTS},
        END_OF_THOUGHTS: {"content": f"<think>\n{TURN_MARK}\n{END_OF_THOUGHTS}\n\nyes"},
    }
    unwritten: list[str] = []
    for key, fields in said.items():
        turn = cast(Message, {"role": "assistant", "content": "", **fields})
        with suppress(DataError):
            unwritten += [key] if TURN_MARK not in render_turn(tokenizer, [asked, turn], 1, [tool]).turn else []
    return unwritten


class UnwrittenRoles:
    """Collects the rows with messages that the chat template leaves out because of their role."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._is_left_out: dict[tuple[str, bool], bool] = {}
        self._rows: dict[str, list[int]] = {}

    def note(self, number: int, messages: Sequence[Message]) -> None:
        """Check the messages of a row, except assistant messages, which some templates leave out on purpose."""
        if self._tokenizer.chat_template is None:
            return
        for role, is_first in {(message["role"], i == 0) for i, message in enumerate(messages)}:
            if role != "assistant" and self._leaves_out(role, is_first=is_first):
                numbers = self._rows.setdefault(role, [])
                numbers += [number] if numbers[-1:] != [number] else []

    def warn(self, source: str, num_rows: int) -> list[Caution]:
        """One warning per role whose messages the chat template leaves out."""
        return [
            Caution(
                f"{source}: in {len(numbers)} of {num_rows} rows (row {numbers[0]} first) the chat template leaves "
                f"out the messages of the role {role!r}, so the model does not see them: give them a role that the "
                "template writes, such as user or system"
            )
            for role, numbers in sorted(self._rows.items())
        ]

    def _leaves_out(self, role: str, *, is_first: bool) -> bool:
        key = (role, is_first)
        if key not in self._is_left_out:
            self._is_left_out[key] = leaves_out_role(self._tokenizer, role, is_first=is_first)
        return self._is_left_out[key]


class UnreadFields:
    """Collects the rows with fields that other training systems read, but this project ignores."""

    def __init__(self, template_values: Mapping[str, Any]) -> None:  # Any: JSON
        """Start without rows.

        Args:
            template_values: `model.chat_template_kwargs`. A row's field with these values is not reported.
        """
        self._template_values = template_values
        self._rows: dict[str, list[int]] = {}

    def note(self, number: int, fields: Mapping[str, Any], messages: Sequence[Message]) -> None:  # Any: JSON
        """Check the fields of a row.

        Args:
            messages: the messages that were made from the row.
        """
        for name in find_unread(fields, messages):
            if name == TEMPLATE_FIELD and fields[name] == self._template_values:
                continue
            self._rows.setdefault(name, []).append(number)

    def warn(self, source: str, num_rows: int) -> list[Caution]:
        first = "write it as the first message, with the role system"
        same = (
            "all rows get the same values for the chat template; set model.chat_template_kwargs if these suit all rows"
        )
        return [
            Caution(
                f"{source}: {len(numbers)} of {num_rows} rows (row {numbers[0]} first) have `{name}`, which the model "
                f"does not see: {first if name in SYSTEM_FIELDS else same}"
            )
            for name, numbers in sorted(self._rows.items())
        ]
