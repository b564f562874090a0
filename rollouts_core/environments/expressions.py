"""Parse and evaluate arithmetic expressions (+ - * / and parentheses) in a policy's text, exactly and without `eval`.

sum      product (('+' | '-') product)*
product  factor (('*' | '/') factor)*
factor   '-' factor | number | '(' sum ')'
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from fractions import Fraction

MAX_CHARS = 400
MAX_DEPTH = 50
TOKEN = re.compile(r"\s*(?:(\d+(?:\.\d+)?|\.\d+)|(.))", re.DOTALL)
SIGNS = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-"})  # other characters for the same operators


class ExpressionError(ValueError):
    """The text is not an arithmetic expression, or its value is not defined."""


def find_marked(text: str, tag: str) -> list[str]:
    """All texts between a `<tag>` and the next `</tag>`, in order."""
    # A regular expression would search the rest of the text for `</tag>` after each of possibly thousands of `<tag>`.
    opening, closing = f"<{tag}>", f"</{tag}>"
    parts = [part.partition(opening) for part in text.split(closing)[:-1]]
    return [body for _, found, body in parts if found]


def evaluate(text: str) -> Fraction:
    """Evaluate an arithmetic expression exactly.

    Raises:
        ExpressionError: the expression is too long, invalid, or divides by zero.
    """
    return _Parser(text).value


def numbers_in(text: str) -> list[Fraction]:
    """All numbers in an arithmetic expression, in order."""
    return _Parser(text).numbers


def render_number(value: Fraction) -> str:
    """Write a number as text: an integer with all digits, any other number with up to ten significant digits.

    Raises:
        ExpressionError: the number is not an integer and exceeds the range of floats.
    """
    if value.denominator == 1:
        return str(value.numerator)
    try:
        return f"{float(value):.10g}"
    except OverflowError as error:
        raise ExpressionError("the value is too large") from error


@dataclass(slots=True)
class _Parser:
    """A recursive-descent parser of arithmetic expressions, which evaluates them while parsing."""

    text: str
    value: Fraction = field(init=False)
    numbers: list[Fraction] = field(default_factory=list)
    _tokens: list[tuple[str, str]] = field(init=False)
    _depth: int = 0

    def __post_init__(self) -> None:
        if len(self.text) > MAX_CHARS:
            raise ExpressionError(f"the expression has {len(self.text)} characters, at most {MAX_CHARS} are allowed")
        self._tokens = TOKEN.findall(self.text.translate(SIGNS).strip())[::-1]
        self.value = self._sum()
        if self._tokens:
            raise ExpressionError(f"unexpected {self._next()!r}")

    def _next(self) -> str:
        return next(filter(None, self._tokens[-1]), "") if self._tokens else ""

    def _take(self) -> tuple[str, str]:
        if not self._tokens:
            raise ExpressionError("the expression ends too early")
        return self._tokens.pop()

    def _sum(self) -> Fraction:
        value = self._product()
        while self._next() in ("+", "-"):
            _, sign = self._take()
            term = self._product()
            value = value + term if sign == "+" else value - term
        return value

    def _product(self) -> Fraction:
        value = self._factor()
        while self._next() in ("*", "/"):
            _, sign = self._take()
            factor = self._factor()
            if sign == "/" and factor == 0:
                raise ExpressionError("division by zero")
            value = value * factor if sign == "*" else value / factor
        return value

    def _factor(self) -> Fraction:
        number, sign = self._take()
        if number:
            self.numbers.append(Fraction(number))
            return self.numbers[-1]
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise ExpressionError(f"more than {MAX_DEPTH} nested parentheses and signs")
        if sign == "-":
            value = -self._factor()
        elif sign == "(":
            value = self._sum()
            if self._take()[1] != ")":
                raise ExpressionError("a parenthesis is not closed")
        else:
            raise ExpressionError(f"unexpected {sign!r}")
        self._depth -= 1
        return value
