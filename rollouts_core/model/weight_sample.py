"""Measure how much of the weight update survives rounding to the engines' number format, on a sample of every weight.

    W_0  weights at the start of training         W_t  weights that are published      r(W)  W in the engines' format
    d = W_t - W_0  change by training            e = r(W_t) - r(W_0)  change in engines

    arrived = <e, d> / <d, d>, over all weights: the part of e along d, as a share of d

Example: bfloat16 has 8 significant bits, so a bfloat16 weight w does not change while |d| is below |w| / 512.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

NUM_SAMPLED = 4096
"""Number of sampled elements per tensor, at fixed random positions. Smaller tensors are sampled completely.

The sampling error of `Arrival.arrived` is below 0.01 for models with at least 10 million weights."""
FEW_ARRIVED = 0.9
"""Smallest share of an update that may arrive in engines without a warning."""
ROUNDING_REMEDY = 'set rollout.engine.dtype = "float32" (on a GPU with the kind vllm), or raise training.rl.optim.lr'
ARRIVED, CHANGED = "update_arrived_share", "weights_changed_share"
"""Names of metrics that describe a publication of weights to engines that round them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """How much of the update since the start of training reached the engines, estimated from a sample of the
    weights."""

    arrived: float
    """<e, d> / <d, d>: 1 if nothing is lost to rounding, 0 if the engines still compute with the start weights."""
    changed: float
    """Share of the elements of trained tensors whose value in the engines differs from the start."""


@torch.no_grad()
def sample_weights(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy up to `NUM_SAMPLED` elements of each tensor to host memory, in the tensor's own dtype."""
    return {name: _pick(tensor.detach()).to("cpu", copy=True) for name, tensor in weights.items()}


@torch.no_grad()
def measure_arrival(start: Mapping[str, Tensor], weights: Mapping[str, Tensor], dtype: torch.dtype) -> Arrival | None:
    """Measure how much of the update reaches engines that compute in `dtype`. Returns None if no weight changed.

    For tensors on a GPU, start values and positions are copied to the GPU tensor by tensor, and the sums are read once.

    Args:
        start: result of `sample_weights` for the start weights. Tensors that are missing in `start` are skipped.
        weights: whole tensors, before rounding to `dtype`.
    """
    by_device: defaultdict[torch.device, list[Tensor]] = defaultdict(list)
    for name, tensor in weights.items():  # in a fixed order, so that every process rounds the sums equally
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


def describe_loss(arrived: float, changed: float) -> str:
    """A phrase that says how much of the update is missing in engines.

    Args:
        arrived: `Arrival.arrived`.
        changed: `Arrival.changed`.
    """
    return (
        f"{arrived:.0%} of RL's change of the weights arrived in the engines, whose number format rounds away the "
        f"rest: {1 - changed:.0%} of the trained weights are still equal to the start weights there"
    )
