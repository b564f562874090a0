"""Read settings from a TOML or JSON file as a record, with absolute paths."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from rollouts_core.config.messages import dotted, explain_validation_error, find_misfits, nested_record
from rollouts_core.config.record import PARTS_ALONE
from rollouts_core.config.reward import has_model_folder
from rollouts_core.errors import ConfigError
from rollouts_core.mistakes import Mistakes
from rollouts_core.system.regular_files import describe_missing, open_file

RecordT = TypeVar("RecordT", bound=BaseModel)
MEANT = re.compile(r"did you mean ([\w.]+)")
MAX_READS = 4
"""Largest number of times that a record is read. An invalid value hides other errors of its record, so the record is
read again without that value."""

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
MAX_NAME_BYTES, MAX_PATH_CHARS = 255, 4000
"""Limits of file systems: bytes of a name, and characters of a path without the folder that the path is relative to."""
DATA_FILE_SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet", ".csv", ".tsv", ".gz", ".bz2", ".xz", ".zst")


def read_settings(path: Path) -> dict[str, Any]:  # Any: unchecked file content
    """Return the content of a TOML or JSON file of settings, without checking the settings."""
    if not path.is_file():
        problem = "is a folder" if path.is_dir() else describe_missing(path)
        raise ConfigError(f"{path} {problem}: give the path of a TOML or JSON configuration")
    try:
        with open_file(path) as file:
            text = file.read().decode("utf-8-sig")  # editors on Windows may add a byte order mark
        is_json = path.suffix == ".json"
        settings = json.loads(text, object_pairs_hook=_table) if is_json else tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}): make it readable") from error
    except (ValueError, RecursionError) as error:
        if path.suffix == ".jsonl":
            raise ConfigError(f"{path} contains rows of data: give the configuration that names it in data") from error
        if path.suffix in (".yaml", ".yml"):
            raise ConfigError(f"{path} is YAML, which is not supported: write it as TOML or JSON") from error
        kind = "JSON" if path.suffix == ".json" else "TOML"
        raise ConfigError(f"{path} is not valid {kind}: {error}") from error
    if not isinstance(settings, dict):
        raise ConfigError(f"{path} must contain a table of settings, found {type(settings).__name__}")
    return settings


def _table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:  # Any: unchecked file content
    """Build the table of a JSON object.

    Raises ValueError for a duplicate key, because JSON would drop its first value.
    """
    table = dict(pairs)
    if len(table) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)} is there twice")
    return table


def resolve_paths(settings: dict[str, Any], base: Path) -> dict[str, Any]:  # Any: unchecked file content
    """Make relative paths in the settings absolute: data files, folders of models, checkpoints to resume from, folders
    of reward models, and files of the engine.

    Jobs run in other folders, so relative paths would not work there. A model path that is not a folder relative to
    `base` may be a hub id and is left unchanged. A `data.sft` of the form `organisation/name` may also be a hub id and
    is left unchanged. URLs are left unchanged.

    Raises:
        ConfigError: a path is too long for any file system.
    """

    def absolute(value: Any) -> Any:
        if not isinstance(value, str) or not value or "://" in value:
            return value
        _check_length(value)
        return str((base / value).resolve())

    def data_file(value: Any) -> Any:
        return _changed(value, absolute, "path") if isinstance(value, dict) else absolute(value)

    def dataset(value: Any) -> Any:
        if isinstance(value, dict):
            return _changed(value, dataset, "path")
        if isinstance(value, list | tuple):
            return [_changed(each, dataset, "path") for each in value]
        return value if isinstance(value, str) and _may_be_hub_id(value, base) else absolute(value)

    def model_folder(value: Any) -> Any:
        if not isinstance(value, str):
            return value
        _check_length(value)
        return absolute(value) if value.startswith((".", "/")) or (base / value).is_dir() else value

    def reward(value: Any) -> Any:
        has_folder = isinstance(value, dict) and has_model_folder(value.get("kind"), value.get("url"))
        return _changed(value, model_folder, "model") if has_folder else value

    def rewards(value: Any) -> Any:
        return [reward(each) for each in value] if isinstance(value, list | tuple) else value

    def engine(value: Any) -> Any:
        return _changed(value, absolute, "requirements", "wheels")

    data: dict[str, Callable[[Any], Any]] = {
        "sft": dataset,
        "prepare": lambda value: _changed(value, dataset, "source"),
    }
    sections: dict[str, Callable[[Any], Any]] = {
        "data": lambda value: _changed_each(value, lambda key, each: data.get(key, data_file)(each)),
        "model": lambda value: _changed(value, model_folder, "path"),
        "training": lambda value: _changed_each(value, lambda _, stage: _changed(stage, absolute, "resume_from")),
        "rollout": lambda value: _changed(_changed(value, engine, "engine"), rewards, "rewards"),
    }
    return {key: sections[key](value) if key in sections else value for key, value in settings.items()}


def _changed(table: Any, change: Callable[[Any], Any], *keys: str) -> Any:
    """Return the table with `change` applied to the values of `keys`.

    A value that is not a table is returned unchanged.
    """
    if not isinstance(table, dict):
        return table
    return {**table, **{key: change(table[key]) for key in keys if key in table}}


def _changed_each(table: Any, change: Callable[[str, Any], Any]) -> Any:
    return {key: change(key, value) for key, value in table.items()} if isinstance(table, dict) else table


def _check_length(path: str) -> None:
    longest = max(len(part.encode(errors="replace")) for part in path.split("/"))
    if longest > MAX_NAME_BYTES or len(path) > MAX_PATH_CHARS:
        raise ConfigError(f"{path[:80]}... is too long for a path or name ({len(path)} characters): correct it")


def _may_be_hub_id(path: str, base: Path) -> bool:
    _check_length(path)
    is_name = HUB_ID.fullmatch(path) is not None and not path.endswith(DATA_FILE_SUFFIXES)
    return is_name and not (base / path).exists()


def parse_config(
    model: type[RecordT],
    settings: dict[str, Any],  # Any: unchecked input
    *,
    source: str,
    table: str = "",
) -> RecordT:
    """Validate `settings` as a record of `model`.

    The ConfigError has one sentence per problem, with `source` and the key within `table`.
    """
    try:
        return model.model_validate(settings)
    except ValidationError as error:
        said = explain_validation_error(error, model, source=source, settings=settings, table=table)
        raise ConfigError(said) from error


def read_record(
    model: type[RecordT],
    settings: dict[str, Any],  # Any: unchecked input
    mistakes: Mistakes,
    *,
    source: str,
    table: str = "",
) -> RecordT | None:
    """Read `settings` as a record of `model`.

    Missing and invalid values are replaced by defaults, and all problems are collected.

    If the valid values break rules between settings, the broken rules are collected too. Returns None if an invalid
    value has no default.

    Args:
        mistakes: collects the problems.
        source: name of the file, for the start of each sentence.
        table: the file's table that contains the settings; "" if the settings are the whole file.
    """
    read = settings
    for _ in range(MAX_READS):
        try:
            return model.model_validate(read)
        except ValidationError as error:
            misfits = find_misfits(error, model, settings, table)
        for path, sentence in misfits:
            mistakes.note(dotted([table, *path]), ConfigError(f"{source}: {sentence}"), names_place=True)
        for path, sentence in misfits:
            mistakes.leave_out(dotted([table, *path]))
            if sentence.startswith("unknown key"):
                leave_out_meant(mistakes, [*filter(None, [table]), *path], sentence)
        read, previous = _with_defaults(read, [path for path, _ in misfits], model), read
        if read == previous:
            break
    try:
        return model.model_validate(read, context=PARTS_ALONE)
    except ValidationError:
        return None


def leave_out_meant(mistakes: Mistakes, path: Sequence[str], sentence: str) -> None:
    """Ignore the setting that a sentence suggests for an unknown key, because its absence is not a second mistake."""
    if meant := MEANT.search(sentence):
        mistakes.leave_out(meant[1] if "." in meant[1] else ".".join([*path[:-1], meant[1]]))


def _with_defaults(
    settings: Any,  # Any: unchecked input
    paths: Sequence[Sequence[str]],
    model: type[BaseModel] | None,
) -> Any:  # Any: unchecked input
    """Remove the values at `paths`. For a path into a list, the whole list is removed.

    A missing value without a default is replaced by a value of the right type, so that the other values can be checked.
    """
    if not isinstance(settings, dict):
        return settings
    read = dict(settings)
    for key in dict.fromkeys(path[0] for path in paths if path):
        below = [path[1:] for path in paths if path and path[0] == key]
        record = nested_record(model, key) if model else None
        if key not in settings:
            read[key] = "-" if record is None else {}
        elif [] in map(list, below) or not isinstance(settings[key], dict):
            del read[key]
        else:
            read[key] = _with_defaults(settings[key], below, record)
    return read
