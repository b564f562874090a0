"""Generate the quickstart's data: demonstrations, prompts, a tokenizer and an untrained model.

Some demonstrations add column by column and are right. The other demonstrations give only a sum, and most of these sums
are wrong. A model that imitates all demonstrations is right in some cases, so RL can improve it by preferring
column-by-column addition.

The files depend only on `QuickstartSize` and on the seed of the model's weights.
"""

from __future__ import annotations

import json
import random
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from rollouts_core.environments.arithmetic import (
    Addition,
    draw_addition,
    write_blurted_answer,
    write_guessed_answer,
    write_worked_answer,
)
from rollouts_core.errors import DataError
from rollouts_core.system.files import new_directory

SPECIAL_TOKENS = ("<|pad|>", "<|end|>", "<|unk|>", "<|system|>", "<|user|>", "<|assistant|>")
CHARACTERS = "0123456789+-*/=;:., ()?"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
HELDOUT_SHARE = 10
"""One in this many additions is held out, which means kept out of all training data. A checksum of the question decides
which additions are held out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuickstartSize:
    """The amounts of data and the size of the model."""

    num_digits: int = 3
    num_demonstrations: int = 12_000
    num_prompts: int = 2_000
    num_selection_prompts: int = 200
    num_heldout_prompts: int = 400
    worked_share: float = 0.4
    """Share of the demonstrations that add column by column. The other demonstrations give only a sum."""
    wrong_share: float = 0.7
    """Share of wrong demonstrations among the demonstrations that give only a sum."""
    hidden_size: int = 64
    num_layers: int = 3


SMALL_SIZE = QuickstartSize(
    num_digits=2,
    num_demonstrations=300,
    num_prompts=100,
    num_selection_prompts=20,
    num_heldout_prompts=20,
    hidden_size=32,
    num_layers=2,
)
"""The size for tests and rehearsals of a run. Every stage runs within seconds, but the model is too small to learn."""


def write_quickstart_files(directory: Path, *, size: QuickstartSize, seed: int = 0) -> None:
    """Write sft.jsonl, prompts.jsonl, selection.jsonl, heldout.jsonl and base_model/ into `directory`.

    No addition is in both the training files and the selection or held-out files.
    """
    num_possible = (9 * 10 ** (size.num_digits - 1)) ** 2
    num_training = size.num_demonstrations + size.num_prompts
    num_heldout = size.num_selection_prompts + size.num_heldout_prompts
    if num_training > num_possible / 2 or num_heldout > num_possible / HELDOUT_SHARE / 2:
        raise DataError(
            f"{num_training} training and {num_heldout} held-out additions are too many: {size.num_digits} digits "
            f"allow {num_possible}. Ask for fewer additions or more digits"
        )
    rng = random.Random(seed)
    training = _draw_distinct(rng, size, is_heldout=False)
    heldout = _draw_distinct(rng, size, is_heldout=True)
    with new_directory(directory) as target:
        demonstrations = (_demonstration(next(training), rng, size) for _ in range(size.num_demonstrations))
        _write_rows(target / "sft.jsonl", demonstrations)
        _write_rows(target / "prompts.jsonl", (_prompt(next(training)) for _ in range(size.num_prompts)))
        _write_rows(target / "selection.jsonl", (_prompt(next(heldout)) for _ in range(size.num_selection_prompts)))
        _write_rows(target / "heldout.jsonl", (_prompt(next(heldout)) for _ in range(size.num_heldout_prompts)))
        tokenizer = build_character_tokenizer()
        tokenizer.save_pretrained(target / "base_model")
        build_untrained_model(tokenizer, size, seed=seed).save_pretrained(target / "base_model")


def build_character_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per character, and a chat template that marks each role with a special
    token."""
    vocabulary = {token: i for i, token in enumerate((*SPECIAL_TOKENS, *CHARACTERS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<|unk|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        eos_token="<|end|>",
        unk_token="<|unk|>",
        additional_special_tokens=list(SPECIAL_TOKENS[3:]),
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def build_untrained_model(tokenizer: PreTrainedTokenizerFast, size: QuickstartSize, *, seed: int) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=size.hidden_size,
        num_hidden_layers=size.num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=size.hidden_size // 4,
        intermediate_size=3 * size.hidden_size,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(config)


def _draw_distinct(rng: random.Random, size: QuickstartSize, *, is_heldout: bool) -> Iterator[Addition]:
    """Draw distinct additions without end: only held-out additions, or only additions for training."""
    seen: set[Addition] = set()
    while True:
        problem = draw_addition(rng, num_digits=size.num_digits)
        belongs = (zlib.crc32(problem.question.encode()) % HELDOUT_SHARE == 0) == is_heldout
        if belongs and problem not in seen:
            seen.add(problem)
            yield problem


def _demonstration(problem: Addition, rng: random.Random, size: QuickstartSize) -> dict[str, Any]:  # Any: JSON
    if rng.random() < size.worked_share:
        completion = write_worked_answer(problem)
    elif rng.random() < size.wrong_share:
        completion = write_guessed_answer(problem, rng)
    else:
        completion = write_blurted_answer(problem)
    return {"prompt": problem.question, "completion": completion}


def _prompt(problem: Addition) -> dict[str, Any]:  # Any: JSON
    return {"id": problem.question, "prompt": problem.question, "answer": problem.answer}


def _write_rows(path: Path, rows: Iterator[dict[str, Any]]) -> None:  # Any: JSON
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
