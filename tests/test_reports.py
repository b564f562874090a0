"""Pins that a test that fails over a name that is no text fails alone.

Without it the first one ends the session, and thousands of other tests are not run.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

FAILING = """
import logging


def test_names():
    logging.getLogger().warning("caf\\udce9")
    raise AssertionError("no text")


def test_after_it():
    pass
"""


def test_a_failure_that_shows_a_name_that_is_no_text_ends_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "test_failing.py").write_text(FAILING)
    command = [sys.executable, "-m", "pytest", "-p", "tests.kit.reports", "--numprocesses", "1"]
    command += ["--rootdir", str(tmp_path)]
    ended = subprocess.run(
        [*command, "-p", "no:cacheprovider", str(tmp_path)],
        cwd=Path(__file__).parents[1],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert ended.returncode == 1 and "1 failed, 1 passed" in ended.stdout, ended.stdout
    assert r"caf\udce9" in ended.stdout
