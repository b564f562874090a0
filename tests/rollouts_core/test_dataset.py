"""Pins how rows become samples and prompts, and that every row that does not fit is named by its number.

Without it a row of another shape would be skipped, trained on with an empty mask, or fail a day later without a name.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
import pytest
from transformers import PreTrainedTokenizerBase

from rollouts_core.config import ModelConfig
from rollouts_core.dataset import (
    check_disjoint,
    load_prompts_from_jsonl,
    load_sft_dataset,
)
from rollouts_core.errors import DataError
from rollouts_core.model import load_tokenizer
from rollouts_core.rows import digest_path, load_rows
from rollouts_core.types import Prompt, Sample, Status
from tests.rollouts_core.make import make_prompts

Row = Mapping[str, Any]
CONVERSATION = [{"role": "user", "content": "1+1=?"}, {"role": "assistant", "content": "2"}]
PROMPT_AND_COMPLETION = {"prompt": "1+1=?", "completion": "2"}


def write_rows(path: Path, rows: Sequence[object]) -> Path:
    """A JSONL file of these rows."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def load_one(path: Path, row: Row, tokenizer: PreTrainedTokenizerBase, **settings: Any) -> Sample:
    """The sample of a file with this one row."""
    [sample] = load_sft_dataset(write_rows(path / "rows.jsonl", [row]), tokenizer, **{"max_length": 100, **settings})
    return sample


def trained_text(tokenizer: PreTrainedTokenizerBase, sample: Sample) -> str:
    """The text of the tokens that enter the loss."""
    return tokenizer.decode([t for t, weight in zip(sample.tokens, sample.loss_mask, strict=True) if weight])


@pytest.mark.parametrize(
    "row",
    [
        {"messages": CONVERSATION},
        PROMPT_AND_COMPLETION,
        {"prompt": "1+1=?", "response": "2"},
        {"prompt": CONVERSATION[:1], "completion": "2"},
    ],
)
def test_every_shape_of_a_conversation_gives_the_same_sample(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, row: Row
) -> None:
    sample = load_one(tmp_path, row, tokenizer)
    assert tokenizer.decode(sample.tokens) == "<|user|>1+1=?<|end|><|assistant|>2<|end|>"
    assert trained_text(tokenizer, sample) == "2<|end|>"
    assert (sample.prompt, sample.response) == ((CONVERSATION[0],), "2")
    assert sample.status is Status.COMPLETED


def test_a_text_row_is_trained_on_whole_and_ends(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    sample = load_one(tmp_path, {"text": "1+1=2"}, tokenizer)
    assert tokenizer.decode(sample.tokens) == "1+1=2<|end|>"
    assert sample.loss_mask == [1.0] * 6


def test_a_text_row_needs_no_chat_template(tmp_path: Path, base_model: ModelConfig) -> None:
    own = load_tokenizer(base_model)
    own.chat_template = None
    assert load_one(tmp_path, {"text": "1+1=2"}, own).response == "1+1=2"


def test_training_on_everything_works_with_any_template(tmp_path: Path, base_model: ModelConfig) -> None:
    own = load_tokenizer(base_model)
    own.chat_template = "{% for m in messages %}{% if loop.last %}{{ m['content'] }}{% endif %}{% endfor %}"
    sample = load_one(tmp_path, {"messages": [*CONVERSATION, *CONVERSATION[:1]]}, own, train_on="everything")
    assert trained_text(own, sample) == "1+1=?"


def test_samples_keep_the_order_of_the_file(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [{"text": str(i) * 2} for i in range(9)])
    assert [s.response for s in load_sft_dataset(path, tokenizer, max_length=9)] == [str(i) * 2 for i in range(9)]


def test_a_long_demonstration_is_cut_and_marked(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    sample = load_one(tmp_path, {"prompt": "1+1=?", "completion": "1234567"}, tokenizer, max_length=12)
    assert tokenizer.decode(sample.tokens) == "<|user|>1+1=?<|end|><|assistant|>1234"
    assert trained_text(tokenizer, sample) == "1234"
    assert sample.status is Status.TRUNCATED


@pytest.mark.parametrize(
    ("row", "max_length", "reason"),
    [
        ({"prompt": "1+1=?", "completion": "2"}, 8, "within the first 8 of its 10 tokens"),
        ({"text": ""}, 8, "within the first 8 of its 1 tokens"),
        ({"text": "123"}, 1, "within the first 1 of its 4 tokens"),
    ],
)
def test_a_row_with_nothing_to_train_on_is_an_error(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, row: Row, max_length: int, reason: str
) -> None:
    with pytest.raises(DataError, match=rf"row 1: nothing to train on {reason}"):
        load_one(tmp_path, row, tokenizer, max_length=max_length)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"question": "x", "solution": "y"}, "expected `messages`.*found question, solution"),
        ({}, "found no field at all"),
        ({"prompt": "x"}, "expected `messages`"),
        ({"text": 3}, "`text` must be text, found int"),
        ({"prompt": "x", "completion": None}, r"expected `messages`.*; found prompt, completion \(null\)"),
        ({"prompt": 3, "completion": "x"}, "`prompt` must be text, found int"),
        ({"messages": []}, "at least one message"),
        ({"messages": "hello"}, "must be a list"),
        ({"messages": [{"role": "user"}]}, "message 0 must have `role` and `content`"),
        ({"messages": [CONVERSATION[0], {"role": "assistant", "content": None}]}, "message 1 must have"),
        ({"messages": ["hello"]}, "message 0 must have"),
        ({"messages": CONVERSATION[:1]}, "no assistant turn"),
    ],
)
def test_a_bad_demonstration_is_named_by_its_row(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, row: Row, reason: str
) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [PROMPT_AND_COMPLETION, row])
    with pytest.raises(DataError, match=rf"rows\.jsonl, row 2: .*{reason}"):
        load_sft_dataset(path, tokenizer, max_length=100)


@pytest.mark.parametrize(
    ("line", "reason"),
    [("{broken", "not valid JSON"), ("[1, 2]", "expected a JSON object, found list"), ("7", "found int")],
)
def test_a_line_that_is_no_json_object_is_named_by_its_row(tmp_path: Path, line: str, reason: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(f'{{"prompt": "x"}}\n{line}\n')
    with pytest.raises(DataError, match=rf"rows\.jsonl, row 2: .*{reason}"):
        list(load_rows(path))


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


def test_blank_lines_are_no_rows(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "x"}\n\n  \n{"prompt": "y"}')
    assert [row["prompt"] for _, row in load_rows(path)] == ["x", "y"]


def test_a_row_after_blank_lines_is_named_by_its_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('\n{"prompt": "x"}\n\n{"question": "y"}\n')
    with pytest.raises(DataError, match=r"rows\.jsonl, row 4: expected"):
        load_prompts_from_jsonl(path)


def test_a_file_in_another_encoding_is_named_by_its_row(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes('{"prompt": "x"}\n{"prompt": "ü"}\n'.encode("latin-1"))
    with pytest.raises(DataError, match=r"rows\.jsonl, row 2: not valid JSON"):
        list(load_rows(tmp_path / "rows.jsonl"))


@pytest.mark.parametrize("keep_bytes", [0, 3, 100])
def test_a_cut_parquet_file_is_one_sentence(tmp_path: Path, keep_bytes: int) -> None:
    path = tmp_path / "rows.parquet"
    datasets.Dataset.from_list([{"prompt": "x"}] * 50).to_parquet(str(path))
    path.write_bytes(path.read_bytes()[:keep_bytes])
    with pytest.raises(DataError, match="is not a Parquet file, or was cut"):
        list(load_rows(path))


def test_a_file_of_another_kind_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("prompt\nx\n")
    with pytest.raises(DataError, match=r"must end in \.jsonl or \.parquet"):
        list(load_rows(tmp_path / "rows.csv"))


def test_a_folder_of_several_splits_is_one_sentence(tmp_path: Path) -> None:
    rows = datasets.Dataset.from_list([{"prompt": "x"}])
    datasets.DatasetDict({"validation": rows, "test": rows}).save_to_disk(str(tmp_path / "folder"))
    with pytest.raises(DataError, match="has the splits test, validation, not train"):
        list(load_rows(tmp_path / "folder"))


def test_a_folder_that_is_no_dataset_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is no dataset"):
        list(load_rows(tmp_path))


def test_a_parquet_file_has_the_rows_of_its_jsonl(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    rows = [{"messages": CONVERSATION}, {"messages": [*CONVERSATION, *CONVERSATION]}]
    datasets.Dataset.from_list(rows).to_parquet(str(tmp_path / "rows.parquet"))
    jsonl = write_rows(tmp_path / "rows.jsonl", rows)
    expected = load_sft_dataset(jsonl, tokenizer, max_length=100)
    assert load_sft_dataset(tmp_path / "rows.parquet", tokenizer, max_length=100) == expected


def test_a_saved_dataset_folder_has_its_rows(tmp_path: Path) -> None:
    datasets.Dataset.from_list([{"prompt": "x"}, {"prompt": "y"}]).save_to_disk(str(tmp_path / "folder"))
    assert [(n, row["prompt"]) for n, row in load_rows(tmp_path / "folder")] == [(1, "x"), (2, "y")]


def test_a_prompt_keeps_id_answer_and_every_other_field(tmp_path: Path) -> None:
    row = {"id": "a", "prompt": "1+1=?", "answer": 2, "level": 3, "tags": ["x"]}
    [prompt] = load_prompts_from_jsonl(write_rows(tmp_path / "p.jsonl", [row]))
    assert prompt == Prompt(
        id="a",
        messages=({"role": "user", "content": "1+1=?"},),
        answer="2",
        metadata={"level": 3, "tags": ["x"]},
    )


def test_an_id_and_an_answer_that_are_null_count_as_absent(tmp_path: Path) -> None:
    row = {"id": None, "prompt": "x", "answer": None}
    [prompt] = load_prompts_from_jsonl(write_rows(tmp_path / "p.jsonl", [row]))
    assert (prompt.id, prompt.answer) == ("p-1", "")


@pytest.mark.parametrize("key", ["messages", "prompt"])
def test_a_prompt_may_be_a_conversation(tmp_path: Path, key: str) -> None:
    [prompt] = load_prompts_from_jsonl(write_rows(tmp_path / "p.jsonl", [{key: CONVERSATION}]))
    assert prompt.messages == tuple(CONVERSATION)


def test_prompts_without_an_id_are_named_by_file_and_row(tmp_path: Path) -> None:
    prompts = load_prompts_from_jsonl(write_rows(tmp_path / "sums.jsonl", [{"prompt": "x"}, {"prompt": "y"}]))
    assert [prompt.id for prompt in prompts] == ["sums-1", "sums-2"]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"question": "x"}, "expected `prompt` or `messages`; found question"),
        ({"prompt": 3}, "`prompt` must be text or a list of messages, found int"),
        ({"prompt": []}, "at least one message"),
        ({"messages": None}, r"expected `prompt` or `messages`; found messages \(null\)"),
        ({"messages": "x"}, "must be a list"),
        ({"id": "first", "prompt": "x"}, "id 'first' is also that of row 1"),
    ],
)
def test_a_bad_prompt_is_named_by_its_row(tmp_path: Path, row: Row, reason: str) -> None:
    path = write_rows(tmp_path / "p.jsonl", [{"id": "first", "prompt": "x"}, row])
    with pytest.raises(DataError, match=rf"p\.jsonl, row 2: .*{reason}"):
        load_prompts_from_jsonl(path)


@pytest.mark.parametrize(("max_rows", "num_loaded"), [(None, 5), (9, 5), (3, 3), (1, 1)])
def test_at_most_so_many_prompts_are_loaded_from_the_start(
    tmp_path: Path, max_rows: int | None, num_loaded: int
) -> None:
    path = write_rows(tmp_path / "p.jsonl", [{"id": i, "prompt": "x"} for i in range(5)])
    prompts = load_prompts_from_jsonl(path, max_rows=max_rows)
    assert [prompt.id for prompt in prompts] == [str(i) for i in range(num_loaded)]


def test_the_digest_of_a_file_is_that_of_its_content(tmp_path: Path) -> None:
    for name, content in [("a", "x"), ("b", "x"), ("c", "y")]:
        (tmp_path / name).write_text(content)
    assert digest_path(tmp_path / "a") == digest_path(tmp_path / "b") != digest_path(tmp_path / "c")


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


def test_lists_without_a_common_prompt_are_disjoint() -> None:
    prompts = make_prompts(6)
    check_disjoint(prompts[:3], prompts[3:], names=("selection", "heldout"))


def test_a_conversation_in_both_lists_is_named_whatever_its_id() -> None:
    prompts = make_prompts(3)
    leaked = Prompt(id="other", messages=prompts[1].messages)
    with pytest.raises(DataError, match="prompt 'other' of heldout is also prompt 'p1' of selection"):
        check_disjoint(prompts, [leaked], names=("selection", "heldout"))
