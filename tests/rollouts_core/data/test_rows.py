"""Pins that every kind of file gives its rows, by number and in order, and that what is not a row is named.

Without it a damaged or changed file would be trained on, or fail a day later without a name.
"""

import errno
import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
import pytest

from rollouts_core.data.conversations import Row
from rollouts_core.data.dataset import load_prompts_from_jsonl
from rollouts_core.data.rows import digest_path, load_rows, open_rows, resolve_revision
from rollouts_core.errors import DataError

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def write_rows(path: Path, rows: Sequence[object]) -> Path:
    """A JSONL file of these rows."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables of a test stay in its folder."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.mark.parametrize(
    ("line", "reason"),
    [("{broken", "not valid JSON"), ("[1, 2]", "expected a JSON object, found list"), ("7", "found int")],
)
def test_a_line_that_is_no_json_object_is_named_by_its_row(tmp_path: Path, line: str, reason: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(f'{{"prompt": "x"}}\n{line}\n')
    with pytest.raises(DataError, match=rf"rows\.jsonl, row 2: .*{reason}"):
        list(load_rows(path))


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "the line ends inside an object"),  # an object over several lines
        ('{"messages": [', "the line ends inside an object"),
        ('{"prompt": "x', "the line ends inside an object"),
        ('{"prompt": "x"}, ', "Extra data at column 16"),
        ("{'prompt': 'x'}", "Expecting property name enclosed in double quotes at column 2"),
    ],
)
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_broken_json_is_told_by_its_place_in_the_row(tmp_path: Path, line: str, reason: str, newline: str) -> None:
    (tmp_path / "rows.jsonl").write_bytes(f'{{"prompt": "x"}}{newline}{line}{newline}"y"}}{newline}'.encode())
    with pytest.raises(DataError) as refused:
        list(load_rows(tmp_path / "rows.jsonl"))
    told = f"{tmp_path / 'rows.jsonl'}, row 2: not valid JSON: {reason}"
    assert str(refused.value).removesuffix(": expected a whole JSON object in each line") == told


@pytest.mark.parametrize("half", [r"\ud83d", r"\uDE00", r"\ude00\ud83d"])
@pytest.mark.parametrize("read", [lambda path: list(load_rows(path)), lambda path: open_rows(path).read([0, 1])])
def test_half_of_a_character_is_named_by_its_row(tmp_path: Path, read: Callable[[Path], object], half: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(f'{{"text": "x"}}\n{{"messages": [{{"role": "user", "content": "so nice {half}"}}]}}\n')
    with pytest.raises(DataError, match=r"rows\.jsonl, row 2: '\\ud[8e][30][d0]' is half of a character"):
        read(path)


def test_an_escaped_character_is_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(r'{"text": "\ud83d\ude00 \\ud83d"}' + "\n")
    assert [row for _, row in load_rows(path)] == [{"text": "\U0001f600 \\ud83d"}]


@pytest.mark.parametrize("content", ["", "\n\n"])
def test_an_empty_file_is_an_error(tmp_path: Path, content: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(content)
    with pytest.raises(DataError, match="is empty"):
        list(load_rows(path))


@pytest.mark.parametrize("name", ["none.jsonl", "none.parquet", "none"])
def test_a_missing_file_is_an_error(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError, match="does not exist"):
        list(load_rows(tmp_path / name))


@pytest.mark.parametrize("read", [lambda path: list(load_rows(path)), digest_path, open_rows])
def test_a_file_that_may_not_be_read_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: Callable[[Path], object]
) -> None:
    """The refusal is made up: these tests may run as root, who may read everything."""
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "a"}\n')

    def refused(path: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr("rollouts_core.data.rows.open_file", refused)
    with pytest.raises(DataError, match=r"rows\.jsonl cannot be read \(Permission denied\)"):
        read(path)


def test_blank_lines_are_no_rows(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "x"}\n\n  \n{"prompt": "y"}')
    assert [row["prompt"] for _, row in load_rows(path)] == ["x", "y"]


def test_a_file_in_another_encoding_is_named_by_its_row(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes('{"prompt": "x"}\n{"prompt": "ü"}\n'.encode("latin-1"))
    with pytest.raises(DataError, match=r"rows\.jsonl, row 2: not UTF-8"):
        list(load_rows(tmp_path / "rows.jsonl"))


@pytest.mark.parametrize("read", [load_rows, lambda path: open_rows(path).read([0, 1])])
def test_a_byte_order_mark_and_windows_line_ends_are_no_part_of_a_row(
    tmp_path: Path, read: Callable[[Path], Iterable[tuple[int, Row]]]
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "x"}\r\n{"prompt": "y"}\r\n')
    assert list(read(path)) == [(1, {"prompt": "x"}), (2, {"prompt": "y"})]


@pytest.mark.parametrize("indent", [None, 1])
def test_an_array_in_a_file_of_lines_is_named_with_a_way_to_make_lines_of_it(
    tmp_path: Path, indent: int | None
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps([{"prompt": "x"}, {"prompt": "y"}], indent=indent))
    with pytest.raises(DataError, match=r"rows\.jsonl is one JSON array: .*jq -c"):
        list(load_rows(path))


@pytest.mark.parametrize("indent", [None, 1])
def test_the_elements_of_a_json_array_are_rows(tmp_path: Path, indent: int | None) -> None:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([{"prompt": "x\n]"}, {"prompt": "y", "more": [1.0, {}]}], indent=indent))
    assert list(load_rows(path)) == [(1, {"prompt": "x\n]"}), (2, {"prompt": "y", "more": [1.0, {}]})]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('[{"prompt": "x"}, {broken}]', "row 2: not valid JSON: Expecting property name"),
        ('[{"prompt": "x"} {"prompt": "y"}]', "row 1: not valid JSON: expected , or ] after the row"),
        ('[{"prompt": "x"}, ', "row 2: not valid JSON: Expecting value"),
        ('[{"prompt": "x"}] and more', "there is text after the end of the array"),
        ('[{"prompt": "x"}, 7]', "row 2: expected a JSON object, found int"),
        ("[]", "is empty"),
    ],
)
def test_a_broken_array_is_one_sentence(tmp_path: Path, content: str, words: str) -> None:
    (tmp_path / "rows.json").write_text(content)
    with pytest.raises(DataError, match=rf"rows\.json.*{re.escape(words)}"):
        list(load_rows(tmp_path / "rows.json"))


@pytest.mark.parametrize("keep_bytes", [0, 3, 100])
def test_a_cut_parquet_file_is_one_sentence(tmp_path: Path, keep_bytes: int) -> None:
    path = tmp_path / "rows.parquet"
    datasets.Dataset.from_list([{"prompt": "x"}] * 50).to_parquet(str(path))
    path.write_bytes(path.read_bytes()[:keep_bytes])
    with pytest.raises(DataError, match="is not a Parquet file, or is truncated"):
        list(load_rows(path))


def test_a_file_of_another_kind_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "rows.xls").write_text("prompt\nx\n")
    with pytest.raises(DataError, match=r"must end in \.jsonl, .* or \.parquet"):
        list(load_rows(tmp_path / "rows.xls"))


def test_a_folder_of_several_splits_is_one_sentence(tmp_path: Path) -> None:
    rows = datasets.Dataset.from_list([{"prompt": "x"}])
    datasets.DatasetDict({"validation": rows, "test": rows}).save_to_disk(str(tmp_path / "folder"))
    with pytest.raises(DataError, match=r"has the splits test, validation, not train: give .*/folder/test, or"):
        list(load_rows(tmp_path / "folder"))
    assert list(load_rows(tmp_path / "folder" / "test")) == [(1, {"prompt": "x"})]


def test_a_folder_of_files_without_the_split_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    write_rows(tmp_path / "folder" / "test.jsonl", [{"prompt": "x"}])
    with pytest.raises(DataError, match=r"has no split train .*test.*: give the file of another split"):
        list(load_rows(tmp_path / "folder"))


def test_a_folder_that_is_no_dataset_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is not a dataset"):
        list(load_rows(tmp_path))


def test_a_saved_dataset_folder_has_its_rows(tmp_path: Path) -> None:
    datasets.Dataset.from_list([{"prompt": "x"}, {"prompt": "y"}]).save_to_disk(str(tmp_path / "folder"))
    assert [(n, row["prompt"]) for n, row in load_rows(tmp_path / "folder")] == [(1, "x"), (2, "y")]


def test_the_digest_of_a_file_is_that_of_its_content(tmp_path: Path) -> None:
    for name, content in [("a", "x"), ("b", "x"), ("c", "y")]:
        (tmp_path / name).write_text(content)
    assert digest_path(tmp_path / "a") == digest_path(tmp_path / "b") != digest_path(tmp_path / "c")


@pytest.mark.parametrize("kept", [".cache/huggingface/download/model.safetensors.metadata", ".git/index"])
def test_what_a_download_or_a_clone_keeps_beside_a_model_is_no_part_of_its_digest(tmp_path: Path, kept: str) -> None:
    """It has the time of the download: a model that was fetched again would have everything trained anew."""
    folder = tmp_path / ".cache" / "model"  # where the folder itself lies does not count
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_text("x")
    before = digest_path(folder)
    (folder / kept).parent.mkdir(parents=True)
    (folder / kept).write_text("1700000000.0")
    assert digest_path(folder) == before
    (folder / "model.safetensors").write_text("y")
    assert digest_path(folder) != before


@pytest.mark.parametrize("change", ["content", "name", "added"])
def test_the_digest_of_a_folder_notices(tmp_path: Path, change: str) -> None:
    (tmp_path / "inner").mkdir()
    file = tmp_path / "inner" / "a"
    file.write_text("x")
    before = digest_path(tmp_path)
    if change == "content":
        file.write_text("y")
    elif change == "name":
        file.rename(tmp_path / "inner" / "b")
    else:
        (tmp_path / "c").write_text("")
    assert digest_path(tmp_path) != before


def test_the_digest_of_a_folder_does_not_depend_on_where_it_lies(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a").write_text("x")
    assert digest_path(tmp_path / "one") == digest_path(tmp_path / "two")


def test_a_split_of_a_folder_is_chosen_by_its_name(tmp_path: Path) -> None:
    splits = {name: datasets.Dataset.from_list([{"prompt": name}]) for name in ("train", "test")}
    datasets.DatasetDict(splits).save_to_disk(str(tmp_path / "folder"))
    assert [row for _, row in open_rows(tmp_path / "folder", split="test").read([0])] == [{"prompt": "test"}]
    assert [row for _, row in load_rows(tmp_path / "folder")] == [{"prompt": "train"}]


def test_a_folder_of_data_files_is_a_dataset(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    write_rows(tmp_path / "folder" / "train.jsonl", [{"prompt": "x"}, {"prompt": "y"}])
    assert [row["prompt"] for _, row in load_rows(tmp_path / "folder")] == ["x", "y"]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_rows_can_be_read_in_any_order(tmp_path: Path, kind: str) -> None:
    rows = [{"prompt": f"{i} ü"} for i in range(10)]
    path = tmp_path / f"rows.{kind}"
    write_rows(path, rows) if kind == "jsonl" else datasets.Dataset.from_list(rows).to_parquet(str(path))
    table = open_rows(path)
    assert len(table) == 10
    assert table.read([7, 0, 7]) == [(8, rows[7]), (1, rows[0]), (8, rows[7])]
    assert table.digest == digest_path(path)


def test_rows_by_number_know_their_lines(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('\n{"prompt": "x"}\n\n{"prompt": "y"}')
    assert open_rows(tmp_path / "rows.jsonl").read([1, 0]) == [(4, {"prompt": "y"}), (2, {"prompt": "x"})]


@pytest.mark.parametrize("change", ["other", "cut", "gone"])
def test_a_file_that_changes_while_it_is_in_use_is_an_error(tmp_path: Path, change: str) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [{"prompt": "x"}, {"prompt": "y"}])
    table = open_rows(path)
    if change == "gone":
        path.unlink()
    else:
        write_rows(path, [{"prompt": "x"}, *([{"prompt": "z"}] if change == "other" else [])])
    with pytest.raises(DataError, match=r"rows\.jsonl(, row 2 changed while it was in use| can no longer be read)"):
        table.read([1])


KINDS = ["jsonl", "parquet", "saved", "folder"]


def write_kind(path: Path, kind: str, prompts: Sequence[str]) -> Path:
    """Rows with these prompts in a file or folder of a kind; returns where."""
    rows = [{"prompt": prompt} for prompt in prompts]
    if kind == "jsonl":
        return write_rows(path / "rows.jsonl", rows)
    if kind == "parquet":
        datasets.Dataset.from_list(rows).to_parquet(str(path / "rows.parquet"))
        return path / "rows.parquet"
    if kind == "saved":
        datasets.Dataset.from_list(rows).save_to_disk(str(path / "folder"))
    else:
        (path / "folder").mkdir(exist_ok=True)
        write_rows(path / "folder" / "train.jsonl", rows)
    return path / "folder"


def data_file(path: Path, kind: str) -> Path:
    """The file that holds the rows."""
    return {"saved": path / "data-00000-of-00001.arrow", "folder": path / "train.jsonl"}.get(kind, path)


@pytest.mark.parametrize("kind", KINDS)
def test_a_change_behind_rows_that_were_read_is_noticed_at_the_next_read(tmp_path: Path, kind: str) -> None:
    path = write_kind(tmp_path, kind, ["aaaaaaaa", "bbbbbbbb", "cccccccc"])
    table = open_rows(path)
    assert table.read([2])
    file = data_file(path, kind)
    content = file.read_bytes()
    with file.open("r+b") as written:  # in place: nothing but bytes and time tell
        written.write(content.replace(b"cccccccc", b"dddddddd"))
    assert file.read_bytes() != content
    with pytest.raises(DataError, match=rf"{path.name} changed while it was in use: start again"):
        table.read([0])


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_are_added_are_a_change_too(tmp_path: Path, kind: str) -> None:
    path = write_kind(tmp_path, kind, ["x", "y"])
    table = open_rows(path)
    with data_file(path, kind).open("ab") as file:
        file.write(b'{"prompt": "z"}\n')
    with pytest.raises(DataError, match="changed while it was in use"):
        table.read([0])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["touched", "replaced"])
def test_the_same_content_written_again_is_no_change(tmp_path: Path, kind: str, how: str) -> None:
    path = write_kind(tmp_path, kind, ["x", "y"])
    table = open_rows(path)
    file = data_file(path, kind)
    if how == "touched":
        file.touch()
    else:
        shutil.copy(file, tmp_path / "copy")
        (tmp_path / "copy").replace(file)
    assert table.read([1, 0]) == [(2, {"prompt": "y"}), (1, {"prompt": "x"})]


@pytest.mark.parametrize("kind", KINDS)
def test_another_file_of_the_same_name_size_and_time_has_its_own_rows(tmp_path: Path, kind: str) -> None:
    for prompt in ("old", "new"):
        path = write_kind(tmp_path, kind, [prompt] * 3)
        os.utime(data_file(path, kind), ns=(10**18, 10**18))
        assert [row for _, row in open_rows(path).read(range(3))] == [{"prompt": prompt}] * 3


def test_a_file_that_grows_while_its_rows_are_read_one_by_one_is_an_error(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [{"prompt": "x"}, {"prompt": "y"}])
    rows = load_rows(path)
    next(rows)
    with path.open("a") as file:
        file.write('{"prompt": "z"}\n')
    with pytest.raises(DataError, match=r"rows\.jsonl changed while it was in use"):
        list(rows)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"prompt": "x", "prompt": "y"}', "the key 'prompt' occurs twice in one object"),
        ('{"messages": [{"role": "user", "role": "user"}]}', "the key 'role' occurs twice"),
        ('{"prompt": NaN}', "NaN is not a JSON value"),
        ('{"prompt": "x", "score": -Infinity}', "-Infinity is not a JSON value"),
    ],
)
def test_json_that_says_two_things_or_nothing_is_an_error(tmp_path: Path, line: str, reason: str) -> None:
    (tmp_path / "rows.jsonl").write_text(f'{{"prompt": "x"}}\n{line}\n')
    with pytest.raises(DataError, match=rf"rows\.jsonl, row 2: not valid JSON: .*{reason}"):
        list(load_rows(tmp_path / "rows.jsonl"))


def test_a_parquet_row_has_the_keys_that_were_written_and_no_nulls_in_them(tmp_path: Path) -> None:
    rows: list[Mapping[str, Any]] = [
        {"messages": [{"role": "user", "content": "x", "name": "a"}, {"role": "assistant", "content": "y"}]},
        {"messages": [{"role": "user", "content": "x"}]},
    ]
    datasets.Dataset.from_list(rows).to_parquet(str(tmp_path / "rows.parquet"))
    assert [row for _, row in load_rows(tmp_path / "rows.parquet")] == rows


def test_a_number_that_a_table_lacks_is_no_number(tmp_path: Path) -> None:
    rows = [{"prompt": "x", "rate": math.nan, "more": {"a": math.nan, "b": [0.5, math.nan]}}]
    datasets.Dataset.from_list(rows).to_parquet(str(tmp_path / "rows.parquet"))
    [(_, row)] = load_rows(tmp_path / "rows.parquet")
    assert row == {"prompt": "x", "rate": None, "more": {"b": [0.5, None]}}


def save_pictures(folder: Path, column: str, values: Sequence[object], kind: Callable[..., object]) -> Path:
    """A dataset of demonstrations with a column of pictures that nobody can decode."""
    features = {**dict.fromkeys(("prompt", "completion"), datasets.Value("string")), column: kind(decode=False)}
    rows = [{"prompt": "1+1=?", "completion": "2", column: value} for value in values]
    table = datasets.Dataset.from_list(rows, features=datasets.Features(features))
    table.cast_column(column, kind(decode=True)).save_to_disk(folder)
    return folder


def test_a_picture_is_not_decoded_and_a_row_without_one_has_none(tmp_path: Path) -> None:
    """Of demonstrations nobody reads the column, and Pillow may not be there."""
    picture = {"bytes": b"\x89PNG, and no more", "path": None}
    folder = save_pictures(tmp_path / "d", "picture", [picture, None], datasets.Image)
    [(_, first), (_, second)] = load_rows(folder)
    assert first == {"prompt": "1+1=?", "completion": "2", "picture": datasets.Image()}
    assert second["picture"] is None
    with pytest.raises(DataError, match=r"row 1: the field `picture` holds Image, which JSON cannot store"):
        load_prompts_from_jsonl(folder)


def test_pictures_within_a_column_that_cannot_be_decoded_are_one_sentence(tmp_path: Path) -> None:
    def several(*, decode: bool) -> object:
        return datasets.List(datasets.Image(decode=decode))

    picture = {"bytes": b"\x89PNG, and no more", "path": None}
    folder = save_pictures(tmp_path / "d", "pictures", [[picture]], several)
    with pytest.raises(DataError, match=r"d has images or audio nested inside a column, .*cannot identify image file"):
        list(load_rows(folder))


@pytest.mark.parametrize(("name", "other"), [("rows[1]", "rows1"), ("rows*", "rows-old"), ("rows?", "rows2")])
def test_a_parquet_file_whose_name_is_a_pattern_is_read_and_no_other(tmp_path: Path, name: str, other: str) -> None:
    for stem in (name, other):
        datasets.Dataset.from_list([{"prompt": stem}]).to_parquet(tmp_path / f"{stem}.parquet")
    assert list(load_rows(tmp_path / f"{name}.parquet")) == [(1, {"prompt": name})]


def test_a_folder_whose_name_is_a_pattern_is_refused_unless_it_was_saved_to_disk(tmp_path: Path) -> None:
    for name in ("rows[1]", "rows1"):
        (tmp_path / name).mkdir()
        write_rows(tmp_path / name / "train.jsonl", [{"prompt": name}])
    with pytest.raises(DataError, match=r"rows\[1\] contains .* rename it"):
        open_rows(tmp_path / "rows[1]")
    datasets.Dataset.from_list([{"prompt": "x"}]).save_to_disk(tmp_path / "saved[1]")
    assert list(load_rows(tmp_path / "saved[1]")) == [(1, {"prompt": "x"})]


def test_an_empty_parquet_file_is_an_error(tmp_path: Path) -> None:
    datasets.Dataset.from_dict({"prompt": []}).to_parquet(str(tmp_path / "rows.parquet"))
    with pytest.raises(DataError, match="is empty"):
        open_rows(tmp_path / "rows.parquet")


@pytest.mark.slow
def test_the_index_of_a_file_does_not_hold_its_rows(tmp_path: Path) -> None:
    # 48 MB of rows under 32 MB of address space more than Python and its imports need.
    write_rows(tmp_path / "rows.jsonl", [{"text": "x" * 12_000}] * 4_000)
    program = (
        "import resource, sys; from rollouts_core.data.rows import open_rows\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + 32 * 2**20,) * 2)\n"
        "table = open_rows(sys.argv[1])\n"
        "print(len(table), sum(len(table.read([i])[0][1]['text']) for i in range(4000)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "rows.jsonl")], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split() == ["4000", "48000000"], done.stderr


def test_a_commit_needs_no_hub_and_decides_the_digest() -> None:
    assert resolve_revision("org/name", COMMIT) == COMMIT
    assert digest_path("org/name", revision=COMMIT) != digest_path("org/name", revision=COMMIT[::-1])


def test_a_local_path_has_no_revision(tmp_path: Path) -> None:
    assert resolve_revision(str(tmp_path), "") == ""
