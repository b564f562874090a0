"""Pins how GPUs are divided among trainer and engines: without it a suggested placement would run out of memory.

The models are those of their names by their public shapes. The memory of a trainer is 16 bytes per parameter and its
activations (test_activation_needs.py); of an engine 2 bytes per parameter and a cache.
"""

from __future__ import annotations

from typing import Any

import pytest

from rollouts_core.checks.needed_part import GIB
from rollouts_core.checks.placement_plan import plan_placement
from rollouts_core.config import Config
from rollouts_core.errors import ConfigError
from rollouts_core.model.model_size import ModelSize

SHAPES = {
    "0.5B": (494e6, 896, 24, 14, 2, 4864),
    "1.5B": (1.54e9, 1536, 28, 12, 2, 8960),
    "8B": (8.2e9, 4096, 36, 32, 8, 12288),
    "32B": (32.8e9, 5120, 64, 64, 8, 25600),
}
"""Parameters, width, layers, heads, heads of keys and values, width of the feed-forward layer."""


def size_of(model: str) -> ModelSize:
    parameters, hidden, layers, heads, kv_heads, intermediate = SHAPES[model]
    settings = {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": intermediate,
        "vocab_size": 151_936,
        "head_dim": 128,
    }
    return ModelSize(tensors={"all": (int(parameters),)}, settings=settings)


def config_of(*, lora: int = 0) -> Config:
    policy: dict[str, Any] = {"precision": "bfloat16", "activation_checkpointing": True, "lora": {"rank": lora}}
    return Config.model_validate(
        {
            "mode": "rl",
            "model": {"path": "/m"},
            "data": {name: f"/{name}.jsonl" for name in ("prompts", "selection", "heldout")},
            "training": {"rl": {"max_micro_batch_tokens": 4096, "policy": policy}},
            "rollout": {
                "environment": "math",
                "max_prompt_tokens": 1024,
                "sampling": {"max_new_tokens": 1024},
                "engine": {"kind": "sglang"},
            },
        }
    )


def gpus_of(*gib: int) -> dict[int, int]:
    """The memory of GPUs by their ranks."""
    return {rank: each * GIB for rank, each in enumerate(gib)}


@pytest.mark.parametrize(
    ("model", "num_gpus", "gib", "lora", "expected"),
    [
        # trainers, GPUs of engines, engines, in turns
        ("0.5B", 1, 24, 0, (1, 1, 1, True)),
        ("0.5B", 2, 24, 0, (1, 1, 1, False)),
        ("1.5B", 1, 80, 0, (1, 1, 1, True)),
        ("1.5B", 2, 80, 0, (1, 1, 1, False)),
        ("1.5B", 4, 80, 0, (1, 3, 3, False)),
        ("1.5B", 8, 80, 0, (1, 7, 7, False)),
        ("8B", 1, 80, 16, (1, 1, 1, True)),
        ("8B", 2, 80, 0, (2, 2, 2, True)),
        ("8B", 4, 80, 0, (2, 2, 2, False)),
        ("8B", 8, 80, 0, (2, 6, 6, False)),
        ("32B", 8, 141, 0, (5, 3, 3, False)),  # 489 GiB of weights, gradients and moments: 98 on each of 5
        ("32B", 8, 80, 0, (8, 8, 2, True)),  # 61 on each of 8; 12 bytes per parameter stay there, 46
        ("32B", 8, 80, 16, (1, 7, 7, False)),
    ],
)
def test_gpus_are_divided_by_memory(
    model: str, num_gpus: int, gib: int, lora: int, expected: tuple[int, int, int, bool]
) -> None:
    plan = plan_placement(config_of(lora=lora), size_of(model), gpus_of(*[gib] * num_gpus))
    found = (len(plan.trainer_ranks), len(plan.engine_ranks), plan.num_engines, plan.is_colocated)
    assert found == expected, str(plan)
    assert plan.trainer_bytes <= gib * GIB and plan.engine_bytes <= gib * GIB


def test_the_plan_is_a_sentence_with_the_settings() -> None:
    said = str(plan_placement(config_of(), size_of("1.5B"), gpus_of(80, 80, 80, 80)))
    assert said.startswith("placement: the trainer on GPU 0 (")
    assert said.endswith("trainer_gpu_ranks = [0], engine_gpu_ranks = [1, 2, 3], num_engines = 3")


def test_unlike_gpus_and_too_small_ones_are_one_sentence() -> None:
    with pytest.raises(ConfigError, match="the GPUs have 80, 24 GiB, but a plan needs GPUs of one size"):
        plan_placement(config_of(), size_of("0.5B"), gpus_of(80, 24))
    with pytest.raises(ConfigError, match="the smallest plan that fits needs 2 such GPUs"):
        plan_placement(config_of(), size_of("8B"), gpus_of(80))
    with pytest.raises(ConfigError, match="nothing fits on 8 x 24 GiB, nor on 8 such GPUs"):
        plan_placement(config_of(), size_of("8B"), gpus_of(*[24] * 8))
    with pytest.raises(ConfigError, match="nor on 8 such GPUs: take larger"):
        plan_placement(config_of(), size_of("32B"), gpus_of(24, 24))
