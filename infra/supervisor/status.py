"""Read a job's status, renew its lease, and print its log, metrics and events for a client that follows the job."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from rollouts.infra.locks import is_locked
from rollouts.infra.supervisor.files import (
    INTERNAL_DIR,
    POLL_S,
    READ_BYTES,
    JsonObject,
    exit_path,
    file_size,
    internal_path,
    latest_attempt,
    parse_object,
    read_from,
    read_json,
)
from rollouts.infra.supervisor.processes import find_recorded, read_boot_id


def is_supervised(run_dir: str) -> bool:
    """Return whether a supervisor of this job is alive or is just being started."""
    # Use a shared lock, so that concurrent checks do not disturb each other.
    return is_locked(internal_path(run_dir, "lock"), fcntl.LOCK_SH)


def read_status(run_dir: str) -> JsonObject:
    is_alive = is_supervised(run_dir)  # check first, because no file changes after the supervisor's end
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
        "is_ending": is_alive and _is_being_ended(run_dir, attempt),
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


def _is_being_ended(run_dir: str, attempt: int) -> bool:
    """Return whether the end of the attempt was requested, or whether its time limit or lease is over."""
    return any(internal_path(run_dir, f"{reason}-{attempt}").exists() for reason in ("cancel", "ending"))


def renew_lease(run_dir: str) -> JsonObject:
    """Renew the job's lease and return the job's status. Touching the file .job/lease also renews the lease."""
    with contextlib.suppress(FileNotFoundError):
        os.utime(internal_path(run_dir, "lease"))
    return read_status(run_dir)


def read_log_tail(run_dir: str, max_bytes: int) -> JsonObject:
    path = Path(run_dir, "log.txt")
    content = read_from(path, max(0, file_size(path) - max_bytes), max_bytes)
    return {"log": base64.b64encode(content).decode()}


# ── following ──


NO_LOG = -1
"""Offset that means: do not follow the log."""
MAX_LINE_BYTES = 4 << 20
_FOLLOWER_END_S = 3.0
"""Seconds that a client needs at most to stop following."""


@contextlib.contextmanager
def marked_as_followed(run_dir: str, store: str = "") -> Iterator[None]:
    """Hold a lock during the block, so that runs of other stores see that the job is followed.

    If the lock file cannot be created (full disk, or no job yet), the job is followed without the lock.
    """
    descriptor = None
    if store:
        with contextlib.suppress(OSError):
            descriptor = os.open(internal_path(run_dir, f"followed-{store}"), os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(descriptor, fcntl.LOCK_SH)  # blocks only while another process briefly checks the lock
    try:
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def is_followed_elsewhere(run_dir: str, store: str) -> bool:
    """Return whether runs of other stores follow the job. Waits up to 3 s for these runs to stop following."""
    own = internal_path(run_dir, f"followed-{store}")
    marks = [path for path in Path(run_dir, INTERNAL_DIR).glob("followed-*") if path != own]
    # Wait, because two runs that are cancelled at once see each other's lock and would both leave the job running.
    deadline = time.monotonic() + _FOLLOWER_END_S
    while is_followed := any(is_locked(path, fcntl.LOCK_EX) for path in marks):
        if time.monotonic() >= deadline:
            break
        time.sleep(POLL_S)
    return is_followed


def follow_job(run_dir: str, log_offset: int, metrics_offset: int, events_offset: int) -> None:
    """Print new output of the job as it appears, one JSON object per line. At the job's end, print the job's status.

    Returns early if standard input ends or the output is closed, because the client is then gone. The offset NO_LOG
    skips the log.

        {"log": base64, "offset": n}      {"metrics": {...}, "offset": n}      {"event": {...}, "offset": n}
        {"skipped": "metrics.jsonl", "offset": n}: a line that is not a JSON object      {"status": {...}}

    Each offset is the position in the file after the printed content. A client whose connection broke continues at the
    last received offset.
    """
    while True:
        is_running = is_supervised(run_dir)  # check before reading, so that the last output is not missed
        before = (log_offset, metrics_offset, events_offset)
        if log_offset != NO_LOG:
            log_offset = _emit_log(Path(run_dir, "log.txt"), log_offset)
        metrics_offset = _emit_records("metrics", Path(run_dir, "metrics.jsonl"), metrics_offset)
        events_offset = _emit_records("event", Path(run_dir, "events.jsonl"), events_offset)
        sys.stdout.flush()
        if before != (log_offset, metrics_offset, events_offset):
            continue
        if not is_running:
            emit({"status": read_status(run_dir)})
            sys.stdout.flush()
            return
        is_readable = select.select([0], [], [], POLL_S)[0]
        if is_readable and not os.read(0, READ_BYTES):
            return


def emit(message: JsonObject) -> None:
    sys.stdout.write(json.dumps(message) + "\n")


def _emit_log(path: Path, offset: int) -> int:
    """Print the next piece of the log. Returns the offset after the piece."""
    content = read_from(path, offset, READ_BYTES) if file_size(path) > offset else b""
    if content:
        emit({"log": base64.b64encode(content).decode(), "offset": offset + len(content)})
    return offset + len(content)


def _emit_records(kind: str, path: Path, offset: int) -> int:
    """Print the complete lines of a JSONL file from an offset on. Returns the offset after the last printed line."""
    content = read_from(path, offset, MAX_LINE_BYTES) if file_size(path) > offset else b""
    complete_bytes = content.rfind(b"\n") + 1
    if complete_bytes == 0 and len(content) == MAX_LINE_BYTES:
        emit({"skipped": path.name, "offset": offset + len(content)})  # no valid record has such a long line
        return offset + len(content)
    position = offset
    for line in content[:complete_bytes].split(b"\n")[:-1]:
        position += len(line) + 1
        record = parse_object(line)
        emit({"skipped": path.name, "offset": position} if record is None else {kind: record, "offset": position})
    return position
