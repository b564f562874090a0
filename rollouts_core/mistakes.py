"""Collect what is wrong with a configuration, so that one check shows every mistake at once.

Not here: the checks (checks/validate.py), the sentences about the form of settings (config/messages.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rollouts_core.errors import InputError

MAX_SHOWN_MISTAKES = 20
SETTING = re.compile(r"[a-z_]+(?:\.\w+)+")


@dataclass(frozen=True, slots=True)
class _Noted:
    place: str
    text: str
    """With the place at the start of each line that does not name it."""
    error: Exception


class Mistakes:
    """The errors of several checks, each with the setting that it belongs to.

    Args:
        kinds: the errors that are noted. Several errors are raised together as the first of these kinds that is among
            them.
    """

    def __init__(self, *kinds: type[Exception]) -> None:
        self._kinds = kinds or (InputError,)
        self._settings: Mapping[str, Any] = {}
        self._noted: list[_Noted] = []
        self._places: set[str] = set()
        """Where errors were found, also those that are told already."""
        self._left_out: set[str] = set()

    def order_by(self, settings: Mapping[str, Any]) -> None:  # Any: unchecked input
        """Raise the errors in the order of these settings, which is that of the file."""
        self._settings = settings

    def leave_out(self, setting: str) -> None:
        """Note no error that names this setting: its value did not fit, and checks see another one."""
        self._left_out |= {setting} - {""}

    @contextmanager
    def at(self, place: str) -> Iterator[None]:
        """Note an error of the block, with the place in the configuration; errors of other kinds are raised.

        A block that failed is left at once, so a check that needs its result belongs into the same block.
        """
        try:
            yield
        except self._kinds as error:
            self.note(place, error)

    def note(self, place: str, error: Exception, *, names_place: bool = False) -> None:
        """Note an error, unless it is about a setting that was left out; the same error again marks its place alone.

        Args:
            names_place: the error says already where it belongs.
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

    def has(self, place: str) -> bool:
        """Whether an error was found at the setting or below it, or one of these was left out."""
        is_left_out = any(f"{place}.".startswith(f"{each}.") for each in self._left_out)
        marked = [*self._left_out, *self._places]
        return is_left_out or any(f"{each}.".startswith(f"{place}.") for each in marked)

    def __bool__(self) -> bool:
        return bool(self._noted)

    def check(self) -> None:
        """Raise what was noted: a single error as itself, several as one that has them in lines of their own.

        Raises:
            Exception: see above.
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
        """The errors in the order of the configuration, in lines; after MAX_SHOWN_MISTAKES lines they are counted."""
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
        """Where the configuration has the setting that an error names first, else the place of the check."""
        named = [name for name in SETTING.findall(noted.text) if name.partition(".")[0] in self._settings]
        within = [name for name in named if not noted.place or f"{name}.".startswith(f"{noted.place}.")]
        return place_in(self._settings, (within[0] if within else noted.place).split("."))


def _sibling_names(place: str) -> re.Pattern[str]:
    """Names that a sentence about a section has for its settings: in backticks, with an underscore, or as its subject.

    Other words may be of the language alone, as the prompts of "12 prompts". Parts of paths are no names.
    """
    subject = rf"(?:^|{re.escape(place)}: )(\w+)"
    return re.compile(rf"`(\w+)`|(?<![\w./-])([a-z0-9]+(?:_[a-z0-9]+)+)(?![\w/-]|\.\w)|{subject}", re.MULTILINE)


def _names(line: str, place: str) -> bool:
    """Whether a sentence names the setting, or begins with the list or table that has it."""
    parents = [place[: match.start()] for match in re.finditer(r"\.", place)]
    return place in line or line.startswith(tuple(f"{each}:" for each in parents))


def place_in(settings: Any, path: Sequence[str]) -> tuple[int, ...]:  # Any: unchecked input
    """The place of a key in the order of the settings; one that is missing is behind all others of its section."""
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
