"""Programming tasks: the policy writes a Python program, which runs in a sandbox (`sandbox.py`) and must pass tests.

The field `tests` of a row has one of two forms: a list of `{"stdin": ..., "stdout": ...}`, or Python code that checks
the program's functions and raises an error if they are wrong. A program cannot cheat a list, because the expected
output is never inside the sandbox. Test code runs in the same process as the program, so a policy may learn to
manipulate it.
"""

from __future__ import annotations

import re
import secrets
import warnings
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import Any

import anyio

from rollouts_core.environments.grading_limit import GradingLimit
from rollouts_core.environments.protocol import Outcome
from rollouts_core.environments.sandbox import SandboxLimits, run_in_sandbox
from rollouts_core.errors import RewardError
from rollouts_core.system.processors import count_processors
from rollouts_core.system.time_limits import take_turn, uncounted
from rollouts_core.types import Sample

# Possessive quantifiers (`+`) avoid backtracking: a policy may write thousands of marks, letters or spaces in a line.
FENCE = re.compile(r"\s*+(?P<marks>`{3,}+|~{3,}+)\s*+(?P<language>[^\s`]*+)[^`]*+")
"""Matches a line that opens or closes a fenced code block."""
LATE_FENCE = re.compile(r"[^`]*+(?P<marks>`{3,}+)(?P<language>\w*+)\s*+")
"""Matches a line that opens a fenced code block after other text, as in "Here it is: ```python"."""
MAX_GRADING_S = 600.0
"""Time limit for all tests of a row together, seconds. Each test also has its own time limit, but a row may have
hundreds of tests."""
MAX_PROGRAM_BYTES = 1 << 20
"""Space in the sandbox's temporary folder that is reserved for the program besides the input of a test, bytes."""
PYTHON = {"python", "python3", "py"}
"""Names of Python in the first line of fenced code blocks, in lower case."""


class CodeEnvironment:
    """Rewards a program that passes all tests of its row."""

    row_fields = ("tests",)

    def __init__(self, limits: SandboxLimits | None = None) -> None:
        self.limits = limits
        self.grading_limit = GradingLimit(MAX_GRADING_S)

    @cached_property
    def _slots(self) -> anyio.CapacityLimiter:
        """Limits concurrent programs to the number of CPUs. With more, programs would exceed their time limits."""
        return anyio.CapacityLimiter(count_processors())

    def check_row(self, row: Mapping[str, Any]) -> None:  # Any: JSON
        """Raise ValueError if every program or no program can pass the tests of a row."""
        check_tests(row["tests"], self.limits or SandboxLimits())

    async def grade(self, sample: Sample) -> float:
        """1 if the program passes every test, else 0. `grading_limit` counts programs whose tests take too long.

        Raises:
            RewardError: the row's tests are missing or invalid.
            EnvironmentUnavailableError: the machine cannot start a sandbox.
        """
        program, tests = extract_program(sample.response), sample.metadata["tests"]
        try:
            check_tests(tests, self.limits or SandboxLimits())
        except ValueError as error:
            raise RewardError(str(error)) from error
        # A slow program must not count against the time limit of `grade` itself, which would end the run.
        with uncounted():
            if isinstance(tests, str):
                return float(await self._passes_code(program, tests))
            return await self._grade_tests(sample, program, tests)

    async def _passes_code(self, program: str, tests: str) -> bool:
        # The mark is printed after the tests. Without the mark, a program could pass by exiting with code 0 before the
        # tests run.
        mark = secrets.token_hex(16)
        async with take_turn(self._slots):
            result = await run_in_sandbox(f"{program}\n\n{tests}\n\nprint({mark!r})\n", limits=self.limits)
        return result.outcome is Outcome.OK and result.stdout.rstrip().endswith(mark)

    async def _grade_tests(
        self,
        sample: Sample,
        program: str,
        tests: Sequence[dict[str, Any]],  # Any: JSON
    ) -> float:
        left_s = self.grading_limit.seconds
        # Tests run one after another, because most wrong programs fail an early test.
        for test in tests:
            async with take_turn(self._slots):
                began = anyio.current_time()
                result = await run_in_sandbox(program, stdin=str(test["stdin"]), limits=self.limits)
                left_s -= anyio.current_time() - began
            if result.outcome is not Outcome.OK or _lines(result.stdout) != _lines(str(test["stdout"])):
                return 0.0
            if left_s < 0:
                return self.grading_limit.note(sample)
        return 1.0


def check_tests(tests: Any, limits: SandboxLimits) -> None:  # Any: JSON
    """Raise ValueError for tests that are empty, are invalid Python, lack stdin or stdout, or exceed the limits of a
    program."""
    if not isinstance(tests, str | list):
        raise ValueError(f"expected `tests` to be a list or Python code, found {type(tests).__name__}")
    if not (tests.strip() if isinstance(tests, str) else tests):
        raise ValueError("the row has no tests: every program would pass")
    if isinstance(tests, str):
        _check_python(tests)
        return
    # The program and its input share the temporary folder and its size limit.
    most = {"stdin": (limits.file_mb << 20) - MAX_PROGRAM_BYTES, "stdout": limits.output_bytes}
    for number, test in enumerate(tests, start=1):
        if not isinstance(test, dict) or not most.keys() <= test.keys():
            raise ValueError(f'test {number} must be {{"stdin": ..., "stdout": ...}}, found {test!r}')
        for name, max_bytes in most.items():
            if (num_bytes := len(str(test[name]).encode())) > max_bytes:
                raise ValueError(
                    f"test {number} has {num_bytes:,} bytes of {name}, but a program may have only {max_bytes:,}: "
                    "leave the test out"
                )


def _check_python(tests: str) -> None:
    """Raise ValueError for test code that is not valid Python."""
    try:
        with warnings.catch_warnings(action="ignore"):  # hides Python's warnings about the test code
            compile(f"pass\n{tests}", "tests", "exec", dont_inherit=True)
    except SyntaxError as error:
        line = max(1, (error.lineno or 2) - 1)
        raise ValueError(f"`tests` is not valid Python ({error.msg}, line {line}): no program would pass") from error
    except ValueError as error:
        raise ValueError(f"`tests` is not valid Python ({error}): no program would pass") from error


def extract_program(text: str) -> str:
    """The last fenced code block marked as Python. Fallbacks are the last code block, then the whole text.

    A block marked as Python is preferred, because a later unmarked block usually has the program's output.
    """
    return find_last_block(text, PYTHON)


def find_last_block(text: str, languages: Collection[str]) -> str:
    """The last fenced code block in one of the languages. Fallbacks are the last code block, then the whole text."""
    blocks = find_blocks(text)
    named = [block for language, block in blocks if language in languages]
    return (named or [block for _, block in blocks] or [text])[-1]


def find_blocks(text: str) -> list[tuple[str, str]]:
    """Return the language and the content of each fenced code block in a Markdown text.

    As in CommonMark, a fence of the same marks without a language closes a block, and so does the end of the text.
    Unlike in CommonMark, marks at the end of a line also open or close a block. The common indentation of a block, for
    instance in a list, is removed.
    """
    blocks: list[tuple[str, str]] = []
    marks, language, indent, lines = "", "", 0, list[str]()
    for line in text.splitlines(keepends=True):
        fence = FENCE.fullmatch(line) or (None if marks else LATE_FENCE.fullmatch(line))
        if not marks:
            if fence:
                marks, language, lines = fence["marks"], fence["language"].lower(), []
                indent = _count_indent(line)
            continue
        is_closed = fence is not None and fence["marks"].startswith(marks) and not fence["language"]
        if not is_closed:
            is_closed = line.rstrip().endswith(marks)
            lines.append(line.rstrip().removesuffix(marks) if is_closed else line)
        if is_closed:
            blocks.append((language, _join_lines(lines, indent)))
            marks = ""
    return [*blocks, (language, _join_lines(lines, indent))] if marks else blocks


def _join_lines(lines: Sequence[str], indent: int) -> str:
    """Join the lines of a code block. The indentation of its fence is removed if all lines have it."""
    space = min([indent, *(_count_indent(line) for line in lines if line.strip())])
    return "".join(line[min(space, _count_indent(line)) :] for line in lines)


def _count_indent(line: str) -> int:
    return len(line) - len(line.lstrip(" \t"))


def _lines(output: str) -> list[str]:
    """The lines of an output, without spaces at line ends and without empty lines at the end."""
    return [line.rstrip() for line in output.rstrip().split("\n")]
