"""Pins that a router that cannot be started ends a run at once, with what to do.

Without it a run on a machine whose environment has no router waits for five minutes, and says that nobody answered.
tests/engines/test_router.py has the real one.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from rollouts_core.engines.router_process import started_router
from rollouts_core.errors import ConfigError, EngineUnavailableError, RolloutsError

pytestmark = pytest.mark.slow


async def start(python: str, log: Path) -> None:
    async with started_router(python, log, timeout_s=60.0):
        raise AssertionError("it answered")


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("python", "expected", "message"),
    [
        (sys.executable, ConfigError, r"^rollout\.engine\.router_python: .* cannot start the router .*No module named"),
        ("/nowhere/python", ConfigError, r"^rollout\.engine\.router_python: /nowhere/python .*No such file"),
        (
            "echo taken; exit 3",
            EngineUnavailableError,
            r"ended while starting \(exit code 3: taken\): see .*router\.txt",
        ),
    ],
)
def test_a_router_that_ends_at_its_start_is_explained(
    tmp_path: Path, python: str, expected: type[RolloutsError], message: str
) -> None:
    if " " in python:
        python = script(tmp_path / "python", python)
    with pytest.raises(expected, match=message):
        asyncio.run(start(python, tmp_path / "router.txt"))


def test_a_router_that_does_not_answer_is_given_up_and_ended(tmp_path: Path) -> None:
    python = script(tmp_path / "python", f"echo $$ > {tmp_path}/pid; exec sleep 600")

    async def start_briefly() -> None:
        async with started_router(python, tmp_path / "router.txt", timeout_s=0.5):
            raise AssertionError("it answered")

    with pytest.raises(EngineUnavailableError, match=r"the router, did not answer within"):
        asyncio.run(start_briefly())
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}").exists()
