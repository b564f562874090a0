"""Collect the errors of invalid rows in a file, so that one exception reports several rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rollouts_core.errors import DataError

MAX_REASONS = 3
MAX_NUMBERS = 5
MAX_KEPT = 1000
"""Highest number of errors kept in memory, because a wrong file may have millions of invalid rows."""


class BadRows:
    """Collects the errors of invalid rows in one file.

    Args:
        source: name of the file for the error message.
    """

    def __init__(self, source: str) -> None:
        self._source = source
        self._errors: dict[int, DataError] = {}
        self._num_bad = 0
        self.num_rows = 0
        """Number of the last row that was read. Rows are numbered from 1."""

    @contextmanager
    def at(self, number: int) -> Iterator[None]:
        """Context manager that collects a DataError of its block as the error of row `number`."""
        try:
            yield
        except DataError as error:
            self.note(number, error)

    def note(self, number: int, error: DataError) -> None:
        """Record the error of a row. Later errors of the same row are ignored."""
        self.num_rows = max(self.num_rows, number)
        if number in self._errors:
            return
        self._num_bad += 1
        if len(self._errors) < MAX_KEPT:
            self._errors[number] = error

    def has(self, number: int) -> bool:
        """True if an error of this row was collected."""
        return number in self._errors

    def __bool__(self) -> bool:
        return self._num_bad > 0

    def check(self) -> None:
        """Raise one error that reports all collected errors: the first distinct reasons, and the number of invalid
        rows.

        Raises:
            DataError: a row is invalid. The exception has the type of the first invalid row's error.
        """
        if not self._errors:
            return
        numbers = sorted(self._errors)
        first = self._errors[numbers[0]]
        reasons: dict[str, str] = {}
        for number in numbers:
            place = f"{self._source}, row {number}"
            text = str(self._errors[number])
            whole = text if text.startswith(place) else f"{place}: {text}"
            reasons.setdefault(whole.removeprefix(place), whole)
        lines = list(reasons.values())[:MAX_REASONS]
        if self._num_bad > 1:
            named = ", ".join(map(str, numbers[:MAX_NUMBERS])) + ", ..." * (self._num_bad > MAX_NUMBERS)
            lines.append(f"{self._source}: {self._num_bad} of {self.num_rows} rows are invalid: {named}")
        raise type(first)("\n".join(lines)) from first


@contextmanager
def noted_rows(source: str, given: BadRows | None) -> Iterator[BadRows]:
    """Context manager that gives a `BadRows` to collect errors of `source`.

    If the caller passes its own `BadRows` as `given`, the caller checks it later. If `given` is None, the end of the
    block raises the collected errors.
    """
    noted = BadRows(source) if given is None else given
    yield noted
    if given is None:
        noted.check()
