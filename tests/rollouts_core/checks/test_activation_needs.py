"""Pins that what a pass is said to take besides weights and optimizer is about what torch allocates for it.

Without it a run could be told that a GPU will do which runs out of memory, or that it needs one twice as large.
Models compute as on a GPU: without the norms and the attention that the CPU gets in their place.
"""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from rollouts_core.batch import build_batch
from rollouts_core.checks import activation_needs
from rollouts_core.checks.activation_needs import Rows, activation_parts, rl_rows, sft_rows
from rollouts_core.checks.needed_part import sum_bytes
from rollouts_core.config import (
    LoRAConfig,
    ModelConfig,
    PolicyConfig,
    RLTrainingConfig,
    RolloutConfig,
    SFTTrainingConfig,
)
from rollouts_core.model import logprobs
from rollouts_core.model.lora import add_adapters
from rollouts_core.model.model_shape import read_shape
from rollouts_core.model.model_size import find_model_size
from rollouts_core.model.policy import Policy, recompute_activations
from tests.rollouts_core.make import make_sample

SIZES: dict[str, Any] = {  # Any: settings
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "tie_word_embeddings": False,
}
NUM_ROWS = 2
BFLOAT16: dict[str, Any] = {"precision": "bfloat16"}
ADAPTERS: dict[str, Any] = {"lora": LoRAConfig(rank=4)}
AGAIN: dict[str, Any] = {"activation_checkpointing": True}


class PeakMemory(TorchDispatchMode):
    """The bytes of all tensors that operations made and that live at the same time, at most."""

    def __init__(self, known: list[torch.Tensor]) -> None:
        super().__init__()
        self.num_bytes = self.peak = 0
        self._living = {tensor.untyped_storage()._cdata for tensor in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor) and (storage := tensor.untyped_storage())._cdata not in self._living:
                self._living.add(storage._cdata)
                self.num_bytes += storage.nbytes()
                self.peak = max(self.peak, self.num_bytes)
                weakref.finalize(storage, self._free, storage._cdata, storage.nbytes())
        return made

    def _free(self, storage: int, num_bytes: int) -> None:
        self._living.discard(storage)
        self.num_bytes -= num_bytes


def build_model(kind: str, policy: PolicyConfig) -> PreTrainedModel:
    torch.manual_seed(0)
    is_half = policy.lora.rank and policy.precision == "bfloat16"
    return AutoModelForCausalLM.from_config(
        CONFIG_MAPPING[kind](**SIZES),
        dtype=torch.bfloat16 if is_half else torch.float32,
        attn_implementation="sdpa" if policy.attention == "auto" else policy.attention,
    ).train()


def peak_of_a_pass(model: PreTrainedModel, policy: PolicyConfig, *, row_length: int, packed: bool) -> int:
    """What a forward and backward pass takes that is not the first of its step: gradients are there already."""
    if policy.lora.rank:
        add_adapters(model, policy.lora)
    if policy.activation_checkpointing:
        recompute_activations(model)
    trained = Policy(model, autocast_dtype=torch.bfloat16 if policy.precision == "bfloat16" else None)
    samples = [list(range(row_length // 2 + 1))] * 2 if packed else [list(range(row_length + 1))]
    batch = build_batch([[make_sample(tokens) for tokens in samples]] * NUM_ROWS, pad_id=0)
    assert batch.inputs_BT.shape == (NUM_ROWS, row_length)
    trained(batch).logprobs_BT.sum().backward()
    gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
    memory = PeakMemory([*model.parameters(), *gradients])
    with memory:
        trained(batch).logprobs_BT.sum().backward()
    return memory.peak


@pytest.mark.parametrize(
    ("kind", "settings", "packed", "most"),
    [
        ("qwen3", {}, False, 1.2),
        ("qwen3", BFLOAT16, False, 1.2),
        ("llama", {}, False, 1.4),
        ("qwen2", BFLOAT16, False, 1.4),
        ("qwen3", {}, True, 1.2),
        ("qwen3", BFLOAT16, True, 1.3),
        ("qwen3", {"attention": "eager"}, True, 1.3),
        ("qwen3", {"attention": "eager", **BFLOAT16}, False, 1.3),
        ("qwen3", AGAIN, False, 1.6),
        ("qwen3", BFLOAT16 | AGAIN, True, 1.8),
        ("qwen3", ADAPTERS, False, 1.4),
        ("qwen3", ADAPTERS | BFLOAT16, True, 1.5),
        ("qwen3", ADAPTERS | BFLOAT16 | AGAIN, False, 1.9),
    ],
)
def test_a_pass_takes_about_what_is_said_and_not_more(
    kind: str, settings: dict[str, Any], packed: bool, most: float, tmp_path: Path
) -> None:
    policy, length = PolicyConfig(**settings), 128
    model = build_model(kind, policy)
    model.save_pretrained(tmp_path)
    size = find_model_size(ModelConfig(path=str(tmp_path)))
    said = activation_parts(size, policy, Rows(NUM_ROWS * length, length, packed, "2 rows"), num_processes=1)
    # Adapters count with their weights, gradients and moments, which are no part of a pass.
    of_a_pass = sum_bytes(part for part in said if part.name != "adapters")
    assert 1.0 <= of_a_pass / peak_of_a_pass(model, policy, row_length=length, packed=packed) <= most


def test_all_layers_keep_one_mask_of_packed_rows() -> None:
    """A copy in each would take 2 bytes per layer and pair of positions: 15 GB with 28 layers and rows of 16,384."""
    masks: list[torch.Tensor] = []

    def keep(saved: torch.Tensor) -> torch.Tensor:
        if saved.shape[-2:] == (length, length):
            masks.append(saved)
        return saved

    length, policy = 48, PolicyConfig(**BFLOAT16)
    batch = build_batch([[make_sample(list(range(length // 2 + 1)))] * 2], pad_id=0)
    trained = Policy(build_model("qwen3", policy), autocast_dtype=torch.bfloat16)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
        trained(batch)
    assert len({mask.untyped_storage().data_ptr() for mask in masks}) == 1
    assert len(masks) >= SIZES["num_hidden_layers"]


def test_the_numbers_of_other_files_are_those_here() -> None:
    assert activation_needs.LOGITS_PIECE_BYTES == logprobs.MAX_GPU_PIECE_BYTES


def test_rows_are_as_long_as_the_settings_let_them_be() -> None:
    assert sft_rows(SFTTrainingConfig(batch_size=4, micro_batch_size=8, max_length=100))[:3] == (400, 100, True)
    bounds = PolicyConfig(precision="bfloat16", attention="varlen")
    assert sft_rows(SFTTrainingConfig(batch_size=4, max_length=100, policy=bounds)).has_mask is False
    rollout = RolloutConfig(max_prompt_tokens=100, sampling={"max_new_tokens": 50})
    assert rl_rows(RLTrainingConfig(max_micro_batch_tokens=1000), rollout)[:3] == (1000, 300, True)
    assert rl_rows(RLTrainingConfig(max_micro_batch_tokens=200), rollout)[:3] == (200, 200, True)
    assert rl_rows(RLTrainingConfig(max_micro_batch_tokens=200, policy=bounds), rollout)[:3] == (200, 150, False)
    assert rl_rows(RLTrainingConfig(max_micro_batch_tokens=20, packing=False), rollout)[:3] == (150, 150, False)


def test_models_name_their_numbers_differently_or_not_at_all() -> None:
    gpt2 = read_shape({"n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 100})
    assert gpt2 is not None and (gpt2.query_size, gpt2.kv_size, gpt2.intermediate_size) == (64, 64, 256)
    experts = {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 8}
    mixture = read_shape({"text_config": {**SIZES, **experts}})
    assert mixture is not None and mixture.intermediate_size == 72
    assert read_shape({"model_type": "unknown"}) is read_shape({}) is None
