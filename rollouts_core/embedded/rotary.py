"""The rotary position embedding of the Llama family: frequencies, and tables of cosines and sines.

Rotary embedding: https://arxiv.org/abs/2104.09864. Scaling `llama3`: https://arxiv.org/abs/2407.21783 and the reference
model of Llama 3.1.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rollouts_core.embedded.architecture import Architecture


def rotary_frequencies(architecture: Architecture) -> Tensor:
    """Radians per position of each pair of dimensions, (D / 2,), in float32 as in the models' training."""
    exponents = torch.arange(0, architecture.head_dim, 2, dtype=torch.float32) / architecture.head_dim
    frequencies = 1.0 / architecture.rope_theta**exponents
    scaling = architecture.rope_scaling
    if scaling is None:
        return frequencies
    # Turns within the context of pretraining. Pairs with few turns are slowed down, pairs with many turns stay.
    turns = scaling.pretrained_length / (2 * math.pi / frequencies)
    kept = ((turns - scaling.low_turns) / (scaling.high_turns - scaling.low_turns)).clamp(0.0, 1.0)
    return (1.0 - kept) * frequencies / scaling.factor + kept * frequencies


def rotary_tables(architecture: Architecture, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos_TD, and sin_TD with the sign of the half that it multiplies."""
    angles = torch.outer(torch.arange(length, dtype=torch.float32), rotary_frequencies(architecture))
    sin = angles.sin()
    return torch.cat((angles, angles), -1).cos().to(dtype), torch.cat((-sin, sin), -1).to(dtype)
