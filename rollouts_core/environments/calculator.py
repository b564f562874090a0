"""Arithmetic problems with a calculator. The policy may call the calculator several times, then it answers.

prompt       57+83-21=?
policy       <calc>57+83</calc>          or a tool call in the format of the model (tools.py)
calculator   140
policy       <calc>140-21</calc>
calculator   119
policy       :119
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from rollouts_core.environments.expressions import (
    SIGNS,
    ExpressionError,
    evaluate,
    find_marked,
    numbers_in,
    render_number,
)
from rollouts_core.environments.math import final_answer, normalise_answer
from rollouts_core.environments.protocol import Conversation, Outcome, Reply, Tool, ToolError
from rollouts_core.environments.tools import answer_tool_calls
from rollouts_core.errors import RewardError
from rollouts_core.types import Sample, Status


def calculate(expression: str) -> str:
    """Evaluate an arithmetic expression; returns the value as text for the policy."""
    try:
        return render_number(evaluate(expression))
    except ExpressionError as error:
        raise ToolError(str(error)) from error


CALCULATOR = Tool(
    name="calculator",
    description="Compute an arithmetic expression of numbers, + - * / and parentheses, exactly.",
    parameters={
        "type": "object",
        "properties": {"expression": {"type": "string", "description": "for instance (3 + 4) * 5"}},
        "required": ["expression"],
        "additionalProperties": False,
    },
    function=calculate,
)


class CalculatorEnvironment:
    """Replies to calls of the calculator. Rewards a conversation whose last turn has the right number."""

    row_fields = ("answer",)
    tools = (CALCULATOR,)

    def check_row(self, row: Mapping[str, Any]) -> None:  # Any: JSON
        """Raise ValueError if the answer is not a number."""
        read_reference(row["answer"])

    async def respond(self, conversation: Conversation) -> Reply:
        """Reply with the results of all calls in the policy's turn. Without a call the conversation ends."""
        text = conversation.text
        called = await answer_tool_calls(text, self.tools)
        if called.messages:
            return called
        expressions = find_marked(text, "calc")
        if not expressions and "<calc>" in text:
            return _answer("error: <calc> has no </calc>", Outcome.PARSE_FAILURE)
        if not expressions:
            return Reply()
        try:
            return _answer("; ".join(map(calculate, expressions)), Outcome.OK)
        except ToolError as error:
            return _answer(f"error: {error}", Outcome.TOOL_ERROR)

    def grade(self, sample: Sample) -> float:
        """1 if the number after the last colon, or the marked answer, equals the row's answer; else 0.

        A completion may write the answer as a number, as in the row, or as a reduced fraction. A completion may not
        write the answer as a sum, because the policy could repeat the sum in its prompt.

        Raises:
            RewardError: the row's answer is not a number.
        """
        reference = str(sample.metadata.get("answer", ""))
        try:
            expected = read_reference(reference)
        except ValueError as error:
            raise RewardError(str(error)) from error
        if sample.status is not Status.COMPLETED:
            return 0.0
        found = final_answer(sample.response) or normalise_answer(sample.response.rpartition(":")[2])
        written = (str(expected), final_answer(reference) or normalise_answer(reference))
        try:
            is_number = found.translate(SIGNS) in written or len(numbers_in(found)) == 1
            return float(is_number and evaluate(found) == expected)
        except ExpressionError:
            return 0.0


def read_reference(answer: str) -> Fraction:
    """Parse the answer of a row as a number.

    Raises:
        ValueError: the answer is not a number.
    """
    try:
        return evaluate(final_answer(answer) or normalise_answer(answer))
    except ExpressionError as error:
        raise ValueError(f"the row's answer {answer!r} is not a number: {error}") from error


def _answer(text: str, outcome: Outcome) -> Reply:
    return Reply(messages=({"role": "tool", "content": text},), outcome=outcome)
