"""Pins what the stage `check` hears of the process that checks for it.

Without it a run from Prefect would be silent while 100,000 rows are read, or wait for ever for checks that ended early.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import IO

import pytest

from rollouts.flows.check import _error_of, _run_checks
from rollouts.infra.errors import PermanentInfraError
from rollouts_core.errors import InputError


def stand_in(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a shell script run in the place of the checks."""
    program = folder / "checks"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))


@pytest.fixture
def refusal(tmp_path: Path) -> IO[str]:
    return (tmp_path / "refusal").open("w+", encoding="utf-8")


def test_what_the_checks_say_is_heard_before_they_end(
    tmp_path: Path, refusal: IO[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = tmp_path / "heard"
    script = f"""cat > {tmp_path}/settings; echo 'half of the rows'
while [ ! -e {heard} ]; do sleep 0.05; done
echo 'the node is full' >&2; exit 3"""
    stand_in(tmp_path, script, monkeypatch)
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        heard.touch()

    assert _run_checks("{}", say, refusal) == 3
    assert said == ["half of the rows"]
    assert (tmp_path / "settings").read_text() == "{}"
    refusal.seek(0)
    assert refusal.read() == "the node is full\n"


def test_checks_that_end_before_they_have_read_the_settings_are_no_riddle(
    tmp_path: Path, refusal: IO[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(tmp_path, "exit 2", monkeypatch)
    assert _run_checks("x" * 1_000_000, print, refusal) == 2


def test_each_exit_code_is_an_error_of_its_kind() -> None:
    assert isinstance(_error_of(2, "no such file"), InputError)
    assert isinstance(_error_of(3, "the node is full"), PermanentInfraError)
    assert "ended with exit code -9" in str(_error_of(-9, ""))
