"""Pins that a search for patterns says what Python's `re` says, and that one without end costs itself alone.

Without it a pattern like (a|a)*$ in one request stops the server for everybody.
"""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollouts_core.embedded.patterns import Found, PatternSearch, Search

TRAP = Search(patterns=("nowhere", r"^(a|a)*$"), text="a" * 60 + "!", limit_s=0.05)
"""Two ways to read each letter: 2**60 steps."""
HOLDER = """
import os, signal
from rollouts_core.embedded.patterns import PatternSearch, Search
search = PatternSearch()
search.find([Search(patterns=("a",), text="a", limit_s=9.0)])
print(search._process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def search() -> Iterator[PatternSearch]:
    searching = PatternSearch()
    yield searching
    searching.close()


def quick(pattern: str, text: str) -> Search:
    return Search(patterns=(pattern,), text=text, limit_s=5.0)


@pytest.mark.parametrize(
    ("patterns", "text"),
    [
        ((r"\d",), "a1"),
        ((r"\d",), "ab"),
        (("b", "a"), "ab"),
        ((r"(?<=a)b\Z", "c"), "ab"),
        ((r"(a)\1",), "aa"),
        (("ü$", "\n"), "grün\nü\n"),
        (("\ud800",), "a\ud800"),
    ],
)
def test_what_is_found_is_what_re_finds(search: PatternSearch, patterns: tuple[str, ...], text: str) -> None:
    [found] = search.find([Search(patterns=patterns, text=text, limit_s=5.0)])
    assert found.pattern == next((pattern for pattern in patterns if re.search(pattern, text)), "")
    assert found.problem == ""


def test_a_search_without_end_is_given_up_and_those_around_it_are_answered(search: PatternSearch) -> None:
    searches = [quick("a", "a"), TRAP, quick("b", "b"), TRAP, TRAP, quick("c", "-")]
    assert [(found.pattern, found.problem) for found in search.find(searches)] == [
        ("a", ""),
        ("", "took too long"),
        ("b", ""),
        ("", "took too long"),
        ("", "took too long"),
        ("", ""),
    ]


def test_what_a_search_took_is_told(search: PatternSearch) -> None:
    expensive = Search(patterns=(r"^(a|a)*$",), text="a" * 18 + "!", limit_s=60.0)
    [cheap, dear] = search.find([quick("a", "a"), expensive])
    assert 0 <= cheap.seconds < dear.seconds


def test_more_text_than_a_pipe_holds_arrives(search: PatternSearch) -> None:
    long = "x" * 300_000
    assert [found.pattern for found in search.find([quick("y$", f"{long}y") for _ in range(5)])] == ["y$"] * 5


def test_a_process_that_was_killed_is_replaced(search: PatternSearch) -> None:
    search.find([quick("a", "a")])
    assert search._process is not None
    search._process.send_signal(signal.SIGKILL)
    search._process.wait()
    lost, after = search.find([quick("a", "a"), quick("b", "b")])
    assert (lost.pattern, "another program killed it" in lost.problem) == ("", True)
    assert after == Found(pattern="b", seconds=after.seconds)


def test_nothing_is_started_for_nothing(search: PatternSearch) -> None:
    assert search.find([]) == []
    assert search._process is None


def test_the_process_ends_with_the_one_that_started_it() -> None:
    root = Path(__file__).parents[3]
    with subprocess.Popen([sys.executable, "-c", HOLDER], cwd=root, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        pid = int(holder.stdout.readline())
    assert holder.returncode == -signal.SIGKILL
    wait_until_gone(pid)


def wait_until_gone(pid: int) -> None:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        while "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text():  # the test's own time limit ends this
            time.sleep(0.01)
