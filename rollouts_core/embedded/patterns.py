"""Search texts for patterns within a limit of time: some searches take hours, and Python cannot interrupt them.

    generation thread                                              a process of its own (pattern_child.py)
      a line of JSON: [[patterns, text, seconds], ...]     ──>
                                                           <──     for each text: [the pattern that matches, seconds]
      the end of its output: the next text was too much    <──     ended by SIGPROF inside the search

It is started when the first pattern is searched for, and again after such an end. The patterns are those of Python's
`re`, as in SGLang; matchers that never take long know fewer of them.

Not here: which texts are searched when (running.py).
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rollouts_core.embedded import pattern_child

MIN_LIMIT_S = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """A text and what is looked for in it."""

    patterns: tuple[str, ...]
    text: str
    limit_s: float
    """Processor time that it may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What came of a search."""

    pattern: str = ""
    """The first of the patterns that the text matches anywhere; empty if it matches none."""
    seconds: float = 0.0
    """Processor time that it took."""
    problem: str = ""
    """Why there is no answer."""


class PatternSearch:
    """The process that searches; for one thread."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def find(self, searches: Sequence[Search]) -> list[Found]:
        """The answer to each search, in order."""
        found: list[Found] = []
        while len(found) < len(searches):
            found += self._ask(searches[len(found) :])
        return found

    def close(self) -> None:
        """End the process, where there is one."""
        self._end()

    def _ask(self, searches: Sequence[Search]) -> list[Found]:
        """The answers up to the one that ended the process, or all; one at least."""
        process = self._process = self._process or _start()
        assert process.stdin is not None and process.stdout is not None, "both are pipes"
        asked = [[search.patterns, search.text, max(search.limit_s, MIN_LIMIT_S)] for search in searches]
        with suppress(BrokenPipeError):  # it was ended from outside: its output has ended, too
            process.stdin.write(f"{json.dumps(asked)}\n")
            process.stdin.flush()
        found: list[Found] = []
        for _ in searches:
            if not (line := process.stdout.readline()):
                is_late = self._end() == -signal.SIGPROF
                problem = "took too long" if is_late else "needed too much memory, or was ended from outside"
                return [*found, Found(problem=problem)]
            pattern, seconds = json.loads(line)
            found.append(Found(pattern=pattern, seconds=seconds))
        return found

    def _end(self) -> int | None:
        """How the process ended; None if there is none."""
        process, self._process = self._process, None
        if process is None:
            return None
        assert process.stdin is not None and process.stdout is not None, "both are pipes"
        with suppress(BrokenPipeError):  # what it did not read is lost
            process.stdin.close()
        process.stdout.close()
        return process.wait()


def _start() -> subprocess.Popen[str]:
    command = [sys.executable, "-I", "-S", str(Path(pattern_child.__file__))]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True)
