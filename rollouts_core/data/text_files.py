"""Convert CSV files, JSON arrays and compressed files to one JSONL file, so that all rows are read in the same way.

The `datasets` library is not used for this, because it guesses column types: "2024-07-26" would become a time, 1 next
to 2.5 would become 1.0, and 007 would become 7.
"""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import itertools
import json
import lzma
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple, cast

from rollouts_core.config.data import ColumnType
from rollouts_core.config.messages import closest_name, first_line
from rollouts_core.data.bad_rows import BadRows
from rollouts_core.data.source_text import TEXT_FIELDS, as_text
from rollouts_core.data.strict_json import read_strict_json
from rollouts_core.errors import DataError
from rollouts_core.system.files import appearing_whole
from rollouts_core.system.regular_files import open_file

FileKind = Literal["json", "csv"]
SUFFIXES: dict[str, FileKind] = {".jsonl": "json", ".ndjson": "json", ".json": "json", ".csv": "csv", ".tsv": "csv"}
"""Suffixes of files with rows as text, and the format of each."""
OPENERS: dict[str, Callable[..., IO[bytes]]] = {
    ".gz": cast(Callable[..., IO[bytes]], gzip.open),
    ".bz2": cast(Callable[..., IO[bytes]], bz2.open),
    ".xz": cast(Callable[..., IO[bytes]], lzma.open),
    ".zst": lambda path: _open_zstd(path),
}
"""Suffixes of compressed files, and the function that opens each."""
MAX_CELL_CHARS = 1 << 30
"""Highest number of characters in a CSV cell. The limit allows long conversations."""
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
BOOLEANS = {"true": True, "false": False}
_DECODER = json.JSONDecoder()
ONE_LINE = str.maketrans("\r\n", "  ")
"""Replaces line breaks of a JSON text by spaces. Outside of JSON strings, line breaks have no meaning. Inside JSON
strings, line breaks are escaped."""


class TextFile(NamedTuple):
    """A file that contains rows as text."""

    path: Path
    kind: FileKind
    name: str
    """Name of the file in messages. `path` may be a cache file with another name."""
    separator: str = ","
    """Separator of the cells in a CSV file."""
    field: str = ""
    """Field of the file's JSON object that contains the rows. If this is "", the whole file contains rows."""


def find_kind(path: str | Path) -> tuple[FileKind | None, str]:
    """(format, compression suffix) of a file by its name. The format is None if it is unknown; the suffix may be ""."""
    suffixes = [suffix.lower() for suffix in Path(path).suffixes]
    packing = suffixes.pop() if suffixes and suffixes[-1] in OPENERS else ""
    return SUFFIXES.get(suffixes[-1] if suffixes else ""), packing


def find_separator(path: str | Path) -> str:
    """The separator of a CSV file's cells, chosen by the file name."""
    return "\t" if ".tsv" in Path(path).suffixes else ","


def is_array(path: Path) -> bool:
    """True if a JSON file contains one array; False if it contains one row per line."""
    with open_file(path) as file:
        return file.read(1 << 16).removeprefix(BYTE_ORDER_MARK).lstrip().startswith(b"[")


def write_lines(files: Iterable[TextFile], target: Path, columns: Mapping[str, ColumnType]) -> None:
    """Write the rows of text files, in order, to the JSONL file `target`, atomically.

    Args:
        columns: types of CSV columns that are not text.

    Raises:
        DataError: a file cannot be read, or a row is invalid.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with appearing_whole(target) as partial, partial.open("wb") as out:
        for file in files:
            try:
                with closing(_unpacked(file)) as content:
                    for line in _lines_of(file, content, columns):
                        out.write(line if line.endswith(b"\n") else line + b"\n")
            except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
                reason = error.strerror if isinstance(error, OSError) and error.strerror else first_line(error)
                raise DataError(f"{file.name} cannot be read ({reason}): write it again") from error


def _unpacked(file: TextFile) -> IO[bytes]:
    _, packing = find_kind(file.name)
    with open_file(file.path) as opened:
        return OPENERS[packing](Path(f"/dev/fd/{opened.fileno()}")) if packing else open_file(file.path)


def _open_zstd(path: Path) -> IO[bytes]:
    import pyarrow  # slow to import; a dependency of datasets

    stream = pyarrow.CompressedInputStream(pyarrow.OSFile(str(path)), "zstd")
    return io.BufferedReader(cast(io.RawIOBase, stream))


def _lines_of(file: TextFile, content: IO[bytes], columns: Mapping[str, ColumnType]) -> Iterator[bytes]:
    if file.kind == "csv":
        return (json.dumps(row).encode() for row in _csv_rows(file, content, columns))
    if file.field:
        return _rows_below(file, content.read())
    if ".jsonl" in Path(file.name).suffixes:
        return _json_lines(content)
    first = content.read(1 << 16)
    rest = itertools.chain([first], iter(lambda: content.read(1 << 20), b""))
    if first.removeprefix(BYTE_ORDER_MARK).lstrip().startswith(b"["):
        return _array_elements(file, b"".join(rest))
    return _json_lines(_lines_in(rest))


def _lines_in(chunks: Iterable[bytes]) -> Iterator[bytes]:
    begun = b""
    for chunk in chunks:
        *lines, begun = (begun + chunk).split(b"\n")
        yield from (line + b"\n" for line in lines)
    if begun:
        yield begun


def _json_lines(lines: Iterable[bytes]) -> Iterator[bytes]:
    for number, line in enumerate(lines):
        yield line if number else line.removeprefix(BYTE_ORDER_MARK)


def _array_elements(file: TextFile, content: bytes) -> Iterator[bytes]:
    """Yield the elements of a JSON array in their original spelling, each on one line."""
    text = _decoded(file, content)
    place = text.index("[")
    end = place
    for start, end in _elements_of(file, text, place):
        yield _on_one_line(text[start:end])
    end = _skip_space(text, end if end > place else place + 1)
    if text[end + 1 :].strip():
        raise DataError(f"{file.name}: not valid JSON: there is text after the end of the array")


def _rows_below(file: TextFile, content: bytes) -> Iterator[bytes]:
    """Yield the rows in one field of a JSON object. The field has an array of rows, or an object with an array per
    column."""
    text = _decoded(file, content)
    place = dict(_values_of(file, text, _skip_space(text, 0))).get(file.field)
    if place is None:
        raise DataError(f"{file.name}: expected a JSON object with {file.field!r}, the field that the README names")
    if text[place] == "[":
        yield from (_on_one_line(text[start:end]) for start, end in _elements_of(file, text, place))
        return
    columns = {key: list(_elements_of(file, text, below)) for key, below in _values_of(file, text, place)}
    if len({len(cells) for cells in columns.values()}) != 1:
        raise DataError(f"{file.name}: {file.field!r} is neither an array of rows nor columns of one length")
    for cells in zip(*columns.values(), strict=True):
        fields = (f"{json.dumps(key)}: {text[start:end]}" for key, (start, end) in zip(columns, cells, strict=True))
        yield _on_one_line("{" + ", ".join(fields) + "}")


def _decoded(file: TextFile, content: bytes) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{file.name}: not UTF-8 ({error.reason}): save the file as UTF-8") from error


def _on_one_line(text: str) -> bytes:
    return text.translate(ONE_LINE).encode(errors="surrogatepass")


def _elements_of(file: TextFile, text: str, place: int) -> Iterator[tuple[int, int]]:
    """Yield the start and end of each element of the JSON array at a position of the text."""
    if text[place : place + 1] != "[":
        raise DataError(f"{file.name}: not valid JSON: expected an array at character {place}")
    number, place = 1, _skip_space(text, place + 1)
    while number > 1 or text[place : place + 1] != "]":
        end = _end_of_value(file, text, place, f", row {number}")
        yield place, end
        place = _skip_space(text, end)
        if text[place : place + 1] == "]":
            return
        if text[place : place + 1] != ",":
            raise DataError(f"{file.name}, row {number}: not valid JSON: expected , or ] after the row")
        place = _skip_space(text, place + 1)
        number += 1


def _values_of(file: TextFile, text: str, place: int) -> Iterator[tuple[str, int]]:
    """Yield the keys of the JSON object at a position of the text, each with the start of its value."""
    if text[place : place + 1] != "{":
        return
    place = _skip_space(text, place + 1)
    while text[place : place + 1] == '"':
        end = _end_of_value(file, text, place)
        key, place = json.loads(text[place:end]), _skip_space(text, end)
        if text[place : place + 1] != ":":
            raise DataError(f"{file.name}: not valid JSON: expected : after {key!r}")
        place = _skip_space(text, place + 1)
        yield key, place
        place = _skip_space(text, _end_of_value(file, text, place))
        place = _skip_space(text, place + 1) if text[place : place + 1] == "," else place


def _end_of_value(file: TextFile, text: str, place: int, row: str = "") -> int:
    try:
        return _DECODER.raw_decode(text, place)[1]
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file.name}{row}: not valid JSON: {first_line(error)}") from error


def _skip_space(text: str, place: int) -> int:
    while text[place : place + 1] in (" ", "\t", "\r", "\n"):
        place += 1
    return place


def _csv_rows(
    file: TextFile, content: IO[bytes], columns: Mapping[str, ColumnType]
) -> Iterator[dict[str, Any]]:  # Any: JSON
    """Yield the rows of a CSV file as objects. Empty cells are left out. Other cells are text if `columns` has no
    type for them."""
    csv.field_size_limit(MAX_CELL_CHARS)
    lines = io.TextIOWrapper(content, encoding="utf-8-sig", newline="")
    reader = csv.reader(lines, delimiter=file.separator, strict=True)
    number, bad = 0, BadRows(file.name)
    try:
        header = next(reader, [])
        _check_header(file, header, columns)
        for cells in reader:
            if not cells:  # a blank line
                continue
            number += 1
            try:
                row = _csv_row(file, number, header, cells, columns)
            except DataError as error:
                bad.note(number, error)
                continue
            yield row
        bad.num_rows = number
        bad.check()
    except UnicodeDecodeError as error:
        raise DataError(f"{file.name}, row {number + 1}: not UTF-8 ({error.reason}): save the file as UTF-8") from error
    except csv.Error as error:
        raise DataError(f"{file.name}, row {number + 1}: not valid CSV: {first_line(error)}") from error


def _csv_row(
    file: TextFile, number: int, header: Sequence[str], cells: Sequence[str], columns: Mapping[str, ColumnType]
) -> dict[str, Any]:  # Any: JSON
    if len(cells) != len(header):
        raise DataError(
            f"{file.name}, row {number}: found {len(cells)} cells, but the first line has {len(header)} columns: quote "
            "cells that contain the separator or a line break"
        )
    filled = {name: cell for name, cell in zip(header, cells, strict=True) if cell != ""}
    return {name: _typed(file, number, name, cell, columns.get(name, "text")) for name, cell in filled.items()}


def _check_header(file: TextFile, header: list[str], columns: Mapping[str, ColumnType]) -> None:
    """Raise DataError if the header has a duplicate column, or lacks a column that `columns` names."""
    if twice := next((name for name in header if header.count(name) > 1), None):
        raise DataError(f"{file.name}: the column {twice!r} occurs twice in the first line: rename one of them")
    for name in columns:
        if name not in header:
            raise DataError(
                f"{file.name} has no column {name!r}, but `columns` sets its type{closest_name(name, header)}"
            )


def _typed(file: TextFile, number: int, name: str, cell: str, kind: ColumnType) -> Any:  # Any: JSON
    """Convert a cell to its column's type. Values of the fields in `TEXT_FIELDS` become text again."""
    try:
        value = _READERS[kind](cell)
    except (ValueError, KeyError) as error:
        raise DataError(
            f"{file.name}, row {number}: {name} is {cell[:80]!r}, but `columns` sets its type to {kind}"
        ) from error
    return as_text(value) if name in TEXT_FIELDS and not isinstance(value, list | dict) else value


def _read_float(cell: str) -> float:
    value = float(cell)
    if value != value or value in (float("inf"), float("-inf")):
        raise ValueError(cell)
    return value


_READERS: dict[ColumnType, Callable[[str], Any]] = {  # Any: JSON
    "text": str,
    "int": int,
    "float": _read_float,
    "bool": lambda cell: BOOLEANS[cell.strip().lower()],
    "json": read_strict_json,
}
