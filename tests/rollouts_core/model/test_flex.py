"""Pins that attention by a block mask is the attention that a mask of T x T numbers gives.

Without it a sample could read its neighbour in the row, or a shared prompt, a window or a cap of scores could be lost.
torch refuses gradients of FlexAttention on a CPU, and compiles its kernel for minutes. Here its own reference
computation runs uncompiled, gradients included. The compiled kernel needs a GPU (benchmarks/gpu_check.py).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as of_torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    LlamaConfig,
    MptConfig,
    PreTrainedConfig,
    Qwen3Config,
)
from transformers.integrations import flex_attention as of_transformers

from rollouts_core.batch import build_batch
from rollouts_core.config import ModelConfig, PolicyConfig, RLTrainingConfig
from rollouts_core.errors import ConfigError
from rollouts_core.model import flex
from rollouts_core.model.flex import FLEX, use_flex_attention, why_not_flex, why_unfit
from rollouts_core.model.policy import create_policy
from tests.rollouts_core.make import TINY_MODEL
from tests.rollouts_core.model.test_varlen import MODELS, ROWS, logprobs_and_gradient

CAPPED = Gemma2Config(**TINY_MODEL, sliding_window=4, attn_logit_softcapping=2.0)


@pytest.fixture
def reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's computation of FlexAttention without a kernel, which has gradients on a CPU, too."""

    def attend(query: Tensor, key: Tensor, value: Tensor, *, training: bool, **others: Any) -> Any:
        return of_torch.flex_attention(query, key, value, **others)

    monkeypatch.setattr(of_torch, "_validate_device", lambda *_: None)
    monkeypatch.setattr(of_transformers, "compile_friendly_flex_attention", attend)


@pytest.mark.slow
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("settings", [*MODELS.values(), CAPPED], ids=[*MODELS, "capped scores"])
def test_log_probs_and_gradients_are_those_of_eager(reference: None, settings: PreTrainedConfig, rows: str) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(settings, attn_implementation="eager")
    batch = build_batch(ROWS[rows], pad_id=0, share_prompts=rows == "shared prompts")
    expected, gradient = logprobs_and_gradient(model, batch)
    use_flex_attention(model)
    assert model.config._attn_implementation == FLEX
    found, other_gradient = logprobs_and_gradient(model, batch)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(other_gradient, gradient, atol=1e-4, rtol=1e-4)


def test_completions_share_prompts_with_it() -> None:
    policy = PolicyConfig(attention="flex", precision="bfloat16")
    assert RLTrainingConfig(policy=policy).shares_prompts and not policy.takes_dense_masks


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (Qwen3Config(**TINY_MODEL), ""),
        (CAPPED, ""),
        (LlamaConfig(**TINY_MODEL, attention_dropout=0.1), "has attention dropout"),
        (
            MptConfig(d_model=16, n_heads=2, n_layers=1, vocab_size=32),
            "mpt models are not known to work with FlexAttention",
        ),
    ],
)
def test_a_model_that_it_does_not_fit_gets_a_reason(settings: PreTrainedConfig, reason: str) -> None:
    with torch.device("meta"):
        found = why_unfit(AutoModelForCausalLM.from_config(settings))
    assert reason in found and bool(reason) == bool(found)


def test_layers_of_another_kind_are_a_reason() -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(Qwen3Config(**TINY_MODEL))
    model.config.layer_types = ["linear_attention"]
    assert why_unfit(model) == "qwen3 has linear_attention layers"


def test_a_machine_that_it_does_not_fit_gets_a_reason(base_model: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ConfigError, match=r'policy\.attention "flex" cannot be used here: it needs a GPU: torch has no'
    ):
        create_policy(base_model, PolicyConfig(precision="bfloat16", attention="flex"))
    monkeypatch.setattr(flex, "find_spec", lambda _: None)
    assert "triton" in why_not_flex(base_model, device_type="cuda")
    monkeypatch.setattr(flex, "is_torch_flex_attn_available", lambda: False)
    assert "has no FlexAttention" in why_not_flex(base_model, device_type="cuda")
