"""Settings from a TOML or JSON file: read, with absolute paths, as a record.

Not here: what the settings mean (the records beside this file), how a misfit is worded (messages.py).
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from rollouts_core.config.messages import explain_validation_error
from rollouts_core.config.reward import has_model_folder
from rollouts_core.errors import ConfigError

RecordT = TypeVar("RecordT", bound=BaseModel)

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
MAX_NAME_BYTES, MAX_PATH_CHARS = 255, 4000
"""What a file system takes, beside the folder that the path is relative to."""
DATA_FILE_SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet", ".csv", ".tsv", ".gz", ".bz2", ".xz")


def read_settings(path: Path) -> dict[str, Any]:  # Any: unchecked file content
    """The content of a TOML or JSON settings file, unchecked."""
    if not path.is_file():
        problem = "is a folder" if path.is_dir() else "does not exist"
        raise ConfigError(f"{path} {problem}: give the path of a TOML or JSON configuration")
    try:
        text = path.read_text(encoding="utf-8-sig")  # editors of Windows mark UTF-8
        is_json = path.suffix == ".json"
        settings = json.loads(text, object_pairs_hook=_table) if is_json else tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}): make it readable") from error
    except (ValueError, RecursionError) as error:
        if path.suffix == ".jsonl":
            raise ConfigError(f"{path} holds rows of data: give the configuration that names it in [data]") from error
        if path.suffix in (".yaml", ".yml"):
            raise ConfigError(f"{path} is YAML, which is not read: write it as TOML or JSON") from error
        kind = "JSON" if path.suffix == ".json" else "TOML"
        raise ConfigError(f"{path} is not valid {kind}: {error}") from error
    if not isinstance(settings, dict):
        raise ConfigError(f"{path} must hold a table of settings at its top, found {type(settings).__name__}")
    return settings


def _table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:  # Any: unchecked file content
    """The table of these settings; ValueError for one that is there twice, of which the first would not count."""
    table = dict(pairs)
    if len(table) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)} is there twice")
    return table


def resolve_paths(settings: dict[str, Any], base: Path) -> dict[str, Any]:  # Any: unchecked file content
    """`settings` with data paths, and a model path that exists as a folder, made absolute against `base`.

    So do the checkpoints to resume from, and the folders of rewards' models: jobs run in folders of their own. A model
    path that is no folder beside the file stays as it is: it may be a hub id. So does `data.sft` where it reads
    `organisation/name` and is nothing beside the file. URLs stay as they are.

    Raises:
        ConfigError: a path that is longer than any file's.
    """

    def absolute(value: Any) -> Any:  # Any: unchecked file content
        if not isinstance(value, str) or not value or "://" in value:
            return value
        _check_length(value)
        return str((base / value).resolve())

    def table(value: Any, resolve: Callable[[Any], Any]) -> Any:  # Any: unchecked file content
        return {**value, "path": resolve(value["path"])} if isinstance(value, dict) and "path" in value else value

    def data_file(value: Any) -> Any:  # Any: unchecked file content
        return table(value, absolute) if isinstance(value, dict) else absolute(value)

    def dataset(value: Any) -> Any:  # Any: unchecked file content
        if isinstance(value, list | tuple | dict):
            return table(value, dataset) if isinstance(value, dict) else [table(each, dataset) for each in value]
        return value if isinstance(value, str) and _may_be_hub_id(value, base) else absolute(value)

    def model_folder(value: Any) -> Any:  # Any: unchecked file content
        if not isinstance(value, str):
            return value
        _check_length(value)
        return absolute(value) if value.startswith((".", "/")) or (base / value).is_dir() else value

    resolved = dict(settings)
    if isinstance(data := settings.get("data"), dict):
        resolved["data"] = {key: (dataset if key == "sft" else data_file)(value) for key, value in data.items()}
    if isinstance(model := settings.get("model"), dict):
        resolved["model"] = {**model, "path": model_folder(model["path"])} if "path" in model else model
    if isinstance(training := settings.get("training"), dict):
        resolved["training"] = {
            stage: {**section, "resume_from": absolute(section["resume_from"])}
            if isinstance(section, dict) and "resume_from" in section
            else section
            for stage, section in training.items()
        }
    if isinstance(rollout := settings.get("rollout"), dict) and isinstance(rollout.get("rewards"), list | tuple):
        rewards = [
            {**each, "model": model_folder(each["model"])}
            if isinstance(each, dict) and "model" in each and has_model_folder(each.get("kind"), each.get("url"))
            else each
            for each in rollout["rewards"]
        ]
        resolved["rollout"] = {**rollout, "rewards": rewards}
    return resolved


def _check_length(path: str) -> None:
    longest = max(len(part.encode(errors="replace")) for part in path.split("/"))
    if longest > MAX_NAME_BYTES or len(path) > MAX_PATH_CHARS:
        raise ConfigError(f"{path[:80]}... is too long for a path or a name: it has {len(path)} characters: correct it")


def _may_be_hub_id(path: str, base: Path) -> bool:
    _check_length(path)
    is_name = HUB_ID.fullmatch(path) is not None and not path.endswith(DATA_FILE_SUFFIXES)
    return is_name and not (base / path).exists()


def parse_config(model: type[RecordT], settings: dict[str, Any], *, source: str) -> RecordT:  # Any: unchecked
    """`settings` as a record of `model`; each misfit becomes a sentence that names `source` and the key."""
    try:
        return model.model_validate(settings)
    except ValidationError as error:
        raise ConfigError(explain_validation_error(error, model, source=source)) from error
