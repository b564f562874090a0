"""Read the sizes in a model's config.json that determine the memory of activations and of the engines' cache.

The sizes are exact for models of the Llama family, and approximate for other models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

NAMES = {
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "num_layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "num_heads": ("num_attention_heads", "n_head", "num_heads"),
    "vocab_size": ("vocab_size",),
}
"""Names of the required sizes in the config.json of different models."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The sizes of a decoder."""

    hidden_size: int
    """Width of the residual stream."""
    num_layers: int
    """Number of transformer blocks."""
    num_heads: int
    """Number of query heads."""
    num_kv_heads: int
    """Number of key heads, equal to the number of value heads."""
    head_dim: int
    """Width of one head."""
    intermediate_size: int
    """Width of the feed-forward layers that one token uses, summed over its experts."""
    vocab_size: int
    """Number of rows of the output head."""

    @property
    def query_size(self) -> int:
        """Total width of the query heads."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Total width of the key heads, equal to that of the value heads."""
        return self.num_kv_heads * self.head_dim


def read_shape(settings: Mapping[str, Any]) -> ModelShape | None:  # Any: JSON
    """Read the sizes from a config.json. Returns None if a size is missing.

    If the model has several parts, the sizes are those of its language model (`text_config`).
    """
    try:
        text = {**settings, **(settings.get("text_config") or {})}
        found = {name: next((int(text[each]) for each in names if text.get(each)), 0) for name, names in NAMES.items()}
        if not all(found.values()):
            return None
        hidden_size, num_heads = found["hidden_size"], found["num_heads"]
        return ModelShape(
            **found,
            num_kv_heads=int(text.get("num_key_value_heads") or num_heads),
            head_dim=int(text.get("head_dim") or hidden_size // num_heads),
            intermediate_size=_intermediate_size(text) or 4 * hidden_size,
        )
    except (TypeError, ValueError):
        return None


def _intermediate_size(text: Mapping[str, Any]) -> int:  # Any: JSON
    num_chosen = text.get("num_experts_per_tok") or 0
    if not num_chosen:
        return int(text.get("intermediate_size") or text.get("n_inner") or 0)
    each = text.get("moe_intermediate_size") or text.get("intermediate_size") or 0
    shared = text.get("shared_expert_intermediate_size") or (text.get("n_shared_experts") or 0) * each
    return int(num_chosen * each + shared)
