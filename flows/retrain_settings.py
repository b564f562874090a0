"""The tables [retrain] and [schedule]: which data are watched, and when they are checked for changes.

Not here: the other settings (form.py, rollouts_core/config/), the steps of a retraining (tasks/retraining.py).

A schedule's cron expression is checked here without importing prefect. Prefect computes the times of its runs.

    minute 0-59   hour 0-23   day of month 1-31   month 1-12, jan-dec   day of week 0-7, sun-sat
    each: * or a list of values and ranges, with steps: 0,30   9-17   */15   mon-fri
"""

from __future__ import annotations

import re
import zoneinfo
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field

from rollouts.infra.stores.object_store import is_url
from rollouts.tasks.watch import can_change, watched_sources
from rollouts_core.config import Config, Record
from rollouts_core.config.record import Finite
from rollouts_core.errors import ConfigError

LINE_PATTERN = r"^([A-Za-z0-9][A-Za-z0-9._-]{0,63})?$"


class RetrainConfig(Record):
    """Conditions for training again, and for promoting the new model."""

    model: str = Field("", pattern=LINE_PATTERN)
    """Name of the models in the registry: small-1, small-2 and so on. Empty: the run's name."""
    sources: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Files, folders and URLs (s3://bucket/prefix) to watch for changes. Empty: the demonstrations and prompts of the
    training."""
    margin: Finite = 0.0
    """The new model's mean score must exceed the mean score of the model in production by more than this. A negative
    margin accepts a slightly worse model that was trained on newer data."""
    max_p_value: Annotated[Finite, Field(gt=0, le=1)] = 0.01
    """Highest p-value of the comparison with production at which a candidate is promoted (1: promote every
    candidate)."""
    approval: bool = False
    """Ask for approval in Prefect's UI before a better candidate goes into production."""
    force: bool = False
    """Train even if no data changed, for example with other settings."""
    max_failures: int = Field(3, ge=1)
    """After this many failed retrainings in a row on the same data, do not train again until the data change."""

    def beside(self, folder: Path) -> Self:
        """These settings with absolute paths. Relative paths in `sources` start in `folder`."""
        absolute = (each if is_url(each) else str((folder / each).resolve()) for each in self.sources)
        return self.model_copy(update={"sources": tuple(absolute)})


class ScheduleConfig(Record):
    """Schedule of the checks whether data changed."""

    cron: str = ""
    """Cron expression of five fields: "0 3 * * *" is every day at three."""
    interval_minutes: Annotated[Finite, Field(ge=1)] | None = None
    """Instead of `cron`: minutes between two checks, counted from midnight."""
    time_zone: str = "UTC"
    """Name of the time zone of `cron`, for example Europe/Berlin."""
    overlap: Literal["queue", "skip"] = "queue"
    """Rule for a check that is due while the previous check still runs. queue: the due check waits. skip: the due check
    is skipped."""

    def _broken_rules(self) -> Iterator[str]:
        if bool(self.cron) == (self.interval_minutes is not None):
            yield 'a schedule has either cron, as in "0 3 * * *", or interval_minutes'
        if self.cron:
            try:
                check_cron(self.cron)
            except ValueError as error:
                yield str(error)
        if self.time_zone not in zoneinfo.available_timezones():
            yield f"time_zone {self.time_zone!r} is not known: expected a name like Europe/Berlin or UTC"


def check_retraining(
    config: Config, retrain: RetrainConfig | None, schedule: ScheduleConfig | None, *, source: str
) -> None:
    """Raise ConfigError for a [schedule] without [retrain], or with data that can never change."""
    if retrain is None:
        if schedule is not None:
            raise ConfigError(f"{source}: the table schedule needs the table retrain: add it")
        return
    if schedule is not None and not can_change(watched_sources(config, retrain.sources)):
        raise ConfigError(
            f"{source}: the watched data can never change, because every dataset is pinned to a commit: leave out its "
            "revision, or name files or folders in retrain.sources"
        )


MONTH_NAMES = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
MONTHS = {name: number for number, name in enumerate(MONTH_NAMES, start=1)}
WEEKDAYS = {"sun": 0, "mon": 1, "tue": 2, "wed": 3, "thu": 4, "fri": 5, "sat": 6}
FIELDS: tuple[tuple[str, int, int, Mapping[str, int]], ...] = (
    ("minute", 0, 59, {}),
    ("hour", 0, 23, {}),
    ("day of month", 1, 31, {}),
    ("month", 1, 12, MONTHS),
    ("day of week", 0, 7, WEEKDAYS),
)
DAYS_OF_MONTH = (31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
PART = re.compile(r"(?P<first>\*|[A-Za-z0-9]+)(?:-(?P<last>[A-Za-z0-9]+))?(?:/(?P<step>[0-9]+))?")


def check_cron(expression: str) -> None:
    """Raise ValueError if the text is not a valid cron expression, or if it matches no existing day."""
    texts = expression.split()
    if len(texts) != len(FIELDS):
        raise ValueError(
            f"{expression!r} has {len(texts)} fields: expected minute, hour, day of month, month and day of week, as "
            'in "0 3 * * 1"'
        )
    values = [_read_field(text, *field) for text, field in zip(texts, FIELDS, strict=True)]
    _, _, days, months, _ = values
    if texts[4] == "*" and not any(day <= DAYS_OF_MONTH[month - 1] for day in days for month in months):
        raise ValueError(f"{expression!r} names a day of month that its months do not have")


def _read_field(text: str, name: str, low: int, high: int, names: Mapping[str, int]) -> set[int]:
    values: set[int] = set()
    for part in text.split(","):
        match = PART.fullmatch(part)
        if match is None or (match["first"] == "*" and match["last"]):
            raise ValueError(f"{part!r} is not a valid {name}: expected *, a number, a range like {low}-{high}, or */2")
        step = int(match["step"] or 1)
        if match["first"] == "*":
            first, last = low, high
        else:
            first = _read_number(match["first"], name, low, high, names)
            is_open = match["step"] is not None and match["last"] is None
            last = high if is_open else _read_number(match["last"] or match["first"], name, low, high, names)
        if last < first or not step:
            raise ValueError(f"{part!r} is not a valid range of {name}: its end is before its start, or its step is 0")
        values.update(range(first, last + 1, step))
    return values


def _read_number(text: str, name: str, low: int, high: int, names: Mapping[str, int]) -> int:
    number = names.get(text.lower(), int(text) if text.isdigit() else -1)
    if not low <= number <= high:
        raise ValueError(f"{text!r} is not a valid {name}: expected {low} to {high}")
    return number
