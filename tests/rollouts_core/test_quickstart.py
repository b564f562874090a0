"""Pins that the quickstart's files are a function of size and seed, and that nothing graded was trained on.

Without it the quickstart would report memory as skill, or another number at each try.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from rollouts_core.config import ModelConfig
from rollouts_core.data.dataset import load_prompts_from_jsonl, load_sft_dataset
from rollouts_core.data.rows import digest_path
from rollouts_core.environments import ArithmeticEnvironment
from rollouts_core.model.loading import check_vocabulary, load_hf_model
from rollouts_core.quickstart import CHARACTERS, SPECIAL_TOKENS, write_quickstart_files
from rollouts_core.types import Sample, Status
from tests.rollouts_core.make import TINY_SIZE

FILES = ["sft", "prompts", "selection", "heldout"]


def read_questions(directory: Path, name: str) -> list[str]:
    """The additions of one file, in its order."""
    return [json.loads(line)["prompt"] for line in (directory / f"{name}.jsonl").read_text().splitlines()]


def test_one_seed_gives_the_same_bytes(quickstart_dir: Path, tmp_path: Path) -> None:
    torch.rand(3)  # the files do not depend on random numbers drawn before
    write_quickstart_files(tmp_path / "again", size=TINY_SIZE)
    assert digest_path(tmp_path / "again") == digest_path(quickstart_dir)


def test_another_seed_gives_other_data_and_weights(quickstart_dir: Path, tmp_path: Path) -> None:
    write_quickstart_files(tmp_path / "other", size=TINY_SIZE, seed=1)
    for name in [*[f"{file}.jsonl" for file in FILES], "base_model/model.safetensors"]:
        assert digest_path(tmp_path / "other" / name) != digest_path(quickstart_dir / name), name


@pytest.mark.parametrize("first", FILES)
@pytest.mark.parametrize("second", FILES)
def test_no_addition_is_in_two_files(quickstart_dir: Path, first: str, second: str) -> None:
    if first != second:
        assert not set(read_questions(quickstart_dir, first)) & set(read_questions(quickstart_dir, second))


@pytest.mark.parametrize("name", FILES)
def test_no_addition_is_twice_in_a_file(quickstart_dir: Path, name: str) -> None:
    questions = read_questions(quickstart_dir, name)
    assert len(set(questions)) == len(questions)


def test_graded_and_trained_additions_stay_apart_across_seeds(quickstart_dir: Path, tmp_path: Path) -> None:
    write_quickstart_files(tmp_path / "other", size=TINY_SIZE, seed=1)
    trained = {q for name in ("sft", "prompts") for q in read_questions(tmp_path / "other", name)}
    graded = {q for name in ("selection", "heldout") for q in read_questions(quickstart_dir, name)}
    assert not trained & graded


@pytest.mark.parametrize(("name", "num_rows"), [("sft", 40), ("prompts", 20), ("selection", 6), ("heldout", 8)])
def test_the_files_have_the_asked_number_of_rows(quickstart_dir: Path, name: str, num_rows: int) -> None:
    assert len(read_questions(quickstart_dir, name)) == num_rows


def test_worked_demonstrations_are_right_and_most_blurted_ones_wrong(quickstart_dir: Path) -> None:
    rewards: dict[bool, list[float]] = {True: [], False: []}
    for line in (quickstart_dir / "sft.jsonl").read_text().splitlines():
        row = json.loads(line)
        first, second = row["prompt"].removesuffix("=?").split("+")
        answer = str(int(first) + int(second))
        sample = Sample(response=row["completion"], metadata={"answer": answer}, status=Status.COMPLETED)
        rewards["," in row["completion"]].append(ArithmeticEnvironment().grade(sample))
    assert set(rewards[True]) == {1.0}
    assert 0.0 < sum(rewards[False]) / len(rewards[False]) < 0.5


@pytest.mark.parametrize(("worked_share", "num_worked"), [(0.0, 0), (1.0, 40)])
def test_the_share_of_worked_demonstrations_is_the_asked_one(
    tmp_path: Path, worked_share: float, num_worked: int
) -> None:
    write_quickstart_files(tmp_path / "files", size=replace(TINY_SIZE, worked_share=worked_share))
    assert (tmp_path / "files" / "sft.jsonl").read_text().count(",") - 40 == num_worked  # one comma is JSON's


@pytest.mark.parametrize("name", ["prompts", "selection", "heldout"])
def test_every_prompt_has_its_right_answer(quickstart_dir: Path, name: str) -> None:
    for prompt in load_prompts_from_jsonl(quickstart_dir / f"{name}.jsonl"):
        first, second = prompt.id.removesuffix("=?").split("+")
        assert prompt.answer == str(int(first) + int(second))


def test_no_character_of_the_data_is_unknown(quickstart_dir: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    samples = load_sft_dataset(quickstart_dir / "sft.jsonl", tokenizer, max_length=100)
    assert all(tokenizer.unk_token_id not in sample.tokens for sample in samples)


def test_every_character_and_special_token_is_one_token(tokenizer: PreTrainedTokenizerBase) -> None:
    text = "".join(SPECIAL_TOKENS) + CHARACTERS
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokens == list(range(len(SPECIAL_TOKENS) + len(CHARACTERS)))
    assert tokenizer.decode(tokens) == text


def test_model_and_tokenizer_belong_together(base_model: ModelConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    model = load_hf_model(base_model)
    check_vocabulary(model.get_input_embeddings().weight.shape[0], tokenizer, base_model.path)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
