"""Turn a pydantic validation error into sentences. Each sentence says which key is wrong, what was found and what to
do."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from rollouts_core.config.foreign_names import find_foreign_name
from rollouts_core.mistakes import MAX_SHOWN_MISTAKES, place_in

MAX_SHOWN_CHARS = 80
MAX_LINE_CHARS = 1_000
MAX_CHOICES = 4
"""Largest number of choices that a suggestion names."""
CHOICES, CHOICE = ("literal_error", "enum"), re.compile(r"'([^']*)'")
"""Types of pydantic's errors for a value that is not one of the fixed choices, and a pattern for the choices in its
message."""


def explain_validation_error(
    error: ValidationError,
    model: type[BaseModel],
    *,
    source: str,
    settings: Any,  # Any: unchecked input
    table: str = "",
) -> str:
    """Return one sentence per invalid key, one per line. Beyond MAX_SHOWN_MISTAKES lines, only the number of further
    lines is given.

    Args:
        model: type of the record that was validated, for suggestions about misspelt keys.
        source: name of the file or form, for the start of each line.
        settings: the input. The lines follow the order of the input.
        table: the file's table that contains the settings; "" if the settings are the whole file.
    """
    return list_mistakes([sentence for _, sentence in find_misfits(error, model, settings, table)], source=source)


def find_misfits(
    error: ValidationError,
    model: type[BaseModel],
    settings: Any,  # Any: unchecked input
    table: str = "",
) -> list[tuple[tuple[str, ...], str]]:
    """Return each invalid key as a path within `table`, with a sentence, in the order of `settings`."""
    problems = sorted(_of_the_meant_type(error.errors()), key=lambda problem: problem["type"] != "extra_forbidden")
    by_key: dict[tuple[str, ...], ErrorDetails] = {}
    for problem in problems:
        by_key.setdefault(tuple(_path_of(problem, model)), problem)
    ordered = sorted(by_key, key=lambda path: place_in(settings, path))
    return [(path, line) for path in ordered for line in _sentence(by_key[path], list(path), model, table).splitlines()]


def list_mistakes(mistakes: Sequence[str], *, source: str) -> str:
    """Write each mistake on its own line, after the name of the file or form.

    Beyond MAX_SHOWN_MISTAKES, only the number of further mistakes is given.
    """
    shown = list(mistakes[:MAX_SHOWN_MISTAKES])
    if num_more := len(mistakes) - len(shown):
        shown.append(f"further settings that do not fit: {num_more}")
    return "\n".join(f"{source}: {each}" for each in shown)


def closest_name(name: str, known: list[str]) -> str:
    """Return `; did you mean X?` for the known name closest to `name`.

    If no name is close, return the list of known names instead.
    """
    swapped = [each for each in known if sorted(each) == sorted(name)]
    close = swapped or difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if close:
        return f"; did you mean {close[0]}?"
    return f"; known are {', '.join(sorted(known))}" if known else ""


def closest_choice(value: object, choices: Sequence[str]) -> str:
    """Return `; did you mean X?` for the choices that a value may stand for, or "".

    Case and the difference of `-` and `_` are ignored.
    """
    names = {_folded(each): each for each in choices if each}
    given = _folded(value) if isinstance(value, str) else ""
    containing = [each for name, each in names.items() if given and given in name][:MAX_CHOICES]
    close = [names[given]] if given in names else containing
    close = close or [names[each] for each in difflib.get_close_matches(given, names, n=1, cutoff=0.6)]
    *others, last = close or [""]
    return f"; did you mean {' or '.join(filter(None, [', '.join(others), last]))}?" if last else ""


def _folded(text: str) -> str:
    return text.casefold().replace("_", "-").strip()


def suggest_key(
    path: Sequence[str], known: list[str], root: type[BaseModel], *, others: Sequence[str] = (), table: str = ""
) -> str:
    """Return a suggestion for an unknown key.

    The suggestion is the setting for a name from another system, a setting of the same name in another section of
    `root`, or the closest known name.

    Args:
        path: the sections that contain the key, then the key.
        others: dotted names of the file's settings that are not in `root`.
        table: the file's table that `root` describes; "" if `root` describes the whole file.
    """
    if foreign := find_foreign_name(path):
        return f"; here it is {foreign}" if " " in foreign else f"; did you mean {foreign}?"
    around, name = [part for part in path[:-1] if not part.isdecimal()], path[-1]
    section = _record_at(around, root)
    below = [".".join([*around, each]) for each in settings_of(section, with_lists=bool(around))] if section else []
    for settings in (below, [*settings_of(root, with_lists=False), *others]):
        if same := [each for each in settings if _last(each) == name]:
            return f"; did you mean {' or '.join(dotted([table, each]) for each in same)}?"
    hint = closest_name(name, known)
    close = difflib.get_close_matches(name, map(_last, below), n=1, cutoff=0.8)
    if close and hint.startswith("; known are"):
        return f"; did you mean {next(each for each in below if _last(each) in close)}?"
    return hint


def reason_of(problem: ErrorDetails) -> str:
    """The message of the check that rejected a value."""
    return str(problem["ctx"]["error"]) if problem["type"] == "value_error" else problem["msg"]


def first_line(error: BaseException) -> str:
    """The first line of an error's message, shortened; the error's type if it has no message."""
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    return line if len(line) <= MAX_LINE_CHARS else line[:MAX_LINE_CHARS] + "..."


def _sentence(problem: ErrorDetails, path: list[str], model: type[BaseModel], table: str) -> str:
    """Return a sentence about one invalid key. If a record breaks several rules, each rule has its own line."""
    key = dotted([table, *path])
    if problem["type"] == "extra_forbidden":
        return f"unknown key {key}{_suggestion(path, model, table)}"
    if problem["type"] == "missing":
        return f"{key} is missing"
    if problem["type"] == "value_error":
        return "\n".join(f"{key}: {line}" if key else line for line in reason_of(problem).splitlines())
    if problem["type"] in ("model_type", "dict_type"):
        return f"{key}: expected a table of settings, found {_show(problem['input'])}".removeprefix(": ")
    if problem["type"] in ("tuple_type", "list_type"):
        return f"{key}: expected a list, [...], found {_show(problem['input'])}"
    if problem["type"] == "too_short":
        fewest = problem.get("ctx", {}).get("min_length", 1)
        return f"{key}: expected at least {fewest} entr{'y' if fewest == 1 else 'ies'}, found {_show(problem['input'])}"
    if problem["type"] == "callable_type":
        return f'{key}: expected one name, "package.module:function", found {_show(problem["input"])}'
    return f"{key}: {_lower_first(problem['msg'])}, found {_show(problem['input'])}{_meant_choice(problem)}"


def _meant_choice(problem: ErrorDetails) -> str:
    """Return a suggestion for a value that is not one of the fixed choices."""
    choices = CHOICE.findall(str(problem.get("ctx", {}).get("expected", ""))) if problem["type"] in CHOICES else []
    return closest_choice(problem["input"], choices)


def dotted(parts: Iterable[str]) -> str:
    """Join the parts of a setting's name with dots. Empty parts are left out."""
    return ".".join(filter(None, parts))


def _of_the_meant_type(problems: list[ErrorDetails]) -> list[ErrorDetails]:
    """If a field accepts a text or a list and a list was given, drop the problems about the text."""
    lists = [each for each in problems if each["type"] == "string_type" and isinstance(each["input"], list | tuple)]
    return [each for each in problems if each not in lists] or problems


def _path_of(problem: Mapping[str, Any], model: type[BaseModel]) -> list[str]:  # Any: pydantic's details
    """The path of the invalid key. Pydantic's names for the alternatives of a union are left out."""
    path: list[str] = []
    section: type[BaseModel] | None = model
    for part in problem["loc"]:
        if isinstance(part, int):
            path.append(str(part))
        elif "[" not in part:  # a part with [ is the name of a list type in a union; the path within the list follows
            if section is None or (part == "str" and part not in section.model_fields):
                break
            path.append(part)
            section = nested_record(section, part)
    return path


def _suggestion(path: list[str], model: type[BaseModel], table: str) -> str:
    section = _record_at(path[:-1], model)
    return suggest_key(path, list(section.model_fields), model, table=table) if section else ""


def _record_at(path: Sequence[str], model: type[BaseModel]) -> type[BaseModel] | None:
    """The type of the record at a path of sections and list items."""
    section: type[BaseModel] | None = model
    for part in path:
        if section and not part.isdecimal():
            section = nested_record(section, part)
    return section


def settings_of(record: type[BaseModel], *, with_lists: bool) -> Iterator[str]:
    """Yield the dotted names of a record's settings, including the settings in its sections and, with `with_lists`, in
    its lists of records.
    """
    for name, field in record.model_fields.items():
        yield name
        below = nested_record(record, name)
        if below and (with_lists or below is field.annotation):
            yield from (f"{name}.{each}" for each in settings_of(below, with_lists=with_lists))


def _last(setting: str) -> str:
    return setting.rpartition(".")[2]


def nested_record(model: type[BaseModel], name: str) -> type[BaseModel] | None:
    """The type of the record in a field, or of the records in a field's list; None if the field has no record."""
    return _record_in(model.model_fields[name].annotation) if name in model.model_fields else None


def _record_in(annotation: object) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((record for part in get_args(annotation) if (record := _record_in(part))), None)


def _show(value: Any) -> str:  # Any: user input
    shown = repr(value)
    return shown if len(shown) <= MAX_SHOWN_CHARS else shown[:MAX_SHOWN_CHARS] + "..."


def _lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]
