"""Search texts for regular expressions within a time limit, in a child process that can be killed.

    generation thread                                              child process (pattern_child.py)
      a line of JSON: [[patterns, text, seconds], ...]     ──>
                                                           <──     for each text: [the pattern that matches, seconds]
      end of output: the search of the next text failed    <──     killed by SIGPROF when the search uses up its time

Python cannot interrupt a search in its own process, and a search may take hours. The child process is started at the
first search, and again after it was killed. Patterns have the syntax of Python's `re`, as in SGLang. Libraries with a
guaranteed search time support fewer patterns.

Not here: the choice of texts to search (running.py).
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
    """A text and the patterns to search in it."""

    patterns: tuple[str, ...]
    text: str
    limit_s: float
    """Limit of CPU time for the search, seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The result of a `Search`."""

    pattern: str = ""
    """The first pattern that matches anywhere in the text; empty if no pattern matches."""
    seconds: float = 0.0
    problem: str = ""
    """Why the search failed; empty if the search succeeded."""


class PatternSearch:
    """A child process that searches texts for patterns. Not thread-safe."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def find(self, searches: Sequence[Search]) -> list[Found]:
        """Search all texts; returns a result per search, in order."""
        found: list[Found] = []
        while len(found) < len(searches):
            found += self._ask(searches[len(found) :])
        return found

    def close(self) -> None:
        self._end()

    def _ask(self, searches: Sequence[Search]) -> list[Found]:
        """The results of all searches, or of the first ones if a later search killed the child process."""
        process = self._process = self._process or _start()
        assert process.stdin is not None and process.stdout is not None, "both are pipes"
        asked = [[search.patterns, search.text, max(search.limit_s, MIN_LIMIT_S)] for search in searches]
        with suppress(BrokenPipeError):  # the child process was killed; `_ask` notices this when it reads the output
            process.stdin.write(f"{json.dumps(asked)}\n")
            process.stdin.flush()
        found: list[Found] = []
        for _ in searches:
            if not (line := process.stdout.readline()):
                is_late = self._end() == -signal.SIGPROF
                problem = "took too long" if is_late else "needed too much memory, or another program killed it"
                return [*found, Found(problem=problem)]
            pattern, seconds = json.loads(line)
            found.append(Found(pattern=pattern, seconds=seconds))
        return found

    def _end(self) -> int | None:
        """End the child process; returns its exit code, or None if it does not run."""
        process, self._process = self._process, None
        if process is None:
            return None
        assert process.stdin is not None and process.stdout is not None, "both are pipes"
        with suppress(BrokenPipeError):  # the child process already ended without reading its input
            process.stdin.close()
        process.stdout.close()
        return process.wait()


def _start() -> subprocess.Popen[str]:
    command = [sys.executable, "-I", "-S", str(Path(pattern_child.__file__))]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True)
