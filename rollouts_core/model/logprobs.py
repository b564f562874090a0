"""Compute log-probs and entropies from hidden states without storing all logits.

The logits are the largest tensor of a batch: for 16,384 tokens and a vocabulary of 150,000 they take 9.8 GB in float32,
and the naive computation stores about three copies. This module processes a piece of the tokens at a time: it
multiplies the piece with the output head, reduces the logits to two numbers per token, and drops the logits. The
backward pass computes the logits of each piece again.

N tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

MAX_PIECE_BYTES = 64 << 20
"""Highest size of the logits of one piece of the tokens in float32, bytes. If all tokens fit in one piece, its logits
are kept for the backward pass."""
MAX_GPU_PIECE_BYTES = 4 * MAX_PIECE_BYTES
"""Highest size of a piece's logits in float32 on a GPU, bytes.

Each piece reads the head three times and updates the head's gradient once: 2.8 GB of memory traffic for a head of
1,024 x 152,000. This traffic dominates with 110 tokens per piece, but not with 440."""


@dataclass(frozen=True, slots=True)
class LogitTransform:
    """How a model converts the products x of its output head to logits: cap * tanh(scale * x / cap)."""

    scale: float = 1.0
    """Factor by which the products are multiplied."""
    cap: float | None = None
    """Limit of the logits' absolute values, or None if the model has no limit."""


PLAIN_LOGITS = LogitTransform()
"""The logits are the products of the head, unchanged."""


def transform_logits(products: Tensor, transform: LogitTransform) -> Tensor:
    """Convert products of an output head to logits, in place."""
    if transform.cap is not None:
        return products.mul_(transform.scale / transform.cap).tanh_().mul_(transform.cap)
    return products if transform.scale == 1.0 else products.mul_(transform.scale)


def linear_logprobs(
    hidden_NH: Tensor,
    head_VH: Tensor,
    targets_N: Tensor,
    *,
    bias_V: Tensor | None = None,
    transform: LogitTransform = PLAIN_LOGITS,
    temperature: float = 1.0,
    with_entropies: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Log-probs of the targets under softmax(transform(hidden @ head.T + bias) / temperature), and entropies of this
    softmax.

    Under autocast, the matrix products use the autocast dtype. All later computations use float32.

    Returns:
        (N,) log-probs and (N,) entropies, nats, float32. The entropies are None unless requested.
    """
    assert len(hidden_NH) == len(targets_N), f"{hidden_NH.shape} against {targets_N.shape}"
    device_type = hidden_NH.device.type
    if torch.is_autocast_enabled(device_type):
        compute_dtype = torch.get_autocast_dtype(device_type)
        hidden_NH, head_VH = hidden_NH.to(compute_dtype), head_VH.to(compute_dtype)
        bias_V = None if bias_V is None else bias_V.to(compute_dtype)
    logprobs_N, entropies_N = _LinearLogprobs.apply(  # type: ignore[no-untyped-call]  # torch has no types for it
        hidden_NH, head_VH, bias_V, targets_N, transform, temperature, with_entropies
    )
    return logprobs_N, entropies_N if with_entropies else None


class _LinearLogprobs(torch.autograd.Function):
    """Autograd function of `linear_logprobs`, with its own backward pass."""

    @staticmethod
    def forward(
        ctx: Any,  # Any: autograd's context, which takes any attribute
        hidden_NH: Tensor,
        head_VH: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        transform: LogitTransform,
        temperature: float,
        with_entropies: bool,
    ) -> tuple[Tensor, Tensor]:
        num_tokens, num_words = len(hidden_NH), len(head_VH)
        max_bytes = MAX_GPU_PIECE_BYTES if hidden_NH.is_cuda else MAX_PIECE_BYTES
        ctx.piece = max(1, max_bytes // (4 * num_words))
        ctx.transform, ctx.temperature = transform, temperature
        logprobs_N = torch.empty(num_tokens, device=hidden_NH.device)
        log_norms_N = torch.empty_like(logprobs_N)
        entropies_N = torch.zeros_like(logprobs_N)
        ctx.logits = None
        for start in range(0, num_tokens, ctx.piece):
            at = slice(start, start + ctx.piece)
            logits = _piece_of_logits(hidden_NH[at], head_VH, bias_V, transform, temperature)
            log_norms_N[at] = torch.logsumexp(logits, dim=-1)
            logprobs_N[at] = logits.gather(1, targets_N[at, None]).squeeze(1) - log_norms_N[at]
            if with_entropies:
                log_probs = logits - log_norms_N[at, None]
                entropies_N[at] = -(log_probs.exp() * log_probs).sum(dim=-1)
            if num_tokens <= ctx.piece and any(ctx.needs_input_grad):
                ctx.logits = logits
        ctx.save_for_backward(hidden_NH, head_VH, bias_V, targets_N, log_norms_N, entropies_N)
        ctx.set_materialize_grads(False)  # unused entropies then cost nothing in the backward pass
        return logprobs_N, entropies_N

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprobs_N: Tensor | None, grad_entropies_N: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden_NH, head_VH, bias_V, targets_N, log_norms_N, entropies_N = ctx.saved_tensors
        if grad_logprobs_N is None:
            grad_logprobs_N = torch.zeros_like(log_norms_N)
        needs_hidden, needs_head, needs_bias = ctx.needs_input_grad[:3]
        grad_hidden_NH = torch.empty_like(hidden_NH) if needs_hidden else None
        grad_head_VH = torch.zeros_like(head_VH, dtype=torch.float32) if needs_head else None
        grad_bias_V = torch.zeros_like(bias_V, dtype=torch.float32) if needs_bias else None
        kept, ctx.logits = ctx.logits, None
        for start in range(0, len(hidden_NH), ctx.piece):
            at = slice(start, start + ctx.piece)
            logits = kept
            if logits is None:
                logits = _piece_of_logits(hidden_NH[at], head_VH, bias_V, ctx.transform, ctx.temperature)
            slope = _slope_of_transform(logits, ctx.transform, ctx.temperature)  # before the logits are overwritten
            log_probs = logits.sub_(log_norms_N[at, None])
            # d logprob / d logit = onehot - p;  d entropy / d logit = -p (log p + entropy)
            weight = -grad_logprobs_N[at, None]
            if grad_entropies_N is not None:
                weight = weight - (log_probs + entropies_N[at, None]) * grad_entropies_N[at, None]
            grad_logits = log_probs.exp_().mul_(weight)
            grad_logits.scatter_add_(1, targets_N[at, None], grad_logprobs_N[at, None])
            if ctx.temperature != 1.0:
                grad_logits /= ctx.temperature
            if slope is not None:
                grad_logits *= slope
            grad_products = grad_logits.to(hidden_NH.dtype)
            if grad_hidden_NH is not None:
                torch.mm(grad_products, head_VH, out=grad_hidden_NH[at])
            if grad_head_VH is not None:
                grad_head_VH += grad_products.T @ hidden_NH[at]
            if grad_bias_V is not None:
                grad_bias_V += grad_logits.sum(dim=0)
        return (
            grad_hidden_NH,
            None if grad_head_VH is None else grad_head_VH.to(head_VH.dtype),
            None if grad_bias_V is None else grad_bias_V.to(bias_V.dtype),
            None,
            None,
            None,
            None,
        )


def _piece_of_logits(
    hidden: Tensor, head_VH: Tensor, bias_V: Tensor | None, transform: LogitTransform, temperature: float
) -> Tensor:
    """Float32 logits of some tokens, divided by the temperature. The caller may overwrite the result."""
    logits = torch.nn.functional.linear(hidden, head_VH, bias_V).float()
    logits = transform_logits(logits, transform)
    return logits if temperature == 1.0 else logits.div_(temperature)


def _slope_of_transform(logits: Tensor, transform: LogitTransform, temperature: float) -> Tensor | float | None:
    """Derivative of the logit transform, computed from the logits after the temperature, or None if it is always 1."""
    if transform.cap is not None:
        # d cap tanh(scale x / cap) / dx = scale (1 - tanh^2)
        return (logits * (temperature / transform.cap)).square_().neg_().add_(1.0).mul_(transform.scale)
    return None if transform.scale == 1.0 else transform.scale
