"""Carry out a preparation: read a dataset, call the function that makes data files of it, and write these files.

    {"name", "source", "revision", "settings"} on standard input ──> FOLDER/sft.jsonl, FOLDER/prompts.jsonl, ...

It runs in a process of its own, `python -P -m rollouts_core.data.preparing FOLDER`, because the libraries read the
address of the hub when they are imported. A mistake is one sentence on standard error and exit code 2.

Not here: the preparations (preparations.py), where the files lie and when they are made (tasks/preparing.py).
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
"""The settings of `data` whose files a preparation may make."""
READ_ROWS = 1024
MAX_CAUSES = 10


def find_source(prepare: PrepareConfig) -> tuple[str, str]:
    """The dataset that is prepared, and its revision as it is asked for; empty for a folder, and for the newest.

    Raises:
        ConfigError: the preparation does not exist.
        DataError: the folder does not exist.
    """
    name = name_of_function(prepare.name)
    from rollouts_core.data.preparations import PREPARATIONS  # imports all environments

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
    """The function of a preparation.

    Raises:
        ConfigError: it does not exist, or does not take these settings.
    """
    from rollouts_core.data.preparations import PREPARATIONS  # imports all environments

    known = {name: each.prepare for name, each in PREPARATIONS.items()}
    function: PrepareFn = resolve_function(prepare.name, known, setting=SETTING)
    try:
        inspect.signature(function).bind(None, **prepare.settings)
    except TypeError as error:
        raise ConfigError(
            f"data.prepare.settings: {name_of_function(prepare.name)} cannot be called with "
            f"{', '.join(prepare.settings) or 'no settings'} ({error}): it is called as function(read, **settings)"
        ) from error
    return function


def digest_preparation(prepare: PrepareConfig, source: str, revision: str) -> str:
    """The identity of what a preparation makes: its code, its settings and the content or commit of its source."""
    name = name_of_function(prepare.name)
    from rollouts_core.data import preparations  # imports all environments

    is_own = name in preparations.PREPARATIONS
    content = {
        "name": name,
        "settings": prepare.settings,
        "source": digest_path(source, revision=revision) if source else "",
        "code": digest_path(preparations.__file__) if is_own else digest_plugins(prepare.name),
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def write_prepared(prepare: PrepareConfig, source: str, revision: str, folder: Path) -> dict[str, int]:
    """Write the data files of a preparation into a folder; returns the number of rows of each.

    Raises:
        InputError: the dataset cannot be read, or the function failed or returned something else than rows.
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
    """The rows of a split of a dataset; those of the hub are streamed.

    Raises:
        DataError: the dataset or split does not exist, or cannot be read.
    """
    if not source:
        raise DataError("data.prepare.source is empty, and the function reads a dataset: name one")
    if Path(source).exists():
        has_subsets = (Path(source) / subset).is_dir() if subset else False
        table = open_rows(Path(source) / subset if has_subsets else source, split=split)
        for start in range(0, len(table), READ_ROWS):
            yield from (dict(row) for _, row in table.read(range(start, min(start + READ_ROWS, len(table)))))
        return
    import datasets  # heavy, and only for the hub

    try:
        chosen = {"split": split, "revision": revision or None, "streaming": True}
        yield from datasets.load_dataset(source, subset or None, **chosen)
    except Exception as error:  # its own errors, and those of the HTTP library that its version has
        raise DataError(explain_hub_error("dataset", source, error)) from error


def explain_hub_error(kind: str, name: str, error: BaseException) -> str:
    """One sentence about a model or dataset that the hub did not give."""
    chain: list[str] = []
    cause: BaseException | None = error
    while cause is not None and len(chain) < MAX_CAUSES:
        chain.append(type(cause).__name__)
        cause = cause.__cause__ or cause.__context__
    what = f"the {kind} {name} cannot be downloaded"
    setting = "model.path" if kind == "model" else "data.prepare.source"
    if "GatedRepoError" in chain:
        return (
            f"{what}, because it is gated: accept its terms on its page, and export a token as HF_TOKEN, or name its "
            "variable as hub.token_variable"
        )
    if "RepositoryNotFoundError" in chain or "DatasetNotFoundError" in chain:
        return f"{what}, because the hub has none of this name that your token may read: correct {setting}"
    if "RevisionNotFoundError" in chain:
        return f"{what}, because the hub has no such revision of it: correct the revision"
    return (
        f"{what} ({first_line(error)}): name a folder as {setting}, or a mirror that can be reached as hub.url, or "
        "start again when the hub can be reached"
    )


def _check_made(made: Any, prepare: PrepareConfig) -> list[tuple[str, Iterable[Any]]]:  # Any: a user's function made it
    name = name_of_function(prepare.name)
    if not isinstance(made, Mapping) or not made or not set(made) <= {*FILES}:
        found = ", ".join(map(str, made)) if isinstance(made, Mapping) else type(made).__name__
        raise DataError(f"data.prepare: {name} returned {found or 'nothing'}: expected rows by {', '.join(FILES)}")
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
            f"data.prepare: no row is left for data.{path.stem}: the source has too few rows, or the settings ask for 0"
        )
    return number


def main() -> int:
    """Prepare what standard input describes."""
    asked = json.load(sys.stdin)
    prepare = PrepareConfig.model_validate(asked["prepare"])
    try:
        numbers = write_prepared(prepare, asked["source"], asked["revision"], Path(sys.argv[1]))
    except InputError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write("\n" + json.dumps(numbers) + "\n")  # a user's function may have printed before
    return 0


if __name__ == "__main__":
    sys.exit(main())
