"""Pins that the norms put in place of transformers' compute the same, and stand only where they do.

Without it a model whose norm has another formula would be trained as if it had Llama's.
"""

import pytest
import torch
from torch import nn
from transformers import GemmaConfig, GemmaForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from rollouts_core.model.rms_norm import RMSNorm, use_fast_rms_norms
from tests.rollouts_core.make import TINY_MODEL


@pytest.mark.parametrize("shape", [(2, 5, 64), (2, 5, 4, 32), (0, 64)], ids=["hidden", "heads", "empty"])
def test_outputs_and_gradients_are_those_of_transformers(shape: tuple[int, ...]) -> None:
    theirs = Qwen3RMSNorm(shape[-1])
    nn.init.normal_(theirs.weight)
    x, grad = torch.randn(shape) * 3 + 1, torch.randn(shape)
    expected, found = (_run(norm, x, grad) for norm in (theirs, RMSNorm(theirs.weight, theirs.variance_epsilon)))
    for ours, reference in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-5, atol=1e-5)


def test_bfloat16_is_rounded_where_transformers_rounds() -> None:
    theirs = Qwen3RMSNorm(64)
    nn.init.normal_(theirs.weight)
    x, grad = torch.randn(4, 64, dtype=torch.bfloat16), torch.randn(4, 64)
    expected, found = (_run(norm, x, grad) for norm in (theirs, RMSNorm(theirs.weight, theirs.variance_epsilon)))
    assert torch.equal(found[0], expected[0]) and found[0].dtype == torch.float32
    assert found[1].dtype == torch.bfloat16
    torch.testing.assert_close(found[1].float(), expected[1].float(), rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(found[2], expected[2], rtol=2e-2, atol=2e-2)


def test_a_frozen_weight_gets_no_gradient() -> None:
    norm = RMSNorm(nn.Parameter(torch.ones(8), requires_grad=False), 1e-6)
    x = torch.randn(3, 8, requires_grad=True)
    norm(x).sum().backward()
    assert x.grad is not None and norm.weight.grad is None


def test_a_model_keeps_its_parameters_and_its_outputs() -> None:
    model = Qwen3ForCausalLM(Qwen3Config(**TINY_MODEL))
    parameters = dict(model.named_parameters())
    tokens = torch.arange(8)[None]
    before = model(tokens).logits
    use_fast_rms_norms(model)
    assert sum(isinstance(module, RMSNorm) for module in model.modules()) == 2 * 4 + 1
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    torch.testing.assert_close(model(tokens).logits, before)


def test_norms_of_another_formula_stay() -> None:
    model = GemmaForCausalLM(GemmaConfig(**TINY_MODEL))
    use_fast_rms_norms(model)
    assert not any(isinstance(module, RMSNorm) for module in model.modules())


def _run(norm: nn.Module, x: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Output, gradient of the input, gradient of the weight."""
    inputs, weight = x.clone().requires_grad_(), norm.weight
    output = norm(inputs)
    norm.zero_grad()
    output.backward(grad)
    assert isinstance(weight, torch.Tensor)
    assert inputs.grad is not None and weight.grad is not None
    return output.detach(), inputs.grad, weight.grad
