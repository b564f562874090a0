"""Read the rows of data files and of Hugging Face datasets: in order, or any of them by number.

Not here: what a row says (conversations.py, dataset.py), CSV and compressed files as JSONL (text_files.py).

    JSONL             one pass notes where each row begins, and its checksum; rows are read again when they are needed
    CSV, JSON arrays, compressed files, and folders and hub datasets of such files: written as one JSONL file into the
                      cache of the `datasets` library
    Parquet, arrow    rows of a table that the `datasets` library keeps on disk and maps into memory

Neither holds the rows in memory: a row of JSONL costs 16 bytes, one of a table nothing.

Files that are changed while they are in use are an error at the next read: their content would not be the one that the
digest names.
"""

from __future__ import annotations

import dataclasses
import glob
import hashlib
import json
import math
import re
import zlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from rollouts_core.config.data import ColumnType
from rollouts_core.config.messages import first_line
from rollouts_core.data.bad_rows import BadRows
from rollouts_core.data.conversations import Row
from rollouts_core.data.source_text import TEXT_FIELDS, SpelledNumber, as_text
from rollouts_core.data.strict_json import STRICT_JSON, find_half_character
from rollouts_core.data.text_files import (
    OPENERS,
    SUFFIXES,
    FileKind,
    TextFile,
    find_kind,
    find_separator,
    is_array,
    write_lines,
)
from rollouts_core.errors import DataError
from rollouts_core.system.concurrency import read_each
from rollouts_core.system.private_files import keep_private
from rollouts_core.system.regular_files import describe_missing, open_file

TABLE_READ_ROWS = 1024
PARQUET_MAGIC = b"PAR1"
SAVED_DATASET_FILES = ("state.json", "dataset_dict.json")
ESCAPED_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
SHORT_FLOATS = ("float16", "float32")
COPY_VERSION = 1
"""Raised when the same files are copied to other rows than before."""
COMMIT = re.compile(r"[0-9a-f]{40}")
KEPT_BESIDE = frozenset({"__pycache__", ".git", ".cache"})
"""Folders in which Python, git and the hub's client keep what is theirs: when a model was downloaded, for instance."""
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
"""How the names of files with weights, or with the state of a training, end."""


class RowTable(Protocol):
    """Rows that can be read in any order."""

    path: str
    """Where they come from, for errors."""
    digest: str
    """`digest_path` of what was opened."""

    def __len__(self) -> int: ...

    def read(self, indices: Sequence[int], bad: BadRows | None = None) -> list[tuple[int, Row]]:
        """The rows at these places from 0, each with the number from 1 that errors call it.

        Args:
            bad: takes the errors of rows, which are left out; without it the first one is raised.
        """
        ...


class _Watch:
    """Notices that the file, or the files of the folder, at a path are not what they were.

    A dataset of the hub has none: its commit is its content.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamps = _stamp_files(path)

    def check(self, digest: str) -> None:
        """Raise DataError when files were changed and what lies there is not the content of `digest` any more."""
        stamps = _stamp_files(self._path)
        if stamps == self._stamps:
            return
        if not stamps or digest_path(self._path) != digest:
            raise DataError(f"{self._path} changed while it was in use: start again")
        self._stamps = stamps  # touched, copied back, or moved to another disk


class JsonlRows:
    """The rows of a JSONL file by number.

    Args:
        path: the file, or what the rows of `copy` were made from.
        copy: a JSONL file with those rows; None reads `path` itself.
        digest: of `path`, if `copy` is given.

    Raises:
        DataError: no such file or no row in it; from `read`, a row that is no JSON object or is not what it was.
    """

    def __init__(self, path: Path, *, copy: Path | None = None, digest: str = "") -> None:
        self.path = str(path)
        self._file = copy or path
        self._offsets = array("q")
        self._checksums = array("I")
        self._numbers = array("I")
        content = hashlib.sha256()
        _check_exists(self._file)
        self._watch = _Watch(path)
        with _opened(self._file) as lines:
            offset = 0
            for number, line in enumerate(lines, start=1):
                content.update(line)
                if not line.isspace():
                    self._offsets.append(offset)
                    self._checksums.append(zlib.crc32(line))
                    self._numbers.append(number)
                offset += len(line)
        self.digest = digest or content.hexdigest()
        if not self._offsets:
            raise _is_empty(path)

    def __len__(self) -> int:
        return len(self._offsets)

    def read(self, indices: Sequence[int], bad: BadRows | None = None) -> list[tuple[int, Row]]:
        """The rows at these places, each with its line number."""
        rows: list[tuple[int, Row]] = []
        try:
            with open_file(self._file) as file:
                for i in indices:
                    file.seek(self._offsets[i])
                    line = file.readline()
                    if zlib.crc32(line) != self._checksums[i]:
                        raise DataError(f"{self.path}, row {self._numbers[i]} changed while it was in use: start again")
                    rows += _parse_noted(line, self.path, self._numbers[i], bad)
            self._watch.check(self.digest)
        except OSError as error:
            raise DataError(f"{self.path} cannot be read any more ({error.strerror}): start again") from error
        return rows


class TableRows:
    """The rows of a table of the `datasets` library by number.

    Pictures and sounds are not decoded, which takes packages and time, and may fail where nobody asks for them: in the
    place of one stands its column's type.

    Args:
        digest: of what `watch` watches, from which the table was made.

    Raises:
        DataError: the table has no row; from `read`, its files are not what they were, or hold pictures within others.
    """

    def __init__(self, path: str, table: Any, digest: str, watch: _Watch) -> None:  # Any: datasets has no types
        self.path = path
        self.digest = digest
        self._media = {name: kind for name, kind in table.features.items() if getattr(kind, "decode", False)}
        for name, kind in self._media.items():
            table = table.cast_column(name, replace(kind, decode=False))
        self._table = table
        self._watch = watch
        if not len(table):
            raise _is_empty(path)

    def __len__(self) -> int:
        return len(self._table)

    def read(self, indices: Sequence[int], bad: BadRows | None = None) -> list[tuple[int, Row]]:
        """The rows at these places; a table has no row that cannot be read alone."""
        try:
            columns = self._table[list(indices)]
        except (ImportError, OSError) as error:
            raise DataError(
                f"{self.path} has pictures or sounds within a column that cannot be read here ({first_line(error)}): "
                "write the rows without them"
            ) from error
        for name, kind in self._media.items():
            columns[name] = [None if value is None else kind for value in columns[name]]
        self._watch.check(self.digest)
        for name in TEXT_FIELDS:
            if name in columns:
                columns[name] = [as_text(self._as_stored(name, value)) for value in columns[name]]
        return [
            (i + 1, {key: _without_nulls(values[n]) for key, values in columns.items()}) for n, i in enumerate(indices)
        ]

    def _as_stored(self, name: str, value: Any) -> Any:  # Any: a column's value
        """The value with as many digits as its column's format has: float32's 0.1 comes as 0.10000000149011612."""
        dtype = getattr(self._table.features[name], "dtype", "")
        if dtype not in SHORT_FLOATS or value is None:
            return value
        import numpy as np  # heavy for a process that reads no table

        return float(str(np.dtype(dtype).type(value)))


def open_rows(
    path: str | Path,
    *,
    split: str = "train",
    subset: str = "",
    revision: str = "",
    columns: Mapping[str, ColumnType] | None = None,
) -> RowTable:
    """Rows of a file, of a folder, or of a dataset of the hub, to be read in any order.

    Args:
        split, subset: of a folder or of the hub.
        revision: commit or tag of the hub.
        columns: types of columns of CSV that are not text.

    Raises:
        DataError: no such data, data of another kind, or no row at all.
    """
    if _is_plain_jsonl(Path(path)):
        return JsonlRows(Path(path))
    if Path(path, "config.json").is_file() and not _is_saved(Path(path)):
        raise DataError(f"{path} is no dataset (it holds a model): give a data file, or a folder of `save_to_disk`")
    watch = _Watch(Path(path))
    digest = digest_path(path, revision=revision)
    source = _Source(Path(path), digest, split, subset, revision, columns or {})
    found = _find_copy(source) or _open_source(source)
    watch.check(digest)
    return (
        JsonlRows(Path(path), copy=found, digest=digest)
        if isinstance(found, Path)
        else TableRows(str(path), found, digest, watch)
    )


def load_rows(
    path: str | Path, *, columns: Mapping[str, ColumnType] | None = None, bad: BadRows | None = None
) -> Iterator[tuple[int, Row]]:
    """Rows of a file or of a Hugging Face dataset, each with its number from 1 (its line in JSONL).

    Args:
        columns: types of columns of CSV that are not text.
        bad: takes the errors of lines, which are left out; without it the first one is raised.

    Raises:
        DataError: no such file, a line that is no JSON object, or no row at all.
    """
    keep_private(path)
    if not _is_plain_jsonl(Path(path)):
        table = open_rows(path, columns=columns)
        for start in range(0, len(table), TABLE_READ_ROWS):
            yield from table.read(range(start, min(start + TABLE_READ_ROWS, len(table))), bad)
        return
    _check_exists(Path(path))
    is_empty = True
    before = _stamp_files(Path(path))
    with _opened(Path(path)) as lines:
        for number, line in enumerate(lines, start=1):
            if not line.isspace():
                is_empty = False
                yield from _parse_noted(line, str(path), number, bad)
    if _stamp_files(Path(path)) != before:
        raise DataError(f"{path} changed while it was in use: start again")
    if is_empty:
        raise _is_empty(path)


def digest_path(path: str | Path, *, revision: str = "", without: tuple[str, ...] = ()) -> str:
    """sha256 of a file, or of the names and contents of all files below a folder, as hex.

    Without what lies in folders of `KEPT_BESIDE`: a model that was downloaded or cloned once more is the same. A hub id
    (no such path) has no content here; its digest is that of its name and revision.

    Args:
        without: how the names of files end that are left out of a folder.
    """
    root = Path(path)
    if root.is_file():
        return _digest_file(root)
    total = hashlib.sha256()
    if not root.is_dir():
        total.update(f"hub:{path}@{revision}".encode() if revision else f"hub:{path}".encode())
        return total.hexdigest()
    below = {each.relative_to(root): each for each in root.rglob("*") if each.is_file()}
    kept = {name: file for name, file in below.items() if KEPT_BESIDE.isdisjoint(name.parts)}
    return digest_files({name: file for name, file in kept.items() if not name.name.endswith(without)})


def digest_files(files: Mapping[Path, Path]) -> str:
    """sha256 of the contents of files and of what they are called, as hex.

    Args:
        files: where they lie, by their names below a folder.
    """
    total, names = hashlib.sha256(), sorted(files)
    paths = [files[name] for name in names]
    for name, digest in zip(names, read_each(_digest_file, paths, num_bytes=_count_bytes(paths)), strict=True):
        total.update(f"{name.as_posix()}\0{digest}\n".encode(errors="surrogateescape"))  # names need not be UTF-8
    return total.hexdigest()


def _count_bytes(files: Sequence[Path]) -> int:
    total = 0
    for file in files:
        with suppress(OSError):  # gone meanwhile: who reads it says so
            total += file.stat().st_size
    return total


def _stamp_files(path: Path) -> dict[str, tuple[int, ...]]:
    """What changes when a file is written or replaced, by file; empty where there is none."""
    files = [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]
    stamps: dict[str, tuple[int, ...]] = {}
    for file in files:
        status = file.stat()
        stamps[str(file)] = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    return stamps


def resolve_revision(path: str, revision: str) -> str:
    """The commit of a dataset of the hub; "" for files and folders.

    Raises:
        DataError: the hub does not know it, or cannot be asked.
    """
    if Path(path).exists() or Path(path).is_absolute() or COMMIT.fullmatch(revision):
        return revision
    from huggingface_hub import HfApi  # heavy, and only for the hub

    try:
        commit: str | None = HfApi().dataset_info(path, revision=revision or None).sha
    except Exception as error:  # its own errors, and those of the HTTP library that its version has
        raise DataError(
            f"{path} is no file or folder, and the hub does not name its commit ({first_line(error)}): "
            "correct the path, or give the commit as `revision`, or start again when the hub can be reached"
        ) from error
    return commit or ""


class _Source(NamedTuple):
    """Where rows come from that are not read in place."""

    path: Path
    digest: str
    split: str
    subset: str
    revision: str
    columns: Mapping[str, ColumnType]

    @property
    def cache(self) -> Path:
        """The folder for copies of this content.

        The `datasets` library takes a file of the same name and time for the same file, so copies lie under the digest.
        """
        import datasets  # heavy, and only for data that is not JSONL

        return Path(datasets.config.HF_DATASETS_CACHE) / self.digest

    @property
    def copy(self) -> Path:
        """The JSONL file that the rows are copied to if they are text."""
        chosen = json.dumps([COPY_VERSION, self.split, self.subset, sorted(self.columns.items())])
        return self.cache / f"rows-{hashlib.sha256(chosen.encode()).hexdigest()[:16]}.jsonl"


def _is_plain_jsonl(path: Path) -> bool:
    kind, packing = find_kind(path)
    if kind != "json" or packing:
        return False
    return path.suffix.lower() == ".jsonl" or not path.is_file() or not is_array(path)


def _is_saved(path: Path) -> bool:
    return any((path / name).is_file() for name in SAVED_DATASET_FILES)


def _find_copy(source: _Source) -> Path | None:
    """The copy that an earlier run made of the same content."""
    is_fixed = source.path.exists() or COMMIT.fullmatch(source.revision)
    return source.copy if is_fixed and source.copy.is_file() else None


def _open_source(source: _Source) -> Any:  # Any: a path, or a table of datasets, which has no types
    """The copy of rows that are text, else the table."""
    path = source.path
    kind, _ = find_kind(path)
    if kind and not path.is_dir():
        _check_exists(path)
        write_lines([TextFile(path, kind, str(path), find_separator(path))], source.copy, source.columns)
        return source.copy
    if path.suffix == ".parquet":
        _check_parquet(path)
    elif path.is_file():
        raise DataError(
            f"{path} is of no kind that is known by its name: it must end in {', '.join(SUFFIXES)} (also with "
            f"{', '.join(OPENERS)} behind that) or .parquet, or lie alone in a folder, which is read as "
            "`datasets.load_dataset` reads it"
        )
    elif path.is_absolute() and not path.is_dir():
        raise DataError(
            f"{path} {describe_missing(path)}: give a data file, or a folder of data files or of `save_to_disk`"
        )
    is_saved = _is_saved(path)
    if path.is_dir() and not is_saved and glob.has_magic(str(path)):
        raise DataError(
            f"{path} has *, ? or [ in it, and the `datasets` library would take it for a pattern of other folders: "
            "rename it"
        )
    import datasets  # heavy, and only for data that is not JSONL

    datasets.disable_progress_bars()  # a log is no terminal
    try:
        found = datasets.load_from_disk(str(path)) if is_saved else _load_dataset(source)
    except DataError:
        raise
    except Exception as error:
        raise _explain_dataset_error(source, error) from error
    if isinstance(found, dict) and source.split not in found:
        raise DataError(
            f"{path} has the splits {', '.join(sorted(found))}, not {source.split}: give the folder of one of them, "
            f"{path / min(found)}, or where `split` can be set one of them as that"
        )
    return found[source.split] if isinstance(found, dict) else found


def _load_dataset(source: _Source) -> Any:  # Any: a path, or a table of datasets, which has no types
    """What the `datasets` library finds at a path or on the hub; rows that are text are copied as they are."""
    import datasets

    path, cache = source.path, str(source.cache) if source.path.exists() else None
    if path.suffix == ".parquet":
        name = glob.escape(str(path))  # or rows[1].parquet means rows1.parquet
        return datasets.load_dataset("parquet", data_files=name, split="train", cache_dir=cache)
    chosen = {"revision": source.revision or None, "cache_dir": cache}
    builder = datasets.load_dataset_builder(str(path), source.subset or None, **chosen)
    _check_kinds(builder, source)
    if files := _find_text_files(builder, source):
        write_lines(files, source.copy, source.columns)
        return source.copy
    table = datasets.load_dataset(str(path), source.subset or None, split=source.split, **chosen)
    return _check_commit(table, path, source.revision)


def _check_kinds(builder: Any, source: _Source) -> None:  # Any: datasets has no types
    """Raise DataError for a folder with rows of several kinds: the `datasets` library reads the most frequent kind."""
    readme = source.path / "README.md"
    chosen = {str(name) for names in (builder.config.data_files or {}).values() for name in names}
    if not source.path.is_dir() or (readme.is_file() and "data_files" in readme.read_text(errors="replace")):
        return
    kinds = {find_kind(name)[0] or Path(name).suffix for name in chosen}
    for file in sorted(source.path.rglob("*")):
        kind = find_kind(file)[0] or file.suffix
        is_rows = ".json" not in file.suffixes and kind in ("json", "csv", ".parquet") and file.stem != "metadata"
        is_hidden = any(part.startswith(".") for part in file.relative_to(source.path).parts)
        if is_rows and not is_hidden and kind not in kinds and str(file) not in chosen:
            raise DataError(
                f"{source.path} has rows of several kinds ({Path(min(chosen)).name} and {file.name}), and only one "
                "kind would be read: give one of the files, or write all of them in one kind"
            )


def _find_text_files(builder: Any, source: _Source) -> list[TextFile]:  # Any: datasets has no types
    """The files of the split, downloaded and unpacked, if the builder reads JSON or CSV; [] for other builders."""
    import datasets
    from datasets.packaged_modules.csv.csv import Csv
    from datasets.packaged_modules.json.json import Json

    kind: FileKind = "csv" if isinstance(builder, Csv) else "json"
    if not isinstance(builder, Csv | Json):
        return []
    _check_csv_options(builder.config, source) if kind == "csv" else None
    splits = builder.config.data_files
    if source.split not in splits:
        raise ValueError(f'Unknown split "{source.split}". Should be one of {list(splits)}.')
    downloads = datasets.DownloadConfig(cache_dir=str(source.cache / "downloads"), use_etag=False, token=builder.token)
    manager = datasets.DownloadManager(dataset_name=builder.dataset_name, download_config=downloads)
    files: list[TextFile] = []
    for name in splits[source.split]:
        separator, field = (builder.config.sep, "") if kind == "csv" else ("", builder.config.field or "")
        if find_kind(name)[1]:  # unpacked as it is read, also with what `datasets` has no package for
            files.append(TextFile(Path(manager.download(name)), kind, str(name), separator, field))
            continue
        for file in manager.iter_files([manager.download_and_extract(name)]):
            files.append(TextFile(Path(file), kind, str(name), separator, field))
    return files


def _check_csv_options(config: Any, source: _Source) -> None:  # Any: datasets has no types
    """Raise DataError for options in the dataset's README by which its CSV would be read otherwise than here."""
    usual = type(config)()
    own = ("name", "version", "data_dir", "data_files", "description", "sep", "delimiter", "features", "chunksize")
    for field in dataclasses.fields(config):
        if field.name not in own and getattr(config, field.name) != getattr(usual, field.name):
            raise DataError(
                f"{source.path}: its README sets the option {field.name} for CSV, which is not supported: write the "
                "rows as JSONL"
            )


def _explain_dataset_error(source: _Source, error: Exception) -> Exception:
    """What the `datasets` library raised, as a sentence; the error itself if it is not about the data."""
    import datasets

    path = source.path
    if not path.exists():  # errors of whichever HTTP library asks the hub
        return DataError(
            f"{path} is no file or folder, and cannot be read from the hub ({first_line(error)}): correct the "
            "path, `split`, `subset` or `revision`, or start again when the hub can be reached"
        )
    if not isinstance(error, OSError | ValueError | datasets.exceptions.DatasetsError):
        return error
    cause = first_line(error.__cause__ or error)
    if cause.startswith("Unknown split"):
        return DataError(
            f"{path} has no split {source.split} ({cause}): give a file of another one, or where `split` can be set "
            "that"
        )
    return DataError(f"{path} is no dataset ({cause}): give a data file, or a folder of `save_to_disk`")


def _check_commit(table: Any, path: Path, revision: str) -> Any:  # Any: datasets has no types
    """The table of a hub dataset; DataError where it is of another commit than the one that `revision` names.

    Where the hub cannot be reached, `datasets` takes whatever commit it has in its cache; its tables lie in a folder
    named after their commit.
    """
    commits = {Path(file["filename"]).parent.name for file in table.cache_files}
    if COMMIT.fullmatch(revision) and not path.exists() and commits - {revision}:
        raise DataError(
            f"{path} is no file or folder, and cannot be read from the hub (only another commit than {revision} is in "
            "the cache of this machine): start again when the hub can be reached"
        )
    return table


def _check_exists(path: Path) -> None:
    if not path.is_file():
        raise DataError(f"{path} {describe_missing(path)}")


def _is_empty(path: str | Path) -> DataError:
    return DataError(f"{path} is empty: expected at least one row")


class _NoLinesError(DataError):
    """A file that is no JSONL at all."""


def _is_array(path: str) -> DataError:
    return _NoLinesError(
        f"{path} is one JSON array: expected one JSON object per line, which `jq -c '.[]' FILE` makes of an array"
    )


def _opened(path: Path) -> BufferedReader:
    """The file, to be read.

    Raises:
        DataError: it may not be.
    """
    try:
        return open_file(path)
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror})") from error


def _check_parquet(path: Path) -> None:
    """Raise DataError when a file is missing or was cut: a whole one begins and ends with its magic number."""
    _check_exists(path)
    with _opened(path) as file:
        head = file.read(len(PARQUET_MAGIC))
        file.seek(max(0, path.stat().st_size - len(PARQUET_MAGIC)))
        tail = file.read()
    if head != PARQUET_MAGIC or tail != PARQUET_MAGIC:
        raise DataError(f"{path} is not a Parquet file, or was cut: write it again")
    from pyarrow.parquet import read_metadata  # comes with datasets, and is as heavy

    if read_metadata(path).num_rows == 0:
        raise _is_empty(path)


def _parse_noted(line: bytes, path: str, number: int, bad: BadRows | None) -> list[tuple[int, Row]]:
    """The row with its number; [] for one whose error was noted."""
    try:
        return [(number, _parse_line(line, path, number))]
    except _NoLinesError:
        raise
    except DataError as error:
        if bad is None:
            raise
        bad.note(number, error)
        return []


def _parse_line(line: bytes, path: str, number: int) -> Row:
    try:
        text = line.decode("utf-8-sig" if number == 1 else "utf-8")  # editors of Windows mark it
        row = STRICT_JSON.decode(text.rstrip(" \t\r\n"))
    except UnicodeDecodeError as error:
        raise DataError(f"{path}, row {number}: not UTF-8 ({error.reason}): save the file as UTF-8") from error
    except (ValueError, RecursionError) as error:
        if number == 1 and line.lstrip().startswith(b"["):
            raise _is_array(path) from error
        if number == 1 and line.strip().removeprefix(b"\xef\xbb\xbf") == b"{":
            raise _NoLinesError(
                f"{path} has JSON over several lines: expected one JSON object per line, which `jq -c . FILE` makes"
            ) from error
        raise DataError(f"{path}, row {number}: not valid JSON: {_describe_broken(error)}") from error
    if number == 1 and isinstance(row, list):
        raise _is_array(path)
    if not isinstance(row, dict):
        raise DataError(f"{path}, row {number}: expected a JSON object, found {type(row).__name__}")
    if ESCAPED_SURROGATE.search(line):
        _check_text(row, path, number)
    for field in TEXT_FIELDS:
        if field in row and not isinstance(row[field], str):
            row[field] = as_text(_SPELLED_JSON.decode(text.rstrip(" \t\r\n"))[field])
    return row


def _describe_broken(error: ValueError | RecursionError) -> str:
    """What is wrong with a line; json's own words count lines in it, which would be taken for those of the file."""
    if not isinstance(error, json.JSONDecodeError):
        return str(error)
    if error.pos >= len(error.doc) or error.msg.startswith("Unterminated string"):
        return "it ends amid an object: expected a whole JSON object in each line"
    return f"{error.msg} at column {error.colno}"


def _check_text(row: Row, path: str, number: int) -> None:
    """Raise DataError for half of a character: JSON can say it, but no tokenizer reads it and no file takes it."""
    if half := find_half_character(row):
        raise DataError(
            f"{path}, row {number}: {half} is half of a character, as where a text was cut: mend it or leave it out"
        )


_SPELLED_JSON = json.JSONDecoder(parse_float=SpelledNumber, parse_int=SpelledNumber)


def _without_nulls(value: Any) -> Any:  # Any: a column's value
    """A table gives every struct all keys of its column: those that a row did not have come back as null.

    A number that is missing may come back as NaN, which no JSON can say.
    """
    if isinstance(value, dict):
        cleaned = {key: _without_nulls(each) for key, each in value.items()}
        return {key: each for key, each in cleaned.items() if each is not None}
    if isinstance(value, list):
        return [_without_nulls(each) for each in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def _digest_file(path: Path) -> str:
    with _opened(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
