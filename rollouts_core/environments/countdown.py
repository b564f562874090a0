"""The game Countdown: write an arithmetic expression that uses each given number once and has the target as its value.

Permitted are + - * / and parentheses. A row has the fields `numbers` and `target`. A completion gives its expression
between <answer> and </answer>. If it gives several expressions, the last one counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from rollouts_core.environments.expressions import ExpressionError, evaluate, find_marked, numbers_in
from rollouts_core.types import Sample


class CountdownEnvironment:
    """Rewards an expression that uses each given number once and has the target as its value."""

    row_fields = ("numbers", "target")

    def check_row(self, row: Mapping[str, Any]) -> None:  # Any: JSON
        """Raise ValueError if the numbers or the target are not numbers."""
        if not isinstance(row["numbers"], list) or not row["numbers"]:
            raise ValueError(f"expected `numbers` to be a list of numbers, found {row['numbers']!r}")
        for value in [*row["numbers"], row["target"]]:
            _read_number(value)

    def grade(self, sample: Sample) -> float:
        """1 if the expression uses each number once and its value is the target, else 0."""
        answers = find_marked(sample.response, "answer")
        if not answers:
            return 0.0
        # Policies often mention the tag before they use it for the answer, and often add "= result" to the expression.
        expression = answers[-1].rpartition("<answer>")[2].partition("=")[0]
        given = sorted(map(_read_number, sample.metadata["numbers"]))
        try:
            is_right = evaluate(expression) == _read_number(sample.metadata["target"])
            return float(is_right and sorted(numbers_in(expression)) == given)
        except ExpressionError:
            return 0.0


def _read_number(value: Any) -> Fraction:  # Any: JSON
    try:
        return Fraction(str(value))
    except (ValueError, ZeroDivisionError) as error:
        raise ValueError(f"expected a number, found {value!r}") from error
