"""Addition of two numbers, the task of the quickstart. Three kinds of completions serve as training data:

prompt     415+298=?
worked     5+8+0=13,1+9+1=11,4+2+1=07:713     addition column by column with the carry, then the answer
blurted    :713                               only the answer
guessed    :753                               only a number in which one digit is wrong
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rollouts_core.types import Sample, Status

NUMBER = re.compile(r"-?\d+(\.\d+)?")


@dataclass(frozen=True, slots=True)
class Addition:
    """An addition problem: two numbers with the same number of digits."""

    first: int
    second: int

    @property
    def question(self) -> str:
        return f"{self.first}+{self.second}=?"

    @property
    def answer(self) -> str:
        return str(self.first + self.second)


class ArithmeticEnvironment:
    """Rewards a completion with the right number after its last colon. Truncated completions get 0."""

    row_fields = ("answer",)

    def check_row(self, row: Mapping[str, Any]) -> None:  # Any: JSON
        """Raise ValueError if the answer is not a number in the form that grading accepts."""
        if not NUMBER.fullmatch(row["answer"]):
            raise ValueError(f"expected a number as `answer`, like 713, found {row['answer']!r}")

    def grade(self, sample: Sample) -> float:
        """1 if the number after the last colon is right; 0 if it is wrong or missing, or the text is truncated."""
        _, colon, number = sample.response.rpartition(":")
        is_right = bool(colon) and number.strip() == sample.metadata.get("answer")
        return float(is_right and sample.status is Status.COMPLETED)

    def vote(self, sample: Sample) -> str | None:
        """The number after the last colon of the completion; None without a number."""
        _, _, number = sample.response.rpartition(":")
        return number.strip() if NUMBER.fullmatch(number.strip()) else None


def draw_addition(rng: random.Random, *, num_digits: int) -> Addition:
    """Draw an addition problem of two random numbers with `num_digits` digits."""
    smallest = 10 ** (num_digits - 1)
    return Addition(rng.randrange(smallest, 10 * smallest), rng.randrange(smallest, 10 * smallest))


def write_worked_answer(problem: Addition) -> str:
    """A completion with the addition column by column from the right, each with its carry, then the answer."""
    carry = 0
    columns = []
    for a, b in zip(reversed(str(problem.first)), reversed(str(problem.second)), strict=True):
        total = int(a) + int(b) + carry
        columns.append(f"{a}+{b}+{carry}={total:02d}")
        carry = total // 10
    return ",".join(columns) + f":{problem.answer}"


def write_blurted_answer(problem: Addition) -> str:
    return f":{problem.answer}"


def write_guessed_answer(problem: Addition, rng: random.Random) -> str:
    """A completion with only a number, in which one digit of the right answer is wrong."""
    digits = list(problem.answer)
    place = rng.randrange(len(digits))
    digits[place] = rng.choice([digit for digit in "0123456789" if digit != digits[place]])
    return f":{''.join(digits)}"
