"""The rotary position embedding of the Llama family of models: frequencies, and tables of cosines and sines.

Rotary embedding: https://arxiv.org/abs/2104.09864. Scaling `llama3`: https://arxiv.org/abs/2407.21783 and the reference
model of Llama 3.1.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rollouts_core.embedded.architecture import Architecture


def rotary_frequencies(architecture: Architecture) -> Tensor:
    """Radians per position for each pair of dimensions, (D / 2,). In float32, as when the models were trained."""
    exponents = torch.arange(0, architecture.head_dim, 2, dtype=torch.float32) / architecture.head_dim
    frequencies = 1.0 / architecture.rope_theta**exponents
    scaling = architecture.rope_scaling
    if scaling is None:
        return frequencies
    # Turns per pair within the context length of pretraining. Pairs with few turns get their frequency divided.
    turns = scaling.pretrained_length / (2 * math.pi / frequencies)
    kept = ((turns - scaling.low_turns) / (scaling.high_turns - scaling.low_turns)).clamp(0.0, 1.0)
    return (1.0 - kept) * frequencies / scaling.factor + kept * frequencies


def rotary_tables(architecture: Architecture, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cos_TD and sin_TD for positions 0..length-1. The first half of sin_TD is negated."""
    angles = torch.outer(torch.arange(length, dtype=torch.float32), rotary_frequencies(architecture))
    sin = angles.sin()
    return torch.cat((angles, angles), -1).cos().to(dtype), torch.cat((-sin, sin), -1).to(dtype)
