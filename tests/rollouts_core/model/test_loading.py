"""Pins that a sample's log-probs through a real attention do not depend on its neighbours, its padding or its batch.

Without it packing would train every sample on the context of strangers, which lowers the loss and spoils the model.
"""

import json
import math
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    FalconMambaConfig,
    FalconMambaForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from rollouts_core.algorithms.loss import LossFn, create_cross_entropy_loss, create_policy_loss
from rollouts_core.batch import TrainBatch, build_batch, with_step_totals
from rollouts_core.config import LossConfig, ModelConfig
from rollouts_core.errors import CheckpointError, ConfigError, DataError
from rollouts_core.model.loading import (
    check_attention,
    check_logits,
    check_settings,
    check_vocabulary,
    find_settings,
    load_hf_model,
    load_tokenizer,
    pad_token_id,
)
from rollouts_core.model.policy import compute_logprobs, find_window, score_targets
from rollouts_core.types import Sample
from tests.rollouts_core.make import TINY_MODEL, make_groups, make_random_samples, make_sample, write_tied

LOSSES = {
    "cross_entropy": create_cross_entropy_loss(),
    "token_mean": create_policy_loss(LossConfig()),
    "sequence_mean": create_policy_loss(LossConfig(aggregation="sequence_mean")),
}
ADVANTAGES = [1.0, -1.0, 2.0, -0.5, 0.5, 1.5, -2.0, 1.0]


def build_rows(samples: list[Sample], num_per_row: int, *, share_prompts: bool = False) -> list[TrainBatch]:
    """One batch of all samples, so many to a row."""
    starts = range(0, len(samples), num_per_row)
    rows = [samples[i : i + num_per_row] for i in starts]
    advantages = [ADVANTAGES[i : i + num_per_row] for i in starts]
    return [build_batch(rows, advantages=advantages, pad_id=0, share_prompts=share_prompts)]


def sum_loss_and_gradient(
    model: PreTrainedModel, batches: list[TrainBatch], loss_fn: LossFn
) -> tuple[float, dict[str, Tensor]]:
    """The loss of a step and its gradient by parameter."""
    model.zero_grad()
    total = 0.0
    for batch in batches:
        loss, _ = loss_fn(score_targets(model, batch), batch)
        loss.backward()
        total += float(loss.detach())
    return total, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same_step(
    model: PreTrainedModel, first: list[TrainBatch], second: list[TrainBatch], loss_fn: LossFn
) -> None:
    """Loss and gradient agree up to the order of float32 sums."""
    loss, gradient = sum_loss_and_gradient(model, first, loss_fn)
    other_loss, other_gradient = sum_loss_and_gradient(model, second, loss_fn)
    assert loss == pytest.approx(other_loss, abs=1e-5)
    for name, value in gradient.items():
        torch.testing.assert_close(value, other_gradient[name], atol=1e-5, rtol=1e-4, msg=name)


@pytest.mark.parametrize("loss_name", LOSSES)
@pytest.mark.parametrize("num_per_row", [2, 8])
def test_packed_rows_give_the_loss_and_gradient_of_unpacked_rows(
    tiny_model: PreTrainedModel, loss_name: str, num_per_row: int
) -> None:
    samples = make_random_samples(8)
    assert_same_step(tiny_model, build_rows(samples, 1), build_rows(samples, num_per_row), LOSSES[loss_name])


@pytest.mark.parametrize("loss_name", LOSSES)
@pytest.mark.parametrize("num_per_row", [3, 8])
def test_shared_prompts_give_the_loss_and_gradient_of_samples_alone(
    tiny_model: PreTrainedModel, loss_name: str, num_per_row: int
) -> None:
    samples = make_groups(2, 4)
    shared = build_rows(samples, num_per_row, share_prompts=True)
    assert shared[0].inputs_BT.numel() < build_rows(samples, num_per_row)[0].inputs_BT.numel()
    assert_same_step(tiny_model, build_rows(samples, 1), shared, LOSSES[loss_name])


@pytest.mark.parametrize("loss_name", LOSSES)
def test_eight_micro_batches_give_the_loss_and_gradient_of_one(tiny_model: PreTrainedModel, loss_name: str) -> None:
    samples = make_random_samples(8)
    parts = [
        build_batch([[sample]], advantages=[[advantage]], pad_id=0)
        for sample, advantage in zip(samples, ADVANTAGES, strict=True)
    ]
    whole = build_rows(samples, 1)
    assert_same_step(tiny_model, whole, with_step_totals(parts, samples), LOSSES[loss_name])


@torch.no_grad()
def test_a_packed_neighbour_does_not_change_the_log_probs_of_a_sample(tiny_model: PreTrainedModel) -> None:
    first, second, third = (make_sample(tokens) for tokens in ([7, 8, 9, 10], [11, 12, 13], [14, 15, 16, 17, 18]))
    other = make_sample([20, 21, 22])
    logprobs_BT = compute_logprobs(tiny_model, build_batch([[first, second, third]], pad_id=0))
    changed_BT = compute_logprobs(tiny_model, build_batch([[first, other, third]], pad_id=0))
    torch.testing.assert_close(logprobs_BT[:, :3], changed_BT[:, :3], atol=1e-6, rtol=0)
    torch.testing.assert_close(logprobs_BT[:, 5:], changed_BT[:, 5:], atol=1e-6, rtol=0)
    assert not torch.allclose(logprobs_BT[:, 3:5], changed_BT[:, 3:5])


@torch.no_grad()
@pytest.mark.parametrize(("settings", "sees_window"), [(LlamaConfig, False), (MistralConfig, True)])
def test_a_window_that_the_model_does_not_know_hides_nothing_in_packed_rows(
    settings: type[PreTrainedConfig], sees_window: bool
) -> None:
    """config.json of a Mistral that was made a Llama still speaks of one, which no Llama reads."""
    config = settings(**TINY_MODEL, sliding_window=2)
    model = MODEL_FOR_CAUSAL_LM_MAPPING[settings](config).eval()
    first, second = make_sample(range(7, 16)), make_sample(range(16, 25))
    alone_BT = compute_logprobs(model, build_batch([[second]], pad_id=0))
    packed_BT = compute_logprobs(model, build_batch([[first, second]], pad_id=0))
    torch.testing.assert_close(packed_BT[:, 8:], alone_BT, atol=1e-6, rtol=0)
    assert find_window(config) == (2 if sees_window else None)


@torch.no_grad()
def test_the_test_of_neighbours_would_notice_a_missing_mask(tiny_model: PreTrainedModel) -> None:
    batch = build_batch([[make_sample([7, 8, 9, 10]), make_sample([11, 12, 13])]], pad_id=0)
    ones = torch.ones_like(batch.segment_ids_BT)
    whole_row = replace(batch, segment_ids_BT=ones, prompt_ids_BT=ones)
    difference = compute_logprobs(tiny_model, batch) - compute_logprobs(tiny_model, whole_row)
    assert float(difference[:, 3:].abs().max()) > 1e-3


@torch.no_grad()
@pytest.mark.parametrize("pad_id", [0, 24])
def test_padding_does_not_change_the_log_probs_of_a_sample(tiny_model: PreTrainedModel, pad_id: int) -> None:
    short, long = make_sample([7, 8, 9]), make_sample(range(7, 20))
    alone_BT = compute_logprobs(tiny_model, build_batch([[short]], pad_id=0))
    padded_BT = compute_logprobs(tiny_model, build_batch([[short], [long]], pad_id=pad_id))
    torch.testing.assert_close(padded_BT[:1, :2], alone_BT, atol=1e-6, rtol=0)


@torch.no_grad()
def test_log_probs_agree_with_the_softmax_of_the_model_itself(tiny_model: PreTrainedModel) -> None:
    tokens = [7, 8, 9, 10, 11]
    found_BT = compute_logprobs(tiny_model, build_batch([[make_sample(tokens)]], pad_id=0), temperature=0.5)
    distribution = torch.log_softmax(tiny_model(torch.tensor([tokens])).logits[0] / 0.5, dim=-1)
    expected = torch.stack([distribution[t, tokens[t + 1]] for t in range(4)])
    torch.testing.assert_close(found_BT[0], expected, atol=1e-5, rtol=0)


@torch.no_grad()
def test_log_probs_depend_on_no_later_token(tiny_model: PreTrainedModel) -> None:
    logprobs_BT = compute_logprobs(tiny_model, build_batch([[make_sample([7, 8, 9, 10])]], pad_id=0))
    changed_BT = compute_logprobs(tiny_model, build_batch([[make_sample([7, 8, 9, 20])]], pad_id=0))
    torch.testing.assert_close(logprobs_BT[:, :2], changed_BT[:, :2], atol=1e-6, rtol=0)


def test_a_model_is_loaded_in_training_mode_and_in_the_asked_number_format(base_model: ModelConfig) -> None:
    model = load_hf_model(base_model, dtype=torch.bfloat16)
    assert model.training
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("damage", ["nowhere", "empty", "no_weights", "bad_config"])
def test_a_folder_without_a_loadable_model_is_one_sentence(quickstart_dir: Path, tmp_path: Path, damage: str) -> None:
    path = tmp_path / "model"
    if damage == "empty":
        path.mkdir()
    elif damage != "nowhere":
        shutil.copytree(quickstart_dir / "base_model", path)
        (path / "model.safetensors").unlink()
        if damage == "bad_config":
            (path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="no model could be loaded from") as caught:
        load_hf_model(ModelConfig(path=str(path)))
    assert "\n" not in str(caught.value)


def test_a_folder_without_a_tokenizer_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no tokenizer could be loaded from") as caught:
        load_tokenizer(ModelConfig(path=str(tmp_path)))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("load", [load_tokenizer, load_hf_model, partial(load_hf_model, device="meta"), check_settings])
@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (
            {"num_hidden_layers": 1, "layer_types": ["full_attention"] * 2},
            r"`num_hidden_layers` \(1\) must be equal to",
        ),
        ({"hidden_size": "64"}, "Field 'hidden_size' expected int, got str"),
        ({"quantization_config": "x"}, "'str' object has no attribute"),
    ],
)
def test_a_config_with_values_that_no_model_has_is_one_sentence(
    quickstart_dir: Path, tmp_path: Path, load: Callable[[ModelConfig], object], values: dict[str, object], reason: str
) -> None:
    config = ModelConfig(path=str(shutil.copytree(quickstart_dir / "base_model", tmp_path / "model")))
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_type": "qwen3", **values}))
    with pytest.raises((CheckpointError, DataError), match=reason) as caught:
        load(config)
    assert "\n" not in str(caught.value)
    assert find_settings(config) is None


@pytest.mark.parametrize("load", [load_tokenizer, load_hf_model, partial(load_hf_model, device="meta")])
def test_a_misspelt_folder_that_is_taken_for_a_name_of_the_hub_is_said_to_be_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, load: Callable[[ModelConfig], object]
) -> None:
    monkeypatch.chdir(tmp_path)
    nowhere = re.escape(f"; and the folder {tmp_path / 'mymodle'}")
    with pytest.raises(
        (CheckpointError, DataError), match=rf"could be loaded from mymodle: .*{nowhere} does not exist$"
    ):
        load(ModelConfig(path="mymodle"))


def test_a_tokenizer_without_an_end_token_is_refused(quickstart_dir: Path, tmp_path: Path) -> None:
    path = shutil.copytree(quickstart_dir / "base_model", tmp_path / "model")
    settings = path / "tokenizer_config.json"
    settings.write_text(settings.read_text().replace('"eos_token"', '"unused_token"'))
    with pytest.raises(DataError, match="no eos_token"):
        load_tokenizer(ModelConfig(path=str(path)))


def test_a_tokenizer_that_fits_the_model_passes(
    tiny_model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    check_vocabulary(tiny_model.get_input_embeddings().weight.shape[0], tokenizer, "folder")


def test_a_tokenizer_with_more_tokens_than_embeddings_is_refused(
    tiny_model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    tiny_model.resize_token_embeddings(10)
    with pytest.raises(DataError, match=rf"has {len(tokenizer)} tokens, but the model has only 10 embeddings"):
        check_vocabulary(tiny_model.get_input_embeddings().weight.shape[0], tokenizer, "folder")


def test_the_pad_token_is_the_tokenizers_own(tokenizer: PreTrainedTokenizerBase) -> None:
    assert pad_token_id(tokenizer) == tokenizer.convert_tokens_to_ids("<|pad|>")


def test_without_a_pad_token_rows_are_filled_with_the_end_token(base_model: ModelConfig) -> None:
    own = load_tokenizer(base_model)
    own.pad_token = None
    assert pad_token_id(own) == own.eos_token_id


class Payload:
    """What an attacker pickles: loading it creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (self.path,))


def with_pickled_weights(base_model: ModelConfig, directory: Path, extra: dict[str, object]) -> ModelConfig:
    """The base model with its weights, and something else, in a pickle."""
    shutil.copytree(base_model.path, directory)
    weights = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    torch.save({**weights, **extra}, directory / "pytorch_model.bin")
    return ModelConfig(path=str(directory))


def test_pickled_weights_are_refused(base_model: ModelConfig, tmp_path: Path) -> None:
    pickled = with_pickled_weights(base_model, tmp_path / "model", {"payload": Payload(tmp_path / "ran")})
    with pytest.raises(CheckpointError, match=r"are pickled \(pytorch_model\.bin\).*convert them to safetensors"):
        load_hf_model(pickled)
    assert not (tmp_path / "ran").exists()


def test_pickled_weights_that_are_allowed_are_those_of_the_model(base_model: ModelConfig, tmp_path: Path) -> None:
    pickled = with_pickled_weights(base_model, tmp_path / "model", {})
    loaded = load_hf_model(pickled.model_copy(update={"allow_pickle": True}))
    for name, parameter in load_hf_model(base_model).named_parameters():
        assert torch.equal(loaded.get_parameter(name), parameter), name


def test_code_in_pickled_weights_does_not_run_even_when_they_are_allowed(
    base_model: ModelConfig, tmp_path: Path
) -> None:
    pickled = with_pickled_weights(base_model, tmp_path / "model", {"payload": Payload(tmp_path / "ran")})
    with pytest.raises(CheckpointError, match="no model could be loaded"):
        load_hf_model(pickled.model_copy(update={"allow_pickle": True}))
    assert not (tmp_path / "ran").exists()


def test_a_head_that_config_json_ties_to_an_embedding_of_other_values_is_refused(
    base_model: ModelConfig, tmp_path: Path
) -> None:
    """As adapters leave it that trained the head: transformers computes with it, engines without."""
    folder = write_tied(base_model, tmp_path / "m")
    with pytest.raises(CheckpointError, match=r"have an output head that differs.*Set tie_word_embeddings = false"):
        load_hf_model(ModelConfig(path=str(folder)))
    weights = load_file(folder / "model.safetensors")
    for head in ({"lm_head.weight": weights["model.embed_tokens.weight"].clone()}, {}):
        others = {name: tensor for name, tensor in weights.items() if name != "lm_head.weight"}
        save_file({**others, **head}, folder / "model.safetensors", metadata={"format": "pt"})
        model = load_hf_model(ModelConfig(path=str(folder)))
        assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_weights_of_other_shapes_than_config_json_says_are_named(base_model: ModelConfig, tmp_path: Path) -> None:
    shutil.copytree(base_model.path, tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    changed = {**config, "intermediate_size": 2 * config["intermediate_size"]}
    (tmp_path / "model" / "config.json").write_text(json.dumps(changed))
    with pytest.raises(CheckpointError, match=r"do not match its config\.json: .*down_proj\.weight has shape .*, "):
        load_hf_model(ModelConfig(path=str(tmp_path / "model")))


def test_how_a_tokenizer_was_loaded_is_not_written_into_checkpoints(base_model: ModelConfig, tmp_path: Path) -> None:
    load_tokenizer(base_model).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert not written.keys() & {"is_local", "local_files_only", "name_or_path"}


TINY = {
    "vocab_size": 25,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "pad_token_id": 0,
}


class ColdModel(LlamaForCausalLM):
    """A model that halves its logits and tells nobody."""

    def forward(self, *inputs: Any, **settings: Any) -> Any:  # Any: whatever a model takes
        output = super().forward(*inputs, **settings)
        output.logits = output.logits / 2
        return output


class CautiousModel(LlamaForCausalLM):
    """A model whose logits, small as they are when it is loaded, stay below 50."""

    def forward(self, *inputs: Any, **settings: Any) -> Any:  # Any: whatever a model takes
        output = super().forward(*inputs, **settings)
        output.logits = 50 * torch.tanh(output.logits / 50)
        return output


@pytest.mark.parametrize("model_class", [ColdModel, CautiousModel])
def test_a_model_that_changes_its_logits_in_its_own_way_is_refused(model_class: type[PreTrainedModel]) -> None:
    check_logits(LlamaForCausalLM(LlamaConfig(**TINY)))
    with pytest.raises(ConfigError, match="transforms hidden states or logits"):
        check_logits(model_class(LlamaConfig(**TINY)))


def test_hidden_states_in_float32_meet_a_head_in_bfloat16() -> None:
    """Adapters are trained beside weights in bfloat16, and Mamba keeps its hidden states in float32."""
    settings = {"vocab_size": 25, "hidden_size": 16, "num_hidden_layers": 1, "state_size": 4}
    check_logits(FalconMambaForCausalLM(FalconMambaConfig(**settings)).to(torch.bfloat16))


def test_a_model_without_a_head_is_refused() -> None:
    with pytest.raises(ConfigError, match="llama models cannot be trained here: it has no output head"):
        check_logits(LlamaModel(LlamaConfig(**TINY)))


def test_a_model_whose_decoder_is_not_where_its_class_says_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="llama4_text models cannot be trained here: its class does not name the attribute"
    ):
        check_logits(Llama4ForCausalLM(Llama4TextConfig(**TINY, intermediate_size_mlp=24, num_local_experts=2)))


def test_weights_that_compute_no_numbers_are_one_sentence(tmp_path: Path, base_model: ModelConfig) -> None:
    model = load_hf_model(base_model)
    with torch.no_grad():
        model.get_input_embeddings().weight.fill_(math.nan)
    model.save_pretrained(tmp_path)
    with pytest.raises(
        CheckpointError, match=f"the weights at {tmp_path} give no finite numbers.* use another checkpoint"
    ):
        load_hf_model(ModelConfig(path=str(tmp_path)))


def test_a_package_that_the_model_lacks_is_not_taken_for_one_of_the_attention(
    tmp_path: Path, base_model: ModelConfig
) -> None:
    load_hf_model(base_model).save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    quantized = {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 8}}
    (tmp_path / "config.json").write_text(json.dumps(settings | quantized))
    with pytest.raises(CheckpointError, match=rf"no model could be loaded from {tmp_path}: Loading a GPTQ quantized"):
        load_hf_model(ModelConfig(path=str(tmp_path)))


def test_a_kernel_that_leaves_out_the_cap_of_attention_scores_is_refused() -> None:
    model = Gemma2ForCausalLM(Gemma2Config(**TINY))
    check_attention(model)  # transformers takes eager by itself
    model.config._attn_implementation = "sdpa"
    with pytest.raises(ConfigError, match=r'"sdpa" does not apply the cap .* gemma2 models: .*"eager"'):
        check_attention(model)
