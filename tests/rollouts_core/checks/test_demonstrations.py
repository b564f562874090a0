"""Pins what is said about demonstrations before any training: what was found, and what will not work.

Without it a run would fail hours later on a row, or train on a handful of rows without a word.
"""

from pathlib import Path
from typing import Any

import pytest
from transformers import (
    PreTrainedTokenizerBase,
)

from rollouts_core.checks import demonstrations
from rollouts_core.checks.demonstrations import check_compared_demonstrations, check_demonstrations
from rollouts_core.config import Config, ModelConfig
from rollouts_core.errors import DataError
from rollouts_core.findings import Caution
from rollouts_core.model.loading import load_tokenizer
from tests.rollouts_core.checks.configurations import SUM, make_config, write_rows

SUM_MESSAGES = [{"role": "user", "content": "1+1=?"}]
NUM_TOKENS = 10
"""Tokens of a sum."""


def compared(config: Config, path: str | Path) -> Config:
    """The settings with this file as the demonstrations whose loss is taken."""
    return config.model_copy(update={"data": config.data.model_copy(update={"sft_eval": str(path)})})


def test_each_dataset_is_described(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    first = write_rows(tmp_path / "a.jsonl", [SUM] * 6)
    second = write_rows(tmp_path / "b.jsonl", [{"text": "1" * n} for n in (5, 30, 9)])
    config = make_config([{"path": first, "max_samples": 5}, {"path": second}])
    assert check_demonstrations(config, tokenizer)[:-1] == [
        f"{first}: 5 demonstrations, 10 trained tokens",
        f"{second}: 3 demonstrations, 36 trained tokens, 1 cut",
    ]


def test_how_far_it_is_is_said_while_many_rows_are_read(
    tmp_path: Path,
    tokenizer: PreTrainedTokenizerBase,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = write_rows(tmp_path / "a.jsonl", [SUM] * 6)
    with caplog.at_level("INFO", logger=demonstrations.__name__):
        check_demonstrations(make_config(path), tokenizer)
        assert not caplog.messages, "it took no five seconds"
        monkeypatch.setattr(demonstrations, "PROGRESS_INTERVAL_S", 0.0)
        check_demonstrations(make_config(path), tokenizer)
    assert caplog.messages == [f"{path}: {i} of 6 rows read" for i in range(6)]


def test_rows_that_will_be_left_out_are_counted(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    path = write_rows(tmp_path / "a.jsonl", [{"text": "1" * n} for n in (15, 30, 15, 15)])
    findings = check_demonstrations(make_config(path, on_overlong="drop"), tokenizer)
    assert findings[0] == f"{path}: 3 demonstrations, 48 trained tokens, 1 left out because they are too long"


def test_a_dataset_that_would_be_left_out_whole_is_an_error(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    path = write_rows(tmp_path / "a.jsonl", [{"text": "1" * 30}] * 3)
    with pytest.raises(DataError, match=r"a\.jsonl: all 3 rows are longer than training\.sft\.max_length"):
        check_demonstrations(make_config(path, on_overlong="drop"), tokenizer)


@pytest.mark.parametrize(
    ("num_steps", "training", "said"),
    [
        (4, {}, "training.sft.num_steps 4 is about 4.0 epochs of about 2 packed rows"),
        (4, {"packing": False}, "training.sft.num_steps 4 is about 2.0 epochs of about 4 rows"),
        (1, {"packing": False, "batch_size": 1}, "training.sft.num_steps 1 is about 0.25 epochs of about 4 rows"),
        (30, {}, "training.sft.num_steps 30 is about 30 epochs of about 2 packed rows"),
        (10, {"max_length": 400}, "training.sft.num_steps 10 is about 20 epochs of about 1 packed rows"),
        (
            100_000,
            {},
            "training.sft.num_steps 100,000 is about 100,000 epochs of about 2 packed rows: a model memorizes",
        ),
    ],
)
def test_what_a_number_of_steps_means_is_said_and_warned_of_where_it_is_absurd(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, num_steps: int, training: dict[str, Any], said: str
) -> None:
    path = write_rows(tmp_path / "a.jsonl", [SUM] * 4)  # 40 tokens: two rows of 20
    finding = check_demonstrations(make_config(path, num_steps=num_steps, **training), tokenizer)[-1]
    assert finding.startswith(said)
    assert isinstance(finding, Caution) == (num_steps > 30)


def test_the_steps_that_a_warning_of_many_epochs_names_are_not_warned_of(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    path = write_rows(tmp_path / "a.jsonl", [SUM] * 7)
    finding = check_demonstrations(make_config(path, num_steps=1000), tokenizer)[-1]
    named = int(finding.rpartition("num_steps = ")[2])
    assert isinstance(finding, Caution)
    assert not isinstance(check_demonstrations(make_config(path, num_steps=named), tokenizer)[-1], Caution)


def turns(*said: dict[str, Any] | str) -> dict[str, Any]:
    """A row in which the assistant says this, each time it is asked."""
    answers = [{"role": "assistant", **({"content": each} if isinstance(each, str) else each)} for each in said]
    return {"messages": [each for answer in answers for each in ({"role": "user", "content": "1"}, answer)]}


@pytest.mark.parametrize(
    ("row", "train_on", "is_empty"),
    [
        (SUM | {"completion": ""}, "all_assistant", True),
        (SUM | {"completion": "2"}, "all_assistant", False),
        (turns(" \n"), "all_assistant", True),
        (turns("", "2"), "all_assistant", True),
        (turns("", "2"), "last_assistant", False),
        (turns("2", ""), "last_assistant", True),
        (turns({"content": None, "tool_calls": [{"function": {"name": "add"}}]}), "all_assistant", False),
        (turns({"content": "", "reasoning_content": "2"}), "all_assistant", False),
        ({"prompt": turns("")["messages"] + SUM_MESSAGES, "completion": "2"}, "all_assistant", False),
    ],
)
def test_rows_in_which_the_assistant_says_nothing_are_told(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, row: dict[str, Any], train_on: str, is_empty: bool
) -> None:
    path = write_rows(tmp_path / "a.jsonl", [SUM, row, row])
    found, *told = check_demonstrations(make_config(path, train_on=train_on, max_length=40, packing=False), tokenizer)
    told = [each for each in told if isinstance(each, Caution) and "message is empty" in each]
    assert found.startswith(f"{path}: 3 demonstrations")
    words = f"{path}: in 2 of 3 rows (row 2 first) the assistant's message is empty, which teaches"
    assert [each.startswith(words) for each in told] == [True] * is_empty


CALLS = {"content": "", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]}
WRITES_CALLS = "{% for call in m.tool_calls or [] %}{{ call.function.arguments | tojson }}{% endfor %}"


@pytest.mark.parametrize(
    ("row", "train_on", "unwritten"),
    [
        (turns(CALLS, "2"), "all_assistant", ["tool_calls"]),
        (turns(CALLS, "2"), "last_assistant", []),
        (turns({"content": "2", "reasoning_content": "1+1"}), "all_assistant", ["reasoning_content"]),
        ({"prompt": turns(CALLS)["messages"] + SUM_MESSAGES, "completion": "2"}, "all_assistant", []),
        (turns("2"), "all_assistant", []),
    ],
)
def test_what_the_chat_template_leaves_out_of_turns_that_are_trained_on_is_told(
    tmp_path: Path, base_model: ModelConfig, row: dict[str, Any], train_on: str, unwritten: list[str]
) -> None:
    own_tokenizer = load_tokenizer(base_model)
    path = write_rows(tmp_path / "a.jsonl", [SUM, row, row])
    config = make_config(path, train_on=train_on, max_length=80, packing=False)
    told = [each for each in check_demonstrations(config, own_tokenizer) if "leaves out" in each]
    words = f"{path}: in 2 of 3 rows (row 2 first) the assistant has"
    assert [each.startswith(f"{words} `{key}`") for each, key in zip(told, unwritten, strict=True)] == [True] * len(
        told
    )
    own_tokenizer.chat_template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ m.reasoning_content }}"
        + WRITES_CALLS
        + "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    assert not any("leaves out" in each for each in check_demonstrations(config, own_tokenizer))


def test_thoughts_in_the_text_that_the_chat_template_cuts_off_are_told(tmp_path: Path, base_model: ModelConfig) -> None:
    own_tokenizer = load_tokenizer(base_model)
    path = write_rows(tmp_path / "a.jsonl", [SUM, turns("<think>1+1</think>2")])
    config = make_config(path, train_on="everything", max_length=80)
    assert not any("leaves out" in each for each in check_demonstrations(config, own_tokenizer))
    own_tokenizer.chat_template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content.split('</think>')[-1] }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    [told] = [each for each in check_demonstrations(config, own_tokenizer) if "leaves out" in each]
    assert told.startswith(f"{path}: in 1 of 2 rows (row 2 first) the assistant has `</think>`, which the chat")


@pytest.mark.parametrize(("repeat", "packing", "is_said"), [(1, True, True), (1, False, False), (2, True, False)])
def test_a_step_of_more_rows_than_an_epoch_has_is_said(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, repeat: float, packing: bool, is_said: bool
) -> None:
    path = write_rows(tmp_path / "a.jsonl", [SUM] * 4)  # 40 tokens: two rows of 20
    config = make_config([{"path": path, "repeat": repeat}], packing=packing, batch_size=4)
    said = [finding for finding in check_demonstrations(config, tokenizer) if "several times" in finding]
    assert (
        said
        == [
            "training.sft.batch_size 4 exceeds the about 2 rows of 20 tokens in an epoch, so a step trains on the same "
            "demonstrations several times: lower it, or add demonstrations"
        ]
        * is_said
    )


def test_of_streamed_data_only_the_first_rows_are_checked(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demonstrations, "NUM_STREAMED_ROWS_CHECKED", 7)
    path = write_rows(tmp_path / "a.jsonl", [SUM] * 9 + [{"broken": 1}])
    finding, _ = check_demonstrations(make_config(path, streaming=True), tokenizer)
    assert finding == f"{path}: 7 demonstrations in the first 7 of 10 rows, 14 trained tokens"
    with pytest.raises(DataError, match="row 10: expected `messages`"):
        check_demonstrations(make_config(path), tokenizer)


@pytest.mark.parametrize("packing", [True, False])
def test_streamed_data_of_which_the_first_rows_are_all_left_out_are_warned_of(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch, packing: bool
) -> None:
    monkeypatch.setattr(demonstrations, "NUM_STREAMED_ROWS_CHECKED", 2)
    path = write_rows(tmp_path / "a.jsonl", [{**SUM, "completion": "2" * 50}] * 2 + [SUM])
    config = make_config(path, streaming=True, packing=packing, on_overlong="drop")
    first, second = check_demonstrations(config, tokenizer)
    assert first.startswith(f"{path}: 0 demonstrations in the first 2 of 3 rows") and isinstance(second, Caution)


KNOWS_USERS = (
    "{% for m in messages if m.role in ('user', 'assistant') %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def test_messages_that_the_chat_template_leaves_out_are_told(tmp_path: Path, base_model: ModelConfig) -> None:
    """Rows of ShareGPT whose roles were not renamed teach answers to questions that the model does not see."""
    own_tokenizer = load_tokenizer(base_model)
    answer = {"role": "assistant", "content": "2"}
    asked_by = [{"messages": [{"role": role, "content": "1+1=?"}, answer]} for role in ("user", "human", "human")]
    path = write_rows(tmp_path / "a.jsonl", [SUM, *asked_by])
    config = make_config(path, max_length=40)
    assert not any("leaves out" in each for each in check_demonstrations(config, own_tokenizer))
    own_tokenizer.chat_template = KNOWS_USERS
    [told] = [each for each in check_demonstrations(config, own_tokenizer) if "leaves out" in each]
    assert told.startswith(f"{path}: in 2 of 4 rows (row 3 first) the chat template leaves out")
    [told] = [
        each
        for each in check_compared_demonstrations("sft_eval", compared(config, path), own_tokenizer)
        if "leaves out" in each
    ]
    assert told.startswith(f"{path}: in 2 of 4 rows (row 3 first) the chat template leaves out")


def test_thoughts_are_told_whatever_they_are_called(tmp_path: Path, base_model: ModelConfig) -> None:
    own_tokenizer = load_tokenizer(base_model)
    thoughts = ("reasoning", "thinking")
    path = write_rows(tmp_path / "a.jsonl", [turns({"content": "2", key: "1+1"}) for key in thoughts])
    told = [each for each in check_demonstrations(make_config(path), own_tokenizer) if "leaves out" in each]
    assert [each.split(",")[0] for each in told] == [
        f"{path}: in 1 of 2 rows (row {row} first) the assistant has `{key}`"
        for row, key in enumerate(thoughts, start=1)
    ]
    path = write_rows(tmp_path / "b.jsonl", [turns({"content": "2", "reasoning": "1+1", "reasoning_content": "1+1"})])
    own_tokenizer.chat_template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.reasoning_content }}{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    assert not any("leaves out" in each for each in check_demonstrations(make_config(path), own_tokenizer))


@pytest.mark.parametrize(
    ("train_on", "told"),
    [
        ("all_assistant", {"weight": "2 of 4 rows (row 2 first)", "train": "1 of 4 rows (row 4 first)"}),
        ("last_assistant", {}),
    ],
)
def test_turns_that_rows_mark_as_not_to_be_trained_on_are_told(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, train_on: str, told: dict[str, str]
) -> None:
    """OpenAI's rows and Axolotl's leave them out of the loss."""
    marks: list[dict[str, Any]] = [{"weight": 1, "train": True}, {"weight": 0}, {"weight": 0.0}, {"train": False}]
    rows = [turns({"content": "1", **each}, {"content": "2", "weight": 1}) for each in marks]
    path = write_rows(tmp_path / "a.jsonl", rows)
    found = check_demonstrations(make_config(path, train_on=train_on, max_length=40), tokenizer)
    expected = [f"{path}: in {rows} `{key}` excludes a turn from training" for key, rows in told.items()]
    warned = [each for each in found if "excludes a turn" in each]
    assert [each.startswith(words) for each, words in zip(warned, expected, strict=True)] == [True] * len(told)


def test_fields_that_other_systems_read_are_told(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """A model that is trained without the system prompts of its rows will be asked with them."""
    has_it = {"messages": [{"role": "system", "content": "+"}, *turns("2")["messages"]]}
    rows: list[dict[str, Any]] = [
        SUM,
        {**SUM, "system_prompt": "+"},
        {**has_it, "system": "+"},
        {**SUM, "system_prompt": "", "chat_template_kwargs": {"enable_thinking": False}},
        {"text": "1+1=2", "system": "+"},
    ]
    path = write_rows(tmp_path / "a.jsonl", rows)
    config = make_config(path, max_length=40)
    for found in (
        check_demonstrations(config, tokenizer),
        check_compared_demonstrations("sft_eval", compared(config, path), tokenizer),
    ):
        kwargs, system = (each for each in found if ", which the model does not see" in each)
        assert kwargs.startswith(f"{path}: 1 of 5 rows (row 4 first) have `chat_template_kwargs`, which the model")
        assert system.startswith(f"{path}: 1 of 5 rows (row 2 first) have `system_prompt`, which the model does")
