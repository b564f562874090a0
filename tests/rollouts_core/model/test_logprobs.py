"""Pins that log-probs taken piece by piece are those of full logits, in value and gradient.

Without it a wrong backward pass would train quietly in a slightly wrong direction.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from rollouts_core.model import logprobs
from rollouts_core.model.logprobs import PLAIN_LOGITS, LogitTransform, linear_logprobs

NUM_TOKENS, HIDDEN, VOCABULARY = 11, 6, 17


def make_inputs(*, with_bias: bool, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Hidden states, head, bias and targets of a small problem."""
    generator = torch.Generator().manual_seed(0)
    hidden_NH = torch.randn(NUM_TOKENS, HIDDEN, generator=generator, dtype=dtype, requires_grad=True)
    head_VH = torch.randn(VOCABULARY, HIDDEN, generator=generator, dtype=dtype, requires_grad=True)
    bias_V = torch.randn(VOCABULARY, generator=generator, dtype=dtype, requires_grad=True) if with_bias else None
    return hidden_NH, head_VH, bias_V, torch.randint(VOCABULARY, (NUM_TOKENS,), generator=generator)


def full_logprobs(
    hidden_NH: Tensor,
    head_VH: Tensor,
    bias_V: Tensor | None,
    targets_N: Tensor,
    temperature: float,
    transform: LogitTransform = PLAIN_LOGITS,
) -> tuple[Tensor, Tensor]:
    """The same by full logits and autograd."""
    logits_NV = F.linear(hidden_NH, head_VH, bias_V).float() * transform.scale
    if transform.cap is not None:
        logits_NV = torch.tanh(logits_NV / transform.cap) * transform.cap
    log_probs_NV = torch.log_softmax(logits_NV / temperature, dim=-1)
    entropies_N = -(log_probs_NV.exp() * log_probs_NV).sum(dim=-1)
    return log_probs_NV.gather(1, targets_N[:, None]).squeeze(1), entropies_N


@pytest.mark.parametrize("piece", [1, 4, 11, 100])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(
    "transform",
    [PLAIN_LOGITS, LogitTransform(scale=0.3), LogitTransform(cap=2.0), LogitTransform(scale=1.7, cap=3.0)],
    ids=["plain", "scale", "cap", "both"],
)
def test_pieces_give_the_values_and_gradients_of_full_logits(
    monkeypatch: pytest.MonkeyPatch, piece: int, with_bias: bool, temperature: float, transform: LogitTransform
) -> None:
    monkeypatch.setattr(logprobs, "MAX_PIECE_BYTES", 4 * VOCABULARY * piece)
    weights_N = torch.linspace(-1.0, 2.0, NUM_TOKENS)
    gradients = []
    for by_pieces in (True, False):
        hidden_NH, head_VH, bias_V, targets_N = make_inputs(with_bias=with_bias)
        if by_pieces:
            logprobs_N, entropies_N = linear_logprobs(
                hidden_NH,
                head_VH,
                targets_N,
                bias_V=bias_V,
                transform=transform,
                temperature=temperature,
                with_entropies=True,
            )
        else:
            logprobs_N, entropies_N = full_logprobs(hidden_NH, head_VH, bias_V, targets_N, temperature, transform)
        assert entropies_N is not None
        loss = (logprobs_N * weights_N).sum() + 0.3 * (entropies_N * weights_N.flip(0)).sum()
        inputs = [hidden_NH, head_VH] + ([bias_V] if bias_V is not None else [])
        gradients.append([loss.detach(), logprobs_N.detach(), *torch.autograd.grad(loss, inputs)])
    for found, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_a_uniform_head_gives_the_log_of_the_vocabulary() -> None:
    logprobs_N, entropies_N = linear_logprobs(
        torch.ones(2, 3), torch.zeros(8, 3), torch.tensor([0, 7]), with_entropies=True
    )
    assert logprobs_N.tolist() == pytest.approx([-2.0794415, -2.0794415])  # log(1 / 8)
    assert entropies_N is not None
    assert entropies_N.tolist() == pytest.approx([2.0794415, 2.0794415])


def test_a_second_backward_pass_gives_the_same_gradient() -> None:
    hidden_NH, head_VH, _, targets_N = make_inputs(with_bias=False)
    logprobs_N, _ = linear_logprobs(hidden_NH, head_VH, targets_N)
    first = torch.autograd.grad(logprobs_N.sum(), [hidden_NH, head_VH], retain_graph=True)
    second = torch.autograd.grad(logprobs_N.sum(), [hidden_NH, head_VH])
    for found, expected in zip(second, first, strict=True):
        torch.testing.assert_close(found, expected)


def test_entropies_alone_have_a_gradient_too() -> None:
    hidden_NH, head_VH, _, targets_N = make_inputs(with_bias=False)
    _, entropies_N = linear_logprobs(hidden_NH, head_VH, targets_N, with_entropies=True)
    assert entropies_N is not None
    found = torch.autograd.grad(entropies_N.sum(), hidden_NH)[0]
    expected = torch.autograd.grad(full_logprobs(hidden_NH, head_VH, None, targets_N, 1.0)[1].sum(), hidden_NH)[0]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_a_frozen_head_gets_no_gradient_and_hidden_states_do() -> None:
    hidden_NH, head_VH, _, targets_N = make_inputs(with_bias=False, dtype=torch.float32)
    linear_logprobs(hidden_NH, head_VH.detach(), targets_N)[0].sum().backward()
    assert hidden_NH.grad is not None
    assert head_VH.grad is None


def test_under_autocast_the_products_are_bfloat16_and_the_log_probs_float32() -> None:
    hidden_NH, head_VH, _, targets_N = make_inputs(with_bias=False, dtype=torch.float32)
    expected_N, _ = linear_logprobs(hidden_NH, head_VH, targets_N)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found_N, _ = linear_logprobs(hidden_NH, head_VH, targets_N)
    found_N.sum().backward()
    assert found_N.dtype == torch.float32
    assert not torch.equal(found_N, expected_N)
    torch.testing.assert_close(found_N, expected_N, atol=0.1, rtol=0.02)
    assert hidden_NH.grad is not None
    assert hidden_NH.grad.dtype == torch.float32


def test_no_tokens_give_no_log_probs() -> None:
    logprobs_N, _ = linear_logprobs(torch.zeros(0, 3), torch.zeros(8, 3), torch.zeros(0, dtype=torch.long))
    assert logprobs_N.shape == (0,)
