"""Pins how rows become samples and prompts, and that every row that does not fit is named by its number.

Without it a row of another shape would be skipped, trained on with an empty mask, or fail a day later without a name.
"""

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import datasets
import pytest
from tokenizers import processors
from transformers import PreTrainedTokenizerBase

from rollouts_core.config import DatasetConfig, ModelConfig, SFTTrainingConfig
from rollouts_core.data.chat import tokenize_prompt
from rollouts_core.data.dataset import (
    CHUNK_ROWS,
    ROLLOUT_FIELDS,
    SampleRules,
    SFTDataset,
    check_disjoint,
    load_prompts_from_jsonl,
    load_sft_dataset,
    open_datasets,
)
from rollouts_core.data.steps import iterate_sft_steps
from rollouts_core.engines.completion import Completion
from rollouts_core.errors import DataError
from rollouts_core.model.loading import load_tokenizer
from rollouts_core.rollout.agent import AgentTurn, Trajectory, agent_integration
from rollouts_core.types import Prompt, Sample, Status
from tests.rollouts_core.data import test_chat
from tests.rollouts_core.make import make_prompts

Row = Mapping[str, Any]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant{{ '\n' }}{% endif %}"
)
THINKS_LAST = CHATML.replace(
    "{{ m.content }}", "{% if m.role == 'assistant' and loop.last %}<think></think>{% endif %}{{ m.content }}"
)
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


@pytest.mark.parametrize("post_processor", ["$A", "<|im_start|> $A", "<|im_start|> $A <|im_end|>"])
@pytest.mark.parametrize("begin", ["", "<|im_start|>"])
@pytest.mark.parametrize("end", ["", "<|im_end|>"])
def test_a_text_row_begins_and_ends_once_whoever_says_it(
    tmp_path: Path, byte_tokenizer: PreTrainedTokenizerBase, post_processor: str, begin: str, end: str
) -> None:
    byte_tokenizer.bos_token = "<|im_start|>"
    special = [(token, byte_tokenizer.convert_tokens_to_ids(token)) for token in ("<|im_start|>", "<|im_end|>")]
    processor = processors.TemplateProcessing(single=post_processor, special_tokens=special)
    byte_tokenizer.backend_tokenizer.post_processor = processor
    sample = load_one(tmp_path, {"text": f"{begin}1+1=2{end}"}, byte_tokenizer)
    expected_begin = "<|im_start|>" if begin or post_processor != "$A" else ""
    assert byte_tokenizer.decode(sample.tokens) == f"{expected_begin}1+1=2<|im_end|>"


@pytest.mark.parametrize("end_of_sequence", ["<|im_end|>", "<|endoftext|>"])
@pytest.mark.parametrize("end", ["<|im_end|>", "<|im_end|>\n", "<|im_end|> \n\n", "<|eom_id|>", "<|endoftext|>\n", ""])
def test_a_text_row_that_has_ended_gets_no_second_end(
    tmp_path: Path, byte_tokenizer: PreTrainedTokenizerBase, end: str, end_of_sequence: str
) -> None:
    byte_tokenizer.add_special_tokens({"additional_special_tokens": ["<|endoftext|>", "<|eom_id|>"]})
    byte_tokenizer.eos_token = end_of_sequence
    byte_tokenizer.chat_template = CHATML
    row = {"text": f"<|im_start|>user\n1+1=?<|im_end|>\n<|im_start|>assistant\n2{end}"}
    sample = load_one(tmp_path, row, byte_tokenizer)
    assert byte_tokenizer.decode(sample.tokens) == row["text"] + (end_of_sequence if not end else "")


def test_a_row_whose_turns_need_texts_of_their_own_is_several_samples(
    tmp_path: Path, byte_tokenizer: PreTrainedTokenizerBase
) -> None:
    byte_tokenizer.chat_template = THINKS_LAST
    rows = [{"messages": [*CONVERSATION, *CONVERSATION]}, {"messages": CONVERSATION}]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    samples = load_sft_dataset(path, byte_tokenizer, max_length=200)
    ask, says = "<|im_start|>user\n1+1=?<|im_end|>\n<|im_start|>assistant\n", "2<|im_end|>\n"
    texts = [f"{ask}<think></think>{says}", f"{ask}{says}{ask}<think></think>{says}", f"{ask}<think></think>{says}"]
    assert [byte_tokenizer.decode(sample.tokens) for sample in samples] == texts
    assert {trained_text(byte_tokenizer, sample) for sample in samples} == {f"<think></think>{says}"}
    assert [len(sample.prompt) for sample in samples] == [1, 3, 1]
    parts = [DatasetConfig(path=str(path))]
    for streaming in (False, True):
        dataset = SFTDataset(parts, open_datasets(parts), byte_tokenizer, SampleRules(200), streaming=streaming)
        visits = {samples[0].metadata["row"]: samples for samples in dataset.iterate_epoch(0, seed=0)}
        assert [byte_tokenizer.decode(s.tokens) for row in (1, 2) for s in visits[row]] == texts
        config = SFTTrainingConfig(num_steps=1, batch_size=3, max_length=200, packing=False)
        [step] = itertools.islice(iterate_sft_steps(dataset, config), 1)
        assert sorted(byte_tokenizer.decode(sample.tokens) for [sample] in step) == sorted(texts)


@pytest.mark.parametrize(("on_overlong", "num_samples"), [("cut", 1), ("cut_or_drop", 1), ("drop", 1)])
def test_of_several_texts_of_a_row_those_that_are_too_long_are_left_out(
    tmp_path: Path, byte_tokenizer: PreTrainedTokenizerBase, on_overlong: Any, num_samples: int
) -> None:
    byte_tokenizer.chat_template = THINKS_LAST
    path = write_rows(tmp_path / "rows.jsonl", [{"messages": [*CONVERSATION, *CONVERSATION]}])
    samples = load_sft_dataset(path, byte_tokenizer, max_length=50, on_overlong=on_overlong)
    assert len(samples) == num_samples
    if on_overlong == "cut":
        with pytest.raises(DataError, match=r"row 1: nothing to train on within the first 20"):
            load_sft_dataset(path, byte_tokenizer, max_length=20)


def test_a_turn_that_a_prompt_begins_goes_on_in_the_completion(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    row = {"prompt": [*CONVERSATION, CONVERSATION[0], {"role": "assistant", "content": "14"}], "completion": "27"}
    sample = load_one(tmp_path, row, tokenizer)
    assert tokenizer.decode(sample.tokens).endswith("<|user|>1+1=?<|end|><|assistant|>1427<|end|>")
    assert trained_text(tokenizer, sample) == "27<|end|>"
    prompt = {**row, "completion": None}
    [loaded] = load_prompts_from_jsonl(write_rows(tmp_path / "p.jsonl", [prompt]))
    text = tokenizer.decode(tokenize_prompt(tokenizer, loaded.messages))
    assert text.endswith("<|user|>1+1=?<|end|><|assistant|>14")


@pytest.mark.parametrize("template", ["WITH_TOOLS", "JOINS_ARGUMENTS"])
def test_calls_without_arguments_give_the_same_tokens_from_every_container(
    tmp_path: Path, byte_tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch, template: str
) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    byte_tokenizer.chat_template = getattr(test_chat, template)
    calls = [{"name": "now"}, {"name": "add", "arguments": {"a": 7, "b": 3}}, {"name": "get", "arguments": {"c": "x"}}]
    rows = [
        {
            "messages": [
                {"role": "user", "content": "?"},
                {"role": "assistant", "content": None, "tool_calls": [{"function": c} for c in called]},
            ],
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {"properties": each}}}],
        }
        for called, each in ((calls[:2], {"a": {"type": "integer"}}), (calls[2:], {"c": {"type": "string"}}))
    ]
    jsonl = write_rows(tmp_path / "rows.jsonl", rows)
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "rows.parquet")
    (tmp_path / "folder").mkdir()
    write_rows(tmp_path / "folder" / "rows.jsonl", rows)
    expected = [sample.tokens for sample in load_sft_dataset(jsonl, byte_tokenizer, max_length=900)]
    assert "null" not in byte_tokenizer.decode(expected[0])
    for container in ("rows.parquet", "folder"):
        found = load_sft_dataset(tmp_path / container, byte_tokenizer, max_length=900)
        assert [sample.tokens for sample in found] == expected


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
        ({"messages": "hello"}, "must be a list .* found text: if it is JSON, parse it"),
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


def test_a_row_after_blank_lines_is_named_by_its_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('\n{"prompt": "x"}\n\n{"question": "y"}\n')
    with pytest.raises(DataError, match=r"rows\.jsonl, row 4: expected"):
        load_prompts_from_jsonl(path)


def test_a_parquet_file_has_the_rows_of_its_jsonl(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    rows = [{"messages": CONVERSATION}, {"messages": [*CONVERSATION, *CONVERSATION]}]
    datasets.Dataset.from_list(rows).to_parquet(str(tmp_path / "rows.parquet"))
    jsonl = write_rows(tmp_path / "rows.jsonl", rows)
    expected = load_sft_dataset(jsonl, tokenizer, max_length=100)
    assert load_sft_dataset(tmp_path / "rows.parquet", tokenizer, max_length=100) == expected


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
    conversation = [*CONVERSATION, {"role": "user", "content": "and 2+2=?"}]
    [prompt] = load_prompts_from_jsonl(write_rows(tmp_path / "p.jsonl", [{key: conversation}]))
    assert prompt.messages == tuple(conversation)


def test_prompts_without_an_id_are_named_by_file_and_row(tmp_path: Path) -> None:
    prompts = load_prompts_from_jsonl(write_rows(tmp_path / "sums.jsonl", [{"prompt": "x"}, {"prompt": "y"}]))
    assert [prompt.id for prompt in prompts] == ["sums-1", "sums-2"]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"question": "x"}, r"expected `prompt` or `messages`; found question; did you mean prompt\? rename question"),
        ({"input": "", "instruction": "x"}, r"found input, instruction; join Alpaca's `instruction` and `input` to"),
        ({"instruction": "x"}, r"found instruction; did you mean prompt\? rename instruction"),
        ({"promt": "x", "query": None}, r"found promt; did you mean prompt\?$"),
        (
            {"messages": [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]},
            "ends with an assistant turn, but the policy must write this turn: remove it",
        ),
        ({"prompt": 3}, "`prompt` must be text or a list of messages, found int"),
        ({"prompt": []}, "at least one message"),
        ({"messages": None}, r"expected `prompt` or `messages`; found messages \(null\)"),
        ({"messages": "x"}, "must be a list"),
        ({"prompt": "x", "outcomes": []}, "the field `outcomes` .*: rename it in the data"),
        ({"prompt": "x", "conversation": None}, "the field `conversation` .*: rename it in the data"),
        ({"id": "first", "prompt": "x"}, "id 'first' also occurs in row 1"),
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


def test_lists_without_a_common_prompt_are_disjoint() -> None:
    prompts = make_prompts(6)
    check_disjoint(prompts[:3], prompts[3:], names=("selection", "heldout"))


def test_a_conversation_in_both_lists_is_named_whatever_its_id() -> None:
    prompts = make_prompts(3)
    leaked = Prompt(id="other", messages=prompts[1].messages)
    with pytest.raises(DataError, match="prompt 'other' of heldout is also prompt 'p1' of selection"):
        check_disjoint(prompts, [leaked], names=("selection", "heldout"))


@pytest.mark.parametrize("field", ["answer", "word"])
def test_prompts_that_begin_alike_are_other_prompts_where_something_else_is_asked(tmp_path: Path, field: str) -> None:
    """All games of Wordle have the same prompt: which word is to be guessed is for the environment alone."""
    words = ["crane", "slate", "pilot"]
    rows = [{"prompt": "Guess the word.", field: word, "id": word} for word in words]
    prompts = load_prompts_from_jsonl(write_rows(tmp_path / "games.jsonl", rows))
    check_disjoint(prompts[:2], prompts[2:], names=("selection", "heldout"))
    again = replace(prompts[0], id="again")
    with pytest.raises(DataError, match="prompt 'again' of heldout is also prompt 'crane' of selection"):
        check_disjoint(prompts[:2], [again], names=("selection", "heldout"))


def test_a_tool_conversation_is_a_sample(tmp_path: Path, byte_tokenizer: PreTrainedTokenizerBase) -> None:
    byte_tokenizer.chat_template = (
        "{{ (tools or []) | length }}{% for m in messages %}{{ m.role[0] }}:{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
        "<|im_end|>{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
    )
    call = {"id": "1", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "2"},
        {"role": "assistant", "content": "2"},
    ]
    sample = load_one(tmp_path, {"messages": messages, "tools": [{"function": {"name": "add"}}]}, byte_tokenizer)
    assert byte_tokenizer.decode(sample.tokens) == ('1u:?<|im_end|>a:add{"a": 1}<|im_end|>t:2<|im_end|>a:2<|im_end|>')
    assert trained_text(byte_tokenizer, sample) == 'add{"a": 1}<|im_end|>2<|im_end|>'


def test_answers_in_a_prompt_are_given_and_not_trained_on(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    row = {"prompt": [*CONVERSATION, CONVERSATION[0]], "completion": "3"}
    assert trained_text(tokenizer, load_one(tmp_path, row, tokenizer)) == "3<|end|>"


LENGTHS = [2, 9, 3, 9, 4]
"""Digits of the answers of five demonstrations, whose other tokens are 5."""


@pytest.mark.parametrize(
    ("on_overlong", "max_length", "num_tokens"),
    [
        ("cut", 10, [7, 10, 8, 10, 9]),
        ("cut_or_drop", 10, [7, 10, 8, 10, 9]),
        ("drop", 10, [7, 8, 9]),
        ("cut_or_drop", 5, [5, 5, 5, 5, 5]),
    ],
)
def test_overlong_rows_are_cut_or_left_out(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, on_overlong: Any, max_length: int, num_tokens: list[int]
) -> None:
    path = write_rows(tmp_path / "r.jsonl", [{"prompt": "1", "completion": "2" * n} for n in LENGTHS])
    samples = load_sft_dataset(path, tokenizer, max_length=max_length, on_overlong=on_overlong)
    assert [len(sample.tokens) for sample in samples] == num_tokens


def test_a_row_whose_answer_is_cut_away_is_left_out_where_that_is_asked_for(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    rows = [PROMPT_AND_COMPLETION, {"prompt": "1" * 30, "completion": "2"}, PROMPT_AND_COMPLETION]
    path = write_rows(tmp_path / "r.jsonl", rows)
    assert len(load_sft_dataset(path, tokenizer, max_length=20, on_overlong="cut_or_drop")) == 2
    with pytest.raises(DataError, match="row 2: nothing to train on within the first 20"):
        load_sft_dataset(path, tokenizer, max_length=20)


def test_at_most_so_many_demonstrations_are_loaded(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    path = write_rows(tmp_path / "r.jsonl", [PROMPT_AND_COMPLETION, PROMPT_AND_COMPLETION, {"broken": 1}])
    assert len(load_sft_dataset(path, tokenizer, max_length=20, max_rows=2)) == 2


@pytest.fixture
def parts(tmp_path: Path) -> list[DatasetConfig]:
    """A mixture of sums that span several chunks, texts of which some are too long, and a few repeated rows."""
    sums = write_rows(
        tmp_path / "sums.jsonl", [{"prompt": f"{i}+1=?", "completion": f"{i + 1}"} for i in range(CHUNK_ROWS + 90)]
    )
    texts = write_rows(tmp_path / "texts.jsonl", [{"text": "7" * (10 + i)} for i in range(40)])
    few = write_rows(tmp_path / "few.jsonl", [{"messages": CONVERSATION}] * 5)
    return [
        DatasetConfig(path=str(sums)),
        DatasetConfig(path=str(texts), repeat=0.5, max_samples=30),
        DatasetConfig(path=str(few), repeat=3),
    ]


def open_mixture(
    parts: list[DatasetConfig], tokenizer: PreTrainedTokenizerBase, *, streaming: bool, max_length: int = 30
) -> SFTDataset:
    """The mixture with overlong rows left out."""
    rules = SampleRules(max_length, on_overlong="drop")
    return SFTDataset(parts, open_datasets(parts), tokenizer, rules, streaming=streaming)


def test_a_mixture_has_its_shares(parts: list[DatasetConfig], tokenizer: PreTrainedTokenizerBase) -> None:
    dataset = open_mixture(parts, tokenizer, streaming=False)
    num_visits = len(list(dataset.iterate_epoch(0, seed=0)))
    assert (len(dataset), num_visits) == (CHUNK_ROWS + 90 + 30 + 5, CHUNK_ROWS + 90 + 15 + 15)
    # Texts of 10 to 39 tokens and an end: those of more than 29 are too long.
    assert dataset.num_dropped == 10
    epochs = [[s for samples in dataset.iterate_epoch(e, seed=0) for s in samples] for e in (0, 1)]
    texts = [sum(tokenizer.decode(s.tokens).startswith("777") for s in epoch) for epoch in epochs]
    assert sum(texts) == 20  # two epochs of half of the rows visit each once
    assert [sum(tokenizer.decode(s.tokens).startswith("<|user|>1+1=?") for s in epoch) for epoch in epochs] == [16, 16]


def test_streaming_gives_the_same_samples_in_the_same_order(
    parts: list[DatasetConfig], tokenizer: PreTrainedTokenizerBase
) -> None:
    kept, streamed = (open_mixture(parts, tokenizer, streaming=each) for each in (False, True))
    for epoch, start in [(0, 0), (1, 0), (1, CHUNK_ROWS - 1)]:
        expected = list(kept.iterate_epoch(epoch, seed=5, start=start))
        found = list(streamed.iterate_epoch(epoch, seed=5, start=start))
        assert [[(s.tokens, s.loss_mask, s.status) for s in samples] for samples in found] == [
            [(s.tokens, s.loss_mask, s.status) for s in samples] for samples in expected
        ]
        assert len(expected) == CHUNK_ROWS + 90 + 15 + 15 - start


def test_an_epoch_from_a_later_visit_is_the_end_of_the_whole_one(
    parts: list[DatasetConfig], tokenizer: PreTrainedTokenizerBase
) -> None:
    dataset = open_mixture(parts, tokenizer, streaming=True)
    assert list(dataset.iterate_epoch(1, seed=0, start=600)) == list(dataset.iterate_epoch(1, seed=0))[600:]


def test_streaming_reads_no_more_than_it_is_asked_for(
    parts: list[DatasetConfig], tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    bad = write_rows(tmp_path / "bad.jsonl", [PROMPT_AND_COMPLETION] * 2 * CHUNK_ROWS + [{"text": 3}])
    with pytest.raises(DataError, match=rf"row {2 * CHUNK_ROWS + 1}: `text` must be text"):
        open_mixture([DatasetConfig(path=str(bad))], tokenizer, streaming=False)
    streamed = open_mixture([DatasetConfig(path=str(bad))], tokenizer, streaming=True)
    with pytest.raises(DataError, match=rf"row {2 * CHUNK_ROWS + 1}: `text` must be text"):
        list(streamed.iterate_epoch(0, seed=0))


@pytest.mark.parametrize("streaming", [True, False])
def test_a_row_of_another_type_midway_is_named(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, streaming: bool
) -> None:
    path = write_rows(tmp_path / "r.jsonl", [{"messages": CONVERSATION}] * 9 + [{"messages": "1+1=2"}])
    with pytest.raises(DataError, match=r"r\.jsonl, row 10: `messages` must be a list"):
        dataset = open_mixture([DatasetConfig(path=str(path))], tokenizer, streaming=streaming)
        list(dataset.iterate_epoch(0, seed=0))


def test_an_empty_part_of_a_mixture_is_an_error(parts: list[DatasetConfig], tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(DataError, match=r"empty\.jsonl is empty"):
        open_datasets([*parts, DatasetConfig(path=str(tmp_path / "empty.jsonl"))])


def test_a_share_of_less_than_a_row_is_an_error(parts: list[DatasetConfig], tokenizer: PreTrainedTokenizerBase) -> None:
    tiny = parts[2].model_copy(update={"repeat": 0.1})
    with pytest.raises(DataError, match=r"few\.jsonl: repeat 0\.1 of 5 rows is less than one row"):
        open_mixture([*parts, tiny], tokenizer, streaming=False)


def test_a_mixture_of_which_everything_is_too_long_is_an_error(
    parts: list[DatasetConfig], tokenizer: PreTrainedTokenizerBase
) -> None:
    with pytest.raises(DataError, match="all 637 rows are longer than max_length 2"):
        open_mixture(parts, tokenizer, streaming=False, max_length=2)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_file_that_changes_while_it_is_streamed_ends_the_epoch_with_an_error(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, kind: str
) -> None:
    rows = [{"text": "1" * (i % 9 + 1)} for i in range(CHUNK_ROWS + 5)]
    path = tmp_path / f"rows.{kind}"
    write_rows(path, rows) if kind == "jsonl" else datasets.Dataset.from_list(rows).to_parquet(str(path))
    parts = [DatasetConfig(path=str(path))]
    samples = SFTDataset(parts, open_datasets(parts), tokenizer, SampleRules(20), streaming=True)
    epoch = samples.iterate_epoch(0, seed=0)
    next(epoch)
    with path.open("ab") as file:
        file.write(b"\n")
    with pytest.raises(DataError, match=rf"rows\.{kind} changed while it was in use: start again"):
        list(epoch)


def test_times_and_decimal_numbers_of_a_table_become_text_that_samples_can_be_written_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    day = date(2024, 2, 29)
    said = {"role": "user", "content": "1+1=?", "at": datetime(2024, 2, 29, 12, 30)}
    row = {"messages": [said], "answer": {"by": day}, "price": Decimal("1.50"), "notes": [{"took": timedelta(hours=1)}]}
    datasets.Dataset.from_list([row]).to_parquet(tmp_path / "prompts.parquet")
    [prompt] = load_prompts_from_jsonl(tmp_path / "prompts.parquet")
    assert prompt.messages == ({"role": "user", "content": "1+1=?", "at": "2024-02-29 12:30:00"},)
    assert prompt.answer == '{"by": "2024-02-29"}'
    assert prompt.metadata == {"price": "1.50", "notes": [{"took": "1:00:00"}]}


def test_a_prompt_with_what_no_sample_can_be_written_with_is_named_by_row_and_field(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    rows = [{"prompt": "1+1=?", "picture": None}, {"prompt": "7", "picture": {"bytes": b"\x89PNG"}}]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "prompts.parquet")
    with pytest.raises(DataError, match=r"prompts\.parquet, row 2: the field `picture` holds bytes"):
        load_prompts_from_jsonl(tmp_path / "prompts.parquet")
    datasets.Dataset.from_list([{"prompt": "7", "rate": -math.inf}]).to_parquet(tmp_path / "more.parquet")
    with pytest.raises(DataError, match=r"more\.parquet, row 1: the field `rate` holds -inf"):
        load_prompts_from_jsonl(tmp_path / "more.parquet")


def test_what_a_rollout_writes_into_metadata_is_what_no_prompt_may_have() -> None:
    completion = Completion(
        tokens=[2], logprobs=[-1.0], status=Status.COMPLETED, finish_reason="stop", version_spans=()
    )
    turn = AgentTurn(prompt_tokens=[1], completion=completion)
    [sample] = agent_integration(Trajectory(turns=(turn,), messages=(), status=Status.COMPLETED, finish_reason="stop"))
    assert set(sample.metadata) == set(ROLLOUT_FIELDS)
