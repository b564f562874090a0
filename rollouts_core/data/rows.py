"""Read the rows of data files and Hugging Face datasets, in order or by row number.

    JSONL             one pass records each row's offset and checksum; rows are read again when needed
    CSV, JSON arrays, compressed files, and folders and hub datasets of such files: copied to one JSONL file in the
                      cache of the `datasets` library (`text_files.py`)
    Parquet, arrow    rows of a table that the `datasets` library memory-maps from disk

Rows are not kept in memory. A row of JSONL needs 16 bytes for its index, a row of a table needs no memory.

If a file changes while it is in use, the next read raises an error, because the content no longer matches its digest.
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
"""Version of the conversion to JSONL copies. Increase it if the same files would now give other rows."""
COMMIT = re.compile(r"[0-9a-f]{40}")
KEPT_BESIDE = frozenset({"__pycache__", ".git", ".cache"})
"""Names of folders that Python, git and the hub's client create inside other folders. Digests of folders ignore
them."""
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
"""File suffixes of model weights and training state."""


class RowTable(Protocol):
    """Rows that can be read in any order."""

    path: str
    """Origin of the rows, for error messages."""
    digest: str
    """Hash of the data's content when they were opened (`digest_path`)."""

    def __len__(self) -> int: ...

    def read(self, indices: Sequence[int], bad: BadRows | None = None) -> list[tuple[int, Row]]:
        """Read the rows at these indices, which start at 0. Each row comes with its number for messages, which starts
        at 1.

        Args:
            bad: collects the errors of invalid rows, which are left out. None raises the first error.
        """
        ...


class _Watch:
    """Detects changes of a file, or of the files in a folder.

    Datasets of the hub are not watched, because a commit fixes their content.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamps = _stamp_files(path)

    def check(self, digest: str) -> None:
        """Raise DataError if the files changed and their content no longer has this digest."""
        stamps = _stamp_files(self._path)
        if stamps == self._stamps:
            return
        if not stamps or digest_path(self._path) != digest:
            raise DataError(f"{self._path} changed while it was in use: start again")
        self._stamps = stamps  # the content is the same: the files were only copied or touched


class JsonlRows:
    """Reads the rows of a JSONL file by index.

    Args:
        path: the original file, named in messages.
        copy: JSONL file with the rows of `path`, if `path` has another format. None reads `path` itself.
        digest: digest of `path`; required with `copy`.

    Raises:
        DataError: the file is missing or empty. `read` raises it for a row that is not a JSON object or has changed.
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
        """Read the rows at these indices, each with its line number."""
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
            raise DataError(f"{self.path} can no longer be read ({error.strerror}): start again") from error
        return rows


class TableRows:
    """Reads the rows of a table of the `datasets` library by index.

    Images and audio are not decoded, because decoding needs extra packages, takes time and may fail. In a row, the
    value of an image or audio column is the column's type.

    Args:
        table: a `datasets.Dataset`.
        digest: digest of the data from which the table was made.
        watch: detects changes of these data.

    Raises:
        DataError: the table has no rows. `read` raises it if files changed, or if images are nested inside other
            values.
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
        """Read the rows at these indices, each with its number from 1. `bad` is ignored: rows of a table are always
        readable."""
        try:
            columns = self._table[list(indices)]
        except (ImportError, OSError) as error:
            raise DataError(
                f"{self.path} has images or audio nested inside a column, which cannot be read here "
                f"({first_line(error)}): write the rows without them"
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
        """The value with the digits that its column's format can store. Without rounding, 0.1 in float32 would
        become 0.10000000149011612."""
        dtype = getattr(self._table.features[name], "dtype", "")
        if dtype not in SHORT_FLOATS or value is None:
            return value
        import numpy as np  # slow to import, and only needed for tables

        return float(str(np.dtype(dtype).type(value)))


def open_rows(
    path: str | Path,
    *,
    split: str = "train",
    subset: str = "",
    revision: str = "",
    columns: Mapping[str, ColumnType] | None = None,
) -> RowTable:
    """Open a file, a folder or a hub dataset to read its rows in any order.

    Args:
        split, subset: the part of a folder or hub dataset to read.
        revision: commit or tag of a hub dataset.
        columns: types of CSV columns that are not text.

    Raises:
        DataError: the data are missing, are not a dataset, or have no rows.
    """
    if _is_plain_jsonl(Path(path)):
        return JsonlRows(Path(path))
    if Path(path, "config.json").is_file() and not _is_saved(Path(path)):
        raise DataError(
            f"{path} contains a model, not a dataset: give a data file, or a folder written by `save_to_disk`"
        )
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
    """Yield the rows of a file or Hugging Face dataset in order, each with its number from 1. In JSONL this is the line
    number.

    Args:
        columns: types of CSV columns that are not text.
        bad: collects the errors of invalid lines, which are left out. None raises the first error.

    Raises:
        DataError: the file is missing, a line is not a JSON object, or there are no rows.
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
    """sha256, as hex, of a file's content, or of the names and contents of all files in a folder.

    Folders of `KEPT_BESIDE` are ignored, so a second download or clone of a model has the same digest. A path that does
    not exist is a hub id. The digest of a hub id covers the id and the revision.

    Args:
        without: suffixes of files to ignore in a folder.
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
    """sha256, as hex, of the names and contents of files.

    Args:
        files: name of each file relative to a folder -> path of the file.
    """
    total, names = hashlib.sha256(), sorted(files)
    paths = [files[name] for name in names]
    for name, digest in zip(names, read_each(_digest_file, paths, num_bytes=_count_bytes(paths)), strict=True):
        total.update(f"{name.as_posix()}\0{digest}\n".encode(errors="surrogateescape"))  # names may be invalid UTF-8
    return total.hexdigest()


def _count_bytes(files: Sequence[Path]) -> int:
    total = 0
    for file in files:
        with suppress(OSError):  # reading the content reports a file that was removed
            total += file.stat().st_size
    return total


def _stamp_files(path: Path) -> dict[str, tuple[int, ...]]:
    """Attributes of each file (device, inode, size, times) that change when the file is written or replaced.

    Returns an empty dict if the path contains no files.
    """
    files = [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]
    stamps: dict[str, tuple[int, ...]] = {}
    for file in files:
        status = file.stat()
        stamps[str(file)] = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    return stamps


def resolve_revision(path: str, revision: str) -> str:
    """The current commit of a hub dataset. For a file, a folder or a commit, `revision` is returned unchanged.

    Raises:
        DataError: the hub has no such dataset, or is unreachable.
    """
    if Path(path).exists() or Path(path).is_absolute() or COMMIT.fullmatch(revision):
        return revision
    from huggingface_hub import HfApi  # slow to import, and only needed for the hub

    try:
        commit: str | None = HfApi().dataset_info(path, revision=revision or None).sha
    except Exception as error:  # errors of the library and of its HTTP client
        raise DataError(
            f"{path} is not a file or folder, and its commit on the hub is unknown ({first_line(error)}): correct the "
            "path, set `revision` to a commit, or start again when the hub is reachable"
        ) from error
    return commit or ""


class _Source(NamedTuple):
    """Origin of rows that are not plain JSONL: they are read through a JSONL copy or a table."""

    path: Path
    digest: str
    split: str
    subset: str
    revision: str
    columns: Mapping[str, ColumnType]

    @property
    def cache(self) -> Path:
        """Cache folder for this content. The folder's name is the digest, because `datasets` treats files with equal
        names and times as the same file."""
        import datasets  # slow to import, and only needed for data other than JSONL

        return Path(datasets.config.HF_DATASETS_CACHE) / self.digest

    @property
    def copy(self) -> Path:
        """Path of the JSONL copy of these rows in the cache."""
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
    """The JSONL copy that an earlier run made of the same content; None if there is no such copy."""
    is_fixed = source.path.exists() or COMMIT.fullmatch(source.revision)
    return source.copy if is_fixed and source.copy.is_file() else None


def _open_source(source: _Source) -> Any:  # Any: a path, or a table of datasets, which has no types
    """Write a JSONL copy and return its path if the rows come from text files; otherwise return a table."""
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
            f"{path} has an unknown file type: its name must end in {', '.join(SUFFIXES)} (optionally followed by "
            f"{', '.join(OPENERS)}) or .parquet. Put files of other types into a folder of their own, which "
            "`datasets.load_dataset` can read"
        )
    elif path.is_absolute() and not path.is_dir():
        raise DataError(
            f"{path} {describe_missing(path)}: give a data file, a folder of data files, or a folder written by "
            "`save_to_disk`"
        )
    is_saved = _is_saved(path)
    if path.is_dir() and not is_saved and glob.has_magic(str(path)):
        raise DataError(f"{path} contains *, ? or [, which the `datasets` library would treat as a pattern: rename it")
    import datasets  # slow to import, and only needed for data other than JSONL

    datasets.disable_progress_bars()  # progress bars would fill the log
    try:
        found = datasets.load_from_disk(str(path)) if is_saved else _load_dataset(source)
    except DataError:
        raise
    except Exception as error:
        raise _explain_dataset_error(source, error) from error
    if isinstance(found, dict) and source.split not in found:
        raise DataError(
            f"{path} has the splits {', '.join(sorted(found))}, not {source.split}: give the folder of one split, "
            f"{path / min(found)}, or set `split` if the section has this setting"
        )
    return found[source.split] if isinstance(found, dict) else found


def _load_dataset(source: _Source) -> Any:  # Any: a path, or a table of datasets, which has no types
    """Load a folder, Parquet file or hub dataset with the `datasets` library. Text files are copied to JSONL
    instead."""
    import datasets

    path, cache = source.path, str(source.cache) if source.path.exists() else None
    if path.suffix == ".parquet":
        name = glob.escape(str(path))  # without escaping, the pattern rows[1].parquet would match rows1.parquet
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
    """Raise DataError for a folder with row files of several formats: the `datasets` library would read only one
    format."""
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
                f"{source.path} has several kinds of row files ({Path(min(chosen)).name} and {file.name}), but only "
                "one kind would be read: give one of the files, or write all in one kind"
            )


def _find_text_files(builder: Any, source: _Source) -> list[TextFile]:  # Any: datasets has no types
    """Download and unpack the split's files if they are JSON or CSV. Returns [] for other formats."""
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
        # Compressed files are unpacked when they are read. This also works for formats that `datasets` cannot unpack
        # here.
        if find_kind(name)[1]:
            files.append(TextFile(Path(manager.download(name)), kind, str(name), separator, field))
            continue
        for file in manager.iter_files([manager.download_and_extract(name)]):
            files.append(TextFile(Path(file), kind, str(name), separator, field))
    return files


def _check_csv_options(config: Any, source: _Source) -> None:  # Any: datasets has no types
    """Raise DataError if the dataset's README sets CSV options that are not supported here."""
    usual = type(config)()
    own = ("name", "version", "data_dir", "data_files", "description", "sep", "delimiter", "features", "chunksize")
    for field in dataclasses.fields(config):
        if field.name not in own and getattr(config, field.name) != getattr(usual, field.name):
            raise DataError(
                f"{source.path}: its README sets the option {field.name} for CSV, which is not supported: write the "
                "rows as JSONL"
            )


def _explain_dataset_error(source: _Source, error: Exception) -> Exception:
    """Convert an exception of the `datasets` library to a DataError. An exception that is not about the data is
    returned unchanged."""
    import datasets

    path = source.path
    if not path.exists():  # for hub datasets, `datasets` also raises errors of several HTTP libraries
        return DataError(
            f"{path} is not a file or folder, and cannot be read from the hub ({first_line(error)}): correct the "
            "path, `split`, `subset` or `revision`, or start again when the hub is reachable"
        )
    if not isinstance(error, OSError | ValueError | datasets.exceptions.DatasetsError):
        return error
    cause = first_line(error.__cause__ or error)
    if cause.startswith("Unknown split"):
        return DataError(
            f"{path} has no split {source.split} ({cause}): give the file of another split, or set `split` if the "
            "section has this setting"
        )
    return DataError(f"{path} is not a dataset ({cause}): give a data file, or a folder written by `save_to_disk`")


def _check_commit(table: Any, path: Path, revision: str) -> Any:  # Any: datasets has no types
    """Check that the table of a hub dataset has the commit `revision`. Returns the table.

    If the hub is unreachable, `datasets` silently uses any commit in its cache. The folder of a cached table has the
    commit's name.

    Raises:
        DataError: the table has another commit.
    """
    commits = {Path(file["filename"]).parent.name for file in table.cache_files}
    if COMMIT.fullmatch(revision) and not path.exists() and commits - {revision}:
        raise DataError(
            f"{path} is not a file or folder, and cannot be read from the hub (this machine's cache has only another "
            f"commit than {revision}): start again when the hub is reachable"
        )
    return table


def _check_exists(path: Path) -> None:
    if not path.is_file():
        raise DataError(f"{path} {describe_missing(path)}")


def _is_empty(path: str | Path) -> DataError:
    return DataError(f"{path} is empty: expected at least one row")


class _NoLinesError(DataError):
    """The whole file is not JSONL, so errors of single lines would not help."""


def _is_array(path: str) -> DataError:
    return _NoLinesError(
        f"{path} is one JSON array: expected one JSON object per line; `jq -c '.[]' FILE` converts an array"
    )


def _opened(path: Path) -> BufferedReader:
    """Open a file for reading.

    Raises:
        DataError: the file cannot be opened.
    """
    try:
        return open_file(path)
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror})") from error


def _check_parquet(path: Path) -> None:
    """Raise DataError if the file is missing, truncated or empty. A whole Parquet file begins and ends with
    `PARQUET_MAGIC`."""
    _check_exists(path)
    with _opened(path) as file:
        head = file.read(len(PARQUET_MAGIC))
        file.seek(max(0, path.stat().st_size - len(PARQUET_MAGIC)))
        tail = file.read()
    if head != PARQUET_MAGIC or tail != PARQUET_MAGIC:
        raise DataError(f"{path} is not a Parquet file, or is truncated: write it again")
    from pyarrow.parquet import read_metadata  # slow to import; a dependency of datasets

    if read_metadata(path).num_rows == 0:
        raise _is_empty(path)


def _parse_noted(line: bytes, path: str, number: int, bad: BadRows | None) -> list[tuple[int, Row]]:
    """Parse one line. Returns [(number, row)], or [] if the line is invalid and `bad` collected its error."""
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
        # editors on Windows may begin a file with a byte order mark
        text = line.decode("utf-8-sig" if number == 1 else "utf-8")
        row = STRICT_JSON.decode(text.rstrip(" \t\r\n"))
    except UnicodeDecodeError as error:
        raise DataError(f"{path}, row {number}: not UTF-8 ({error.reason}): save the file as UTF-8") from error
    except (ValueError, RecursionError) as error:
        if number == 1 and line.lstrip().startswith(b"["):
            raise _is_array(path) from error
        if number == 1 and line.strip().removeprefix(b"\xef\xbb\xbf") == b"{":
            raise _NoLinesError(
                f"{path} has JSON over several lines: expected one JSON object per line; `jq -c . FILE` converts it"
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
    """Describe a JSON error in one line of a file. json's own messages would mention line 1, which is misleading."""
    if not isinstance(error, json.JSONDecodeError):
        return str(error)
    if error.pos >= len(error.doc) or error.msg.startswith("Unterminated string"):
        return "the line ends inside an object: expected a whole JSON object in each line"
    return f"{error.msg} at column {error.colno}"


def _check_text(row: Row, path: str, number: int) -> None:
    """Raise DataError for half of a surrogate pair. JSON can express such text, but tokenizers and files cannot
    store it."""
    if half := find_half_character(row):
        raise DataError(
            f"{path}, row {number}: {half} is half of a character (an unpaired surrogate), as in truncated text: "
            "repair or remove it"
        )


_SPELLED_JSON = json.JSONDecoder(parse_float=SpelledNumber, parse_int=SpelledNumber)


def _without_nulls(value: Any) -> Any:  # Any: a column's value
    """Remove keys with the value null or NaN.

    A table gives every object the keys of all objects in its column, with null for missing values and NaN for missing
    numbers.
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
