"""Pins the size of `make test`. Without it the command that every change must pass would grow until users skip it."""

from __future__ import annotations

from pathlib import Path

TESTS = Path(__file__).parent
MARK = "pytest.mark.promise"


def test_at_most_ten_slow_tests_are_promises() -> None:
    files = [path for path in TESTS.rglob("test_*.py") if path != Path(__file__)]
    assert 5 < sum(path.read_text(encoding="utf-8").count(MARK) for path in files) <= 10
