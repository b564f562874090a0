"""Status, lease and output of a job."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import os
from pathlib import Path

from rollouts.infra.locks import is_locked
from rollouts.infra.supervisor.files import (
    JsonObject,
    exit_path,
    file_size,
    internal_path,
    latest_attempt,
    read_from,
    read_json,
)
from rollouts.infra.supervisor.processes import find_recorded, read_boot_id


def is_supervised(run_dir: str) -> bool:
    """Return whether a supervisor of this job lives or is just being started."""
    # A shared lock, so that concurrent checks do not disturb each other.
    return is_locked(internal_path(run_dir, "lock"), fcntl.LOCK_SH)


def read_status(run_dir: str) -> JsonObject:
    """Return the job's current status; changes nothing."""
    is_alive = is_supervised(run_dir)  # asked first: after its end nothing below changes any more
    attempt = latest_attempt(run_dir)
    meta = read_json(internal_path(run_dir, f"meta-{attempt}.json")) or {}
    exit_record = None if is_alive else read_json(exit_path(run_dir, attempt))
    status: JsonObject = {
        "run_dir": run_dir,
        "attempt": attempt,
        "attached": False,
        "pid": meta.get("pid") if is_alive else None,
        "restarts": meta.get("restarts", 0),
        "waits_for": meta.get("waits_for", "") if is_alive else "",
        "log_size": file_size(Path(run_dir, "log.txt")),
        "exit": exit_record,
        "reason": "",
        "orphans": [],
        "is_ending": is_alive and is_being_ended(run_dir, attempt),
    }
    if is_alive:
        return {**status, "state": "RUNNING"}
    if read_json(Path(run_dir, "result.json")) is not None:
        return {**status, "state": "FINISHED"}
    if exit_record is not None:
        return {**status, "state": "EXITED"}
    if attempt == 0:
        return {**status, "state": "ABSENT"}
    if meta.get("boot_id") != read_boot_id():
        return {**status, "state": "LOST", "reason": "the node was rebooted"}
    orphans = find_recorded(run_dir, meta)
    return {**status, "state": "LOST", "reason": "its supervisor was killed", "orphans": orphans}


def is_being_ended(run_dir: str, attempt: int) -> bool:
    """Return whether the end of an attempt was requested, or one of its limits is reached."""
    return any(internal_path(run_dir, f"{reason}-{attempt}").exists() for reason in ("cancel", "ending"))


def renew_lease(run_dir: str) -> JsonObject:
    """Renew the job's lease. Touching the file .job/lease has the same effect."""
    with contextlib.suppress(FileNotFoundError):
        os.utime(internal_path(run_dir, "lease"))
    return read_status(run_dir)


def read_log_tail(run_dir: str, max_bytes: int) -> JsonObject:
    """Return the last bytes of the log in base64."""
    path = Path(run_dir, "log.txt")
    content = read_from(path, max(0, file_size(path) - max_bytes), max_bytes)
    return {"log": base64.b64encode(content).decode()}
