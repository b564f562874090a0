"""Pins that the layers which adapters are for are held against the model's files, before anything is rented or loaded.

Without it a run whose adapters are for layers of another model would fine-tune, select and rent for them, and then end;
or train without a word on those of them alone that there are.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from rollouts_core.checks.activation_needs import adapter_bytes
from rollouts_core.config import Config, LoRAConfig, ModelConfig, PolicyConfig
from rollouts_core.errors import ConfigError
from rollouts_core.model.adapter_targets import check_adapters, linear_layers
from rollouts_core.model.lora import add_adapters, base_weights, merged_weights
from rollouts_core.model.model_size import find_model_size

SIZES: dict[str, Any] = {  # Any: settings
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "pad_token_id": 0,
}
GPT2: dict[str, Any] = {"vocab_size": 40, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}


def save_model(folder: Path, kind: str, **settings: Any) -> PreTrainedModel:
    """A random model, and its files in the folder."""
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**settings))
    model.save_pretrained(folder)
    return model


def config_of(model: Path | str, *, mode: str = "sft+rl", remote: bool = False, **lora: Any) -> Config:
    """Settings whose RL trains adapters."""
    return Config.model_validate(
        {
            "mode": mode,
            "model": {"path": str(model), "trust_remote_code": remote},
            "data": {"sft": "a", "prompts": "b", "selection": "c", "heldout": "d"},
            "training": {"rl": {"policy": {"lora": {"rank": 4, **lora}}}},
        }
    )


def adapted_layers(model: PreTrainedModel) -> set[str]:
    add_adapters(model, LoRAConfig(rank=2))
    return {name for name, module in model.named_modules() if hasattr(module, "lora_A")}


@pytest.mark.parametrize(
    ("kind", "settings"),
    [("qwen3", SIZES), ("llama", SIZES | {"tie_word_embeddings": True}), ("gemma3_text", SIZES), ("gpt2", GPT2)],
)
def test_the_layers_in_files_are_those_that_get_adapters(kind: str, settings: dict[str, Any], tmp_path: Path) -> None:
    model = save_model(tmp_path, kind, **settings)
    layers = linear_layers(find_model_size(ModelConfig(path=str(tmp_path))).tensors)
    assert set(layers) == adapted_layers(model)


def test_the_experts_of_a_mixture_get_no_adapters(tmp_path: Path) -> None:
    model = save_model(tmp_path, "qwen3_moe", **SIZES, **EXPERTS)
    size = find_model_size(ModelConfig(path=str(tmp_path)))
    assert any(".experts." in name for name in size.tensors)
    assert {"model.layers.0.self_attn.q_proj"} <= adapted_layers(model) <= set(linear_layers(size.tensors))
    assert merged_weights(model).keys() == base_weights(model).keys()
    with pytest.raises(ConfigError, match=r"target_modules up_proj: the model has no .* it has .*q_proj"):
        check_adapters(config_of(tmp_path, target_modules=["q_proj", "up_proj"]))


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("qwen3_moe", {**EXPERTS, "mlp_only_layers": [0]}),
        ("glm4_moe", {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}),
    ],
)
def test_layers_that_are_called_like_experts_get_adapters_and_experts_get_none(
    kind: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    model = save_model(tmp_path, kind, **SIZES, **settings)
    adapted = adapted_layers(model)
    assert {"model.layers.0.mlp.gate_proj", "model.layers.0.mlp.down_proj"} <= adapted
    assert not any(name.endswith("experts") for name in adapted)
    assert merged_weights(model).keys() == base_weights(model).keys()
    assert check_adapters(config_of(tmp_path, target_modules=["up_proj"])) == []
    again = save_model(tmp_path, kind, **SIZES, **settings)
    add_adapters(again, LoRAConfig(rank=2, target_modules=("mlp.up_proj",)))
    assert [name for name, part in again.named_modules() if hasattr(part, "lora_A")] == ["model.layers.0.mlp.up_proj"]


def test_what_inherits_from_a_linear_layer_and_chooses_experts_gets_no_adapter(tmp_path: Path) -> None:
    model = save_model(tmp_path, "phimoe", **SIZES, num_local_experts=4)
    assert {name.rpartition(".")[2] for name in adapted_layers(model)} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    model(input_ids=torch.tensor([[1, 2, 3]])).logits.sum().backward()


@pytest.mark.parametrize(
    ("kind", "settings", "adapted", "unknown"),
    [
        ("mamba", {"state_size": 4}, {"in_proj"}, "dt_proj"),
        (
            "falcon_h1",
            {"mamba_d_ssm": 16, "mamba_n_heads": 2, "mamba_d_state": 8},
            {"in_proj", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"},
            "out_proj",
        ),
        ("biogpt", {}, {"q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"}, "dt_proj"),
    ],
)
def test_weights_that_the_kernels_of_mamba_read_past_an_adapter_get_none(
    kind: str, settings: dict[str, Any], adapted: set[str], unknown: str, tmp_path: Path
) -> None:
    model = save_model(tmp_path, kind, **SIZES, **settings)
    layers = linear_layers(find_model_size(ModelConfig(path=str(tmp_path))).tensors)
    assert set(layers) == adapted_layers(model)
    assert {name.rpartition(".")[2] for name in layers} == adapted
    model(input_ids=torch.tensor([[1, 2, 3]])).logits.sum().backward()
    assert [name for name, value in model.named_parameters() if value.requires_grad and value.grad is None] == []
    with pytest.raises(ConfigError, match=f"target_modules {unknown}: the model has no linear layer with this name"):
        check_adapters(config_of(tmp_path, target_modules=[unknown]))


def test_a_router_of_which_only_the_weight_is_taken_gets_no_adapter(tmp_path: Path) -> None:
    heads = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
    experts = {"n_routed_experts": 2, "zero_expert_num": 1, "moe_topk": 1, "expert_ffn_hidden_size": 8}
    shape = {"vocab_size": 40, "hidden_size": 16, "ffn_hidden_size": 24, "num_layers": 1, "num_attention_heads": 2}
    model = save_model(tmp_path, "longcat_flash", **shape, **heads, **experts, head_dim=8)
    layers = linear_layers(find_model_size(ModelConfig(path=str(tmp_path))).tensors)
    assert set(layers) == adapted_layers(model)
    assert not any("router" in name for name in layers)


@pytest.mark.parametrize(
    ("names", "unknown"),
    [
        (["c_attn"], "c_attn"),
        (["q_proj", "w_proj"], "w_proj"),
        (["mlp.q_proj", "x"], "mlp.q_proj, x"),
        (["model.layers.2.self_attn.q_proj"], r"model\.layers\.2\.self_attn\.q_proj"),
        (["all-linear"], "all-linear"),
        (["q_proj", "lm_head"], "lm_head"),
        (["q_proj", "model.layers.1.mlp.up_proj"], ""),
        (["language_model.layers.0.self_attn.q_proj"], ""),  # what stands before the number differs between libraries
        ([], ""),
    ],
)
def test_names_of_no_layer_are_refused_with_those_that_there_are(
    names: list[str], unknown: str, tmp_path: Path
) -> None:
    save_model(tmp_path, "qwen3", **SIZES)
    config = config_of(tmp_path, target_modules=names)
    if not unknown:
        assert check_adapters(config) == []
        return
    known = "down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"
    setting = r"training\.rl\.policy\.lora\.target_modules"
    with pytest.raises(ConfigError, match=rf"^{setting} {unknown}: the model has no .* it has {known}:"):
        check_adapters(config)
    assert check_adapters(config_of(tmp_path, mode="sft", target_modules=names)) == []
    assert check_adapters(config_of(tmp_path, rank=0, target_modules=names)) == []
    assert check_adapters(config_of(tmp_path, remote=True, target_modules=names)) == []


def test_a_model_whose_layers_nobody_knows_is_said_and_not_refused(tmp_path: Path) -> None:
    [said] = check_adapters(config_of(tmp_path, target_modules=["c_attn"]))
    assert "not compared with the layers of" in said and "it has no safetensors weights" in said


def test_adapters_count_by_the_names_that_they_are_given_for(tmp_path: Path) -> None:
    save_model(tmp_path, "qwen3", **SIZES)
    size = find_model_size(ModelConfig(path=str(tmp_path)))

    def num_bytes(*names: str) -> int:
        return adapter_bytes(size, PolicyConfig(lora=LoRAConfig(rank=4, target_modules=names)))

    assert num_bytes("self_attn.q_proj") == num_bytes("q_proj") == 16 * 4 * 2 * (16 + 16)
    assert num_bytes("layers.0.self_attn.q_proj") == num_bytes("q_proj") / 2
