"""Models and documents that the benchmarks train on, made from configurations and seeds.

Not here: measuring (side_by_side.py).
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from rollouts_core import Sample

PAD_ID, EOS_ID = 0, 1
NUM_DOCUMENTS = 6_000
MEAN_LENGTH, SHORTEST, LONGEST = 79, 12, 256
LENGTH_SIGMA = 0.6
"""Standard deviation of the logarithm of a document's length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """Shape of a Qwen3 model."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    intermediate_size: int
    ties_embeddings: bool = False


SIZES = {
    "0.16M": ModelSize(vocab_size=64, hidden_size=64, num_layers=3, num_heads=4, num_kv_heads=2, intermediate_size=192),
    "1M": ModelSize(vocab_size=128, hidden_size=128, num_layers=4, num_heads=4, num_kv_heads=2, intermediate_size=512),
    "20M": ModelSize(
        vocab_size=4096, hidden_size=512, num_layers=6, num_heads=8, num_kv_heads=4, intermediate_size=1536
    ),
    # Widths, depths and vocabulary of Qwen2.5-0.5B and Qwen2.5-1.5B.
    "0.5B": ModelSize(
        vocab_size=151_936,
        hidden_size=896,
        num_layers=24,
        num_heads=14,
        num_kv_heads=2,
        intermediate_size=4864,
        ties_embeddings=True,
    ),
    "1.5B": ModelSize(
        vocab_size=151_936,
        hidden_size=1536,
        num_layers=28,
        num_heads=12,
        num_kv_heads=2,
        intermediate_size=8960,
        ties_embeddings=True,
    ),
}


def write_model(folder: Path, size: ModelSize, *, seed: int = 0, device: str = "cpu") -> Path:
    """Write a checkpoint with random weights and a tokenizer of one token per word; returns its folder.

    Args:
        device: where the weights are drawn: a GPU is faster, and draws others.
    """
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=size.vocab_size,
        hidden_size=size.hidden_size,
        num_hidden_layers=size.num_layers,
        num_attention_heads=size.num_heads,
        num_key_value_heads=size.num_kv_heads,
        head_dim=size.hidden_size // size.num_heads,
        intermediate_size=size.intermediate_size,
        max_position_embeddings=2048,
        tie_word_embeddings=size.ties_embeddings,
        pad_token_id=PAD_ID,
        eos_token_id=EOS_ID,
        bos_token_id=None,
    )
    with torch.device(device):
        model = Qwen3ForCausalLM(config)
    model.save_pretrained(folder)
    if device != "cpu":  # this process keeps no memory of the GPU that others measure
        del model
        torch.cuda.empty_cache()
    build_tokenizer(size.vocab_size).save_pretrained(folder)
    return folder


def build_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """Words `w2`, `w3`, ... are the tokens 2, 3, ...; a chat template that joins the contents of the messages."""
    vocabulary = {"<pad>": PAD_ID, "<end>": EOS_ID} | {f"w{i}": i for i in range(2, vocab_size)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<end>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<end>", unk_token="<end>")
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    return tokenizer


def make_documents(vocab_size: int, *, count: int = NUM_DOCUMENTS, seed: int = 0) -> list[list[int]]:
    """Token ids with log-normal lengths; low ids are more frequent, so that there is something to learn."""
    random_numbers = random.Random(seed)
    center = math.log(MEAN_LENGTH) - LENGTH_SIGMA**2 / 2
    lengths = [
        min(LONGEST, max(SHORTEST, round(random_numbers.lognormvariate(center, LENGTH_SIGMA)))) for _ in range(count)
    ]
    return [
        [2 + int((vocab_size - 2) * random_numbers.random() ** 3) for _ in range(length - 1)] + [EOS_ID]
        for length in lengths
    ]


def as_samples(documents: list[list[int]]) -> list[Sample]:
    """Demonstrations that train every token but the first."""
    return [
        Sample(prompt="", response="", tokens=tokens, loss_mask=[0.0] + [1.0] * (len(tokens) - 1))
        for tokens in documents
    ]
