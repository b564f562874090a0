"""Pins that the same rows give the same prompts and samples from every kind of file.

Without it an answer `1.50` would be compared as `1.5`, `007` as `7`, and a date as a time, by the file that holds it.
"""

from __future__ import annotations

import bz2
import csv
import gzip
import json
import lzma
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet
import pytest
from transformers import PreTrainedTokenizerBase

from rollouts_core.config import DataConfig, DatasetConfig
from rollouts_core.data.dataset import SampleRules, SFTDataset, load_prompts_from_jsonl, open_datasets
from rollouts_core.data.rows import load_rows
from rollouts_core.errors import DataError
from rollouts_core.types import Prompt

ANSWERS = ["2024-07-26", "1.50", "007", "72", "", "1e3", "-0", "true", "NA", "12345678901234567890123", " x "]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of a test stay in its folder."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def folder_with(path: Path, name: str, content: bytes) -> Path:
    (path / "folder").mkdir(exist_ok=True)
    (path / "folder" / name).write_bytes(content)
    return path / "folder"


def file_with(path: Path, name: str, content: bytes) -> Path:
    (path / name).write_bytes(content)
    return path / name


def lines(rows: Sequence[str]) -> bytes:
    return "".join(f"{row}\n" for row in rows).encode()


def array(rows: Sequence[str]) -> bytes:
    return ("[\n" + ",\n".join(rows) + "\n]\n").encode()


def zstd(content: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as packed:
        packed.write(content)
    return bytes(sink.getvalue().to_pybytes())


def below_a_field(path: Path, rows: Sequence[str]) -> Path:
    """A folder as the hub has it, whose README names the field of the rows."""
    folder_with(
        path, "README.md", b"---\nconfigs:\n- config_name: default\n  data_files: all.json\n  field: data\n---\n"
    )
    return folder_with(path, "all.json", b'{"version": [1.0, {"data": 2}], "data": ' + array(rows) + b', "end": 1}')


def snapshot(path: Path, rows: Sequence[str]) -> Path:
    """A dataset as the cache of the hub's client has it: links to files without an ending."""
    folder = path / "snapshots" / "0123"
    (folder / "data").mkdir(parents=True)
    (path / "blobs").mkdir()
    (path / "blobs" / "89ab").write_bytes(lines(rows))
    (folder / "data" / "train-00000-of-00001.jsonl").symlink_to("../../../blobs/89ab")
    splits = "  - split: train\n    path: data/train-*.jsonl\n"
    (folder / "README.md").write_text(f"---\nconfigs:\n- config_name: main\n  data_files:\n{splits}---\n")
    return folder


JSON_CONTAINERS: dict[str, Callable[[Path, Sequence[str]], Path]] = {
    "jsonl": lambda path, rows: file_with(path, "rows.jsonl", lines(rows)),
    "json": lambda path, rows: file_with(path, "rows.json", lines(rows)),
    "array": lambda path, rows: file_with(path, "rows.json", array(rows)),
    "gz": lambda path, rows: file_with(path, "rows.jsonl.gz", gzip.compress(lines(rows))),
    "bz2": lambda path, rows: file_with(path, "rows.jsonl.bz2", bz2.compress(lines(rows))),
    "xz": lambda path, rows: file_with(path, "rows.json.xz", lzma.compress(array(rows))),
    "zst": lambda path, rows: file_with(path, "rows.jsonl.zst", zstd(lines(rows))),
    "zst of lines": lambda path, rows: file_with(path, "rows.json.zst", zstd(lines(rows))),
    "BOM and CRLF": lambda path, rows: file_with(
        path, "rows.jsonl", b"\xef\xbb\xbf" + lines(rows).replace(b"\n", b"\r\n")
    ),
    "field of a README": below_a_field,
    "snapshot of the hub": snapshot,
    "folder": lambda path, rows: folder_with(path, "train.jsonl", lines(rows)),
    "folder of zst": lambda path, rows: folder_with(path, "train.jsonl.zst", zstd(lines(rows))),
    "folder of arrays": lambda path, rows: folder_with(path, "train.json", array(rows)),
    "folder of gz": lambda path, rows: folder_with(path, "train.jsonl.gz", gzip.compress(lines(rows))),
    "two files": lambda path, rows: (
        folder_with(path, "a.jsonl", b"\xef\xbb\xbf" + lines(rows[:3]).rstrip())
        and folder_with(path, "b.jsonl", lines(rows[3:]))
    ),
}


def without_ids(prompts: Sequence[Prompt]) -> list[Prompt]:
    return [replace(prompt, id="") for prompt in prompts]


@pytest.mark.parametrize("container", JSON_CONTAINERS)
def test_an_answer_in_json_is_what_the_file_says(tmp_path: Path, container: str) -> None:
    answers = ['"2024-07-26"', "1", "2.5", "1.50", "1e3", "-0", "true", "null", '[1.50, {"a": 1.0, "b": "x"}]', '"007"']
    rows = [f'{{"prompt": "{i}", "answer": {answer}, "level": 1.50}}' for i, answer in enumerate(answers)]
    prompts = load_prompts_from_jsonl(JSON_CONTAINERS[container](tmp_path, rows))
    expected = ["2024-07-26", "1", "2.5", "1.50", "1e3", "-0", "true", "", '[1.50, {"a": 1.0, "b": "x"}]', "007"]
    assert [prompt.answer for prompt in prompts] == expected
    assert [prompt.has_json_answer for prompt in prompts] == [answer.startswith("[") for answer in expected]
    assert all(prompt.metadata == {"level": 1.5} for prompt in prompts)


@pytest.mark.parametrize("container", JSON_CONTAINERS)
def test_other_fields_of_json_keep_their_types_and_their_keys(tmp_path: Path, container: str) -> None:
    more: list[dict[str, Any]] = [
        {"day": "2024-07-26", "n": 1, "call": {"a": 7}},
        {"day": "2024-07-27", "n": 2.5, "call": {"b": None}},
        {"day": "x", "n": None, "flag": True},
        {"n": "1"},
    ]
    path = JSON_CONTAINERS[container](tmp_path, [json.dumps({"prompt": "?", **each}) for each in more])
    found = [prompt.metadata for prompt in load_prompts_from_jsonl(path)]
    assert found == [{key: value for key, value in each.items() if value is not None} for each in more]
    assert [type(each["n"]) for each in (found[0], found[1])] == [int, float]


def test_columns_below_the_field_of_a_readme_are_rows(tmp_path: Path) -> None:
    folder = below_a_field(tmp_path, [])
    (folder / "all.json").write_text('{"data": {"prompt": ["a", "b"], "answer": [1.50, null]}}')
    assert [prompt.answer for prompt in load_prompts_from_jsonl(folder)] == ["1.50", ""]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[1]", "expected a JSON object with 'data', the field that the README names"),
        ('{"rows": []}', "expected a JSON object with 'data'"),
        ('{"data": 3}', "'data' is neither an array of rows nor columns of one length"),
        ('{"data": {"a": [1], "b": []}}', "neither an array of rows nor columns"),
        ('{"data": [1,]}', "not valid JSON"),
        ('{"data" [1]}', "expected : after 'data'"),
    ],
)
def test_a_file_without_the_field_of_its_readme_is_one_sentence(tmp_path: Path, content: str, words: str) -> None:
    folder = below_a_field(tmp_path, [])
    (folder / "all.json").write_text(content)
    with pytest.raises(DataError, match=words):
        list(load_rows(folder))


def test_a_folder_with_rows_of_several_kinds_loses_none_silently(tmp_path: Path) -> None:
    folder_with(tmp_path, "a.jsonl", b'{"prompt": "x"}\n')
    folder_with(tmp_path, "dataset_info.json", b"{}")
    folder = folder_with(tmp_path, "b.csv", b"prompt\ny\n")
    with pytest.raises(DataError, match=r"several kinds of row files \(a\.jsonl and b\.csv\), but only one kind"):
        list(load_rows(folder))


@pytest.mark.parametrize("content", ['[{"prompt": "x"},]', '[,{"prompt": "x"}]', '{\n "prompt": "x"\n}\n', "[[1]]"])
def test_json_that_is_no_list_of_rows_is_no_fewer_rows(tmp_path: Path, content: str) -> None:
    with pytest.raises(DataError, match=r"not valid JSON|JSON over several lines|one JSON array"):
        list(load_rows(file_with(tmp_path, "rows.json", content.encode())))


def as_csv(answers: Sequence[str], *, separator: str = ",") -> bytes:
    rows = [["prompt", "answer", "level"], *([f"what,\nis {i}?", answer, "1.0"] for i, answer in enumerate(answers))]
    out: list[str] = []

    class Sink:
        def write(self, text: str) -> None:
            out.append(text)

    csv.writer(Sink(), delimiter=separator).writerows(rows)
    return "".join(out).encode()


CSV_CONTAINERS: dict[str, Callable[[Path, Sequence[str]], Path]] = {
    "csv": lambda path, answers: file_with(path, "rows.csv", as_csv(answers)),
    "tsv": lambda path, answers: file_with(path, "rows.tsv", as_csv(answers, separator="\t")),
    "gz": lambda path, answers: file_with(path, "rows.csv.gz", gzip.compress(as_csv(answers))),
    "folder": lambda path, answers: folder_with(path, "train.csv", as_csv(answers)),
    "folder of tsv": lambda path, answers: folder_with(path, "train.tsv", as_csv(answers, separator="\t")),
    "folder of gz": lambda path, answers: folder_with(path, "train.csv.gz", gzip.compress(as_csv(answers))),
}


@pytest.mark.parametrize("container", CSV_CONTAINERS)
def test_cells_of_csv_are_text(tmp_path: Path, container: str) -> None:
    prompts = load_prompts_from_jsonl(CSV_CONTAINERS[container](tmp_path, ANSWERS))
    assert [prompt.answer for prompt in prompts] == ANSWERS
    assert prompts[3].messages[0]["content"] == "what,\nis 3?"
    assert {prompt.metadata["level"] for prompt in prompts} == {"1.0"}


@pytest.mark.parametrize("container", CSV_CONTAINERS)
def test_a_column_of_csv_has_the_type_that_the_settings_give(tmp_path: Path, container: str) -> None:
    path = CSV_CONTAINERS[container](tmp_path, ["1.50", "72", "", "1e3"])
    prompts = load_prompts_from_jsonl(path, columns={"answer": "float", "level": "float"})
    assert [prompt.answer for prompt in prompts] == ["1.5", "72", "", "1000"]
    assert [type(prompt.metadata["level"]) for prompt in prompts] == [float] * 4
    assert load_prompts_from_jsonl(path)[0].answer == "1.50"  # a copy of the same file with other types


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"answer": "int"}, "row 1: answer is '1.50', but `columns` sets its type to int"),
        ({"answr": "float"}, "has no column 'answr', but `columns` sets its type; did you mean answer?"),
        ({"answer": "bool"}, "row 1: answer is '1.50', but `columns` sets its type to bool"),
    ],
)
def test_a_cell_that_is_not_of_its_type_is_one_sentence(tmp_path: Path, columns: dict[str, Any], words: str) -> None:
    path = CSV_CONTAINERS["csv"](tmp_path, ["1.50"])
    with pytest.raises(DataError, match=words.replace("?", r"\?")):
        list(load_rows(path, columns=columns))


def test_a_file_of_prompts_names_the_types_of_its_columns() -> None:
    given = {"prompts": {"path": "a.csv", "columns": {"answer": "float"}}, "sft": {"path": "b.csv"}, "heldout": "c"}
    data = DataConfig.model_validate(given)
    assert (data.prompts, data.columns_of("prompts"), data.columns_of("heldout")) == ("a.csv", {"answer": "float"}, {})
    assert data.sft == (DatasetConfig(path="b.csv"),)
    assert DataConfig.model_validate(data.model_dump()) == data
    with pytest.raises(ValueError, match="prompts: expected a path, or a table with path and columns"):
        DataConfig.model_validate({"prompts": {"path": "a.csv", "split": "test"}})


PARQUET = [
    (pa.float64(), [72.0, 1.5, 0.1, 1e300, None], ["72", "1.5", "0.1", "1e+300", ""]),
    (pa.float32(), [72.0, 1.5, 0.1, None], ["72", "1.5", "0.1", ""]),
    (pa.int64(), [7, -3, None], ["7", "-3", ""]),
    (pa.bool_(), [True, False], ["true", "false"]),
    (
        pa.decimal128(10, 2),
        [Decimal("1.50"), Decimal("72.00")],
        ["1.5", "72"],
    ),
    (pa.string(), ["007", "1.50", "2024-07-26"], ["007", "1.50", "2024-07-26"]),
    (pa.date32(), [date(2024, 7, 26)], ["2024-07-26"]),
    (pa.list_(pa.float64()), [[1.0, 2.5]], ["[1, 2.5]"]),
]


@pytest.mark.parametrize(("kind", "values", "expected"), PARQUET, ids=lambda each: str(each)[:20])
@pytest.mark.parametrize("container", ["parquet", "folder", "saved"])
def test_an_answer_in_a_table_is_the_shortest_text_of_its_value(
    tmp_path: Path, kind: Any, values: Sequence[object], expected: Sequence[str], container: str
) -> None:
    table = pa.table({"prompt": [str(i) for i in range(len(values))], "answer": pa.array(values, kind)})
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(table, path)
    if container == "folder":
        path = folder_with(tmp_path, "train.parquet", path.read_bytes())
    elif container == "saved":
        datasets.Dataset.from_parquet(str(path)).save_to_disk(str(tmp_path / "folder"))
        path = tmp_path / "folder"
    assert [prompt.answer for prompt in load_prompts_from_jsonl(path)] == list(expected)


@pytest.mark.parametrize("field", ["id", "answer"])
def test_an_id_is_the_same_text_in_every_file(tmp_path: Path, field: str) -> None:
    rows = [{"prompt": "a", field: 1}, {"prompt": "b", field: None}]
    jsonl = JSON_CONTAINERS["jsonl"](tmp_path, list(map(json.dumps, rows)))
    table = pa.table({"prompt": ["a", "b"], field: pa.array([1.0, None], pa.float64())})
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    of_lines, of_table = (load_prompts_from_jsonl(path) for path in (jsonl, tmp_path / "rows.parquet"))
    assert of_lines == of_table


@pytest.mark.parametrize("streaming", [False, True])
def test_a_mixture_trains_on_the_same_tokens_from_every_container(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, streaming: bool
) -> None:
    rows = [{"prompt": f"{i}+1=?", "completion": f"{i + 1}"} for i in range(8)]
    cells = "prompt,completion\n" + "".join(f"{row['prompt']},{row['completion']}\n" for row in rows)

    def tokens(paths: Sequence[Path]) -> list[list[int]]:
        mixture = [DatasetConfig(path=str(path)) for path in paths]
        dataset = SFTDataset(mixture, open_datasets(mixture), tokenizer, SampleRules(64), streaming=streaming)
        return [sample.tokens for samples in dataset.iterate_epoch(0, seed=3) for sample in samples]

    def each_path() -> Iterator[Path]:
        text = list(map(json.dumps, rows))
        for name, write in JSON_CONTAINERS.items():
            (tmp_path / name).mkdir()
            yield write(tmp_path / name, text)
        yield file_with(tmp_path, "rows.csv", cells.encode())

    first, *others = each_path()
    expected = tokens([first, first])
    assert [tokens([first, other]) for other in others] == [expected] * len(others)


CALLS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}{% for call in m.tool_calls or [] %}"
    "<call>{{ call.function.name }}{{ call.function.arguments | tojson }}</call>{% endfor %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.mark.parametrize("template", [CALLS, CALLS.replace("arguments | tojson", "arguments + ''")])
def test_calls_of_tools_train_on_the_same_tokens_from_every_container(
    tmp_path: Path, byte_tokenizer: PreTrainedTokenizerBase, template: str
) -> None:
    """Tables fill up the arguments that a call lacks."""
    byte_tokenizer.chat_template = template
    calls: list[dict[str, Any]] = [
        {"type": "function", "function": {"name": "now"}},
        {"type": "function", "function": {"name": "add", "arguments": {"a": 7, "b": 3}}},
        {"type": "function", "function": {"name": "say", "arguments": {"text": "3", "nested": {"deep": [1, None]}}}},
    ]
    rows = [
        {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": each}]}
        for each in (calls[:1], calls[1:2], calls)
    ]
    written = ["now{}", 'add{"a": 7, "b": 3}', 'say{"text": "3", "nested": {"deep": [1, null]}}']

    def texts(path: Path) -> list[str]:
        mixture = [DatasetConfig(path=str(path))]
        dataset = SFTDataset(mixture, open_datasets(mixture), byte_tokenizer, SampleRules(512))
        return sorted(
            byte_tokenizer.decode(sample.tokens) for samples in dataset.iterate_epoch(0, seed=3) for sample in samples
        )

    def each_path() -> Iterator[Path]:
        for name, write in JSON_CONTAINERS.items():
            (tmp_path / name).mkdir()
            yield write(tmp_path / name, list(map(json.dumps, rows)))
        pyarrow.parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
        yield tmp_path / "rows.parquet"
        datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "saved")
        yield tmp_path / "saved"

    expected = sorted(
        f"<user>?<|im_end|><assistant>{''.join(f'<call>{call}</call>' for call in said)}<|im_end|>"
        for said in (written[:1], written[1:2], written)
    )
    for path in each_path():
        assert texts(path) == expected, path


def test_a_folder_is_copied_once_and_again_when_it_changes(tmp_path: Path) -> None:
    def prompts(rows: Sequence[Mapping[str, str]]) -> list[str]:
        path = JSON_CONTAINERS["folder"](tmp_path, list(map(json.dumps, rows)))
        return [str(row["prompt"]) for _, row in load_rows(path)]

    assert prompts([{"prompt": "x"}]) == prompts([{"prompt": "x"}]) == ["x"]
    assert prompts([{"prompt": "y"}]) == ["y"]
    assert len(list((tmp_path / "cache").glob("*/rows-*.jsonl"))) == 2
