"""Run a preparation: read a dataset, call the function that makes data files from its rows, and write the files.

    {"prepare", "source", "revision"} on standard input ──> FOLDER/sft.jsonl, FOLDER/prompts.jsonl, ...

The command `python -P -m rollouts_core.data.preparing FOLDER` runs in a separate process, because the hub's libraries
read the hub's address when they are imported. An error is one sentence on standard error, with exit code 2. Built-in
preparations: `preparations.py`. Folders and schedule: `tasks/preparing.py`.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollouts_core.config import name_of_function
from rollouts_core.config.data import PrepareConfig
from rollouts_core.config.messages import first_line
from rollouts_core.data.rows import digest_path, open_rows
from rollouts_core.errors import ConfigError, DataError, InputError
from rollouts_core.fingerprint import digest_plugins
from rollouts_core.user_code.failures import describe_raised
from rollouts_core.user_code.functions import resolve_function

if TYPE_CHECKING:
    from rollouts_core.data.preparations import PrepareFn, Row

SETTING = "data.prepare.name"
FILES = ("sft", "sft_eval", "prompts", "selection", "heldout")
"""Data files that a preparation may make; each is a setting of the section `data`."""
READ_ROWS = 1024
MAX_CAUSES = 10


def find_source(prepare: PrepareConfig) -> tuple[str, str]:
    """The dataset that a preparation reads, and its requested revision.

    The revision of a folder is "". For a hub dataset, "" requests the newest commit. Dataset and revision are "" if the
    preparation reads no dataset.

    Raises:
        ConfigError: the preparation does not exist.
        DataError: the source is an absolute path that does not exist.
    """
    name = name_of_function(prepare.name)
    from rollouts_core.data.preparations import PREPARATIONS  # slow: imports all environments

    known = PREPARATIONS.get(name)
    if known is None:
        find_function(prepare)
    source = prepare.source or (known.source if known else "")
    if not source:
        return "", ""
    if Path(source).is_absolute() and not Path(source).exists():
        raise DataError(f"data.prepare.source: {source} does not exist: give a folder, or the name of a hub dataset")
    is_usual = known is not None and source == known.source
    revision = prepare.revision or (known.revision if known and is_usual else "")
    return source, "" if Path(source).exists() else revision


def find_function(prepare: PrepareConfig) -> PrepareFn:
    """The function that `data.prepare.name` names.

    Raises:
        ConfigError: the function does not exist, or does not accept `data.prepare.settings`.
    """
    from rollouts_core.data.preparations import PREPARATIONS  # slow: imports all environments

    known = {name: each.prepare for name, each in PREPARATIONS.items()}
    function: PrepareFn = resolve_function(prepare.name, known, setting=SETTING)
    try:
        inspect.signature(function).bind(None, **prepare.settings)
    except TypeError as error:
        raise ConfigError(
            f"data.prepare.settings: {name_of_function(prepare.name)} cannot be called with "
            f"{', '.join(prepare.settings) or 'no settings'} ({error}): the settings are passed as function(read, "
            "**settings)"
        ) from error
    return function


def digest_preparation(prepare: PrepareConfig, source: str, revision: str) -> str:
    """Hash of everything that determines the prepared files: the code, the settings, and the content or commit of
    the source."""
    name = name_of_function(prepare.name)
    from rollouts_core.data import preparations  # slow: imports all environments

    is_own = name in preparations.PREPARATIONS
    content = {
        "name": name,
        "settings": prepare.settings,
        "source": digest_path(source, revision=revision) if source else "",
        "code": digest_path(preparations.__file__) if is_own else digest_plugins(prepare.name),
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def write_prepared(prepare: PrepareConfig, source: str, revision: str, folder: Path) -> dict[str, int]:
    """Run a preparation and write its data files into `folder`. Returns the number of rows of each file.

    Raises:
        InputError: the dataset cannot be read, or the function failed or did not return rows.
    """
    function = find_function(prepare)

    def read(split: str, subset: str = "") -> Iterator[Row]:
        return read_split(source, revision, split, subset)

    try:
        made = function(read, **prepare.settings)
        return {name: _write_rows(folder / f"{name}.jsonl", rows) for name, rows in _check_made(made, prepare)}
    except InputError:
        raise
    except Exception as error:
        raise DataError(f"data.prepare: {name_of_function(prepare.name)} {describe_raised(error)}") from error


def read_split(source: str, revision: str, split: str, subset: str) -> Iterator[Row]:
    """Yield the rows of a dataset's split. Rows of a hub dataset are streamed.

    Raises:
        DataError: the dataset or split does not exist, or cannot be read.
    """
    if not source:
        raise DataError(
            "data.prepare.source is empty, but the function of data.prepare.name reads a dataset: set it to a "
            "folder or a hub dataset"
        )
    if Path(source).exists():
        has_subsets = (Path(source) / subset).is_dir() if subset else False
        table = open_rows(Path(source) / subset if has_subsets else source, split=split)
        for start in range(0, len(table), READ_ROWS):
            yield from (dict(row) for _, row in table.read(range(start, min(start + READ_ROWS, len(table)))))
        return
    import datasets  # slow to import, and only needed for the hub

    try:
        chosen = {"split": split, "revision": revision or None, "streaming": True}
        yield from datasets.load_dataset(source, subset or None, **chosen)
    except Exception as error:  # `datasets` raises its own errors and those of its HTTP library
        raise DataError(explain_hub_error("dataset", source, error)) from error


def explain_hub_error(kind: str, name: str, error: BaseException) -> str:
    """A sentence about a model or dataset that could not be downloaded: the cause, and what to do.

    Args:
        kind: "model" or "dataset".
    """
    chain: list[str] = []
    cause: BaseException | None = error
    while cause is not None and len(chain) < MAX_CAUSES:
        chain.append(type(cause).__name__)
        cause = cause.__cause__ or cause.__context__
    what = f"the {kind} {name} cannot be downloaded"
    setting = "model.path" if kind == "model" else "data.prepare.source"
    if "GatedRepoError" in chain:
        return (
            f"{what}, because it is gated: accept the terms on its page on the hub, and export your access token as "
            "HF_TOKEN, or set hub.token_variable to the name of another variable with the token"
        )
    if "RepositoryNotFoundError" in chain or "DatasetNotFoundError" in chain:
        return f"{what}, because the hub has no repository of this name that your token may read: correct {setting}"
    if "RevisionNotFoundError" in chain:
        return f"{what}, because this revision does not exist on the hub: correct the revision"
    return (
        f"{what} ({first_line(error)}): set {setting} to a local folder, set hub.url to a mirror that is reachable, "
        "or start again when the hub is reachable"
    )


def _check_made(made: Any, prepare: PrepareConfig) -> list[tuple[str, Iterable[Any]]]:  # Any: a user's function made it
    name = name_of_function(prepare.name)
    if not isinstance(made, Mapping) or not made or not set(made) <= {*FILES}:
        found = ", ".join(map(str, made)) if isinstance(made, Mapping) else type(made).__name__
        raise DataError(
            f"data.prepare: {name} returned {found or 'nothing'}: expected a dict of rows with keys among "
            f"{', '.join(FILES)}"
        )
    return list(made.items())


def _write_rows(path: Path, rows: Iterable[Any]) -> int:  # Any: a user's function made them
    number = 0
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            if not isinstance(row, Mapping):
                raise DataError(f"data.prepare: row {number + 1} of {path.stem} is a {type(row).__name__}, not a dict")
            file.write(json.dumps(dict(row), ensure_ascii=False) + "\n")
            number += 1
    if not number:
        raise DataError(
            f"data.prepare: the function made no rows for data.{path.stem}: the source has too few rows, or the "
            "settings request 0 rows"
        )
    return number


def main() -> int:
    """Run the preparation that standard input describes as JSON, and print the number of rows of each file."""
    asked = json.load(sys.stdin)
    prepare = PrepareConfig.model_validate(asked["prepare"])
    try:
        numbers = write_prepared(prepare, asked["source"], asked["revision"], Path(sys.argv[1]))
    except InputError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    # begin a new line, because a user's function may have printed text
    sys.stdout.write("\n" + json.dumps(numbers) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
