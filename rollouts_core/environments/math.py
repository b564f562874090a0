r"""Mathematical problems with one final answer, as in GSM8K and MATH. A completion marks its answer by `\boxed{}` or
`####`.

Two environments compare answers in different ways:

    math           answers must be equal as text or as decimal numbers
    math_verify    answers must be equal as mathematics (1/2 is 0.5, x+1 is 1+x); needs the package math-verify
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from decimal import Context, Decimal, InvalidOperation, Overflow
from typing import Any

from rollouts_core.environments.grading_limit import GradingLimit
from rollouts_core.errors import ConfigError
from rollouts_core.types import Sample

TIMEOUT_S = 4.0
"""Limit of CPU time for parsing and comparing one answer, seconds. Answers that take longer get reward 0."""
MAX_ANSWER_CHARS = 2000
"""Highest number of characters of an answer that math-verify parses. A longer answer would reach the time limit, and
math-verify would write it to the log."""
MAX_EXPONENT = 1000
"""Numbers with more digits than this are compared as text."""
HASHES = re.compile(r"####\s*([^\n]+)")
BOXED = "\\boxed{"
TEX_COMMA = re.compile(r"\{,\}|,\\!")
"""TeX commands for a comma without a space after it, as in thousands separators."""
THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
NOISE = re.compile(r"\\[!,; $%]|[\s$%]|\.$|^\*\*|\*\*(?=\.?$)")
"""Matches parts to remove before a comparison: spaces, `$`, `%`, a final full stop, and `**` around the answer."""
MINUS = "−"


class MathEnvironment:
    """Rewards a completion whose marked final answer equals the row's answer as text or as a number."""

    row_fields = ("answer",)

    def check_row(self, row: Mapping[str, Any]) -> None:  # Any: JSON
        """Raise ValueError if the answer is empty after normalisation."""
        check_reference(row["answer"])

    def grade(self, sample: Sample) -> float:
        """1 for the right final answer, 0 for a wrong or missing answer."""
        found = final_answer(sample.response)
        reference = str(sample.metadata.get("answer", ""))
        expected = final_answer(reference) or normalise_answer(reference)
        return float(found is not None and found != "" and found == expected)

    def vote(self, sample: Sample) -> str | None:
        """The final answer in normalised form; None without an answer."""
        return final_answer(sample.response) or None


class MathVerifyEnvironment:
    """Rewards a completion whose marked final answer equals the row's answer mathematically.

    Raises:
        ConfigError: math-verify is not installed.
    """

    row_fields = ("answer",)

    def check_row(self, row: Mapping[str, Any]) -> None:  # Any: JSON
        """Raise ValueError if the answer is empty after normalisation."""
        check_reference(row["answer"])

    def __init__(self) -> None:
        try:
            from math_verify import parse, verify
        except ImportError as error:
            raise ConfigError(
                'the environment "math_verify" needs the package math-verify: pip install "rollouts[math]", or use '
                'the environment "math", which compares answers as text or as numbers'
            ) from error
        self._parse, self._verify = parse, verify
        # math_verify warns that its callers must limit the time. `grading_limit` does this.
        for name in ("math_verify.parser", "math_verify.grader"):
            logging.getLogger(name).addFilter(_is_no_advice)
        self.grading_limit = GradingLimit(TIMEOUT_S)

    def grade(self, sample: Sample) -> float:
        """1 if the final answer equals the row's answer mathematically; 0 if it is wrong, missing or too long.

        An answer that takes too long to compare also gets 0, and `grading_limit` counts it.
        """
        found = marked_answer(sample.response)
        reference = str(sample.metadata.get("answer", ""))
        expected = marked_answer(reference) or reference
        if not found:
            return 0.0
        if normalise_answer(found) == normalise_answer(expected):
            return 1.0
        if len(found) > MAX_ANSWER_CHARS:
            return 0.0
        return self.grading_limit.call(sample, self._compare, expected, found)

    def _compare(self, expected: str, found: str) -> float:
        # math-verify's own time limits are disabled. The signal of these limits has no effect inside a finalizer, and
        # setting such a limit cancels the timer of the enclosing time limit.
        gold, guess = (self._parse(f"${text.strip().strip('$')}$", parsing_timeout=None) for text in (expected, found))
        return float(self._verify(gold, guess, timeout_seconds=None))

    def vote(self, sample: Sample) -> str | None:
        """The final answer as normalised text; None without an answer. `1/2` and `0.5` count as different votes."""
        return final_answer(sample.response) or None


def _is_no_advice(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("Timeout is disabled")


def check_reference(answer: str) -> None:
    """Raise ValueError for an answer of a row that no completion can match."""
    if not (final_answer(answer) or normalise_answer(answer)):
        raise ValueError(f"the row's answer {answer!r} has nothing but spaces, units and marks")


def final_answer(text: str) -> str | None:
    r"""`marked_answer` in normalised form; None without a marked answer."""
    answer = marked_answer(text)
    return None if answer is None else normalise_answer(answer)


def marked_answer(text: str) -> str | None:
    r"""The last answer in `\boxed{}`, or the last number after `####`, as written; None without an answer.

    Text after `####` that is not a number may be a heading. Such text counts only if there is no other answer.
    """
    lines = list(HASHES.finditer(text))
    numbers = [(line.start(), line[1]) for line in lines if _read_number(line[1]) is not None]
    boxed = _last_boxed(text)
    answers = numbers[-1:] + ([boxed] if boxed else [])
    if answers:
        return max(answers)[1]
    return lines[-1][1] if lines else None


def _last_boxed(text: str) -> tuple[int, str] | None:
    r"""Start and content of the last `\boxed{...}`; None without a box. The content may have nested braces."""
    start = text.rfind(BOXED)
    if start < 0:
        return None
    content = text[start + len(BOXED) :]
    depth = 1
    for place, character in enumerate(content):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return start, content[:place]
    return None


def normalise_answer(answer: str) -> str:
    """Normalise an answer for comparison. Numbers lose units, thousands separators and unneeded zeros."""
    number = _read_number(answer)
    if number is None:
        return _strip_noise(answer).lower()
    # A short text like 1e999999 could be a number with a million digits.
    is_short = number.is_finite() and abs(number.adjusted()) < MAX_EXPONENT
    return format(number or Decimal(0), "f") if is_short else _strip_noise(answer).lower()


def _read_number(answer: str) -> Decimal | None:
    """Parse an answer as a number, ignoring units and marks; None if it is not a number."""
    text = _strip_noise(answer)
    try:
        # The default precision of 28 digits would make some different long numbers equal.
        return Context(prec=len(text) + 1).normalize(Decimal(text))
    except (InvalidOperation, Overflow):
        return None


def _strip_noise(answer: str) -> str:
    return NOISE.sub("", THOUSANDS.sub("", TEX_COMMA.sub(",", answer.strip().replace(MINUS, "-"))))
