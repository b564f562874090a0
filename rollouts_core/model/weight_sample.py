"""Measure the share of training's changes that survives the engines' number format, on a sample of every weight.

    W_0  weights that training started from      W_t  weights that are published      r(W)  W in the engines' format
    d = W_t - W_0  change by training            e = r(W_t) - r(W_0)  change in engines

    arrived = <e, d> / <d, d>, over all weights: the part of e along d, as a share of d

bfloat16 has 8 significant bits: a bfloat16 weight w does not change while |d| is below |w| / 512.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

NUM_SAMPLED = 4096
"""Sampled numbers per tensor, at fixed random places; smaller tensors are used whole. The sampling error of
`Arrival.arrived` is below 0.01 for models of 10 million weights or more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """How much of the update since the start of training reached the engines, estimated from a sample."""

    arrived: float
    """<e, d> / <d, d>: 1 without rounding, 0 if engines still compute with the start weights."""
    changed: float
    """Share of the numbers in trained tensors whose value in engines differs from the start."""


@torch.no_grad()
def sample_weights(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies of up to `NUM_SAMPLED` numbers of each tensor, in its number format, in host memory."""
    return {name: _pick(tensor.detach()).to("cpu", copy=True) for name, tensor in weights.items()}


@torch.no_grad()
def measure_arrival(start: Mapping[str, Tensor], weights: Mapping[str, Tensor], dtype: torch.dtype) -> Arrival | None:
    """Measure how much of an update reaches engines with `dtype`; None without an update.

    For tensors on a GPU, start values and places are copied there one by one; the sums are read once.

    Args:
        start: `sample_weights` of the start weights. Tensors that are missing in `start` are skipped.
        weights: whole tensors, before rounding.
    """
    by_device: defaultdict[torch.device, list[Tensor]] = defaultdict(list)
    for name, tensor in weights.items():  # in a fixed order, so that the sums round alike in every process
        if name not in start:
            continue
        before, now = start[name].to(tensor.device), _pick(tensor)
        intended = now.double() - before.double()
        delivered = now.to(dtype).double() - before.to(dtype).double()
        sums = [delivered @ intended, intended @ intended, (delivered != 0).sum(), intended.any() * len(now)]
        by_device[tensor.device].append(torch.stack([each.double() for each in sums]) * (tensor.numel() / len(now)))
    if not by_device:
        return None
    totals = [torch.stack(found).sum(dim=0).tolist() for found in by_device.values()]
    along, squared, num_changed, num_trained = (sum(column) for column in zip(*totals, strict=True))
    return Arrival(arrived=along / squared, changed=num_changed / num_trained) if squared else None


def _pick(tensor: Tensor) -> Tensor:
    flat = tensor.reshape(-1)
    return flat if len(flat) <= NUM_SAMPLED else flat[_places(len(flat)).to(flat.device)]


@lru_cache(maxsize=256)
def _places(num_numbers: int) -> Tensor:
    return torch.randint(num_numbers, (NUM_SAMPLED,), generator=torch.Generator().manual_seed(num_numbers))
