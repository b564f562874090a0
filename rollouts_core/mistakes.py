"""Collect configuration errors, so that one check shows all errors at once.

`checks/validate.py` and `config/files.py` find the errors.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from rollouts_core.errors import InputError

MAX_SHOWN_MISTAKES = 20
SETTING = re.compile(r"[a-z_]+(?:\.\w+)+")


@dataclass(frozen=True, slots=True)
class _Noted:
    place: str
    text: str
    """The error's text. Each line starts with the place (the setting), unless the line already names the setting."""
    error: Exception


class Mistakes:
    """The errors that several checks raised, each with the setting that it belongs to.

    Args:
        kinds: exception types to collect. Several errors are raised as one exception, of the first listed type that any
            of the errors has.
    """

    def __init__(self, *kinds: type[Exception]) -> None:
        self._kinds = kinds or (InputError,)
        self._settings: Mapping[str, Any] = {}
        self._noted: list[_Noted] = []
        self._places: set[str] = set()
        """Settings with errors, including errors that were not collected because their text was already collected."""
        self._left_out: set[str] = set()

    def order_by(self, settings: Mapping[str, Any]) -> None:  # Any: unchecked input
        """Sort the errors in the order in which their settings occur in the configuration file."""
        self._settings = settings

    def leave_out(self, setting: str) -> None:
        """Ignore errors that name this setting, because later checks see a default in place of its invalid value."""
        self._left_out |= {setting} - {""}

    @contextmanager
    def at(self, place: str) -> Iterator[None]:
        """Collect an error of the `with` block for this setting. Errors of other types are raised.

        The block ends at its first error, so a check that needs the result of another check belongs into the same
        block.
        """
        try:
            yield
        except self._kinds as error:
            self.note(place, error)

    def note(self, place: str, error: Exception, *, names_place: bool = False) -> None:
        """Collect an error, unless it names an ignored setting or its text is already part of a collected error.

        Args:
            names_place: whether the error's text already names its setting.
        """
        text = str(error)
        if self._is_left_out(place, text):
            return
        self._places.add(place)
        if any(text in each.text for each in self._noted):
            return
        is_whole = names_place or not place or not isinstance(error, InputError)
        lines = [line if is_whole or _names(line, place) else f"{place}: {line}" for line in text.splitlines()]
        self._noted.append(_Noted(place, "\n".join(lines), error))

    def rename_source(self, settings: Iterable[str], source: str, other: str) -> None:
        """Replace the file's name at the beginning of errors by `other`, in errors of these settings and of settings
        below them.
        """
        renamed = tuple(f"{each}." for each in settings)
        begins = re.compile(rf"^{re.escape(source)}: ", re.MULTILINE)
        self._noted = [
            replace(each, text=begins.sub(f"{other}: ", each.text)) if f"{each.place}.".startswith(renamed) else each
            for each in self._noted
        ]

    def has(self, place: str) -> bool:
        """Return True if the setting, or a setting below it, has an error or is ignored."""
        is_left_out = any(f"{place}.".startswith(f"{each}.") for each in self._left_out)
        marked = [*self._left_out, *self._places]
        return is_left_out or any(f"{each}.".startswith(f"{place}.") for each in marked)

    def __bool__(self) -> bool:
        return bool(self._noted)

    def check(self) -> None:
        """Raise the collected errors.

        A single error keeps its type. Several errors become one exception with a line for each error.

        Raises:
            Exception: an exception whose type is among the collected types.
        """
        if not self._noted:
            return
        [first, *others] = sorted(self._noted, key=self._position)
        if others:
            kind = next(kind for kind in self._kinds if any(isinstance(each.error, kind) for each in self._noted))
            raise kind(self.describe()) from first.error
        if first.text == str(first.error):
            raise first.error
        raise type(first.error)(first.text) from first.error

    def describe(self) -> str:
        """The collected errors in the order of the configuration, one per line.

        Beyond MAX_SHOWN_MISTAKES lines, only the number of further errors is given.
        """
        ordered = sorted(self._noted, key=self._position)
        lines = [line for each in ordered for line in each.text.splitlines()]
        shown = lines[:MAX_SHOWN_MISTAKES]
        if more := len(lines) - len(shown):
            shown.append(f"further mistakes: {more}")
        return "\n".join(shown)

    def _is_left_out(self, place: str, text: str) -> bool:
        words = [word for found in _sibling_names(place).findall(text) for word in found if word]
        beside = {f"{place}.{word}" for word in words} if place else set()
        named = {place, *SETTING.findall(text), *beside}
        return any(f"{name}.".startswith(f"{each}.") for name in named for each in self._left_out)

    def _position(self, noted: _Noted) -> tuple[int, ...]:
        """Position in the configuration of the first setting that the error names, otherwise of the check's setting."""
        named = [name for name in SETTING.findall(noted.text) if name.partition(".")[0] in self._settings]
        within = [name for name in named if not noted.place or f"{name}.".startswith(f"{noted.place}.")]
        return place_in(self._settings, (within[0] if within else noted.place).split("."))


def _sibling_names(place: str) -> re.Pattern[str]:
    """Return a pattern for the words that an error's text uses as names of settings: in backticks, with an underscore,
    or as its subject.

    Other words are plain language, such as "prompts" in "12 prompts". Parts of file paths do not match.
    """
    subject = rf"(?:^|{re.escape(place)}: )(\w+)"
    return re.compile(rf"`(\w+)`|(?<![\w./-])([a-z0-9]+(?:_[a-z0-9]+)+)(?![\w/-]|\.\w)|{subject}", re.MULTILINE)


def _names(line: str, place: str) -> bool:
    """Return True if a line names the setting, or begins with the list or table that contains the setting."""
    parents = [place[: match.start()] for match in re.finditer(r"\.", place)]
    return place in line or line.startswith(tuple(f"{each}:" for each in parents))


def place_in(settings: Any, path: Sequence[str]) -> tuple[int, ...]:  # Any: unchecked input
    """Position of a key in the order of the settings. A missing key comes after all other keys of its section."""
    place: list[int] = []
    section = settings
    for part in path:
        if isinstance(section, Mapping):
            names = [str(name) for name in section]
            place.append(names.index(part) if part in names else len(names))
            section = section.get(part)
        elif isinstance(section, list | tuple) and part.isdecimal():
            place.append(int(part))
            section = section[int(part)] if int(part) < len(section) else None
    return tuple(place)
