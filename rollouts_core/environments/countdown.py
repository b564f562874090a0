"""Countdown: reach a target with every given number exactly once, by + - * / and parentheses.

A row has `numbers` and `target`. The answer is the expression between the last <answer> and </answer>.
"""

from __future__ import annotations

import re
from fractions import Fraction

from rollouts_core.environments.expressions import ExpressionError, evaluate, numbers_in
from rollouts_core.types import Sample

ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class CountdownEnvironment:
    """Rewards an expression of the given numbers whose value is the target."""

    row_fields = ("numbers", "target")

    def grade(self, sample: Sample) -> float:
        """1 for an expression that uses every number once and gives the target, else 0."""
        answers = ANSWER.findall(sample.response)
        if not answers:
            return 0.0
        expression = answers[-1].partition("=")[0]  # many write the result behind it
        given = sorted(Fraction(str(number)) for number in sample.metadata["numbers"])
        try:
            is_right = evaluate(expression) == Fraction(str(sample.metadata["target"]))
            return float(is_right and sorted(numbers_in(expression)) == given)
        except ExpressionError:
            return 0.0
