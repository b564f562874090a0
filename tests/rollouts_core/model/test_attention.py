"""Pins that attention written out as products is the attention of torch's fused kernel.

Without it bfloat16 training on a CPU would compute another model than float32 training does.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, DogeConfig, DogeForCausalLM, PreTrainedModel

from rollouts_core.batch import build_batch
from rollouts_core.config import ModelConfig, PolicyConfig
from rollouts_core.model.attention import WRITTEN_OUT, use_written_out_attention
from rollouts_core.model.policy import compute_logprobs, create_policy
from rollouts_core.types import Sample
from tests.rollouts_core.make import TINY_MODEL, make_groups, make_random_samples

ROWS = {
    "alone": [[sample] for sample in make_random_samples(4)],
    "packed": [make_random_samples(3), make_random_samples(2, seed=1)],
    "shared prompts": [make_groups(1, 4), make_groups(2, 2, seed=1)],
}


def logprobs_and_gradient(model: PreTrainedModel, rows: list[list[Sample]]) -> tuple[Tensor, list[Tensor]]:
    model.zero_grad()
    logprobs_BT = compute_logprobs(model, build_batch(rows, pad_id=0, share_prompts=True))
    logprobs_BT.square().sum().backward()
    return logprobs_BT.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("name", ROWS)
def test_log_probs_and_gradients_are_those_of_the_fused_kernel(tiny_model: PreTrainedModel, name: str) -> None:
    expected, gradient = logprobs_and_gradient(tiny_model, ROWS[name])
    use_written_out_attention(tiny_model)
    found, other_gradient = logprobs_and_gradient(tiny_model, ROWS[name])
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(other_gradient, gradient, atol=1e-4, rtol=1e-4)


def test_values_may_be_of_another_width_than_keys() -> None:
    torch.manual_seed(0)
    config = DeepseekV3Config(
        **TINY_MODEL | {"num_key_value_heads": 2}, q_lora_rank=8, kv_lora_rank=8, qk_nope_head_dim=8,
        qk_rope_head_dim=8, v_head_dim=12, first_k_dense_replace=2,
    )  # fmt: skip
    model = DeepseekV3ForCausalLM(config)
    expected, gradient = logprobs_and_gradient(model, ROWS["packed"])
    use_written_out_attention(model)
    found, other_gradient = logprobs_and_gradient(model, ROWS["packed"])
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(other_gradient, gradient, atol=1e-4, rtol=1e-4)


def test_each_query_head_may_have_a_mask_of_its_own() -> None:
    """Doge makes one, of what each key is worth."""
    torch.manual_seed(0)
    model = DogeForCausalLM(DogeConfig(**TINY_MODEL, hidden_dropout=0.0))
    expected, gradient = logprobs_and_gradient(model, ROWS["packed"])
    use_written_out_attention(model)
    found, other_gradient = logprobs_and_gradient(model, ROWS["packed"])
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(other_gradient, gradient, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("policy", "is_written_out"),
    [
        (PolicyConfig(precision="bfloat16"), True),
        (PolicyConfig(precision="float32"), False),
        (PolicyConfig(precision="bfloat16", attention="eager"), False),
    ],
)
def test_only_bfloat16_on_a_cpu_takes_it(base_model: ModelConfig, policy: PolicyConfig, is_written_out: bool) -> None:
    hf_model = create_policy(base_model, policy).hf_model
    assert (hf_model.config._attn_implementation == WRITTEN_OUT) is is_written_out


def test_it_is_not_written_into_checkpoints(base_model: ModelConfig) -> None:
    hf_model = create_policy(base_model, PolicyConfig(precision="bfloat16")).hf_model
    assert WRITTEN_OUT not in hf_model.config.to_json_string()
