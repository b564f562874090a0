"""Print what a job writes, from where its client stopped, until it ends or nobody listens."""

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
    file_size,
    internal_path,
    parse_object,
    read_from,
)
from rollouts.infra.supervisor.status import is_supervised, read_status

NO_LOG = -1
"""In place of an offset in the log, from which on it is followed."""
MAX_LINE_BYTES = 4 << 20
FOLLOWER_END_S = 3.0
"""Who stops following a job at the moment at which another one cancels it is gone within this time."""


@contextlib.contextmanager
def marked_as_followed(run_dir: str, store: str = "") -> Iterator[None]:
    """Let other stores see that a run of this one follows the job: a lock, which the kernel frees with this process.

    Where the mark cannot be made, as on a full disk or before there is a job, the job is followed without it.
    """
    descriptor = None
    if store:
        with contextlib.suppress(OSError):
            descriptor = os.open(internal_path(run_dir, f"followed-{store}"), os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(descriptor, fcntl.LOCK_SH)  # waits for who looks, which takes a moment
    try:
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def is_followed_elsewhere(run_dir: str, store: str) -> bool:
    """Whether runs of other stores follow the job, and do not stop at this moment."""
    own = internal_path(run_dir, f"followed-{store}")
    marks = [path for path in Path(run_dir, INTERNAL_DIR).glob("followed-*") if path != own]
    # Of two runs that are cancelled at once each would leave the job to the other one, and nobody would end it.
    deadline = time.monotonic() + FOLLOWER_END_S
    while is_followed := any(is_locked(path, fcntl.LOCK_EX) for path in marks):
        if time.monotonic() >= deadline:
            break
        time.sleep(POLL_S)
    return is_followed


def follow_job(run_dir: str, log_offset: int, metrics_offset: int, events_offset: int) -> None:
    """Print what the job writes as it appears, one JSON object per line, and its status when it has ended.

    Ends early when standard input ends or nobody reads the output: the client is gone. Of the log nothing is printed
    from the offset NO_LOG on.

        {"log": base64, "offset": n}      {"metrics": {...}, "offset": n}      {"event": {...}, "offset": n}
        {"skipped": "metrics.jsonl", "offset": n}: a line that is no JSON object      {"status": {...}}

    Each offset is the position behind what the line delivers: where to go on after a broken connection.
    """
    while True:
        is_running = is_supervised(run_dir)  # asked before reading: whatever it wrote is there when it is gone
        before = (log_offset, metrics_offset, events_offset)
        if log_offset != NO_LOG:
            log_offset = emit_log(Path(run_dir, "log.txt"), log_offset)
        metrics_offset = emit_records("metrics", Path(run_dir, "metrics.jsonl"), metrics_offset)
        events_offset = emit_records("event", Path(run_dir, "events.jsonl"), events_offset)
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
    """Print one message of `follow`."""
    sys.stdout.write(json.dumps(message) + "\n")


def emit_log(path: Path, offset: int) -> int:
    """Print the next piece of the log; returns the offset behind it."""
    content = read_from(path, offset, READ_BYTES) if file_size(path) > offset else b""
    if content:
        emit({"log": base64.b64encode(content).decode(), "offset": offset + len(content)})
    return offset + len(content)


def emit_records(kind: str, path: Path, offset: int) -> int:
    """Print the complete lines of a JSONL file from an offset on; returns the offset behind the last of them."""
    content = read_from(path, offset, MAX_LINE_BYTES) if file_size(path) > offset else b""
    complete_bytes = content.rfind(b"\n") + 1
    if complete_bytes == 0 and len(content) == MAX_LINE_BYTES:
        emit({"skipped": path.name, "offset": offset + len(content)})  # no line of ours is that long
        return offset + len(content)
    position = offset
    for line in content[:complete_bytes].split(b"\n")[:-1]:
        position += len(line) + 1
        record = parse_object(line)
        emit({"skipped": path.name, "offset": position} if record is None else {kind: record, "offset": position})
    return position
