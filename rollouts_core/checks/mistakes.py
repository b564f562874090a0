"""Collect what is wrong with a configuration, so that one check shows every mistake at once.

Not here: the checks (validate.py), mistakes in the form of settings (config/messages.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rollouts_core.errors import InputError

MAX_SHOWN = 20


class Mistakes:
    """The errors of several checks, each with the setting that it belongs to.

    Args:
        kinds: the errors that are noted.
    """

    def __init__(self, *kinds: type[Exception]) -> None:
        self._kinds = kinds or (InputError,)
        self._errors: list[Exception] = []

    @contextmanager
    def at(self, place: str) -> Iterator[None]:
        """Note an error of the block, with the place in the configuration; errors of other kinds are raised.

        A block that failed is left at once, so a check that needs its result belongs into the same block.
        """
        try:
            yield
        except self._kinds as error:
            text = str(error)
            if any(text in str(each) for each in self._errors):
                return
            if place and place not in text and isinstance(error, InputError):
                located = type(error)(f"{place}: {text}")
                located.__cause__ = error.__cause__
                self._errors.append(located)
            else:
                self._errors.append(error)

    def __bool__(self) -> bool:
        return bool(self._errors)

    def check(self) -> None:
        """Raise what was noted: a single error as itself, several as one that has them in lines of their own.

        Raises:
            Exception: see above; several are an InputError.
        """
        if not self._errors:
            return
        if len(self._errors) == 1:
            raise self._errors[0]
        lines = [line for each in self._errors for line in str(each).splitlines()]
        shown = lines[:MAX_SHOWN]
        if more := len(lines) - len(shown):
            shown.append(f"further mistakes: {more}")
        raise InputError("\n".join(shown)) from self._errors[0]
