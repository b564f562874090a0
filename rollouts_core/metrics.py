"""Append metrics and events to files that stay readable while they are written and after a crash.

Each line is flushed whole. A line torn by a crash is cut off when the file is opened again. A resumed run repeats some
steps, so readers keep the last line per step. Readers skip lines that a disk damaged.
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
"""Metrics of micro-batches and ranks with this suffix combine by maximum; all other metrics are summed."""
NUM_LAST = 100
"""Number of last lines that `read_spread_lines` always keeps."""
LAST_BYTES = 1 << 20
"""Number of last bytes that `read_last_lines` reads, bytes."""


def sum_metrics(results: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Combine the metrics of micro-batches or ranks: maxima for `MAX_SUFFIX`, else sums."""
    return {
        name: (max if name.endswith(MAX_SUFFIX) else sum)(metrics[name] for metrics in results) for name in results[0]
    }


def average_metrics(results: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Combine the metrics of a step's updates: maxima for `MAX_SUFFIX`, else means."""
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
        """Flush everything logged to disk, to survive a power failure."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file; everything logged is already in it."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def keep_logged(metrics_logger: MetricsLogger | None) -> None:
    """Flush the metrics to disk if the logger is a `JSONLLogger`. Other loggers flush by themselves."""
    if isinstance(metrics_logger, JSONLLogger):
        metrics_logger.sync()


class EventLog:
    """A file with one JSON object per line: `{"event": "checkpoint", "attempt": 1, "time": ..., ...}`."""

    def __init__(self, path: str | Path, *, attempt: int = 1) -> None:
        self.path = Path(path)
        self.attempt = attempt
        self._file = open_for_lines(self.path)

    def write(self, event: str, **details: Any) -> None:  # Any: JSON
        """Append an event. The event is on disk when this returns."""
        line = {"event": event, "attempt": self.attempt, "time": round(time.time(), 3), **details}
        append_line(self._file, line)
        os.fsync(self._file.fileno())

    def warn(self, message: str, **details: Any) -> None:  # Any: JSON
        """Append a warning and log it; an empty message does nothing."""
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
    """The objects in a metrics, event or sample file; torn and damaged lines are left out."""
    if not path.is_file():
        return []
    with path.open("rb") as lines:
        return _whole_objects(lines)


def read_spread_lines(path: Path, max_lines: int, *, rare: str = "") -> list[dict[str, Any]]:  # Any: JSON
    """Like `read_json_lines`, but from a long file only every n-th line and the last `NUM_LAST` lines.

    Finding the beginnings of lines takes a tenth of the time of parsing them.

    Args:
        max_lines: from a file with many more lines, only about this many lines are read.
        rare: a key that few lines may have. Lines with the key are chosen separately.
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
    """At most `count` of the objects in a file, at even distances in bytes, and the last one; reads nothing else."""
    if not path.is_file():
        return []
    lines = []
    with path.open("rb") as file:
        size, at = file.seek(0, os.SEEK_END), -1
        for place in range(count):
            file.seek(size * place // count)
            if place:
                file.readline()  # the rest of a line that begins earlier
            if file.tell() > at:
                lines.append(file.readline())
                at = file.tell() - 1
    return _whole_objects(lines) + read_last_lines(path, LAST_BYTES // 16)[-1:]


def read_last_lines(path: Path, max_bytes: int = LAST_BYTES) -> list[dict[str, Any]]:  # Any: JSON
    """The objects among the last bytes of a file; a torn last line is left out."""
    if not path.is_file():
        return []
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        if size > max_bytes:
            file.seek(size - max_bytes - 1)
            file.readline()  # the rest of a line that begins earlier
        else:
            file.seek(0)
        return _whole_objects(file)


def _whole_objects(lines: Iterable[bytes]) -> list[dict[str, Any]]:  # Any: JSON
    return [found for line in lines if line.endswith(b"\n") and (found := parse_line(line)) is not None]


def parse_line(line: bytes) -> dict[str, Any] | None:  # Any: JSON
    """The object in a line; None if the line is damaged."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def read_metrics(path: Path) -> list[dict[str, float]]:
    """The metrics in a file, one line per step; see `metrics_by_step`."""
    return metrics_by_step(read_json_lines(path))


def metrics_by_step(lines: Iterable[dict[str, Any]]) -> list[dict[str, float]]:  # Any: JSON
    """The last line of each step, in order of steps.

    If an attempt went beyond the checkpoint that a later attempt resumed from, its later steps are dropped: they are
    not part of the training. A step number that goes back also marks a new attempt, because another machine counts
    attempts from 1 again.
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
    """Open a file for appending lines, after cutting off a torn last line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_file() and (content := path.read_bytes()) and not content.endswith(b"\n"):
        os.truncate(path, content.rfind(b"\n") + 1)
    return path.open("ab", buffering=0)


def append_line(file: FileIO, record: Mapping[str, Any]) -> None:  # Any: JSON
    """Append a record to a file of `open_for_lines`, completely or not at all.

    On a full disk or quota, `write` stores the beginning of the line without an error. The part is removed, so that
    later lines do not follow it.

    Raises:
        OSError: no space is left.
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
