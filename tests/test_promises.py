"""Pins the size of `make test`. Without it the command that every change must pass would grow until users skip it."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parent
MARKED = re.compile(r"^@pytest\.mark\.promise\n(?:async )?def (\w+)", re.MULTILINE)


def test_at_most_twenty_slow_tests_are_promises() -> None:
    marked = [name for path in TESTS.rglob("test_*.py") for name in MARKED.findall(path.read_text(encoding="utf-8"))]
    assert 10 < len(marked) <= 20
