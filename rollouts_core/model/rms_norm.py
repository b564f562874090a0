"""RMS norm for CPUs that reads memory a third as often as transformers' version, in both passes.

    y = w * x * r,  r = (mean(x^2) + eps)^-1/2        dx = r * (w * dy - x * r * mean(w * dy * x * r))

The backward pass calls torch's kernel for layer norm with mean 0 and r, which computes dx and dw at once. That kernel
also subtracts r * mean(w * dy) from dx, because layer norm subtracts a mean. RMS norm subtracts no mean, so this
backward pass adds the term again.

N positions, H hidden size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TRIAL_TOLERANCE = 1e-5
"""Largest accepted difference from the replaced norm in a test, relative to the largest output."""


class RMSNorm(nn.Module):
    """`weight * x / rms(x)` in float32, rounded to the input's dtype before the multiplication by the weight, as in
    Llama."""

    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight = weight
        self.variance_epsilon = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the last dimension."""
        normed: Tensor = _RMSNorm.apply(x, self.weight, self.variance_epsilon)  # type: ignore[no-untyped-call]
        return normed

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, eps={self.variance_epsilon}"


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_H: Tensor, eps: float) -> Tensor:
        wide = x.float()
        inverse_rms = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        inverse_rms = inverse_rms.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight_H, inverse_rms)
        normed: Tensor = wide * inverse_rms
        is_plain = x.dtype == weight_H.dtype == torch.float32
        return normed.mul_(weight_H) if is_plain else normed.to(x.dtype) * weight_H

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight_H, inverse_rms = ctx.saved_tensors
        wide_grad, wide_weight_H = grad.float(), weight_H.float()
        size = x.shape[-1]
        grad_x, grad_weight_H, _ = torch.ops.aten.native_layer_norm_backward(
            wide_grad,
            x.float(),
            (size,),
            torch.zeros_like(inverse_rms),
            inverse_rms,
            wide_weight_H,
            None,
            [True, ctx.needs_input_grad[1], False],
        )
        taken_off = (wide_grad.reshape(-1, size) @ wide_weight_H).view_as(inverse_rms) * inverse_rms / size
        grad_x = grad_x.add_(taken_off).to(x.dtype)
        return grad_x, None if grad_weight_H is None else grad_weight_H.to(weight_H.dtype), None


def use_fast_rms_norms(hf_model: PreTrainedModel) -> None:
    """Replace the model's RMS norms by `RMSNorm`, unless a test shows different results. The replacements keep the
    weights."""
    for module in list(hf_model.modules()):
        for name, norm in list(module.named_children()):
            if type(norm).__name__.endswith("RMSNorm") and (replacement := _find_replacement(norm)) is not None:
                setattr(module, name, replacement)


@torch.no_grad()
def _find_replacement(norm: nn.Module) -> RMSNorm | None:
    """The replacement of `norm`, or None if a test shows that `norm` computes another formula."""
    weight, eps = getattr(norm, "weight", None), getattr(norm, "variance_epsilon", None)
    if not isinstance(weight, nn.Parameter) or weight.ndim != 1 or eps is None or dict(norm.named_children()):
        return None
    replacement = RMSNorm(weight, eps)
    x = torch.linspace(-2.0, 3.0, 2 * len(weight)).view(2, -1).to(weight.dtype)
    expected = norm(x)
    found = replacement(x)
    is_same = found.dtype == expected.dtype and torch.allclose(
        found.float(), expected.float(), rtol=0, atol=TRIAL_TOLERANCE * float(expected.abs().max())
    )
    return replacement if is_same else None
