"""Pins that a checkpoint has its adapters as a folder that PEFT loads, beside the merged weights, in full precision.

Without it the adapters are in a trainer's file that nothing else reads, and the merged weights have lost in bfloat16
what adapters had learned.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from rollouts_core.backends.pytorch import PyTorchTrainingBackend
from rollouts_core.checkpoint import load_manifest
from rollouts_core.config import LoRAConfig, ModelConfig, PolicyConfig
from rollouts_core.model.adapter_folder import describe_adapters, is_converted
from rollouts_core.model.lora import add_adapters
from rollouts_core.model.policy import compute_logprobs
from tests.rollouts_core.make import TINY_MODEL
from tests.rollouts_core.model.test_policy import create_backend, make_batch, score, take_steps

ADAPTERS = LoRAConfig(rank=4, alpha=64, dropout=0.1)


def save_with_base(
    folder: Path, base_model: ModelConfig, policy: PolicyConfig, *, stored_as: torch.dtype
) -> tuple[PyTorchTrainingBackend, Path]:
    """A backend after three steps on a base model whose files have a number format, and its checkpoint."""
    base = AutoModelForCausalLM.from_pretrained(base_model.path, dtype=stored_as)
    base.save_pretrained(folder / "base")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / "base" / name).write_bytes((Path(base_model.path) / name).read_bytes())
    backend = create_backend(ModelConfig(path=str(folder / "base")), policy=policy)
    take_steps(backend, range(3))
    asyncio.run(backend.save_checkpoint(folder / "step_000003", {"step": 3}).result())
    return backend, folder / "step_000003"


def logprobs_of(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return compute_logprobs(model.eval(), make_batch())


@pytest.mark.parametrize("targets", [(), ("q_proj", "layers.1.mlp.up_proj")], ids=["all layers", "some"])
def test_the_base_with_the_loaded_adapter_computes_what_was_trained(
    base_model: ModelConfig, tmp_path: Path, targets: tuple[str, ...]
) -> None:
    policy = PolicyConfig(lora=ADAPTERS.model_copy(update={"target_modules": targets}))
    backend, checkpoint = save_with_base(tmp_path, base_model, policy, stored_as=torch.float32)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    untrained = logprobs_of(base)
    adapted = logprobs_of(PeftModel.from_pretrained(base, checkpoint / "adapter").base_model.model)
    assert not torch.allclose(adapted, untrained, atol=1e-3)
    torch.testing.assert_close(adapted, score(backend), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(logprobs_of(AutoModelForCausalLM.from_pretrained(checkpoint)), adapted)
    settings = json.loads((checkpoint / "adapter" / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(tmp_path / "base")
    assert (settings["r"], settings["lora_alpha"], settings["lora_dropout"]) == (4, 64, 0.1)


def test_adapters_on_bfloat16_weights_are_merged_without_rounding(base_model: ModelConfig, tmp_path: Path) -> None:
    policy = PolicyConfig(precision="bfloat16", lora=ADAPTERS)
    _, checkpoint = save_with_base(tmp_path, base_model, policy, stored_as=torch.bfloat16)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    adapted = PeftModel.from_pretrained(base, checkpoint / "adapter").base_model.model
    merged = AutoModelForCausalLM.from_pretrained(checkpoint)
    assert {value.dtype for value in merged.parameters()} == {torch.float32}
    torch.testing.assert_close(logprobs_of(merged), logprobs_of(adapted), atol=1e-5, rtol=1e-5)


def test_the_digest_of_a_model_does_not_depend_on_where_its_base_lay(base_model: ModelConfig, tmp_path: Path) -> None:
    policy = PolicyConfig(lora=ADAPTERS)
    digests = []
    for place in (tmp_path / "here", tmp_path / "there"):
        _, checkpoint = save_with_base(place, base_model, policy, stored_as=torch.float32)
        manifest = load_manifest(checkpoint)
        assert {"adapter/adapter_config.json", "adapter/adapter_model.safetensors"} <= manifest.files.keys()
        digests.append(manifest.digest)
    assert digests[0] == digests[1]


GPT2: dict[str, Any] = {"vocab_size": 32, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}


def random_model(kind: str, settings: dict[str, Any]) -> PreTrainedModel:
    return AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**settings))


@pytest.mark.parametrize(
    ("kind", "settings", "targets", "expected"),
    [
        ("gpt2", GPT2, (), False),
        ("llama", TINY_MODEL, (), False),
        ("qwen3_moe", TINY_MODEL | EXPERTS, (), False),
        ("qwen3_moe", TINY_MODEL | EXPERTS | {"mlp_only_layers": [0]}, ("q_proj",), False),
        ("qwen3_moe", TINY_MODEL | EXPERTS | {"mlp_only_layers": [0]}, (), True),
        ("qwen3_moe", TINY_MODEL | EXPERTS | {"mlp_only_layers": [0]}, ("up_proj",), True),
    ],
)
def test_adapters_that_peft_would_give_to_experts_are_known(
    kind: str, settings: dict[str, Any], targets: tuple[str, ...], expected: bool
) -> None:
    model = random_model(kind, settings)
    add_adapters(model, LoRAConfig(rank=2, target_modules=targets))
    assert is_converted(describe_adapters(model), model) is expected
