"""Pins that a program that was started to end with its parent does so, whatever ends that.

Without it a router or an engine of a trainer that was killed goes on, with its port, its memory and its GPUs.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from rollouts_core.system import parent_death
from tests.kit.waiting import wait_until

PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-I", "-S", sys.argv[1], sys.argv[2], "/bin/sleep", "600"])
print(child.pid, flush=True)
time.sleep(600)
"""


def command_line(pid: int) -> str:
    """Empty where it has ended, also where nobody has asked how."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except (FileNotFoundError, ProcessLookupError):
        return ""


def start_parent(claimed: str) -> tuple[subprocess.Popen[str], int]:
    """A process, and the one that it started and told to end with the process `claimed`."""
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT.replace("sys.argv[2]", claimed), parent_death.__file__],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    return parent, int(parent.stdout.readline())


def test_a_command_ends_when_its_parent_is_killed() -> None:
    parent, child = start_parent("str(__import__('os').getpid())")
    with parent:
        wait_until(lambda: command_line(child).startswith("/bin/sleep"))
        os.kill(parent.pid, signal.SIGKILL)
    wait_until(lambda: not command_line(child))


def test_a_command_whose_parent_is_gone_already_does_not_start() -> None:
    parent, child = start_parent("'1'")  # as if another process had taken it over
    with parent:
        wait_until(lambda: not command_line(child))
        parent.kill()


def test_a_command_that_cannot_be_run_is_named() -> None:
    command = [sys.executable, "-I", "-S", parent_death.__file__, str(os.getpid()), "/nowhere/python"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == parent_death.NO_PROGRAM
    assert ended.stderr == "/nowhere/python: No such file or directory\n"
