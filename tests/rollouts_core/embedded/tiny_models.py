"""Tiny random models as transformers makes them, saved as a checkpoint directory; the oracle of this folder's tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCAB_SIZE = 61
EOS = 1
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 8.0,
    "low_freq_factor": 0.5,
    "high_freq_factor": 2.0,
    "original_max_position_embeddings": 16,
}
"""Of heads with 8 or 16 dimensions some pairs are slowed down, some interpolated, some kept."""

FAMILIES: dict[str, tuple[Any, Any]] = {  # Any: classes that transformers loads lazily
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}


def make_model(family: str = "qwen3", *, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A two-layer model with well separated logits; `overrides` go into its config."""
    config_class, model_class = FAMILIES[family]
    settings: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "initializer_range": 0.2,
        "bos_token_id": None,
        "eos_token_id": EOS,
        "pad_token_id": 0,
    }
    if family == "qwen3":
        settings["head_dim"] = 16
    torch.manual_seed(seed)
    model = model_class(config_class(**{**settings, **overrides})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # norms and biases start at 1 and 0, where a mix-up would not show
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def save_model(model: PreTrainedModel, directory: Path, **options: Any) -> Path:
    """Write the checkpoint and return its directory."""
    model.save_pretrained(directory, **options)
    return directory


def expected_logits(model: PreTrainedModel, token_ids: Sequence[int]) -> torch.Tensor:
    """logits_TV of a transformers forward pass over one sequence."""
    with torch.no_grad():
        return model(torch.tensor([list(token_ids)])).logits[0]


def expected_logprobs(
    model: PreTrainedModel, prompt: Sequence[int], completion: Sequence[int], *, temperature: float = 1.0
) -> torch.Tensor:
    """Log-probability of each completion token under log_softmax(logits / temperature)."""
    logits = expected_logits(model, [*prompt, *completion])[len(prompt) - 1 : -1]
    return (logits / temperature).log_softmax(-1).gather(-1, torch.tensor(completion)[:, None])[:, 0]


def random_prompt(length: int, seed: int) -> list[int]:
    """Token ids without the end of turn."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, VOCAB_SIZE, (length,), generator=generator).tolist()
