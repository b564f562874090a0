"""Word and number problems with a calculator at hand: the policy calls it as often as it may, then answers.

Not here: the parser (expressions.py), the files of an example (examples/tool_use.py).

    prompt       57+83-21=?
    policy       <calc>57+83</calc>          or a call as tool-use models write it (tools.py)
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
    """The value of an arithmetic expression, as the policy reads it."""
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
    """Answers calls of the calculator; rewards a last turn whose number is the answer."""

    row_fields = ("answer",)
    tools = (CALCULATOR,)

    def check_row(self, row: Mapping[str, Any]) -> None:  # Any: JSON
        """Raise ValueError where the answer is no number."""
        read_reference(row["answer"])

    async def respond(self, conversation: Conversation) -> Reply:
        """The result of the calls in the policy's turn; nothing where it has none."""
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
        """1 where the number behind the last colon, or the marked answer, is the reference, else 0.

        A number is one number, the reference as it is written, or a fraction that cannot be reduced. A sum is none,
        whatever its value: the policy could repeat that of its prompt.

        Raises:
            RewardError: the reference is no number.
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
    """The number that a row's answer stands for.

    Raises:
        ValueError: it is none.
    """
    try:
        return evaluate(final_answer(answer) or normalise_answer(answer))
    except ExpressionError as error:
        raise ValueError(f"the row's answer {answer!r} is no number: {error}") from error


def _answer(text: str, outcome: Outcome) -> Reply:
    return Reply(messages=({"role": "tool", "content": text},), outcome=outcome)
