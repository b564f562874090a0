"""Round weights to the number format of the engines, and measure how much of an update the rounding removes.

Not here: the measure (model/weight_sample.py), publishing (weight_sync.py).

    engines keep float32, or an unknown format    no rounding
    engines keep bfloat16                         rounds merged adapters over bfloat16 weights: half the bytes
                                                  -> metrics of the publication; warning_rules.py reads them
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from rollouts_core.algorithms.loss import Metrics
from rollouts_core.model.weight_sample import (
    ARRIVED,
    CHANGED,
    FEW_ARRIVED,
    ROUNDING_REMEDY,
    Arrival,
    describe_loss,
    measure_arrival,
)
from rollouts_core.system.concurrency import gather


@runtime_checkable
class ReportsWeightsDtype(Protocol):
    """An engine that reports the number format of its server's weights."""

    async def weights_dtype(self) -> torch.dtype | None:
        """The server's number format, or None if the server does not report it, is unreachable, or has quantized
        weights."""
        ...


async def common_dtype(engines: Sequence[object]) -> torch.dtype | None:
    """The number format in which all engines store weights, or None if the formats differ or a format is unknown."""
    known = [engine for engine in engines if isinstance(engine, ReportsWeightsDtype)]
    found = set(await gather([engine.weights_dtype for engine in known]))
    return found.pop() if len(found) == 1 and len(known) == len(engines) else None


class RoundingWatch:
    """Measures how much of a training's update arrived in engines with the last publication."""

    def __init__(self) -> None:
        self._last: Arrival | None = None

    def round_for(self, weights: dict[str, Tensor], start: Mapping[str, Tensor], dtype: torch.dtype) -> None:
        """Measure the effect of rounding, then round merged adapters to `dtype` if engines and frozen weights have
        `dtype`.

        Tensors in `weights` are replaced one after another, so that host memory never holds both forms of all tensors.
        Other tensors are not rounded, because engines keep a few of them in float32 and round the rest.

        Args:
            start: result of `sample_weights` for the weights that training started from.
        """
        self._last = measure_arrival(start, weights, dtype)
        for name, before in start.items():
            if name in weights and before.dtype == dtype:
                weights[name] = weights[name].to(dtype)

    def take_metrics(self) -> Metrics:
        """Return the metrics of the last publication, and forget them, or empty if nothing was measured."""
        last, self._last = self._last, None
        return {ARRIVED: last.arrived, CHANGED: last.changed} if last else {}


def describe_last_rounding(lines: Sequence[Mapping[str, float]]) -> str:
    """The warning if a training's last publication rounded much of the update away, or empty.

    Args:
        lines: the metrics of the training's steps.
    """
    last = next((line for line in reversed(lines) if ARRIVED in line), None)
    return describe_rounding(last[ARRIVED], last[CHANGED]) if last and last[ARRIVED] < FEW_ARRIVED else ""


def describe_rounding(arrived: float, changed: float) -> str:
    """The text of the warning: how much of the update is missing in engines, and which setting avoids the loss."""
    return f"{describe_loss(arrived, changed)}. {ROUNDING_REMEDY[0].upper()}{ROUNDING_REMEDY[1:]}"
