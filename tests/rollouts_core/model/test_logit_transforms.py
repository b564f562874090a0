"""Pins that models which cap or scale their logits get the log-probs of their own logits, wherever those are taken.

Without it a Gemma, Cohere or Granite model would be trained on another distribution than the one that it samples from.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from rollouts_core.algorithms.loss import create_cross_entropy_loss
from rollouts_core.backends.pytorch import create_pytorch_backend
from rollouts_core.batch import build_batch
from rollouts_core.config import LoRAConfig, ModelConfig, OptimConfig, PolicyConfig
from rollouts_core.embedded.architecture import UnsupportedModelError, load_architecture
from rollouts_core.evaluate import score_demonstrations
from rollouts_core.model.loading import load_hf_model
from rollouts_core.model.policy import Policy, create_policy
from rollouts_core.types import Sample
from tests.rollouts_core.make import TINY_MODEL, make_random_samples

TINY = {
    **TINY_MODEL,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.5,
}
"""Large enough weights that the caps below bend the logits."""
FAMILIES: dict[str, dict[str, object]] = {
    "Gemma2": {"final_logit_softcapping": 1.5, "attn_logit_softcapping": 1.0, "sliding_window": 4},
    "Cohere": {"logit_scale": 0.25},
    "Granite": {"logits_scaling": 3.0},
    "FalconH1": {"lm_head_multiplier": 0.4, "mamba_d_ssm": 16, "mamba_n_heads": 2, "mamba_d_state": 8},
}
PACKED = [name for name in FAMILIES if name != "FalconH1"]  # whose layers carry a state from sample to sample


def make_model(family: str) -> PreTrainedModel:
    """A tiny model of a family with random weights."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**TINY, **FAMILIES[family])
    return getattr(transformers, f"{family}ForCausalLM")(config)


@pytest.fixture
def saved(request: pytest.FixtureRequest, tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> ModelConfig:
    """The model of the family that a test is about, on disk."""
    make_model(request.param).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return ModelConfig(path=str(tmp_path / "model"))


def own_scores(model: PreTrainedModel, sample: Sample, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Log-probs of the trained tokens of a sample, and entropies, from the model's own logits."""
    token_ids = torch.tensor([sample.tokens])
    log_probs_TV = torch.log_softmax(model(token_ids, use_cache=False).logits[0, :-1].float() / temperature, dim=-1)
    is_trained_T = torch.tensor(sample.loss_mask[1:]) != 0
    entropies_T = -(log_probs_TV.exp() * log_probs_TV).sum(dim=-1)
    targets_T = token_ids[0, 1:, None]
    return log_probs_TV.gather(1, targets_T)[is_trained_T, 0], entropies_T[is_trained_T]


@pytest.mark.parametrize("family", FAMILIES)
def test_values_and_gradients_are_those_of_the_models_own_logits(family: str) -> None:
    ours, theirs = make_model(family), make_model(family)
    samples = make_random_samples(5)
    rows = [samples[:3], samples[3:]] if family in PACKED else [[sample] for sample in samples]
    batch = build_batch(rows, pad_id=0)
    scores = Policy(ours, temperature=0.7, with_entropies=True)(batch)
    is_trained_BT = batch.loss_mask_BT != 0
    assert scores.entropies_BT is not None
    found = torch.stack([scores.logprobs_BT[is_trained_BT], scores.entropies_BT[is_trained_BT]])
    expected = torch.stack(
        [torch.cat(parts) for parts in zip(*(own_scores(theirs, s, 0.7) for s in samples), strict=True)]
    )
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)

    weights = torch.linspace(-1, 2, found.numel()).view_as(found)
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], atol=1e-4, rtol=1e-3, msg=name)


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_the_transform_matters_in_these_models(family: str) -> None:
    model = make_model(family)
    logits = model(torch.arange(8)[None], use_cache=False).logits
    plain = model.get_output_embeddings()(model.base_model(torch.arange(8)[None], use_cache=False).last_hidden_state)
    assert not torch.allclose(torch.log_softmax(logits, -1), torch.log_softmax(plain, -1), atol=0.1)


@pytest.mark.parametrize("saved", FAMILIES, indirect=True)
def test_a_checkpoint_of_a_trained_model_has_the_log_probs_that_training_saw(
    saved: ModelConfig, tmp_path: Path
) -> None:
    policy = PolicyConfig(lora=LoRAConfig(rank=2, target_modules=("q_proj", "v_proj")))
    optim = OptimConfig(lr=0.05, eps=1e-3)
    backend = create_pytorch_backend(
        saved, optim, create_cross_entropy_loss(), num_steps=3, policy=policy, device="cpu"
    )
    sample = make_random_samples(1)[0]
    batch = build_batch([[sample]], pad_id=0)
    losses = []
    for _ in range(3):
        losses.append(asyncio.run(backend.forward_backward(batch).result())["loss"])
        asyncio.run(backend.optim_step().result())
    assert losses[2] < losses[0]
    asyncio.run(backend.save_checkpoint(tmp_path / "step_000003", {"step": 3}).result())
    scores_BT = asyncio.run(backend.score(batch).result()).logprobs_BT
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "step_000003", dtype=torch.float32)
    expected, _ = own_scores(reloaded, sample)
    torch.testing.assert_close(scores_BT[batch.loss_mask_BT != 0], expected.detach(), atol=1e-4, rtol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("saved", FAMILIES, indirect=True)
def test_an_evaluation_scores_by_the_models_own_logits(saved: ModelConfig) -> None:
    samples = make_random_samples(2)
    model = load_hf_model(saved).eval()
    expected = [float(own_scores(model, sample)[0].mean()) for sample in samples]
    assert score_demonstrations(saved, samples) == pytest.approx(expected, abs=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("saved", PACKED, indirect=True)
def test_bfloat16_products_are_capped_and_scaled_in_float32(saved: ModelConfig) -> None:
    batch = build_batch([make_random_samples(3)], pad_id=0)
    exact_BT = create_policy(saved, PolicyConfig())(batch).logprobs_BT
    rounded_BT = create_policy(saved, PolicyConfig(precision="bfloat16"))(batch).logprobs_BT
    frozen_BT = create_policy(saved, PolicyConfig(precision="bfloat16", lora=LoRAConfig(rank=2)))(batch).logprobs_BT
    for found_BT in (rounded_BT, frozen_BT):
        assert found_BT.dtype == torch.float32
        torch.testing.assert_close(found_BT, exact_BT, atol=0.3, rtol=0.1)


@pytest.mark.parametrize("saved", FAMILIES, indirect=True)
def test_the_embedded_engine_refuses_these_models_in_one_sentence(saved: ModelConfig) -> None:
    with pytest.raises(UnsupportedModelError, match=r"the embedded engine does not support architecture \w+"):
        load_architecture(Path(saved.path))
