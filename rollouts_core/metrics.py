"""Append metrics and events to files of JSON lines that can be read while they are written and after a crash.

Each line is written to the file at once. If a crash truncated a line, the incomplete line is removed when the file is
opened again. A resumed run repeats some steps, so readers keep the last line of each step. Readers skip damaged lines.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

logger = logging.getLogger(__name__)

MAX_SUFFIX = "_max"
"""Suffix of metrics whose maximum is taken when micro-batches or ranks are combined; other metrics are added."""
NUM_LAST = 100
"""`read_spread_lines` always keeps this number of lines from the end of a file."""
LAST_BYTES = 1 << 20
"""Default number of bytes that `read_last_lines` reads from the end of a file."""


def sum_metrics(results: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Combine the metrics of micro-batches or ranks: the maximum for names with `MAX_SUFFIX`, otherwise the sum."""
    return {
        name: (max if name.endswith(MAX_SUFFIX) else sum)(metrics[name] for metrics in results) for name in results[0]
    }


def average_metrics(results: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Combine the metrics of a step's updates: the maximum for names with `MAX_SUFFIX`, otherwise the mean."""
    return {
        name: value if name.endswith(MAX_SUFFIX) else value / len(results)
        for name, value in sum_metrics(results).items()
    }


class MetricsLogger(Protocol):
    """Receives the metrics of each step."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Record the metrics of a step."""
        ...


class JSONLLogger:
    """A file with one JSON object per line: `{"step": 10, "attempt": 1, "time": ..., "loss": 0.7, ...}`."""

    def __init__(self, path: str | Path, *, attempt: int = 1) -> None:
        self.attempt = attempt
        self._file = open_for_lines(Path(path))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Append the metrics of a step."""
        line = {"step": step, "attempt": self.attempt, "time": round(time.time(), 3), **metrics}
        append_line(self._file, line)

    def sync(self) -> None:
        """Flush all logged lines to disk, so that a power failure does not lose them."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file, which already contains all logged lines."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def keep_logged(metrics_logger: MetricsLogger | None) -> None:
    """If the logger is a `JSONLLogger`, flush its lines to disk. For another logger, nothing is done."""
    if isinstance(metrics_logger, JSONLLogger):
        metrics_logger.sync()


class EventLog:
    """A file with one JSON object per line: `{"event": "checkpoint", "attempt": 1, "time": ..., ...}`."""

    def __init__(self, path: str | Path, *, attempt: int = 1) -> None:
        self.path = Path(path)
        self.attempt = attempt
        self._file = open_for_lines(self.path)

    def write(self, event: str, **details: Any) -> None:  # Any: JSON
        """Append an event. The event is on disk when this method returns."""
        line = {"event": event, "attempt": self.attempt, "time": round(time.time(), 3), **details}
        append_line(self._file, line)
        os.fsync(self._file.fileno())

    def warn(self, message: str, **details: Any) -> None:  # Any: JSON
        """Log a warning and append the warning as an event. Does nothing if `message` is empty."""
        if message:
            logger.warning("%s", message)
            self.write("warning", message=message, **details)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_json_lines(path: Path) -> list[dict[str, Any]]:  # Any: JSON
    """The objects in a file of JSON lines, such as metrics, events or samples. Damaged and incomplete lines are left
    out."""
    if not path.is_file():
        return []
    with path.open("rb") as lines:
        return _whole_objects(lines)


def read_spread_lines(path: Path, max_lines: int, *, rare: str = "") -> list[dict[str, Any]]:  # Any: JSON
    """Like `read_json_lines`, but from a long file read only every n-th line and the last `NUM_LAST` lines.

    Only the chosen lines are parsed, because finding the starts of all lines takes a tenth of the time of parsing them.

    Args:
        max_lines: approximate number of lines that are read from a longer file.
        rare: a key that only few lines may have. Lines with this key and lines without this key are thinned separately,
            so that enough lines with the key are kept.
    """
    if not path.is_file():
        return []
    places: dict[bool, list[int]] = {True: [], False: []}
    at, name = 0, f'"{rare}":'.encode()
    with path.open("rb") as file:
        for line in file:
            places[name in line].append(at)
            at += len(line)
        thinned = (found[:: max(1, len(found) // max_lines)] + found[-NUM_LAST:] for found in places.values())
        lines = []
        for place in sorted(set(itertools.chain.from_iterable(thinned))):
            file.seek(place)
            lines.append(file.readline())
    return _whole_objects(lines)


def read_some_lines(path: Path, count: int) -> list[dict[str, Any]]:  # Any: JSON
    """Read at most `count` objects of a file, at even distances in bytes, and the last object.

    The rest of the file is not read.
    """
    if not path.is_file():
        return []
    lines = []
    with path.open("rb") as file:
        size, at = file.seek(0, os.SEEK_END), -1
        for place in range(count):
            file.seek(size * place // count)
            if place:
                file.readline()  # the rest of a line that begins before `place`
            if file.tell() > at:
                lines.append(file.readline())
                at = file.tell() - 1
    return _whole_objects(lines) + read_last_lines(path, LAST_BYTES // 16)[-1:]


def read_last_lines(path: Path, max_bytes: int = LAST_BYTES) -> list[dict[str, Any]]:  # Any: JSON
    """The objects in the last `max_bytes` bytes of a file. An incomplete last line is left out."""
    if not path.is_file():
        return []
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        if size > max_bytes:
            file.seek(size - max_bytes - 1)
            file.readline()  # the rest of a line that begins before these bytes
        else:
            file.seek(0)
        return _whole_objects(file)


def _whole_objects(lines: Iterable[bytes]) -> list[dict[str, Any]]:  # Any: JSON
    return [found for line in lines if line.endswith(b"\n") and (found := parse_line(line)) is not None]


def parse_line(line: bytes) -> dict[str, Any] | None:  # Any: JSON
    """The JSON object in a line; None if the line is damaged."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def read_metrics(path: Path) -> list[dict[str, float]]:
    """The metrics in a file, one line per step; `metrics_by_step` explains which line is kept."""
    return metrics_by_step(read_json_lines(path))


def metrics_by_step(lines: Iterable[dict[str, Any]]) -> list[dict[str, float]]:  # Any: JSON
    """The last line of each step, sorted by step.

    If an attempt went beyond the checkpoint from which a later attempt resumed, the lines of its further steps are
    dropped, because the training does not contain these steps. A step number that decreases also marks a new attempt,
    because a run that moves to another machine counts its attempts from 1 again.
    """
    by_step: dict[int, dict[str, float]] = {}
    before: tuple[object, float] = (None, 0)
    for line in lines:
        if line.get("attempt") != before[0] or line["step"] < before[1]:
            by_step = {step: kept for step, kept in by_step.items() if step < line["step"]}
        before = (line.get("attempt"), line["step"])
        by_step[line["step"]] = line
    return [by_step[step] for step in sorted(by_step)]


def open_for_lines(path: Path) -> FileIO:
    """Open a file for appending lines. An incomplete last line is removed first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_file() and (content := path.read_bytes()) and not content.endswith(b"\n"):
        os.truncate(path, content.rfind(b"\n") + 1)
    return path.open("ab", buffering=0)


def append_line(file: FileIO, record: Mapping[str, Any]) -> None:  # Any: JSON
    """Append a record to a file from `open_for_lines`, completely or not at all.

    On a full disk or quota, `write` may store only the beginning of a line without an error. The incomplete line is
    removed, so that the next record starts on its own line.

    Raises:
        OSError: the disk or the quota has no space left.
    """
    line = json.dumps(record).encode() + b"\n"
    size = os.fstat(file.fileno()).st_size
    num_written = 0
    try:
        while num_written < len(line):
            num_written += file.write(line[num_written:])
    except OSError:
        os.truncate(file.fileno(), size)
        raise
