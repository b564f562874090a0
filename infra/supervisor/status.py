"""What is known about a job, and the lease by which somebody keeps it."""

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
    """True while a supervisor of this job lives (or one is just being started)."""
    # Shared: looking never disturbs another look.
    return is_locked(internal_path(run_dir, "lock"), fcntl.LOCK_SH)


def read_status(run_dir: str) -> JsonObject:
    """What is known about the job now; changes nothing."""
    is_alive = is_supervised(run_dir)  # asked first: once it is gone, nothing below changes any more
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
    """Whether the end of an attempt has been asked for, or one of its limits is reached."""
    return any(internal_path(run_dir, f"{reason}-{attempt}").exists() for reason in ("cancel", "ending"))


def renew_lease(run_dir: str) -> JsonObject:
    """Tell the supervisor that somebody still wants the job. Touching the file .job/lease does the same."""
    with contextlib.suppress(FileNotFoundError):
        os.utime(internal_path(run_dir, "lease"))
    return read_status(run_dir)


def read_log_tail(run_dir: str, max_bytes: int) -> JsonObject:
    """The last bytes of the log, in base64."""
    path = Path(run_dir, "log.txt")
    content = read_from(path, max(0, file_size(path) - max_bytes), max_bytes)
    return {"log": base64.b64encode(content).decode()}
