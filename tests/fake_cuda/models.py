"""Backends of real shapes on the fake device: Qwen3 by its settings, without any weights.

Not here: the device (device.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import peft  # noqa: F401  # it makes tensors when it is imported, which no fake device can
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from rollouts_core.checks.activation_needs import Rows
from rollouts_core.checks.needed_part import sum_bytes
from rollouts_core.checks.resource_needs import training_parts
from rollouts_core.config import ModelConfig, PolicyConfig
from rollouts_core.model import policy as policy_module
from rollouts_core.model import varlen
from rollouts_core.model.model_size import ModelSize
from rollouts_core.model.varlen import why_unfit
from rollouts_core.quickstart import build_character_tokenizer

SHAPES: dict[str, dict[str, Any]] = {  # Any: settings
    "small": {
        "vocab_size": 64,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 128,
        "tie_word_embeddings": False,
    },
    "0.6B": {
        "vocab_size": 151_936,
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 3072,
        "tie_word_embeddings": True,
    },
    "1.7B": {
        "vocab_size": 151_936,
        "hidden_size": 2048,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 6144,
        "tie_word_embeddings": True,
    },
    "8B": {
        "vocab_size": 151_936,
        "hidden_size": 4096,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 12_288,
        "tie_word_embeddings": False,
    },
}
"""Of the config.json of Qwen3-0.6B, -1.7B and -8B."""


def build_model(shape: str, *, device: str, dtype: torch.dtype, attention: str) -> PreTrainedModel:
    """A Qwen3 of this shape as `load_hf_model` gives it, without values."""
    with _disable_current_modes(), torch.device("meta"):
        config = Qwen3Config(**SHAPES[shape])
        model: PreTrainedModel = Qwen3ForCausalLM._from_config(config, dtype=dtype, attn_implementation=attention)
    if device != "meta":
        model.to_empty(device=device)
        model.tie_weights()
    return model.train()


@contextmanager
def models_of(shape: str, folder: Path) -> Iterator[ModelConfig]:
    """A block in which every model that is loaded is of this shape; its tokenizer and config.json lie in `folder`."""
    build_character_tokenizer().save_pretrained(folder)
    Qwen3Config(**SHAPES[shape], architectures=["Qwen3ForCausalLM"]).save_pretrained(folder)

    def load(_: ModelConfig, *, device: str = "cpu", dtype: torch.dtype, attention: str) -> PreTrainedModel:
        return build_model(shape, device=device, dtype=dtype, attention=attention)

    def try_without_modes(model: ModelConfig) -> str:
        with _disable_current_modes():
            return why_unfit(model)

    with (
        mock.patch.object(policy_module, "load_hf_model", load),
        mock.patch.object(varlen, "why_unfit", try_without_modes),  # it tries the model on a device of its own
    ):
        yield ModelConfig(path=str(folder))


@contextmanager
def adapters_in_place() -> Iterator[None]:
    """A block in which peft can make adapters: it makes them on the CPU and moves them, and torch refuses to exchange
    tensors that something watches, as the trace does."""

    def swap(first: Tensor, second: Tensor) -> None:
        if first is not second:
            first.__dict__, second.__dict__ = second.__dict__, first.__dict__
            torch._C._swap_tensor_impl(first, second)

    with mock.patch.object(torch.utils, "swap_tensors", swap):
        yield


def size_of(shape: str) -> ModelSize:
    """What `find_model_size` says of the files of such a model."""
    model = build_model(shape, device="meta", dtype=torch.float32, attention="sdpa")
    tensors = {name: tuple(value.shape) for name, value in model.named_parameters()}
    return ModelSize(tensors=tensors, settings=SHAPES[shape])


def estimate(shape: str, policy: PolicyConfig, rows: Rows) -> int:
    """Bytes that the preflight says for a training on one device."""
    return sum_bytes(training_parts(size_of(shape), policy, rows))
