"""Pins that the process of a Prefect server ends when nobody uses it, also where what looks after that fails.

Without it a server stays behind for good, with its port and the store's database, as on a disk that is full.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

LOCKS_THAT_FAIL = """
import sys, threading, time
from pathlib import Path
import rollouts.flows.own_server.server_process as keeper
from rollouts.flows.own_server.scheduler_watchdog import SchedulerWatchdog

def fail(*_):
    raise OSError("no locks any more")

keeper.try_lock, keeper.POLL_S = fail, 0.01
threading.Thread(target=keeper._watch, args=(Path(sys.argv[1]), SchedulerWatchdog()), daemon=True).start()
time.sleep(60)
"""

BEGUN_ANEW = """
import os
import rollouts.flows.own_server.server_process as keeper
from rollouts.flows.own_server.scheduler_watchdog import SchedulerWatchdog

os.execv = lambda *_: os._exit(7)  # as execv does, it flushes no stream on the way
keeper._begin_anew(SchedulerWatchdog())
"""


def test_a_server_ends_when_nobody_can_tell_any_more_whether_it_is_used(tmp_path: Path) -> None:
    command = [sys.executable, "-c", LOCKS_THAT_FAIL, str(tmp_path)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=50, check=False)
    assert ended.returncode == -signal.SIGTERM and "no locks any more" in ended.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is Linux's")
def test_a_server_begins_anew_though_its_log_lies_on_a_full_disk() -> None:
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run([sys.executable, "-c", BEGUN_ANEW], cwd=ROOT, stderr=full, timeout=50, check=False)
    assert ended.returncode == 7
