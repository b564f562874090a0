"""Small shell programs as jobs, and ways to look at their processes."""

import os
import shlex
import signal
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

from rollouts.infra.jobs import JobSpec, JobStatus, follow_job
from rollouts.infra.session import Session
from tests.kit.waiting import wait_until


def shell_spec(run_dir: Path, script: str, **limits: Any) -> JobSpec:
    """A job that runs the script in its run directory."""
    moved = f"cd {shlex.quote(str(run_dir))} || exit; {script}"
    return JobSpec(run_dir=str(run_dir), argv=("/bin/sh", "-c", moved), job={"script": script}, **limits)


def is_alive(pid: int) -> bool:
    """Whether the process still runs: one that only waits to be taken note of does not."""
    try:
        os.kill(pid, 0)
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except (ProcessLookupError, FileNotFoundError):
        return False


def read_pid(path: Path) -> int:
    """The process number that a script writes to a file, once it is there."""
    wait_until(lambda: path.exists() and path.read_text().endswith("\n"))
    return int(path.read_text())


def kill_follower(run_dir: Path, store: str = "") -> int:
    """Kill who follows the job, for a store or for all, and return how many there were: none, when all is said."""
    table = subprocess.run(["ps", "-A", "-ww", "-o", "pid=,args="], capture_output=True, text=True, check=True).stdout
    lines = [line for line in table.splitlines() if f" follow {run_dir} " in line and line.endswith(store)]
    for line in lines:
        with suppress(ProcessLookupError):  # it has said everything since then
            os.kill(int(line.split()[0]), signal.SIGKILL)
    return len(lines)


def wait_for_end(session: Session, run_dir: Path) -> JobStatus:
    ignored: list[object] = []
    ignore = ignored.append
    return follow_job(session, str(run_dir), on_metrics=ignore, on_event=ignore, on_log=ignore)
