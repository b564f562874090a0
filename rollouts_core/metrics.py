"""Append metrics and events to files that are readable while they are written and after a crash.

Not here: what is measured (the loops), how it is drawn (report/).

A line is written whole and flushed; a line that a crash tore is cut off when the file is opened again. A resumed run
writes some steps a second time, so readers keep the last line per step. Lines that a disk damaged are passed over.
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
"""Metrics of micro-batches and ranks whose name ends so combine to the largest; all others are summands."""
NUM_LAST = 100
"""So many lines at the end of a file are never left out."""
LAST_BYTES = 1 << 20
"""So much of the end of a file is read to know its last lines."""


def sum_metrics(results: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The metrics of an update from those of its micro-batches or ranks: maxima by `MAX_SUFFIX`, else sums."""
    return {
        name: (max if name.endswith(MAX_SUFFIX) else sum)(metrics[name] for metrics in results) for name in results[0]
    }


def average_metrics(results: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The metrics of a step from those of its updates: maxima by `MAX_SUFFIX`, else means."""
    return {
        name: value if name.endswith(MAX_SUFFIX) else value / len(results)
        for name, value in sum_metrics(results).items()
    }


class MetricsLogger(Protocol):
    """Whatever takes the numbers of a step."""

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
        """Have everything logged survive a power cut."""
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
    """Have what was logged survive a power cut, where it is in a file of ours: other loggers see to it themselves."""
    if isinstance(metrics_logger, JSONLLogger):
        metrics_logger.sync()


class EventLog:
    """A file with one JSON object per line: `{"event": "checkpoint", "attempt": 1, "time": ..., ...}`."""

    def __init__(self, path: str | Path, *, attempt: int = 1) -> None:
        self.path = Path(path)
        self.attempt = attempt
        self._file = open_for_lines(self.path)

    def write(self, event: str, **details: Any) -> None:  # Any: JSON
        """Append an event; it is on disk when this returns."""
        line = {"event": event, "attempt": self.attempt, "time": round(time.time(), 3), **details}
        append_line(self._file, line)
        os.fsync(self._file.fileno())

    def warn(self, message: str) -> None:
        """Append a warning, and log it; nothing if it is empty."""
        if message:
            logger.warning("%s", message)
            self.write("warning", message=message)

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
    """The whole lines of a metrics, event or sample file; torn and damaged ones are left out."""
    if not path.is_file():
        return []
    with path.open("rb") as lines:
        return _whole_objects(lines)


def read_spread_lines(path: Path, max_lines: int, *, rare: str = "") -> list[dict[str, Any]]:  # Any: JSON
    """`read_json_lines`; of a file of many more than `max_lines` every second one, or third, ..., and the last ones.

    To find where lines begin takes a tenth of the time of reading what they say.

    Args:
        rare: a name that few lines may have, of which as many are read.
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


def read_last_lines(path: Path, max_bytes: int = LAST_BYTES) -> list[dict[str, Any]]:  # Any: JSON
    """The whole lines among the last bytes of a file; a torn last line is left out."""
    if not path.is_file():
        return []
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        if size > max_bytes:
            file.seek(size - max_bytes - 1)
            file.readline()  # the end of one
        else:
            file.seek(0)
        return _whole_objects(file)


def _whole_objects(lines: Iterable[bytes]) -> list[dict[str, Any]]:  # Any: JSON
    return [found for line in lines if line.endswith(b"\n") and (found := parse_line(line)) is not None]


def parse_line(line: bytes) -> dict[str, Any] | None:  # Any: JSON
    """The object in a line of such a file; None of one that a disk, or somebody, damaged."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def read_metrics(path: Path) -> list[dict[str, float]]:
    """One line per step, in order of steps: the last one written for each; see `metrics_by_step`."""
    return metrics_by_step(read_json_lines(path))


def metrics_by_step(lines: Iterable[dict[str, Any]]) -> list[dict[str, float]]:  # Any: JSON
    """One line per step, in order of steps: the last one written for each.

    Without the steps that an attempt came to behind the checkpoint from which a later one went on: these are no part of
    the training before they are done again, and may never be. Steps that go back tell of such an attempt, too: on
    another machine attempts are numbered anew.
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
    """`path` opened for appending whole lines, after cutting a torn last one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_file() and (content := path.read_bytes()) and not content.endswith(b"\n"):
        os.truncate(path, content.rfind(b"\n") + 1)
    return path.open("ab", buffering=0)


def append_line(file: FileIO, record: Mapping[str, Any]) -> None:  # Any: JSON
    """Append a record to a file of `open_for_lines`, whole or not at all.

    A disk that is full, or a quota, takes the beginning of a line and says so only by its length. What is written when
    there is room again must not stand behind that.

    Raises:
        OSError: there is no room for it.
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
