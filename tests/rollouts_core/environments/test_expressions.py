"""Pins the arithmetic that the calculator and countdown evaluate: exact, bounded, and never code.

Without it a policy could be paid for rounding errors, or hang a run with one long expression.
"""

from __future__ import annotations

import random
from fractions import Fraction

import pytest

from rollouts_core.environments.expressions import ExpressionError, evaluate, find_marked, numbers_in, render_number


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("57+83", 140),
        ("2+3*4", 14),
        ("(2+3)*4", 20),
        ("10-4-3", 3),
        ("100/10/2", 5),
        ("-3 * -(2)", 6),
        ("--2", 2),
        ("0.1+0.2", Fraction(3, 10)),
        (".5", Fraction(1, 2)),
        ("1/3*3", 1),
        ("6÷2×5−1", 14),
        (" 7 ", 7),
    ],
)
def test_an_expression_has_its_exact_value(text: str, value: Fraction) -> None:
    assert evaluate(text) == value


def test_random_expressions_have_the_value_that_python_gives_them() -> None:
    rng = random.Random(0)
    for _ in range(300):
        text = str(rng.randrange(1, 50))
        for _ in range(rng.randrange(5)):
            text = f"{'(' if (inner := rng.random() < 0.4) else ''}{text}{rng.choice('+-*')}{rng.randrange(50)}"
            text += ")" if inner else ""
        assert evaluate(text) == eval(text)


@pytest.mark.parametrize(
    "text",
    [
        *[
            "",
            " ",
            "+",
            "1+",
            "1 2",
            "(1",
            "1)",
            "()",
            "1//2",
            "2**3",
            "1e3",
            "x",
            "__import__('os')",
            "1/0",
            "1/(2-2)",
        ],
        *["(" * 300, "-" * 300 + "1", "9" * 500, "1\x00", "1.2.3"],
    ],
)
def test_anything_else_is_refused_with_a_sentence(text: str) -> None:
    with pytest.raises(ExpressionError, match=r"."):
        evaluate(text)


def test_numbers_are_listed_as_they_stand() -> None:
    assert numbers_in("(3+7)*-3") == [3, 7, 3]


@pytest.mark.parametrize(
    ("value", "text"), [(Fraction(140), "140"), (Fraction(-1, 2), "-0.5"), (Fraction(1, 3), "0.3333333333")]
)
def test_a_value_is_written_for_the_policy(value: Fraction, text: str) -> None:
    assert render_number(value) == text


@pytest.mark.parametrize("text", ["9" * 350 + "/7", "-" + "9" * 350 + "/7"])
def test_a_value_that_cannot_be_written_is_refused_with_a_sentence(text: str) -> None:
    with pytest.raises(ExpressionError, match="the value is too large"):
        render_number(evaluate(text))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("<a>1</a> or <a>2\n</a>", ["1", "2\n"]),
        ("</a><a>1</a></a><a>", ["1"]),
        ("<a>1 <a>2</a> 3</a>", ["1 <a>2"]),
        ("<a>1", []),
        ("1</a>", []),
    ],
)
def test_what_is_marked_reaches_from_an_opening_to_the_next_end(text: str, found: list[str]) -> None:
    assert find_marked(text, "a") == found
