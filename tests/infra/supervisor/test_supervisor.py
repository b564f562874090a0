"""Pins the parts of the supervisor that cannot be provoked on every machine, and its races.

Without it a program that the kernel killed for want of memory looks like one that somebody killed, or a job ends though
somebody has just asked for it.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rollouts.infra.supervisor.processes import count_oom_kills, find_group, read_start
from rollouts.infra.supervisor.program import StopRequests, build_environment
from rollouts.infra.supervisor.spec import JobSpec


@pytest.mark.parametrize(
    ("membership", "counter", "content"),
    [
        ("0::/jobs/a\n", "jobs/a/memory.events", "low 0\noom 4\noom_kill 3\n"),
        ("0::/host/path/of/a/container\n", "memory.events", "oom_kill 3\n"),
        ("9:cpu:/x\n4:memory:/x\n0::/\n", "memory/x/memory.oom_control", "oom_kill_disable 0\noom_kill 3\n"),
        ("4:memory:/host/path\n0::/\n", "memory/memory.oom_control", "under_oom 0\noom_kill 3\n"),
    ],
    ids=["v2", "v2 in a container", "v1", "v1 in a container"],
)
def test_out_of_memory_kills_are_counted(membership: str, counter: str, content: str, tmp_path: Path) -> None:
    (tmp_path / "membership").write_text(membership)
    (tmp_path / "mount" / counter).parent.mkdir(parents=True)
    (tmp_path / "mount" / counter).write_text(content)
    assert count_oom_kills(tmp_path / "membership", tmp_path / "mount") == 3


def test_no_counter_is_no_kill(tmp_path: Path) -> None:
    assert count_oom_kills(tmp_path / "membership", tmp_path) == 0


def test_the_job_cannot_rename_itself() -> None:
    spec = JobSpec(run_dir="/runs/a", argv=("true",), job={}, env={"ROLLOUTS_JOB": "/runs/b", "X": "1"})
    environment = build_environment({"PATH": "/bin", "AWS_SECRET": "s", "LC_ALL": "C"}, spec, attempt=2)
    assert (environment["ROLLOUTS_JOB"], environment["ROLLOUTS_ATTEMPT"], environment["X"]) == ("/runs/a", "2", "1")
    assert environment["PATH"] == "/bin" and environment["LC_ALL"] == "C" and "AWS_SECRET" not in environment
    assert environment["PYTHONUTF8"] == "1"  # whatever LC_ALL says


def test_without_proc_a_job_is_found_by_its_process_group() -> None:
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as process:
        found = find_group(process.pid, started=read_start(process.pid))
        given_again = find_group(process.pid, started="before")
        process.kill()
    assert given_again == []
    assert found == [process.pid] and find_group(process.pid) == [] and find_group(None) == []


ENDS_WHILE_REQUESTS_ARE_READ = """
import os, signal, sys
from pathlib import Path
from rollouts.infra.supervisor.program import CappedLog
from rollouts.infra.supervisor.program import spawn_program, watch_program
from rollouts.infra.supervisor.spec import JobSpec
from rollouts.infra.supervisor.program import StopRequests

run_dir = Path(sys.argv[1])
(run_dir / ".job").mkdir()
spec = JobSpec(run_dir=str(run_dir), argv=("sleep", "60"), job={}, grace_s=5)
program = spawn_program(spec, attempt=1)

class SlowRequests(StopRequests):
    def find(self) -> str:
        program.process.send_signal(signal.SIGTERM)
        os.waitid(os.P_PID, program.process.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and nobody has asked
        return "cancelled"

with CappedLog(run_dir / "log.txt", 1 << 20) as log:
    ending = watch_program(program, spec, log, SlowRequests(spec, 1))
print(ending.signal, ending.stopped_by, ending.leftover_processes)
"""
"""In a process of its own: a supervisor takes every child of its process for one of the program's."""


@pytest.mark.timeout(30)
def test_a_program_that_ends_while_a_cancel_request_is_read_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    command = [sys.executable, "-c", ENDS_WHILE_REQUESTS_ARE_READ, str(tmp_path)]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (found.stdout, found.stderr) == (f"{int(signal.SIGTERM)} cancelled 0\n", "")


def test_a_lease_that_a_start_renews_at_the_last_moment_keeps_the_job(tmp_path: Path) -> None:
    (tmp_path / ".job").mkdir()
    lease = tmp_path / ".job/lease"
    lease.touch()

    class RacedRequests(StopRequests):
        def _note_ending(self) -> None:
            super()._note_ending()
            assert (tmp_path / ".job/ending-1").exists()
            os.utime(lease, (1, 1))

    requests = RacedRequests(JobSpec(run_dir=str(tmp_path), argv=("true",), job={}, lease_s=0.01), 1)
    assert requests.find() == ""  # it sees the lease
    time.sleep(0.05)
    assert requests.find() == "" and not (tmp_path / ".job/ending-1").exists()
