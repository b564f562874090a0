"""Is a text a cron expression of five fields that comes to pass? Checked without prefect, before anything is started.

Not here: when it fires next, which Prefect works out from the same text.

    minute 0-59   hour 0-23   day of month 1-31   month 1-12, jan-dec   day of week 0-7, sun-sat
    each: * or a list of values and ranges, with steps: 0,30   9-17   */15   mon-fri
"""

from __future__ import annotations

import re
from collections.abc import Mapping

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
    """Raise ValueError, with a reason, for what is no cron expression or names days that no year has."""
    texts = expression.split()
    if len(texts) != len(FIELDS):
        raise ValueError(
            f"{expression!r} has {len(texts)} fields: expected minute, hour, day of month, month and day of week, as "
            'in "0 3 * * 1"'
        )
    values = [_read_field(text, *field) for text, field in zip(texts, FIELDS, strict=True)]
    _, _, days, months, _ = values
    if texts[4] == "*" and not any(day <= DAYS_OF_MONTH[month - 1] for day in days for month in months):
        raise ValueError(f"{expression!r} names a day that its months do not have")


def _read_field(text: str, name: str, low: int, high: int, names: Mapping[str, int]) -> set[int]:
    values: set[int] = set()
    for part in text.split(","):
        match = PART.fullmatch(part)
        if match is None or (match["first"] == "*" and match["last"]):
            raise ValueError(f"{part!r} is no {name}: expected *, a number, a range like {low}-{high}, or */2")
        step = int(match["step"] or 1)
        if match["first"] == "*":
            first, last = low, high
        else:
            first = _read_number(match["first"], name, low, high, names)
            is_open = match["step"] is not None and match["last"] is None
            last = high if is_open else _read_number(match["last"] or match["first"], name, low, high, names)
        if last < first or not step:
            raise ValueError(f"{part!r} is no range of {name}: its end lies before its start, or its step is 0")
        values.update(range(first, last + 1, step))
    return values


def _read_number(text: str, name: str, low: int, high: int, names: Mapping[str, int]) -> int:
    number = names.get(text.lower(), int(text) if text.isdigit() else -1)
    if not low <= number <= high:
        raise ValueError(f"{text!r} is no {name}: expected {low} to {high}")
    return number
