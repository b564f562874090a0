"""Pins: the decoder computes what transformers computes, and weights are replaced wholly or not at all.

Without it a wrong rotation, a lost bias or half-loaded weights would show only as training that goes slowly astray.
"""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from rollouts_core.embedded.architecture import UnsupportedModelError
from rollouts_core.embedded.decoder import Decoder
from rollouts_core.embedded.weights import tensor_digest
from rollouts_core.errors import CheckpointError, NoMemoryError
from tests.rollouts_core.embedded.tiny_models import LLAMA3_ROPE, expected_logits, make_model, random_prompt, save_model

TOLERANCE = 1e-4  # logits reach 10 here: 1e-5 relative, float32 with another order of summation

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-biased-tied": ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama-no-gqa": ("llama", {"num_key_value_heads": 4}),
    "llama-rope-llama3": ("llama", {"rope_parameters": LLAMA3_ROPE, "max_position_embeddings": 128}),
    "mistral": ("mistral", {"sliding_window": None, "head_dim": 16}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied-one-kv-head": ("qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "qwen3": ("qwen3", {}),
    "qwen3-tied": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3-biased-theta": (
        "qwen3",
        {"attention_bias": True, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    ),
}


def decode_greedily(decoder: Decoder, prompts: list[list[int]], num_steps: int) -> list[tuple[list[int], torch.Tensor]]:
    """Tokens and logits_TV of each prompt's completion, all rows in step."""
    logits_BV = decoder.prefill(prompts)
    lengths_B = torch.tensor([len(prompt) for prompt in prompts])
    tokens, logits = [logits_BV.argmax(-1)], [logits_BV]
    for step in range(num_steps):
        positions_B = lengths_B + step
        logits.append(decoder.step(tokens[-1], positions_B))
        tokens.append(logits[-1].argmax(-1))
    columns = torch.stack(tokens, 1).tolist()
    return [(columns[row], torch.stack(logits, 1)[row]) for row in range(len(prompts))]


def edit_config(directory: Path, **changes: Any) -> Path:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, **changes}))
    return directory


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_of_ragged_prompts_and_their_continuations_equal_transformers(variant: str, tmp_path: Path) -> None:
    family, overrides = VARIANTS[variant]
    model = make_model(family, **overrides)
    decoder = Decoder(save_model(model, tmp_path), num_slots=4)
    prompts = [random_prompt(length, seed=length) for length in (1, 31, 33, 7)]
    for prompt, (tokens, logits_TV) in zip(prompts, decode_greedily(decoder, prompts, 40), strict=True):
        expected_TV = expected_logits(model, prompt + tokens[:-1])[len(prompt) - 1 :]
        torch.testing.assert_close(logits_TV, expected_TV, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("length", [64, 65, 94, 130])
def test_a_long_prompt_has_as_much_room_for_its_completion_as_it_needs(
    length: int, decoder: Decoder, model: PreTrainedModel
) -> None:
    """Longer than the cache grows by itself, so that it becomes as large as the prompt, and then grows from there."""
    prompt = random_prompt(length, seed=length)
    [(tokens, logits_TV)] = decode_greedily(decoder, [prompt], length + 40)
    expected_TV = expected_logits(model, prompt + tokens[:-1])[length - 1 :]
    torch.testing.assert_close(logits_TV, expected_TV, atol=TOLERANCE, rtol=0)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere there is no such limit, or it is not kept to")
def test_a_cache_that_finds_no_memory_says_what_to_lower_and_stays_as_it_is(
    model_dir: Path, model: PreTrainedModel
) -> None:
    decoder = Decoder(model_dir, num_slots=4096)
    prompt = random_prompt(9, seed=1)
    decoder.prefill([prompt])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + 2**28, hard))
    try:
        with pytest.raises(
            NoMemoryError,
            match=r"too little memory for a KV cache of 2\.0 GiB for 4096 completions of up to 1024 .*: lower",
        ):
            decoder.step(torch.ones(4096, dtype=torch.int64), torch.full((4096,), 1000))
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    logits_V = decoder.step(torch.tensor([7]), torch.tensor([9]))[0]
    torch.testing.assert_close(logits_V, expected_logits(model, [*prompt, 7])[-1], atol=TOLERANCE, rtol=0)


def test_equal_prompts_share_one_prefill_and_get_equal_logits(decoder: Decoder, model: PreTrainedModel) -> None:
    prompt, other = random_prompt(9, seed=1), random_prompt(9, seed=2)
    logits_BV = decoder.prefill([prompt, other, prompt])
    assert torch.equal(logits_BV[0], logits_BV[2])
    step_BV = decoder.step(torch.tensor([5, 5, 5]), torch.tensor([9, 9, 9]))
    torch.testing.assert_close(step_BV[2], expected_logits(model, [*prompt, 5])[-1], atol=TOLERANCE, rtol=0)


def test_a_moved_slot_continues_as_before(decoder: Decoder, model: PreTrainedModel) -> None:
    prompts = [random_prompt(5, seed=1), random_prompt(12, seed=2)]
    decoder.prefill(prompts)
    decoder.move_slot(1, 0, length=12)
    logits_V = decoder.step(torch.tensor([7]), torch.tensor([12]))[0]
    torch.testing.assert_close(logits_V, expected_logits(model, [*prompts[1], 7])[-1], atol=TOLERANCE, rtol=0)


def test_bfloat16_stays_near_float32(model_dir: Path, model: PreTrainedModel) -> None:
    decoder = Decoder(model_dir, num_slots=1, dtype=torch.bfloat16)
    prompt = random_prompt(20, seed=3)
    logits_V = decoder.prefill([prompt])[0].float()
    assert (logits_V.softmax(-1) - expected_logits(model, prompt)[-1].softmax(-1)).abs().max() < 0.1


def test_sharded_weights_load_like_one_file(model: PreTrainedModel, tmp_path: Path) -> None:
    save_model(model, tmp_path, max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    prompt = random_prompt(10, seed=0)
    logits_V = Decoder(tmp_path, num_slots=1).prefill([prompt])[0]
    torch.testing.assert_close(logits_V, expected_logits(model, prompt)[-1], atol=TOLERANCE, rtol=0)


def test_the_rotation_that_old_llama_checkpoints_hold_per_layer_is_passed_over(
    model: PreTrainedModel, model_dir: Path, tmp_path: Path
) -> None:
    save_model(model, tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    frequencies = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(8) for i in range(2)}
    save_file({**weights, **frequencies}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    decoders = [Decoder(folder, num_slots=1) for folder in (tmp_path, model_dir)]
    assert decoders[0].weight_digests() == decoders[1].weight_digests()


def test_digests_are_those_of_the_published_file(decoder: Decoder, other_dir: Path) -> None:
    decoder.load_weights(other_dir)
    published = load_file(other_dir / "model.safetensors")
    assert decoder.weight_digests() == {name: tensor_digest(tensor) for name, tensor in published.items()}


def test_digests_of_a_bfloat16_file_are_those_of_the_file(tmp_path: Path) -> None:
    save_model(make_model(seed=0).to(torch.bfloat16), tmp_path)
    published = load_file(tmp_path / "model.safetensors")
    digests = Decoder(tmp_path, num_slots=1).weight_digests()
    assert digests == {name: tensor_digest(tensor) for name, tensor in published.items()}


def test_a_tensor_that_was_not_taken_over_changes_its_digest(decoder: Decoder) -> None:
    before = decoder.weight_digests()
    decoder._weights.layers[1].qkv.weight_NK[-1, -1] += 1e-3  # the last value row of the fused matrix
    after = decoder.weight_digests()
    assert [name for name in before if before[name] != after[name]] == ["model.layers.1.self_attn.v_proj.weight"]


def test_logits_after_a_weight_update_equal_the_new_model(
    decoder: Decoder, other_dir: Path, other_model: PreTrainedModel
) -> None:
    prompt = random_prompt(8, seed=4)
    decoder.prefill([prompt])  # now the old weights are packed
    decoder.load_weights(other_dir)
    expected_V = expected_logits(other_model, prompt)[-1]
    torch.testing.assert_close(decoder.prefill([prompt])[0], expected_V, atol=TOLERANCE, rtol=0)


def test_a_tied_model_takes_over_its_output_projection(tmp_path: Path) -> None:
    first, second = (make_model(seed=seed, tie_word_embeddings=True) for seed in (0, 1))
    decoder = Decoder(save_model(first, tmp_path / "first"), num_slots=1)
    prompt = random_prompt(8, seed=4)
    decoder.prefill([prompt])
    decoder.load_weights(save_model(second, tmp_path / "second"))
    expected_V = expected_logits(second, prompt)[-1]
    torch.testing.assert_close(decoder.prefill([prompt])[0], expected_V, atol=TOLERANCE, rtol=0)


def test_a_tied_model_accepts_an_equal_explicit_head_and_refuses_another(tmp_path: Path) -> None:
    directory = save_model(make_model(tie_word_embeddings=True), tmp_path)
    decoder = Decoder(directory, num_slots=1)
    tensors = load_file(directory / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    save_file({**tensors, "lm_head.weight": embedding.clone()}, directory / "model.safetensors")
    decoder.load_weights(directory)
    assert decoder.weight_digests()["lm_head.weight"] == tensor_digest(embedding)
    save_file({**tensors, "lm_head.weight": embedding + 1}, directory / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"lm_head.weight differs from model.embed_tokens.weight"):
        decoder.load_weights(directory)


@pytest.mark.parametrize(
    "damage", ["missing", "unexpected", "reshaped", "integers", "float8", "nan", "cut", "absent", "index"]
)
def test_unusable_weights_are_refused_and_the_old_ones_stay(
    damage: str, decoder: Decoder, other_dir: Path, tmp_path: Path
) -> None:
    before = decoder.weight_digests()
    tensors = load_file(other_dir / "model.safetensors")
    name = "model.norm.weight"
    words = {"cut": "safetensors", "absent": "neither", "unexpected": "extra", "index": "no readable weight_map"}
    if damage == "missing":
        del tensors[name]
    elif damage == "unexpected":
        tensors["extra"] = torch.zeros(1)
    elif damage == "reshaped":
        tensors[name] = torch.zeros(7)
    elif damage == "integers":
        tensors[name] = torch.zeros(32, dtype=torch.int64)
    elif damage == "float8":
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    elif damage == "nan":
        tensors[name][3] = torch.nan
    path = tmp_path / "model.safetensors"
    if damage == "index":
        (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"model.norm.weight": 3}}')
    elif damage != "absent":
        save_file(tensors, path)
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=words.get(damage, name)):
        decoder.load_weights(tmp_path)
    assert decoder.weight_digests() == before


def test_weights_for_another_rotation_are_refused(
    decoder: Decoder, other_model: PreTrainedModel, tmp_path: Path
) -> None:
    before = decoder.weight_digests()
    rope = {"rope_type": "default", "rope_theta": 5.0}
    directory = edit_config(save_model(other_model, tmp_path), rope_parameters=rope)
    with pytest.raises(CheckpointError, match=r"rope_theta 5.0, but the loaded model has 10000.0"):
        decoder.load_weights(directory)
    assert decoder.weight_digests() == before


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "yarn"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": None}, "linear"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"use_sliding_window": True}, "sliding-window"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 64}, "sliding-window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding-window"),
        ({"quantization_config": {"bits": 4}}, "quantized"),
    ],
)
def test_an_unsupported_model_is_refused_with_what_is_supported(
    changes: dict[str, Any], found: str, model: PreTrainedModel, tmp_path: Path
) -> None:
    directory = edit_config(save_model(model, tmp_path), **changes)
    with pytest.raises(UnsupportedModelError, match=rf"does not support .*{found}.*it supports .*SGLang or vLLM"):
        Decoder(directory, num_slots=1)


def test_a_context_longer_than_the_model_was_made_for_is_refused(model_dir: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="a context length of 1 to 2048 tokens, found 4096"):
        Decoder(model_dir, num_slots=1, context_length=4096)


def test_a_directory_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no config\.json: give the folder"):
        Decoder(tmp_path, num_slots=1)


def test_both_files_name_the_ends_of_turn(model: PreTrainedModel, tmp_path: Path) -> None:
    directory = edit_config(save_model(model, tmp_path), eos_token_id=3)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 3]}))
    assert Decoder(directory, num_slots=1).architecture.eos_token_ids == (1, 3)
