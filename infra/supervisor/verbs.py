"""The verbs of the supervisor's command line, and the end of a job. supervisor/__init__.py describes the verbs."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from rollouts.infra.locks import locked
from rollouts.infra.supervisor.files import (
    INTERNAL_DIR,
    POLL_S,
    JsonObject,
    exit_path,
    granted_s,
    internal_path,
    latest_attempt,
    read_json,
    read_text,
)
from rollouts.infra.supervisor.processes import end_orphans
from rollouts.infra.supervisor.spec import JobError, parse_spec
from rollouts.infra.supervisor.start import start_job
from rollouts.infra.supervisor.status import (
    follow_job,
    is_followed_elsewhere,
    is_supervised,
    marked_as_followed,
    read_log_tail,
    read_status,
    renew_lease,
)


def main(argv: list[str]) -> int:
    verb, run_dir, parameters = argv[1], os.path.realpath(argv[2]), argv[3:]
    if verb == "follow":
        with contextlib.suppress(BrokenPipeError), marked_as_followed(run_dir, *parameters[3:]):
            follow_job(run_dir, *(int(offset) for offset in parameters[:3]))
        return 0
    verbs: dict[str, Callable[[], JsonObject]] = {
        "start": lambda: start_job(dataclasses.replace(parse_spec(sys.stdin.buffer.read()), run_dir=run_dir)),
        "status": lambda: read_status(run_dir),
        "cancel": lambda: cancel_job(run_dir, CancelRequest.parse(parameters), *parameters[4:]),
        "renew": lambda: renew_lease(run_dir),
        "finish": lambda: ask_to_finish(run_dir, parameters[0]),
        "tail": lambda: read_log_tail(run_dir, int(parameters[0])),
    }
    try:
        answer, exit_code = verbs[verb](), 0
    except (JobError, OSError) as error:
        answer, exit_code = {"error": f"{verb} of {run_dir}: {error}"}, 1
    sys.stdout.write(json.dumps(answer) + "\n")
    return exit_code


_CANCEL_MARGIN_S = 15.0


class CancelRequest(NamedTuple):
    grace_s: float
    max_grace_s: float
    """Largest time in seconds that a program may request for saving. Only the main process of such a program gets
    SIGTERM."""
    wait_s: float
    attempt: int
    """The number of the attempt to end; 0 means the current attempt. An attempt that has already ended stays
    unchanged."""

    @classmethod
    def parse(cls, parameters: Sequence[str]) -> CancelRequest:
        grace_s, max_grace_s, wait_s = map(float, parameters[:3])
        return cls(grace_s, max_grace_s, wait_s, int(parameters[3]))


def cancel_job(run_dir: str, asked: CancelRequest, store: str = "") -> JsonObject:
    """Request the end of a job and wait up to `wait_s` seconds for the end. Returns the job's status.

    If the job is still running after this time, `is_ending` is true in the status.

    Args:
        store: identity of the requesting ledger. A job that runs of other stores follow keeps running. Without `store`,
            the job is always ended.

    Raises:
        JobError: the job survived SIGKILL.
    """
    if not Path(run_dir, INTERNAL_DIR).is_dir() or (store and is_followed_elsewhere(run_dir, store)):
        return read_status(run_dir)
    attempt = asked.attempt
    with locked(internal_path(run_dir, "start.lock")):  # waits until a concurrent start has succeeded or failed
        status = read_status(run_dir)
        if attempt and status["attempt"] != attempt:
            return _status_of_ended(run_dir, attempt)
        if status["state"] == "LOST":
            end_orphans(run_dir, asked.grace_s)
        if status["state"] != "RUNNING":
            return read_status(run_dir)
        attempt = attempt or status["attempt"]
        _request_cancel(run_dir, attempt, f"{asked.grace_s:g} {asked.max_grace_s:g}")
    until = time.monotonic() + asked.wait_s
    while is_supervised(run_dir) and latest_attempt(run_dir) == attempt:
        if time.monotonic() >= until:
            _check_overdue(run_dir, attempt, asked.grace_s)
            return read_status(run_dir)
        time.sleep(POLL_S / 2)
    ended = read_status(run_dir)
    if ended["attempt"] == attempt and ended["state"] != "RUNNING":
        return ended
    return _status_of_ended(run_dir, attempt)


def _status_of_ended(run_dir: str, attempt: int) -> JsonObject:
    """Return the status of an ended attempt after another start has begun the next attempt."""
    ended = {"attempt": attempt, "state": "EXITED", "pid": None, "waits_for": "", "reason": "", "is_ending": False}
    return {**read_status(run_dir), **ended, "exit": read_json(exit_path(run_dir, attempt))}


def _check_overdue(run_dir: str, attempt: int, grace_s: float) -> None:
    """Raise JobError if the job still runs although its grace time is over."""
    limit_s = max(grace_s, granted_s(run_dir, attempt)) + _CANCEL_MARGIN_S
    asked_at = internal_path(run_dir, f"cancel-{attempt}").stat().st_mtime
    if time.time() >= asked_at + limit_s and is_supervised(run_dir):
        raise JobError(f"the job did not end within {limit_s:g} s: look at its processes")


def _request_cancel(run_dir: str, attempt: int, limits: str) -> None:
    """Create the file that requests the end of an attempt. If `limits` cannot be written, the limits of the spec
    apply."""
    request = internal_path(run_dir, f"cancel-{attempt}")
    if read_text(request) == limits:
        return
    try:
        request.touch()
    except OSError:  # the disk takes no more files, so rename the spare file
        internal_path(run_dir, f"spare-{attempt}").rename(request)
    with contextlib.suppress(OSError):  # the disk may be full
        request.write_text(limits)


def ask_to_finish(run_dir: str, asked_by: str) -> JsonObject:
    """Ask the program of a running job to finish early with its present result. Returns at once."""
    if not Path(run_dir, INTERNAL_DIR).is_dir():
        return read_status(run_dir)
    with locked(internal_path(run_dir, "start.lock")):
        status = read_status(run_dir)
        if status["state"] == "RUNNING":
            partial = internal_path(run_dir, f"finish-{os.getpid()}")
            partial.write_text(asked_by)
            partial.replace(Path(run_dir, f"finish-{status['attempt']}"))
    return status
