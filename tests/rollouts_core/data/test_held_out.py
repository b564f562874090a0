"""Pins that rows which models are compared on are noticed when they are trained on.

Without it a model that learnt the answers by heart is reported as an improvement.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from rollouts_core.checks.compared_rows import check_held_out
from rollouts_core.data.dataset import load_prompts_from_jsonl
from rollouts_core.data.held_out import HeldOutRows, Metric, key_of_prompt, read_held_out, watch_rows
from rollouts_core.errors import DataError

SUM = {"role": "user", "content": "1+1=?"}
ANSWER = {"role": "assistant", "content": "2"}
OTHER = {"role": "user", "content": "7"}


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def look_at(folder: Path, held_out: list[dict[str, Any]], trained: list[dict[str, Any]], metric: Metric) -> HeldOutRows:
    rows = read_held_out("data.heldout", str(write_rows(folder / "heldout.jsonl", held_out)), metric)
    assert list(watch_rows(enumerate(trained, 1), "sft.jsonl", [rows])) == list(enumerate(trained, 1))
    return rows


@pytest.mark.parametrize(
    ("trained", "is_found"),
    [
        ({"prompt": "1+1=?", "completion": "another answer"}, True),
        ({"messages": [SUM, ANSWER]}, True),
        ({"messages": [SUM, ANSWER, OTHER, ANSWER]}, True),
        ({"messages": [OTHER, ANSWER, SUM, ANSWER]}, False),
        ({"prompt": " 1 + 1 = ?\n", "completion": "2"}, True),
        ({"messages": [{"role": "system", "content": "Be brief."}, SUM, ANSWER]}, True),
        ({"prompt": "2+1=?", "completion": "2"}, False),
        ({"prompt": "1-1=?", "completion": "2"}, False),
        ({"text": "1+1=?"}, True),
        ({"text": "<|user|>\n1+1=?<|end|>\n<|assistant|>2<|end|>"}, True),
        ({"text": "<|im_start|>user\n1+1=?<|im_end|>\n<|im_start|>assistant\n2<|im_end|>"}, True),
        ({"text": "Question: 1+1=?\nAnswer: 2"}, True),
        ({"text": "<s>[INST] 1+1=? [/INST] 2</s>"}, True),
        ({"text": "11+1=?"}, False),
        ({"no": "demonstration"}, False),
    ],
)
def test_a_held_out_prompt_that_is_answered_in_a_demonstration_is_found(
    trained: dict[str, Any], is_found: bool, tmp_path: Path
) -> None:
    rows = look_at(tmp_path, [{"prompt": "3"}, {"prompt": "1+1=?"}], [{"text": "7"}, trained], "accuracy")
    if is_found:
        with pytest.raises(
            DataError,
            match=r"1 of 2 rows of data\.heldout .*\(row 2 is row 2 of sft\.jsonl\): 50% .*'1\+1=\?'.*remove",
        ):
            rows.check()
    else:
        assert rows.check() == []


@pytest.mark.parametrize(
    ("trained", "is_found"),
    [
        ({"prompt": "1+1=?", "completion": "2"}, True),
        ({"messages": [SUM, ANSWER]}, True),
        ({"messages": [{"role": "system", "content": "Be brief."}, SUM, {**ANSWER, "content": "2\n"}]}, True),
        ({"prompt": "1+1=?", "completion": "3"}, False),
        ({"text": "a page"}, True),
        ({"text": "A  page.\n"}, True),
    ],
)
def test_a_held_out_demonstration_is_found_where_all_that_it_says_is_trained_on(
    trained: dict[str, Any], is_found: bool, tmp_path: Path
) -> None:
    held_out = [{"text": "a page"}, {"prompt": "1+1=?", "completion": "2"}]
    rows = look_at(tmp_path, held_out, [trained], "loss")
    if is_found:
        with pytest.raises(DataError, match=r"1 of 2 rows of data\.heldout are also trained on"):
            rows.check()
    else:
        assert rows.check() == []


def test_a_prompt_of_rl_that_is_held_out_is_found_whatever_its_id(tmp_path: Path) -> None:
    rows = look_at(tmp_path, [{"id": "a", "prompt": "1+1=?", "answer": "2"}], [], "accuracy")
    [prompt] = load_prompts_from_jsonl(write_rows(tmp_path / "p.jsonl", [{"id": "b", "messages": [SUM]}]))
    rows.look_for([key_of_prompt(prompt)], "p.jsonl", prompt.row)
    with pytest.raises(DataError, match=r"row 1 is row 1 of p\.jsonl"):
        rows.check()


def test_of_prompts_that_begin_alike_the_same_rows_alone_are_found(tmp_path: Path) -> None:
    """A demonstration of a game is of one word, and the prompt of another game with another word the same."""
    games = [{"prompt": "Guess the word.", "answer": word} for word in ("crane", "slate", "pilot", "mound")]
    rows = look_at(tmp_path, games[:2], [{"prompt": "Guess the word.", "completion": "pilot"}], "accuracy")
    trained = load_prompts_from_jsonl(write_rows(tmp_path / "prompts.jsonl", games[2:]))
    assert check_held_out([rows], trained, source="prompts.jsonl") == []
    leaked = load_prompts_from_jsonl(write_rows(tmp_path / "prompts.jsonl", [games[3], games[1]]))
    with pytest.raises(DataError, match=r"1 of 2 rows of data\.heldout .*\(row 2 is row 2 of prompts\.jsonl\)"):
        check_held_out([rows], leaked, source="prompts.jsonl")


def test_a_few_of_many_are_told_and_no_reason_to_stop(tmp_path: Path) -> None:
    """Two datasets of the hub often have a few sentences in common."""
    held_out = [{"prompt": f"{number}"} for number in range(200)]
    trained = [{"prompt": f"{number}", "completion": "x"} for number in range(3)]
    [sentence] = look_at(tmp_path, held_out, trained[:2], "accuracy").check()
    assert sentence.startswith("2 of 200 rows of data.heldout are also trained on (row 1 is row 1 of")
    with pytest.raises(DataError, match="3 of 200"):
        look_at(tmp_path, held_out, trained, "accuracy").check()


def test_rows_that_are_not_compared_may_be_trained_on(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "h.jsonl", [{"prompt": "3"}, {"prompt": "1+1=?"}])
    rows = read_held_out("data.heldout", str(path), "accuracy", max_rows=1)
    list(watch_rows([(1, {"messages": [SUM, ANSWER]})], "sft.jsonl", [rows]))
    assert rows.check() == []


def test_demonstrations_that_are_not_compared_neither_count_nor_make_the_others_few(tmp_path: Path) -> None:
    others = [{"prompt": f"{i}?", "completion": "2"} for i in range(200)]
    path = write_rows(tmp_path / "h.jsonl", [{"prompt": "1+1=?", "completion": "2"}, *others])
    compared = read_held_out("data.heldout", str(path), "loss", max_rows=10)
    list(watch_rows([(1, {"messages": [SUM, ANSWER]})], "sft.jsonl", [compared]))
    with pytest.raises(DataError, match=r"^1 of 10 rows of data\.heldout"):
        compared.check()
    list(watch_rows([(1, others[150])], "sft.jsonl", [rows := read_held_out("h", str(path), "loss", max_rows=10)]))
    assert rows.check() == []


def test_each_file_is_looked_for_by_what_is_compared_on_it(tmp_path: Path) -> None:
    """Prompts choose the checkpoint, and demonstrations say which ones are kept until then."""
    prompts = write_rows(tmp_path / "heldout.jsonl", [{"prompt": "1+1=?"}])
    asked = read_held_out("data.heldout", str(prompts), "accuracy")
    demonstrations = write_rows(tmp_path / "sft_eval.jsonl", [{"messages": [SUM, ANSWER]}])
    demonstrated = read_held_out("data.sft_eval", str(demonstrations), "loss")
    list(watch_rows([(1, {"messages": [SUM, OTHER, ANSWER]})], "sft.jsonl", [asked, demonstrated]))
    assert (asked.check(), demonstrated.check()) == ([], [])
    list(watch_rows([(2, {"messages": [SUM, ANSWER]})], "sft.jsonl", [asked, demonstrated]))
    for rows, name in ((asked, "heldout"), (demonstrated, "sft_eval")):
        with pytest.raises(DataError, match=rf"1 of 1 rows of data\.{name} .*\(row 1 is row 2 of sft\.jsonl\)"):
            rows.check()


LONG = "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May."
PREFIX = "Solve this problem step by step. "


@pytest.mark.parametrize(
    "trained",
    [
        {"text": f"A page that quotes {LONG.upper()} And goes on."},
        {"prompt": f"{PREFIX}{LONG} How many clips?", "completion": "72"},
        {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": f"You asked: {LONG}"}]},
    ],
)
@pytest.mark.parametrize("metric", ["accuracy", "loss"])
def test_a_long_run_of_words_is_reported_with_its_share_and_an_example(
    trained: dict[str, Any], metric: Metric, tmp_path: Path
) -> None:
    other = " ".join(f"word{i}" for i in range(30))
    held_out = [{"prompt": LONG, "completion": "72"}, {"prompt": other, "completion": "1"}]
    if metric == "accuracy":
        held_out = [{"prompt": row["prompt"], "answer": "72"} for row in held_out]
    [sentence] = look_at(tmp_path, held_out, [{"text": "7"}, trained], metric).check()
    assert sentence.startswith("1 of 2 rows of data.heldout (50%) share a long run of words")
    assert "row 1 and row 2 of sft.jsonl both have 'natalia sold clips to 48 of her friends in april and" in sentence


def test_words_that_many_held_out_rows_begin_with_are_no_leak(tmp_path: Path) -> None:
    common = "Read the following question carefully and answer it with a single number between zero and nine please "
    held_out = [{"prompt": f"{common}{i}?", "answer": "1"} for i in range(5)]
    assert look_at(tmp_path, held_out, [{"prompt": f"{common}77?", "completion": "1"}], "accuracy").check() == []


def test_prompts_of_rl_are_looked_at_word_by_word_too(tmp_path: Path) -> None:
    rows = look_at(tmp_path, [{"prompt": LONG}], [], "accuracy")
    trained = load_prompts_from_jsonl(write_rows(tmp_path / "prompts.jsonl", [{"prompt": PREFIX + LONG}]))
    [sentence] = check_held_out([rows], trained, source="prompts.jsonl")
    assert "row 1 and row 1 of prompts.jsonl" in sentence
