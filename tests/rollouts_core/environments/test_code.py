"""Pins when a program counts as right: all tests reached and passed.

Without it a program that ends before its tests would be paid for.
"""

from __future__ import annotations

import asyncio
from time import perf_counter
from typing import Any

import pytest

from rollouts_core.environments import code
from rollouts_core.environments.code import CodeEnvironment, extract_program
from rollouts_core.environments.protocol import Outcome
from rollouts_core.environments.sandbox import SandboxLimits, SandboxResult, run_in_sandbox
from rollouts_core.errors import RewardError
from rollouts_core.rewards import grade_group
from rollouts_core.types import Sample

ADD = "def add(a, b):\n    return a + b\n"
CHECKS = "assert add(1, 2) == 3\nassert add(-1, 1) == 0"
SUMS = [{"stdin": "1 2\n", "stdout": "3\n"}, {"stdin": "5 5\n", "stdout": "10"}]


def grade(response: str, tests: Any) -> float:
    environment = CodeEnvironment(SandboxLimits(wall_s=5.0, cpu_s=1))
    return asyncio.run(environment.grade(Sample(response=response, metadata={"tests": tests})))


@pytest.mark.parametrize(
    ("response", "tests", "reward"),
    [
        (f"Here it is:\n```python\n{ADD}```\nDone.", CHECKS, 1.0),
        (ADD, CHECKS, 1.0),
        (ADD.replace("+", "-"), CHECKS, 0.0),
        ("import sys\nsys.exit(0)", CHECKS, 0.0),
        ("import os\nos._exit(0)", CHECKS, 0.0),
        ("def add(a, b:", CHECKS, 0.0),
        ("", CHECKS, 0.0),
        ("while True: pass", CHECKS, 0.0),
        ("print(sum(map(int, input().split())))", SUMS, 1.0),
        ("print(3)", SUMS, 0.0),
        ("print(sum(map(int, input().split())), end='  ')", SUMS, 1.0),
        ("import os\nprint(sum(map(int, input().split()))); os._exit(1)", SUMS, 0.0),
    ],
)
def test_a_program_is_paid_for_where_all_tests_pass(response: str, tests: Any, reward: float) -> None:
    assert grade(response, tests) == reward


@pytest.mark.parametrize("tests", [[], "", " \n"])
def test_a_row_without_tests_is_an_error_and_pays_for_nothing(tests: Any) -> None:
    with pytest.raises(RewardError, match="the row has no tests: every program would pass"):
        grade("print(3)", tests)


def test_no_test_is_run_after_the_first_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs: list[str] = []

    async def run_and_count(program: str, *, stdin: str, limits: SandboxLimits | None) -> SandboxResult:
        inputs.append(stdin)
        return await run_in_sandbox(program, stdin=stdin, limits=limits)

    monkeypatch.setattr(code, "run_in_sandbox", run_and_count)
    assert grade("print(3)", [SUMS[0], SUMS[1], SUMS[0]]) == 0.0
    assert inputs == [SUMS[0]["stdin"], SUMS[1]["stdin"]]


@pytest.mark.slow
def test_programs_that_wait_for_a_processor_have_their_time_before_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch of slow programs takes longer than one reward may."""
    monkeypatch.setattr(code, "count_processors", lambda: 1)

    async def run_slowly(program: str, *, limits: SandboxLimits | None) -> SandboxResult:
        await asyncio.sleep(0.1)
        return SandboxResult(outcome=Outcome.TIMEOUT, exit_code=-9, stdout="", stderr="")

    monkeypatch.setattr(code, "run_in_sandbox", run_slowly)
    samples = [Sample(response="while True: pass", metadata={"tests": CHECKS}, index=i) for i in range(6)]
    graded = asyncio.run(grade_group(samples, CodeEnvironment().grade, timeout_s=0.3))
    assert [sample.reward for sample in graded] == [0.0] * 6


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("print(1)", "print(1)"),
        ("First:\n```python\na\n```\nor better\n```python\nb\n```\nDone.", "b\n"),
        ("```\na\n```\nor\n```\nb\n```", "b\n"),
        ("```python\na\n```\nwhich prints\n```\n3\n```", "a\n"),
        ("```python\na\n```\nwhich prints\n```text\n3\n```", "a\n"),
        ("```python3\na\n```\nIt adds.\n```text\n3\n```", "a\n"),
        ("```Python\na\n```", "a\n"),
        ("```py title=sum.py\na\n```", "a\n"),
        ("~~~python\na\n~~~", "a\n"),
        ("````python\na\n```\nb\n````", "a\n```\nb\n"),
        ("1. The program:\n   ```python\na\n   ```", "a\n"),
        ("```python\nprint(1)```", "print(1)"),
        ("Here it is: ```python\na\n```\nIt prints 3.", "a\n"),
        ("I use ```a```\n```python\nb\n```", "b\n"),
        ("```python\na\n", "a\n"),
        ("```python\na\n``` ", "a\n"),
        ("1. Read it:\n   ```python\n   if 1:\n       f()\n\n   ```\n2. Run it.", "if 1:\n    f()\n\n"),
        ("- so\n\t```python\n\tf()\n\t```", "f()\n"),
        ("1. Run\n   ```python\nif 1:\n  f()\n   ```", "if 1:\n  f()\n"),
    ],
)
def test_the_program_is_the_last_block_in_python(response: str, program: str) -> None:
    assert extract_program(response) == program


@pytest.mark.parametrize(
    "line", ["~" * 3_000 + "`", "a```" * 20_000, "```" + "a" * 60_000 + "`", "```" + " " * 60_000 + "`"]
)
def test_a_line_of_thousands_of_marks_is_read_at_once(line: str) -> None:
    """All other conversations wait meanwhile, and one that takes too long ends the run."""
    began = perf_counter()
    assert extract_program(line) == line
    assert perf_counter() - began < 5.0
