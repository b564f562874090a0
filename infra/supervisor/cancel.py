"""End a job, or ask its program to end by itself."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from infra.locks import locked
from infra.supervisor.files import INTERNAL_DIR, POLL_S, JsonObject, exit_path, internal_path, latest_attempt, read_json
from infra.supervisor.follow import is_followed_elsewhere
from infra.supervisor.processes import end_orphans
from infra.supervisor.spec import JobError
from infra.supervisor.status import is_supervised, read_status

CANCEL_MARGIN_S = 15.0


def cancel_job(run_dir: str, grace_s: float, store: str = "") -> JsonObject:
    """End the job and return once its end is recorded: SIGTERM to all its processes, SIGKILL after `grace_s`.

    Args:
        store: on whose behalf; a job that runs of other stores follow is left RUNNING. Empty ends it all the same.
    """
    if not Path(run_dir, INTERNAL_DIR).is_dir() or (store and is_followed_elsewhere(run_dir, store)):
        return read_status(run_dir)
    with locked(internal_path(run_dir, "start.lock")):  # a start under way becomes either running or nothing
        status = read_status(run_dir)
        if status["state"] == "LOST":
            end_orphans(run_dir, grace_s)
        if status["state"] != "RUNNING":
            return read_status(run_dir)
        request_cancel(run_dir, status["attempt"], grace_s)
    deadline = time.monotonic() + grace_s + CANCEL_MARGIN_S
    while is_supervised(run_dir) and latest_attempt(run_dir) == status["attempt"]:
        if time.monotonic() >= deadline:
            raise JobError(f"the job did not end within {grace_s + CANCEL_MARGIN_S:g} s: look at its processes")
        time.sleep(POLL_S / 2)
    ended = read_status(run_dir)
    if ended["attempt"] == status["attempt"] and ended["state"] != "RUNNING":
        return ended
    # Somebody waited for the end, and starts the next attempt, which is none of ours.
    record = read_json(exit_path(run_dir, status["attempt"]))
    return {**status, "state": "EXITED", "pid": None, "waits_for": "", "exit": record}


def request_cancel(run_dir: str, attempt: int, grace_s: float) -> None:
    """Let the file appear that asks for the end of an attempt; where it stays empty the spec's grace holds."""
    request = internal_path(run_dir, f"cancel-{attempt}")
    try:
        request.touch()
    except OSError:  # the disk takes no more files
        internal_path(run_dir, f"spare-{attempt}").rename(request)
    with contextlib.suppress(OSError):  # it is full
        request.write_text(str(grace_s))


def ask_to_finish(run_dir: str, asked_by: str) -> JsonObject:
    """Ask the program to end by itself, with what it has, and return at once; a job that does not run is left alone."""
    if not Path(run_dir, INTERNAL_DIR).is_dir():
        return read_status(run_dir)
    with locked(internal_path(run_dir, "start.lock")):
        status = read_status(run_dir)
        if status["state"] == "RUNNING":
            partial = internal_path(run_dir, f"finish-{os.getpid()}")
            partial.write_text(asked_by)
            partial.replace(Path(run_dir, f"finish-{status['attempt']}"))
    return status
