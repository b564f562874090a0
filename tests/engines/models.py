"""Tiny models in folders that every engine loads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from rollouts_core.quickstart import build_character_tokenizer
from tests.rollouts_core.embedded.tiny_models import make_model


@dataclass(frozen=True)
class SavedModel:
    """A model in memory, as the oracle, and its directory."""

    model: PreTrainedModel
    directory: Path


def save(model: PreTrainedModel, directory: Path) -> SavedModel:
    """Write a checkpoint with a tokenizer, which vLLM wants."""
    model.save_pretrained(directory)
    build_character_tokenizer().save_pretrained(directory)
    return SavedModel(model, directory)


def make(seed: int, **overrides: Any) -> PreTrainedModel:
    """A tiny random Qwen3 with tied embeddings, the harder case, of sizes that vLLM and SGLang have on a CPU."""
    settings: dict[str, Any] = {  # Any: settings of every type
        "vocab_size": len(build_character_tokenizer()),
        "head_dim": 32,
        "intermediate_size": 64,
        "tie_word_embeddings": True,
    }
    return make_model(seed=seed, **{**settings, **overrides})
