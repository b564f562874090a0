"""Collect the rows of one file that do not fit, so that one error names several of them.

Not here: what a row may look like (conversations.py, dataset.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rollouts_core.errors import DataError

MAX_REASONS = 3
MAX_NUMBERS = 5
MAX_KEPT = 1000
"""Errors that are kept: a file of another kind has one in each of its millions of rows."""


class BadRows:
    """The errors of the rows of one file.

    Args:
        source: the file, for errors.
    """

    def __init__(self, source: str) -> None:
        self._source = source
        self._errors: dict[int, DataError] = {}
        self._num_bad = 0
        self.num_rows = 0
        """The number of the last row that was looked at."""

    @contextmanager
    def at(self, number: int) -> Iterator[None]:
        """Note a DataError of the block with the number of the row."""
        try:
            yield
        except DataError as error:
            self.note(number, error)

    def note(self, number: int, error: DataError) -> None:
        """Note the error of a row; of several errors of a row, the first."""
        self.num_rows = max(self.num_rows, number)
        if number in self._errors:
            return
        self._num_bad += 1
        if len(self._errors) < MAX_KEPT:
            self._errors[number] = error

    def has(self, number: int) -> bool:
        """Whether the error of a row was noted, and kept."""
        return number in self._errors

    def __bool__(self) -> bool:
        return self._num_bad > 0

    def check(self) -> None:
        """Raise what was noted: the first different reasons in lines of their own, and how many rows do not fit.

        Raises:
            DataError: see above; of the kind that the first row raised.
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
            lines.append(f"{self._source}: {self._num_bad} of {self.num_rows} rows do not fit: {named}")
        raise type(first)("\n".join(lines)) from first


@contextmanager
def noted_rows(source: str, given: BadRows | None) -> Iterator[BadRows]:
    """The rows that were given, which the caller checks; else new ones, which are checked at the end of the block."""
    noted = BadRows(source) if given is None else given
    yield noted
    if given is None:
        noted.check()
