"""Start a job's next attempt or find the running attempt, and detach the supervisor from the client.

Not here: the supervisor's work (supervise.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path

from rollouts.infra.locks import locked
from rollouts.infra.supervisor.files import (
    INTERNAL_DIR,
    POLL_S,
    JsonObject,
    granted_s,
    internal_path,
    read_text,
    write_json,
)
from rollouts.infra.supervisor.processes import become_subreaper, end_orphans
from rollouts.infra.supervisor.program import LEFTOVER_GRACE_S, with_absolute_paths
from rollouts.infra.supervisor.spec import JobError, JobSpec
from rollouts.infra.supervisor.status import read_status, renew_lease
from rollouts.infra.supervisor.supervise import supervise

ENDING_WAIT_S = 60.0
"""Seconds that a start waits for the end of the earlier attempt, in addition to that attempt's time for saving."""


def start_job(spec: JobSpec) -> JsonObject:
    """Start the next attempt unless the job is finished or running, and renew the job's lease.

    Concurrent calls start only one attempt. If the end of an attempt was already requested, the call waits for this
    attempt's end and then starts the next attempt.
    """
    run_dir = spec.run_dir
    Path(run_dir).mkdir(parents=True, exist_ok=True)
    Path(run_dir, INTERNAL_DIR).mkdir(mode=0o700, exist_ok=True)
    began = time.monotonic()
    while True:
        with locked(internal_path(run_dir, "start.lock")) as start_lock:
            status = renew_lease(run_dir)  # renew the lease before `is_ending` is read, see StopRequests
            if not status["is_ending"]:
                return _start_or_find(spec, status, start_lock)
        # Wait without the lock, so that a second cancel request can take the lock now. Otherwise, the request could
        # end the next attempt.
        limit_s = ENDING_WAIT_S + granted_s(run_dir, status["attempt"])
        if time.monotonic() >= began + limit_s:
            raise JobError(
                f"attempt {status['attempt']} is being ended, and did not end within {limit_s:g} s: "
                "look at its processes"
            )
        time.sleep(POLL_S / 2)


def _start_or_find(spec: JobSpec, status: JsonObject, start_lock: int) -> JsonObject:
    """Start the next attempt and return its status, or return `status` if the job is finished or running.

    Args:
        start_lock: descriptor of start.lock, which is held.
    """
    run_dir = spec.run_dir
    if status["state"] in ("RUNNING", "FINISHED"):
        return {**status, "attached": True}
    write_json(run_dir, "job.json", spec.job)
    end_orphans(run_dir, LEFTOVER_GRACE_S)
    # Take the lock before the fork, so that the supervisor inherits it and the lock is held without a gap.
    with locked(internal_path(run_dir, "lock")):
        answer = detach(spec, status["attempt"] + 1, start_lock)
    if "error" in answer:
        # The failed supervisor holds the lock until its process has ended. Until then, another start would attach to
        # the failed supervisor.
        with locked(internal_path(run_dir, "lock")):
            raise JobError(answer["error"])
    return read_status(run_dir)


def detach(spec: JobSpec, attempt: int, start_lock: int) -> JsonObject:
    """Fork the supervisor. Returns its report: empty after the program has started, or an error."""
    report_read, report_write = os.pipe()
    middle = os.fork()
    if middle == 0:
        os.setsid()
        if os.fork() == 0:
            os.close(report_read)
            os.close(start_lock)  # close it, or else the supervisor would hold start.lock
            _run_detached(spec, attempt, report_write)
        os._exit(0)
    os.close(report_write)
    os.waitpid(middle, 0)
    with os.fdopen(report_read, "rb") as pipe:
        text = pipe.read()
    if not text:
        reason = read_text(internal_path(spec.run_dir, f"supervisor-{attempt}.txt")).strip()
        return {"error": f"the supervisor ended before the program was started: {reason[-500:]}"}
    answer: JsonObject = json.loads(text)
    return answer


def _run_detached(spec: JobSpec, attempt: int, report_fd: int) -> None:
    """Run the supervisor until the job has ended. Never returns."""
    exit_code = 1
    try:
        for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT):
            # At a shutdown, the supervisor must outlive the program to write the exit record. Ignore these signals by a
            # function, because the program would inherit SIG_IGN.
            signal.signal(number, lambda *_: None)
        with contextlib.suppress(FileNotFoundError):  # the working directory was removed
            os.environ.update(with_absolute_paths(os.environ, Path.cwd()))
        os.chdir("/")
        own_output = internal_path(spec.run_dir, f"supervisor-{attempt}.txt")
        null = os.open(os.devnull, os.O_RDONLY)
        output = os.open(own_output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(null, 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        become_subreaper()
        supervise(spec, attempt, report_fd)
        exit_code = 0
    except BaseException:  # noqa: BLE001 - an error that is not written here is lost, because the process ends
        with contextlib.suppress(OSError):  # the disk may be full
            traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):
            sys.stderr.flush()
        os._exit(exit_code)
