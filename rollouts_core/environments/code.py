"""Python programs that must pass tests, run where they can do no harm (sandbox.py).

A row has `tests`: a list of `{"stdin": ..., "stdout": ...}`, or Python code that checks what the program defines and
raises where it is wrong. The first kind cannot be cheated, because the expected output is never in the sandbox. With
the second kind the program and its tests share a process, so a policy may learn to fool them.
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

# Nothing is given back (`+`): a policy may write thousands of marks, letters or spaces in one line.
FENCE = re.compile(r"\s*+(?P<marks>`{3,}+|~{3,}+)\s*+(?P<language>[^\s`]*+)[^`]*+")
"""A line that opens a block, or closes one."""
LATE_FENCE = re.compile(r"[^`]*+(?P<marks>`{3,}+)(?P<language>\w*+)\s*+")
"""A line that opens a block behind words, as in "Here it is: ```python"."""
MAX_GRADING_S = 600.0
"""How long a program may run for all tests of its row; each of hundreds could use up its own time."""
MAX_PROGRAM_BYTES = 1 << 20
"""For which there is room beside the input of a test; policies write less."""
PYTHON = {"python", "python3", "py"}
"""What blocks call it, in small letters."""


class CodeEnvironment:
    """Rewards a program that passes all tests of its row."""

    row_fields = ("tests",)

    def __init__(self, limits: SandboxLimits | None = None) -> None:
        self.limits = limits
        self.grading_limit = GradingLimit(MAX_GRADING_S)

    @cached_property
    def _slots(self) -> anyio.CapacityLimiter:
        """Programs at a time: more than processors would only run into their time limits."""
        return anyio.CapacityLimiter(count_processors())

    def check_row(self, row: Mapping[str, Any]) -> None:  # Any: JSON
        """Raise ValueError for tests that every program passes, or none can."""
        check_tests(row["tests"], self.limits or SandboxLimits())

    async def grade(self, sample: Sample) -> float:
        """1 where every test passes, else 0; also if that takes too long, which `grading_limit` counts.

        Raises:
            RewardError: the row has no tests that can be run.
            EnvironmentUnavailableError: the machine cannot shut a program in.
        """
        program, tests = extract_program(sample.response), sample.metadata["tests"]
        try:
            check_tests(tests, self.limits or SandboxLimits())
        except ValueError as error:
            raise RewardError(str(error)) from error
        with uncounted():  # what a policy writes does not end a run, and every program has a limit of its own
            if isinstance(tests, str):
                return float(await self._passes_code(program, tests))
            return await self._grade_tests(sample, program, tests)

    async def _passes_code(self, program: str, tests: str) -> bool:
        # The mark says that the tests were reached and passed: a program could end before them with exit code 0.
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
        # One after another: most programs of a policy that learns fail early, and the rest need not run.
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
    """Raise ValueError for tests that are empty, no Python, without what they give and expect, or with more of it than
    a program may have."""
    if not isinstance(tests, str | list):
        raise ValueError(f"expected `tests` to be a list or Python code, found {type(tests).__name__}")
    if not (tests.strip() if isinstance(tests, str) else tests):
        raise ValueError("the row has no tests: every program would pass")
    if isinstance(tests, str):
        _check_python(tests)
        return
    # The folder that has the input has the program, too.
    most = {"stdin": (limits.file_mb << 20) - MAX_PROGRAM_BYTES, "stdout": limits.output_bytes}
    for number, test in enumerate(tests, start=1):
        if not isinstance(test, dict) or not most.keys() <= test.keys():
            raise ValueError(f'test {number} must be {{"stdin": ..., "stdout": ...}}, found {test!r}')
        for name, max_bytes in most.items():
            if (num_bytes := len(str(test[name]).encode())) > max_bytes:
                raise ValueError(
                    f"test {number} has {num_bytes:,} bytes of {name}, more than a program may have ({max_bytes:,}): "
                    "leave it out"
                )


def _check_python(tests: str) -> None:
    """Raise ValueError for tests that cannot be run behind a program, as each of them is."""
    try:
        with warnings.catch_warnings(action="ignore"):  # of what works all the same
            compile(f"pass\n{tests}", "tests", "exec", dont_inherit=True)
    except SyntaxError as error:
        line = max(1, (error.lineno or 2) - 1)
        raise ValueError(f"`tests` is no Python ({error.msg}, line {line}): no program would pass") from error
    except ValueError as error:
        raise ValueError(f"`tests` is no Python ({error}): no program would pass") from error


def extract_program(text: str) -> str:
    """The last fenced block that calls itself Python, else the last one, or the whole text where there is none.

    What stands in a block without a name beside a program is what it prints, more often than another program.
    """
    return find_last_block(text, PYTHON)


def find_last_block(text: str, languages: Collection[str]) -> str:
    """The last fenced block of one of the languages, else the last one, or the whole text where there is none."""
    blocks = find_blocks(text)
    named = [block for language, block in blocks if language in languages]
    return (named or [block for _, block in blocks] or [text])[-1]


def find_blocks(text: str) -> list[tuple[str, str]]:
    """The fenced blocks of a Markdown text: what language each says that it is in, and its lines.

    As in CommonMark, a fence is closed by one of the same marks that names nothing, and by the end of the text; besides
    that, marks at the end of a line open and close one, too. Where it is indented, as in a list, with all lines of its
    block, these begin that much further left.
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
    """The lines of a block, without the space before its fence where all have that."""
    space = min([indent, *(_count_indent(line) for line in lines if line.strip())])
    return "".join(line[min(space, _count_indent(line)) :] for line in lines)


def _count_indent(line: str) -> int:
    return len(line) - len(line.lstrip(" \t"))


def _lines(output: str) -> list[str]:
    """Output without what nobody sees: space at the ends of lines, empty lines at the end."""
    return [line.rstrip() for line in output.rstrip().split("\n")]
