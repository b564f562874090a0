"""Pins how a policy computes: bfloat16 products, adapters, recomputed activations, windows, kernels without padding.

Without it an exported adapter could compute something else than what was trained, or a packed sample see a stranger.
"""

import asyncio
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoConfig,
    Lfm2Config,
    Lfm2ForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MptConfig,
    OpenAIGPTConfig,
    OpenAIGPTLMHeadModel,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from rollouts_core.algorithms.loss import Metrics, TokenScores, create_cross_entropy_loss
from rollouts_core.backends import training_state
from rollouts_core.backends.pytorch import PyTorchTrainingBackend, create_pytorch_backend
from rollouts_core.batch import TrainBatch, build_batch, place_samples, split_by_sample
from rollouts_core.config import PLAIN_POLICY, LoRAConfig, ModelConfig, OptimConfig, PolicyConfig
from rollouts_core.errors import ConfigError
from rollouts_core.model import lora, policy
from rollouts_core.model.lora import merge_each
from rollouts_core.model.policy import compute_hidden_states, compute_logprobs, create_policy, recompute_activations
from tests.rollouts_core.make import (
    STATE_OF_ITS_OWN,
    TINY_MODEL,
    make_random_samples,
    make_sample,
    write_model_with_own_code,
)

VOCABULARY = 25


def create_backend(
    model: ModelConfig, policy: PolicyConfig = PLAIN_POLICY, *, with_reference: bool = False
) -> PyTorchTrainingBackend:
    """A backend that trains by cross entropy on the CPU."""
    optim = OptimConfig(lr=0.01, num_warmup_steps=2, weight_decay=0.1)
    loss_fn = create_cross_entropy_loss()
    return create_pytorch_backend(
        model, optim, loss_fn, num_steps=10, policy=policy, with_reference=with_reference, device="cpu"
    )


def make_batch(seed: int = 0) -> TrainBatch:
    """Four random samples, a row each."""
    return build_batch([[sample] for sample in make_random_samples(4, seed=seed)], pad_id=0)


def take_steps(backend: PyTorchTrainingBackend, seeds: range) -> list[Metrics]:
    """One optimizer step for each seed's batch; returns the metrics."""
    history = []
    for seed in seeds:
        loss = asyncio.run(backend.forward_backward(make_batch(seed)).result())
        history.append({**loss, **asyncio.run(backend.optim_step().result())})
    return history


def copy_weights(backend: PyTorchTrainingBackend) -> dict[str, Tensor]:
    """The exported weights as they are now."""
    return {name: value.clone() for name, value in asyncio.run(backend.get_weights().result()).items()}


def score(backend: PyTorchTrainingBackend, *, reference: bool = False) -> Tensor:
    """Log-probs of a fixed batch."""
    return asyncio.run(backend.score(make_batch(), reference=reference).result()).logprobs_BT


def assert_equal_tensors(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    """Same names, same bits."""
    assert first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


@pytest.mark.parametrize(
    "policy",
    [
        PolicyConfig(precision="bfloat16"),
        PolicyConfig(lora=LoRAConfig(rank=4, dropout=0.1)),
        PolicyConfig(lora=LoRAConfig(rank=4), precision="bfloat16", activation_checkpointing=True),
    ],
    ids=["bfloat16", "lora", "lora bfloat16"],
)
def test_a_resumed_policy_trains_on_exactly(base_model: ModelConfig, tmp_path: Path, policy: PolicyConfig) -> None:
    backend = create_backend(base_model, policy=policy)
    take_steps(backend, range(2))
    asyncio.run(backend.save_checkpoint(tmp_path / "step_000002", {"step": 2}).result())
    expected = take_steps(backend, range(2, 4))
    restored = create_backend(base_model, policy=policy)
    asyncio.run(
        restored.load_checkpoint(tmp_path / "step_000002").result()
    )  # sets the random state, which dropout takes from, too
    assert take_steps(restored, range(2, 4)) == expected
    assert_equal_tensors(copy_weights(restored), copy_weights(backend))


def test_bfloat16_products_train_float32_weights(base_model: ModelConfig) -> None:
    backend = create_backend(base_model, policy=PolicyConfig(precision="bfloat16"))
    plain = create_backend(base_model)
    found, expected = take_steps(backend, range(3)), take_steps(plain, range(3))
    assert {p.dtype for p in backend.model.parameters()} == {torch.float32}
    assert found != expected
    assert [metrics["loss"] for metrics in found] == pytest.approx([m["loss"] for m in expected], rel=0.01)


def test_adapters_change_nothing_at_first_then_only_they_are_trained(base_model: ModelConfig) -> None:
    policy = PolicyConfig(lora=LoRAConfig(rank=4))
    backend, plain = create_backend(base_model, policy=policy), create_backend(base_model)
    assert_equal_tensors(copy_weights(backend), copy_weights(plain))
    frozen = {name: p.detach().clone() for name, p in backend.model.named_parameters() if not p.requires_grad}
    take_steps(backend, range(2))
    assert all(torch.equal(p, dict(backend.model.named_parameters())[name]) for name, p in frozen.items())
    changed = {
        name for name, value in copy_weights(backend).items() if not torch.equal(value, copy_weights(plain)[name])
    }
    assert changed == {name for name in copy_weights(plain) if name.endswith("_proj.weight")}


def test_exported_adapters_compute_what_the_policy_computes(base_model: ModelConfig, tmp_path: Path) -> None:
    backend = create_backend(base_model, policy=PolicyConfig(lora=LoRAConfig(rank=4, alpha=64)))
    take_steps(backend, range(3))
    asyncio.run(backend.save_checkpoint(tmp_path / "step_000003", {"step": 3}).result())
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "step_000003", dtype=torch.float32)
    batch = make_batch()
    with torch.no_grad():
        torch.testing.assert_close(
            compute_logprobs(backend.model, batch), compute_logprobs(merged, batch), atol=1e-5, rtol=1e-5
        )


def test_merged_weights_leave_the_device_one_after_another(
    base_model: ModelConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU that holds a model with adapters may have no room for all of its matrices once more."""
    merged: list[weakref.ref[Tensor]] = []

    def watched(hf_model: nn.Module) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in merge_each(hf_model):
            if name.endswith("_proj.weight"):
                merged.append(weakref.ref(tensor))
            assert sum(each() is not None for each in merged) <= 2, "the caller's last one, and this"
            yield name, tensor
            del tensor

    backend = create_backend(base_model, policy=PolicyConfig(lora=LoRAConfig(rank=4)))
    for module in (lora, training_state):
        monkeypatch.setattr(module, "merge_each", watched)
    monkeypatch.setattr(Tensor, "cpu", lambda self: self.clone())  # as of a GPU
    weights = asyncio.run(backend.get_weights().result())
    asyncio.run(backend.save_checkpoint(tmp_path / "step_000000", {"step": 0}).result())
    assert len(merged) == 2 * sum(name.endswith("_proj.weight") for name in weights) > 4


@pytest.mark.parametrize("rank", [0, 4], ids=["frozen copy", "adapters off"])
def test_the_reference_is_the_model_that_training_started_from(base_model: ModelConfig, rank: int) -> None:
    policy = PolicyConfig(lora=LoRAConfig(rank=rank))
    backend = create_backend(base_model, policy=policy, with_reference=True)
    before = score(backend)
    take_steps(backend, range(2))
    torch.testing.assert_close(score(backend, reference=True), before, atol=1e-6, rtol=0)
    assert not torch.allclose(score(backend), before, atol=1e-4)


def test_replaced_weights_are_what_adapters_start_from(base_model: ModelConfig) -> None:
    backend = create_backend(base_model, policy=PolicyConfig(lora=LoRAConfig(rank=4)))
    take_steps(backend, range(2))
    other = {name: value + 0.01 for name, value in copy_weights(backend).items()}
    asyncio.run(backend.load_weights(other).result())
    assert_equal_tensors(copy_weights(backend), other)


def test_a_value_head_is_trained_and_resumed(base_model: ModelConfig, tmp_path: Path) -> None:
    def value_loss(scores: TokenScores, batch: TrainBatch) -> tuple[torch.Tensor, Metrics]:
        assert scores.values_BT is not None
        loss = ((scores.values_BT - 1).square() * batch.loss_mask_BT).sum() / batch.num_loss_tokens
        return loss, {"loss": float(loss.detach())}

    def create() -> PyTorchTrainingBackend:
        optim = OptimConfig(lr=1e-2)
        return create_pytorch_backend(base_model, optim, value_loss, num_steps=10, with_values=True, device="cpu")

    backend = create()
    losses = [metrics["loss"] for metrics in take_steps(backend, range(4))]
    assert losses[0] == pytest.approx(1.0)  # the head starts at 0
    assert losses[-1] < 0.9
    asyncio.run(backend.save_checkpoint(tmp_path / "step_000004", {"step": 4}).result())
    restored = create()
    asyncio.run(restored.load_checkpoint(tmp_path / "step_000004").result())
    assert take_steps(restored, range(4, 6)) == take_steps(backend, range(4, 6))


def use_the_name_of_older_releases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Earlier releases of transformers 5 know recomputed activations as gradient checkpointing."""
    enable = PreTrainedModel._activation_checkpointing_enable
    monkeypatch.delattr(PreTrainedModel, "activation_checkpointing_enable")
    monkeypatch.setattr(PreTrainedModel, "gradient_checkpointing_enable", enable)


@pytest.mark.filterwarnings("error::FutureWarning")
@pytest.mark.parametrize("is_older", [False, True])
def test_layers_compute_their_activations_again_in_the_backward_pass(
    base_model: ModelConfig, monkeypatch: pytest.MonkeyPatch, is_older: bool
) -> None:
    if is_older:
        use_the_name_of_older_releases(monkeypatch)
    backend = create_backend(base_model, PolicyConfig(activation_checkpointing=True))
    calls = []
    for layer in backend.model.base_model.layers:
        layer.mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    asyncio.run(backend.forward_backward(make_batch()).result())
    assert len(calls) == 2 * len(backend.model.base_model.layers)


def test_a_model_that_cannot_recompute_activations_is_one_sentence() -> None:
    model = OpenAIGPTLMHeadModel(OpenAIGPTConfig(vocab_size=VOCABULARY, n_positions=8, n_embd=8, n_layer=1, n_head=2))
    with pytest.raises(ConfigError, match=r"do not support .*: set policy.activation_checkpointing = false"):
        recompute_activations(model)


def test_recomputed_activations_give_the_same_gradient(base_model: ModelConfig) -> None:
    plain, saving = create_backend(base_model), create_backend(base_model, PolicyConfig(activation_checkpointing=True))
    assert take_steps(saving, range(3)) == take_steps(plain, range(3))
    assert_equal_tensors(copy_weights(saving), copy_weights(plain))


@pytest.mark.matrix
@pytest.mark.slow
def test_compiled_layers_train_as_plain_ones_do(base_model: ModelConfig) -> None:
    found = take_steps(create_backend(base_model, PolicyConfig(compile=True)), range(2))
    expected = take_steps(create_backend(base_model), range(2))
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-4)


@pytest.mark.parametrize(
    ("names", "unknown"),
    [
        (("query_projection",), "query_projection"),
        (("q_proj", "w_proj"), "w_proj"),
        (("q_proj", "mlp.v_proj"), "mlp.v_proj"),
        (("all-linear",), "all-linear"),
        ((".*q_proj",), r"\.\*q_proj"),
        (("q_proj", "lm_head"), "lm_head"),  # log-probs are taken from the head's weight, past its adapter
        (("q_proj", "embed_tokens", "norm"), "embed_tokens, norm"),
    ],
)
def test_adapters_need_layers_that_the_model_has(base_model: ModelConfig, names: tuple[str, ...], unknown: str) -> None:
    lora = LoRAConfig(rank=4, target_modules=names)
    known = "down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"
    with pytest.raises(ConfigError, match=rf"^lora\.target_modules {unknown}: the model has no .* it has {known}:"):
        create_policy(base_model, PolicyConfig(lora=lora))


def test_adapters_are_for_layers_by_their_names_and_by_ends_of_them(base_model: ModelConfig) -> None:
    lora = LoRAConfig(rank=4, target_modules=("model.layers.0.self_attn.q_proj", "1.self_attn.k_proj", "mlp.up_proj"))
    created = create_policy(base_model, PolicyConfig(lora=lora))
    layers = {name for name, module in created.hf_model.named_modules() if hasattr(module, "lora_A")}
    attention = {"model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.k_proj"}
    num_layers = created.hf_model.config.num_hidden_layers
    assert layers == attention | {f"model.layers.{number}.mlp.up_proj" for number in range(num_layers)}


def test_flash_attention_that_is_not_installed_is_one_sentence(base_model: ModelConfig) -> None:
    with pytest.raises(ConfigError, match=r"policy\.attention 'flash_attention_2' cannot be used here"):
        create_policy(base_model, PolicyConfig(attention="flash_attention_2", precision="bfloat16"))


def build_windowed_model(kind: str) -> PreTrainedModel:
    """A random model whose layers, or some of them, see four tokens back."""
    torch.manual_seed(0)
    shape = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "sliding_window": 4,
    }
    if kind == "all layers":
        return MistralForCausalLM(MistralConfig(**shape))
    if kind == "some layers of a model that sees images":
        layers = {"layer_types": ["sliding_attention", "full_attention"], "head_dim": 8}
        sight = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
        images = {"vision_config": sight | {"image_size": 4, "patch_size": 2}, "mm_tokens_per_image": 1}
        return Gemma3ForConditionalGeneration(Gemma3Config(text_config=shape | layers, **images))
    return Qwen2ForCausalLM(Qwen2Config(**shape, use_sliding_window=True, max_window_layers=1))


@pytest.mark.parametrize("kind", ["all layers", "some layers", "some layers of a model that sees images"])
@torch.no_grad()
def test_packed_samples_see_no_further_back_than_the_window(kind: str) -> None:
    model = build_windowed_model(kind)
    first, second = make_sample(range(1, 13)), make_sample(range(12, 2, -1))
    packed_BT = compute_logprobs(model, build_batch([[first, second]], pad_id=0))
    alone = [compute_logprobs(model, build_batch([[sample]], pad_id=0)) for sample in (first, second)]
    torch.testing.assert_close(packed_BT, torch.cat(alone, dim=1), atol=1e-5, rtol=1e-5)
    other_start = make_sample([20, *range(2, 13)])
    changed_BT = compute_logprobs(model, build_batch([[other_start, second]], pad_id=0))
    # Two layers that see 3 tokens back reach 6; one such layer and one that sees all reach everything.
    assert torch.allclose(packed_BT[:, 7:11], changed_BT[:, 7:11], atol=1e-6) == (kind == "all layers")


@pytest.mark.parametrize("kind", ["all layers", "some layers", "some layers of a model that sees images"])
@torch.no_grad()
def test_a_shared_prompt_is_seen_as_far_back_as_an_own_one(kind: str) -> None:
    model = build_windowed_model(kind)
    prompt, mask = list(range(1, 9)), [0.0] * 8
    samples = [make_sample([*prompt, *answer], mask + [1.0] * len(answer)) for answer in ([3, 9], [4, 5, 6], [7])]
    layout = place_samples(samples, share_prompts=True)
    shared_BT = compute_logprobs(model, build_batch([samples], pad_id=0, share_prompts=True))
    for sample, found_T in zip(samples, split_by_sample(shared_BT, [layout])[0], strict=True):
        alone_BT = compute_logprobs(model, build_batch([[sample]], pad_id=0))
        torch.testing.assert_close(found_T, alone_BT[0], atol=1e-5, rtol=1e-5)


ROW_DISTANCES: dict[str, PreTrainedConfig] = {
    "gpt_neo": GPTNeoConfig(
        vocab_size=VOCABULARY, hidden_size=16, num_layers=1, attention_types=[[["local"], 1]], num_heads=2,
        window_size=4, max_position_embeddings=64,
    ),
    "mpt": MptConfig(vocab_size=VOCABULARY, d_model=16, n_heads=2, n_layers=1),
}  # fmt: skip
"""A window, and a slope (ALiBi), that are counted along the row."""


@pytest.mark.parametrize("kind", ROW_DISTANCES)
@torch.no_grad()
def test_a_model_that_counts_distances_along_the_row_takes_packed_samples_without_a_shared_prompt(kind: str) -> None:
    """The second sample's distance to a shared prompt would be larger than to its own one."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(ROW_DISTANCES[kind]).eval()
    prompt, mask = list(range(1, 9)), [0.0] * 8
    samples = [make_sample([*prompt, *answer], mask + [1.0] * len(answer)) for answer in ([3, 9], [4, 5, 6], [7])]
    packed_BT = compute_logprobs(model, build_batch([samples], pad_id=0))
    for sample, found_T in zip(samples, split_by_sample(packed_BT, [place_samples(samples)])[0], strict=True):
        alone_BT = compute_logprobs(model, build_batch([[sample]], pad_id=0))
        torch.testing.assert_close(found_T, alone_BT[0], atol=1e-5, rtol=1e-5)
    with pytest.raises(ConfigError, match=f"{kind} models would compute wrong distances to a shared prompt"):
        compute_logprobs(model, build_batch([samples], pad_id=0, share_prompts=True))


def test_models_that_carry_a_state_refuse_packed_rows() -> None:
    config = Qwen3NextConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, linear_num_key_heads=1, linear_num_value_heads=1, linear_key_head_dim=8,
        linear_value_head_dim=8, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=8,
        shared_expert_intermediate_size=8,
    )  # fmt: skip
    with pytest.raises(ConfigError, match="linear_attention layers of qwen3_next: set packing = false"):
        compute_logprobs(Qwen3NextForCausalLM(config), build_batch([[make_sample(), make_sample()]], pad_id=0))


@torch.no_grad()
def test_layers_that_carry_a_state_start_anew_in_each_row_whatever_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = Lfm2ForCausalLM(Lfm2Config(**TINY_MODEL, layer_types=["conv", "full_attention"]))
    samples = make_random_samples(3)
    alone = [compute_logprobs(model, build_batch([[sample]], pad_id=0))[0] for sample in samples]
    monkeypatch.setattr(policy, "KERNELS_WITHOUT_MASK", {"sdpa"})
    found_BT = compute_logprobs(model, build_batch([[sample] for sample in samples], pad_id=0))
    for found_T, alone_T in zip(found_BT, alone, strict=True):
        torch.testing.assert_close(found_T[: len(alone_T)], alone_T, atol=1e-5, rtol=1e-5)
    with pytest.raises(ConfigError, match="conv layers of lfm2: set packing = false"):
        compute_logprobs(model, build_batch([samples], pad_id=0))


@torch.no_grad()
@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_code_of_a_models_own_that_carries_a_state_refuses_packed_rows(
    base_model: ModelConfig, tmp_path: Path, precision: Literal["float32", "bfloat16"]
) -> None:
    """Its settings do not say so: they are those of a Qwen3."""
    settings = PolicyConfig(precision=precision, lora=LoRAConfig(rank=2 if precision == "bfloat16" else 0))
    plain = write_model_with_own_code(base_model, tmp_path / f"own_plain_{precision}")
    stateful = write_model_with_own_code(
        base_model, tmp_path / f"own_stateful_{precision}", further_code=STATE_OF_ITS_OWN
    )
    packed, single = (
        build_batch(rows, pad_id=0) for rows in ([make_random_samples(2)], [[s] for s in make_random_samples(2)])
    )
    create_policy(plain, settings)(packed)
    with_state = create_policy(stateful, settings)
    assert with_state.hf_model.training
    with_state(single)
    with pytest.raises(ConfigError, match=r"would affect each other: .* Set packing = false"):
        with_state(packed)


def attend_by_bounds(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **settings: object,
) -> tuple[Tensor, None]:
    """What a kernel for sequences of varying length computes: causal attention between each two bounds."""
    bounds = settings["cu_seq_lens_q"]
    assert isinstance(bounds, Tensor) and attention_mask is None
    lengths = bounds.diff().tolist()
    assert max(lengths) == settings["max_length_q"]
    num_repeats = query.shape[1] // key.shape[1]
    parts = zip(
        query.split(lengths, dim=2),
        key.repeat_interleave(num_repeats, dim=1).split(lengths, dim=2),
        value.repeat_interleave(num_repeats, dim=1).split(lengths, dim=2),
        strict=True,
    )
    outputs = [F.scaled_dot_product_attention(q, k, v, is_causal=True) for q, k, v in parts]
    return torch.cat(outputs, dim=2).transpose(1, 2), None


def test_values_are_float32_under_autocast(base_model: ModelConfig) -> None:
    trained = create_policy(base_model, PolicyConfig(precision="bfloat16"), with_values=True)
    values_BT = trained(build_batch([make_random_samples(2)], pad_id=0)).values_BT
    assert values_BT is not None and values_BT.dtype == torch.float32


@torch.no_grad()
def test_values_are_told_apart_under_autocast_as_well_as_without(base_model: ModelConfig) -> None:
    """Near 10 the numbers of bfloat16 are 0.06 apart: a value head could not learn smaller differences."""
    trained = create_policy(base_model, PolicyConfig(precision="bfloat16"), with_values=True)
    assert trained.value_head is not None
    torch.manual_seed(0)
    torch.nn.init.normal_(trained.value_head.weight, std=1e-3)
    trained.value_head.bias.fill_(10.0)
    batch = build_batch([make_random_samples(4)], pad_id=0)
    values_BT = trained(batch).values_BT
    assert values_BT is not None
    with torch.autocast("cpu", torch.bfloat16):
        hidden_BTH = compute_hidden_states(trained.hf_model, batch)
    expected_BT = trained.value_head(hidden_BTH.float()).squeeze(-1)
    is_scored_BT = batch.loss_mask_BT != 0
    torch.testing.assert_close(values_BT[is_scored_BT], expected_BT[is_scored_BT])


@torch.no_grad()
def test_rows_without_padding_score_as_masked_rows_do(
    tiny_model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = make_random_samples(7)
    batch = build_batch([samples[:3], samples[3:4], samples[4:]], pad_id=0)
    expected_BT = compute_logprobs(tiny_model, batch)
    AttentionInterface.register("by_bounds", attend_by_bounds)
    tiny_model.set_attn_implementation("by_bounds")
    monkeypatch.setattr(policy, "KERNELS_WITHOUT_MASK", {"by_bounds"})
    torch.testing.assert_close(compute_logprobs(tiny_model, batch), expected_BT, atol=1e-5, rtol=1e-5)


def test_a_row_may_be_longer_than_a_model_sees_as_long_as_no_sample_is() -> None:
    """Also the padding of a row must read positions that the model has."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_positions=8, n_embd=8, n_layer=1, n_head=2)).eval()
    samples = [make_sample(range(start, start + 9)) for start in range(4)]
    packed, single = (
        build_batch(rows, pad_id=0) for rows in ([samples[:3], samples[3:]], [[sample] for sample in samples])
    )
    together, alone = (
        split_by_sample(compute_logprobs(model, batch), [place_samples(row) for row in rows])
        for batch, rows in ((packed, [samples[:3], samples[3:]]), (single, [[sample] for sample in samples]))
    )
    for ours, theirs in zip([*together[0], *together[1]], [row[0] for row in alone], strict=True):
        torch.testing.assert_close(ours, theirs)
    with pytest.raises(IndexError):
        compute_logprobs(model, build_batch([[make_sample(range(10))]], pad_id=0))
