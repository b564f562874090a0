"""Pins that attention by the bounds of samples is the attention that a mask gives.

Without it a sample could read its neighbour in the row, or a window or a group of heads could be another one. The
kernel itself needs a GPU. Here an implementation of its signature stands for it, one sample at a time, and the kernel's
own shapes and gradients are traced without values.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MptConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from rollouts_core.batch import TrainBatch, build_batch
from rollouts_core.config import ModelConfig, PolicyConfig
from rollouts_core.errors import ConfigError
from rollouts_core.model import varlen
from rollouts_core.model.policy import create_policy, score_targets
from rollouts_core.model.varlen import (
    SDPA_BY_ROWS,
    VARLEN,
    attend_varlen,
    use_sdpa_by_rows,
    use_varlen_attention,
    why_unfit,
)
from tests.rollouts_core.make import TINY_MODEL, make_groups, make_random_samples

ROWS = {
    "alone": [[sample] for sample in make_random_samples(4)],
    "packed": [make_random_samples(3), make_random_samples(2, seed=1)],
    "shared prompts": [make_groups(1, 4), make_groups(2, 2, seed=1)],
}
WINDOWS: dict[str, Any] = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
MODELS = {
    "groups of heads": Qwen3Config(**TINY_MODEL),
    "windows": Gemma3TextConfig(**TINY_MODEL, **WINDOWS),
    "one window": MistralConfig(**TINY_MODEL, sliding_window=4),
    "odd heads": LlamaConfig(**TINY_MODEL | {"head_dim": 12}),
}


def attend_one_by_one(
    query_MHD: Tensor,
    key_MKD: Tensor,
    value_MKD: Tensor,
    bounds: Tensor,
    key_bounds: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
) -> Tensor:
    """The attention that `varlen_attn` documents, with a loop over samples."""
    assert bounds.dtype == torch.int32 and max_q == max_k == int(bounds.diff().max())
    assert query_MHD.shape[-1] % 8 == 0 and window_size[1] == 0
    parts = []
    assert scale is not None
    for start, end in zip(bounds.tolist(), bounds.tolist()[1:], strict=False):
        query, key, value = (each[start:end].transpose(0, 1) for each in (query_MHD, key_MKD, value_MKD))
        if len(query) != len(key):
            assert enable_gqa
            key, value = (each.repeat_interleave(len(query) // len(each), dim=0) for each in (key, value))
        places = torch.arange(end - start)
        back = places[:, None] - places
        is_read = (back >= 0) & ((back <= window_size[0]) if window_size[0] >= 0 else True)
        scores = (query @ key.transpose(-1, -2) * scale).masked_fill(~is_read, -torch.inf)
        parts.append((scores.softmax(dim=-1) @ value).transpose(0, 1))
    return torch.cat(parts)


def attend_without_groups(*tensors: Any, scale: float | None = None, window_size: tuple[int, int] = (-1, -1)) -> Tensor:
    """The same in a torch whose kernel knows no groups of heads."""
    return attend_one_by_one(*tensors, scale=scale, window_size=window_size)


def logprobs_and_gradient(model: PreTrainedModel, batch: TrainBatch) -> tuple[Tensor, list[Tensor]]:
    model.zero_grad()
    logprobs_BT = score_targets(model, batch).logprobs_BT
    logprobs_BT.square().sum().backward()
    return logprobs_BT.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("kernel", [attend_one_by_one, attend_without_groups])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("name", MODELS)
def test_log_probs_and_gradients_are_those_of_eager(
    name: str, rows: str, kernel: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(MODELS[name], attn_implementation="eager")
    batch = build_batch(ROWS[rows], pad_id=0, share_prompts=rows == "shared prompts")
    expected, gradient = logprobs_and_gradient(model, batch)
    monkeypatch.setattr(varlen, "find_varlen_attn", lambda: kernel)
    use_varlen_attention(model)
    assert model.config._attn_implementation == VARLEN
    found, other_gradient = logprobs_and_gradient(model, batch)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(other_gradient, gradient, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("name", MODELS)
def test_sdpa_by_rows_takes_only_the_masks_that_it_is_given(name: str, rows: str) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(MODELS[name], attn_implementation="eager")
    batch = build_batch(ROWS[rows], pad_id=0, share_prompts=rows == "shared prompts")
    expected, gradient = logprobs_and_gradient(model, batch)
    model.set_attn_implementation("sdpa")
    use_sdpa_by_rows(model)
    assert model.config._attn_implementation == SDPA_BY_ROWS
    found, other_gradient = logprobs_and_gradient(model, batch)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(other_gradient, gradient, atol=1e-4, rtol=1e-4)


def test_rows_without_a_shared_prompt_make_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[torch.Size] = []

    def note(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any) -> Any:
        assert mask is None
        shapes.append(query.shape)
        return attend_varlen(module, query, key, value, mask, **options)

    model = AutoModelForCausalLM.from_config(MODELS["groups of heads"])
    monkeypatch.setattr(varlen, "find_varlen_attn", lambda: attend_one_by_one)
    monkeypatch.setattr(varlen, "attend_varlen", note)
    use_varlen_attention(model)
    batch = build_batch(ROWS["packed"], pad_id=0)
    score_targets(model, batch)
    assert {shape[2] for shape in shapes} == {int((batch.segment_ids_BT > 0).sum())}  # padding is left out, too


def test_torchs_kernel_takes_what_it_is_given_forward_and_backward() -> None:
    """Traced without values: on a GPU the same call runs the kernel."""
    kernel = varlen.find_varlen_attn()
    assert kernel is not None
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = AutoModelForCausalLM.from_config(Gemma3TextConfig(**TINY_MODEL, **WINDOWS), dtype=torch.bfloat16)
        use_varlen_attention(model)
        bounds = torch.zeros(3, dtype=torch.int32)
        hidden_1MH = model.base_model(
            input_ids=torch.zeros(1, 7, dtype=torch.int64),
            position_ids=torch.zeros(1, 7, dtype=torch.int64),
            use_cache=False,
            cu_seq_lens_q=bounds,
            cu_seq_lens_k=bounds,
            max_length_q=4,
            max_length_k=4,
        ).last_hidden_state
        hidden_1MH.float().sum().backward()
        assert hidden_1MH.shape == (1, 7, TINY_MODEL["hidden_size"])
        assert all(parameter.grad is not None for parameter in model.base_model.parameters())


def test_a_kernel_without_windows_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def old(query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, *, is_causal: bool = False) -> Tensor:
        return query

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", old)
    assert "window_size" not in inspect.signature(old).parameters
    assert varlen.find_varlen_attn() is None


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (Qwen3Config, ""),
        (LlamaConfig, ""),
        (MistralConfig, ""),
        (Gemma3TextConfig, ""),
        (CohereConfig, ""),
        (Qwen3MoeConfig, ""),
        (Gemma2Config, "gemma2 models cap attention scores"),
        (GptOssConfig, "gpt_oss models have attention sinks"),
        (GPT2Config, "the model has attention dropout"),
        (MptConfig, "mpt models are not known to have standard attention"),
        (Qwen3NextConfig, "qwen3_next has linear_attention layers"),
    ],
)
def test_models_that_do_more_in_their_attention_are_told_apart(
    config: type[PreTrainedConfig], reason: str, tmp_path: Path
) -> None:
    config(**TINY_MODEL | {"pad_token_id": 0}).save_pretrained(tmp_path)
    found = why_unfit(ModelConfig(path=str(tmp_path)))
    assert found == reason if not reason else found.startswith(reason)


@pytest.mark.parametrize("error", [IndexError("no layer"), AssertionError("no mask"), ConfigError("sinks")])
def test_a_model_that_fails_without_values_is_left_to_other_kernels(
    error: Exception, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    Qwen3Config(**TINY_MODEL).save_pretrained(tmp_path)
    monkeypatch.setattr(Qwen3Attention, "forward", fail)
    assert why_unfit(ModelConfig(path=str(tmp_path))) == (
        "qwen3 models change attention scores in a way that varlen does not support"
    )


def test_wide_heads_do_not_fit(tmp_path: Path) -> None:
    LlamaConfig(**TINY_MODEL | {"head_dim": 512}).save_pretrained(tmp_path)
    assert why_unfit(ModelConfig(path=str(tmp_path))) == "its heads have width 512, the limit is 256"


def test_a_cpu_takes_it_for_nothing(base_model: ModelConfig) -> None:
    with pytest.raises(ConfigError, match=r'policy\.attention "varlen" cannot be used here: it needs an NVIDIA GPU'):
        create_policy(base_model, PolicyConfig(precision="bfloat16", attention="varlen"))


def test_values_may_be_of_another_width_than_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    config = DeepseekV3Config(
        **TINY_MODEL | {"num_key_value_heads": 2}, q_lora_rank=8, kv_lora_rank=8, qk_nope_head_dim=8,
        qk_rope_head_dim=8, v_head_dim=12, first_k_dense_replace=2,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    batch = build_batch(ROWS["packed"], pad_id=0)
    expected, _ = logprobs_and_gradient(model, batch)
    monkeypatch.setattr(varlen, "find_varlen_attn", lambda: attend_one_by_one)
    use_varlen_attention(model)
    torch.testing.assert_close(logprobs_and_gradient(model, batch)[0], expected, atol=1e-5, rtol=1e-5)
