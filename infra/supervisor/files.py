"""The files of a run directory that the supervisor reads and writes; the package's head lists them.

Not here: what they mean together (status.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Any: JSON objects, and the parts of /proc, have no better type at this edge.
JsonObject = dict[str, Any]

INTERNAL_DIR = ".job"
POLL_S = 0.1
"""So often it is looked at what may have changed, here and in the modules that use this one."""
READ_BYTES = 256 << 10


def internal_path(run_dir: str, name: str) -> Path:
    """A file that only this program reads and writes."""
    return Path(run_dir, INTERNAL_DIR, name)


def exit_path(run_dir: str, attempt: int) -> Path:
    """Where the record of an attempt's end appears."""
    return Path(run_dir, f"exit-{attempt}.json")


def latest_attempt(run_dir: str) -> int:
    """The number of the last attempt; 0 before the first."""
    numbers = [int(path.stem.removeprefix("meta-")) for path in Path(run_dir, INTERNAL_DIR).glob("meta-*.json")]
    return max(numbers, default=0)


def read_stop_state(run_dir: str, attempt: int) -> JsonObject:
    """What the program of an attempt says of its end: its process, how long it needs, which step is saved."""
    said = read_json(Path(run_dir, "stop.json")) or {}
    return said if said.get("attempt") == attempt else {}


def granted_path(run_dir: str, attempt: int) -> Path:
    """Where the program finds how many seconds it has to save and end."""
    return Path(run_dir, f"stop-{attempt}")


def granted_s(run_dir: str, attempt: int) -> float:
    """How many seconds the program of an attempt has to save and end; 0 if it was not told to."""
    try:
        return float(granted_path(run_dir, attempt).read_text())
    except (OSError, ValueError):
        return 0.0


def parse_object(text: bytes) -> JsonObject | None:
    """The JSON object in a text, or None."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):  # the latter of thousands of brackets
        return None
    return document if isinstance(document, dict) else None


def read_json(path: Path) -> JsonObject | None:
    """The JSON object in a file; None when it is absent, half-written or something else."""
    try:
        return parse_object(path.read_bytes())
    except OSError:
        return None


def write_json(run_dir: str, name: str, document: Mapping[str, Any]) -> None:
    """Write a JSON object atomically and durably to a file of the run directory."""
    part = internal_path(run_dir, f"{Path(name).name}.{os.getpid()}.part")
    try:
        with part.open("w") as file:
            file.write(json.dumps(document, indent=2) + "\n")
            file.flush()
            os.fsync(file.fileno())
        part.rename(Path(run_dir, name))
    finally:
        part.unlink(missing_ok=True)


def file_size(path: Path) -> int:
    """The size in bytes; 0 when there is no such file."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def read_from(path: Path, offset: int, max_bytes: int) -> bytes:
    """The bytes of a file from an offset on; empty when there are none, or no file."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(max_bytes)
    except FileNotFoundError:
        return b""


def read_text(path: Path) -> str:
    """The text of a file; empty when there is none, or none for us."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


def append_event(run_dir: str, attempt: int, event: str, **details: Any) -> None:  # Any: JSON
    """Append an event, as the program will; on a full disk it is left out."""
    path = Path(run_dir, "events.jsonl")
    line = {"event": event, "attempt": attempt, "time": round(time.time(), 3), **details}
    with contextlib.suppress(OSError), path.open("a+b") as file:
        file.seek(0)
        content = file.read()
        file.truncate(content.rfind(b"\n") + 1)  # an attempt that was killed may have torn its last line
        file.write(json.dumps(line).encode() + b"\n")
