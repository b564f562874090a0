"""Collect the invalid rows of one file, so that one error names several of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rollouts_core.errors import DataError

MAX_REASONS = 3
MAX_NUMBERS = 5
MAX_KEPT = 1000
"""Highest number of collected errors: a wrong file may have an error in each of its millions of rows."""


class BadRows:
    """The errors of the rows of one file.

    Args:
        source: name of the file, for messages.
    """

    def __init__(self, source: str) -> None:
        self._source = source
        self._errors: dict[int, DataError] = {}
        self._num_bad = 0
        self.num_rows = 0
        """Number of the last row that was read."""

    @contextmanager
    def at(self, number: int) -> Iterator[None]:
        """Collect a DataError of the block under the row's number."""
        try:
            yield
        except DataError as error:
            self.note(number, error)

    def note(self, number: int, error: DataError) -> None:
        """Collect the error of a row, if it is the row's first error."""
        self.num_rows = max(self.num_rows, number)
        if number in self._errors:
            return
        self._num_bad += 1
        if len(self._errors) < MAX_KEPT:
            self._errors[number] = error

    def has(self, number: int) -> bool:
        """True if an error of the row was collected."""
        return number in self._errors

    def __bool__(self) -> bool:
        return self._num_bad > 0

    def check(self) -> None:
        """Raise one error with the first distinct reasons, one per line, and the number of invalid rows.

        Raises:
            DataError: a row was invalid; the type is that of the first row's error.
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
    """Collect errors in `bad`, which the caller checks later. If `bad` is None, check at the end of the block."""
    noted = BadRows(source) if given is None else given
    yield noted
    if given is None:
        noted.check()
