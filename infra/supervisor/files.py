"""Read and write the files of a run directory. The docstring of the package `supervisor` lists these files."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# JSON objects, and the fields of /proc, have no better type than Any.
JsonObject = dict[str, Any]

INTERNAL_DIR = ".job"
POLL_S = 0.1
READ_BYTES = 256 << 10


def internal_path(run_dir: str, name: str) -> Path:
    return Path(run_dir, INTERNAL_DIR, name)


def exit_path(run_dir: str, attempt: int) -> Path:
    return Path(run_dir, f"exit-{attempt}.json")


def latest_attempt(run_dir: str) -> int:
    """Return the number of the latest attempt, or 0 before the first attempt."""
    numbers = [int(path.stem.removeprefix("meta-")) for path in Path(run_dir, INTERNAL_DIR).glob("meta-*.json")]
    return max(numbers, default=0)


def read_stop_state(run_dir: str, attempt: int) -> JsonObject:
    """Return stop.json (the program's process, needed time, saved step) of this attempt, or an empty dict if the file
    is missing."""
    said = read_json(Path(run_dir, "stop.json")) or {}
    return said if said.get("attempt") == attempt else {}


def granted_path(run_dir: str, attempt: int) -> Path:
    """Return the path of the file with the seconds that the program has for saving."""
    return Path(run_dir, f"stop-{attempt}")


def granted_s(run_dir: str, attempt: int) -> float:
    """Return the seconds that the program of an attempt has for saving, or 0 if the program was not asked to end."""
    try:
        return float(granted_path(run_dir, attempt).read_text())
    except (OSError, ValueError):
        return 0.0


def parse_object(text: bytes) -> JsonObject | None:
    """Parse a JSON object, or return None if the text is not a JSON object."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):  # RecursionError: the text has thousands of nested brackets
        return None
    return document if isinstance(document, dict) else None


def read_json(path: Path) -> JsonObject | None:
    try:
        return parse_object(path.read_bytes())
    except OSError:
        return None


def write_json(run_dir: str, name: str, document: Mapping[str, Any]) -> None:
    """Write a JSON object to a file of the run directory, atomically and with fsync."""
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
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def read_from(path: Path, offset: int, max_bytes: int) -> bytes:
    """Return at most `max_bytes` bytes of a file from an offset on, or b"" at the file's end, or if the file is
    missing."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(max_bytes)
    except FileNotFoundError:
        return b""


def read_text(path: Path) -> str:
    """Return the text of a file. The text is empty if the file is missing or unreadable."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


def append_event(run_dir: str, attempt: int, event: str, **details: Any) -> None:  # Any: JSON
    """Append an event to the program's events.jsonl. On a full disk the event is dropped."""
    path = Path(run_dir, "events.jsonl")
    line = {"event": event, "attempt": attempt, "time": round(time.time(), 3), **details}
    with contextlib.suppress(OSError), path.open("a+b") as file:
        file.seek(0)
        content = file.read()
        file.truncate(content.rfind(b"\n") + 1)  # a killed attempt may have left an incomplete last line
        file.write(json.dumps(line).encode() + b"\n")
