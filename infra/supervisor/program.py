"""One start of the program: its environment, its output, requests to end it, and its end."""

from __future__ import annotations

import ctypes
import dataclasses
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from rollouts.infra.supervisor.files import internal_path
from rollouts.infra.supervisor.output import CappedLog, ProgramOutput
from rollouts.infra.supervisor.processes import UNKILLABLE_AFTER_S, count_oom_kills, find_processes, send_signal
from rollouts.infra.supervisor.spec import JobSpec
from rollouts.infra.supervisor.stop_requests import Grant, StopRequests
from rollouts.infra.supervisor.variables import build_environment

LEFTOVER_GRACE_S = 2.0
"""Seconds between SIGTERM and SIGKILL for processes that outlive the program."""
_PR_SET_PDEATHSIG = 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """One start of the program."""

    process: subprocess.Popen[bytes]
    output_fd: int
    """Reading end of the pipe with its output."""
    oom_kills_before: int
    """The kernel's number of out-of-memory kills before the start."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How one start of the program ended."""

    code: int
    """The exit code; 128 + the signal's number if a signal ended it."""
    signal: int | None
    oom: bool
    """Whether the kernel killed it because the node or its container was out of memory."""
    stopped_by: str
    """"cancelled", "timeout", "lease_expired", or "" if it ended by itself."""
    leftover_processes: int
    """Processes of the job that outlived the program and were killed."""


def spawn_program(spec: JobSpec, attempt: int, gpu_locks: Sequence[int] = ()) -> Program:
    """Start the program in a new session. On Linux the kernel kills it when this process dies.

    Args:
        gpu_locks: open files that the program inherits.

    Raises:
        OSError: the executable cannot be run.
    """
    supervisor_pid = os.getpid()
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None

    def die_with_supervisor() -> None:
        if libc is not None:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != supervisor_pid:  # the supervisor died before the line above
            os._exit(125)

    # Not the run directory: its files may come from another machine, and Python imports from its working directory.
    work_dir = internal_path(spec.run_dir, "work")
    work_dir.mkdir(exist_ok=True)
    output_fd, program_fd = os.pipe()
    oom_kills_before = count_oom_kills()
    try:
        process = subprocess.Popen(
            spec.argv,
            cwd=work_dir,
            env=build_environment(os.environ, spec, attempt),
            stdin=subprocess.DEVNULL,
            stdout=program_fd,
            stderr=program_fd,
            start_new_session=True,
            pass_fds=gpu_locks,
            preexec_fn=die_with_supervisor,
        )
    except OSError:
        os.close(output_fd)
        raise
    finally:
        os.close(program_fd)
    return Program(process=process, output_fd=output_fd, oom_kills_before=oom_kills_before)


def watch_program(
    program: Program, spec: JobSpec, log: CappedLog, requests: StopRequests, on_look: Callable[[], None] = lambda: None
) -> Ending:
    """Collect the program's output until all its processes have ended; end them when that is requested.

    Args:
        on_look: called several times a second.
    """
    output = ProgramOutput(program.output_fd, log)
    wait_status: int | None = None
    stopped_by = ""
    told_at = kill_at = math.inf
    grant: Grant | None = None
    leftover_processes = 0
    while True:
        on_look()
        output.pump()
        if wait_status is None:
            wait_status = reap_children(program.process)
        if wait_status is None and not stopped_by:
            stopped_by = requests.find()
        if wait_status is None and not stopped_by:
            continue
        # The program may have ended since the check above, for example while a cancel request was read.
        if (ended := reap_children(program.process)) is not None:
            wait_status = ended
        processes = find_processes(spec.run_dir, supervisor=os.getpid(), group=program.process.pid)
        now = time.monotonic()
        if wait_status is not None:
            leftover_processes = max(leftover_processes, len(processes))
            if not processes or now > kill_at + UNKILLABLE_AFTER_S:
                break
        if wait_status is not None and grant is not None:
            grant, kill_at = None, now + LEFTOVER_GRACE_S
            send_signal(processes, signal.SIGTERM)
        elif kill_at == math.inf and stopped_by and (grant := requests.grant()) is not None:
            told_at, kill_at = now, now + grant.seconds
            send_signal([grant.pid] if grant.pid in processes else processes, signal.SIGTERM)
        elif kill_at == math.inf:
            kill_at = now + (requests.grace_s if stopped_by else LEFTOVER_GRACE_S)
            send_signal(processes, signal.SIGTERM)
        elif grant is not None and now < kill_at:
            kill_at = told_at + (requests.grant() or grant).seconds
        elif now >= kill_at:
            send_signal(processes, signal.SIGKILL)
    output.drain()
    exit_code = os.waitstatus_to_exitcode(wait_status)
    was_killed_by_kernel = exit_code == -signal.SIGKILL and not stopped_by
    return Ending(
        code=exit_code if exit_code >= 0 else 128 - exit_code,
        signal=-exit_code if exit_code < 0 else None,
        oom=was_killed_by_kernel and count_oom_kills() > program.oom_kills_before,
        stopped_by=stopped_by,
        leftover_processes=leftover_processes,
    )


def reap_children(process: subprocess.Popen[bytes]) -> int | None:
    """Reap every ended child, also adopted ones; return the wait status of `process` if it has ended."""
    found: int | None = None
    while True:
        try:
            pid, wait_status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if pid == 0:
            return found
        if pid == process.pid:
            found = wait_status
            process.returncode = os.waitstatus_to_exitcode(wait_status)
