"""One optimizer update from its micro-batches: what a step of SFT and of RL have in common.

Not here: which samples an update takes (sft.py, rl_batch.py), gradients (backends/pytorch.py).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from rollouts_core.backends.protocol import FailedTrainFuture, LateTrainFuture, TrainFuture, TrainingBackend
from rollouts_core.batch import TrainBatch
from rollouts_core.errors import ConfigError, NonFiniteError
from rollouts_core.metrics import sum_metrics
from rollouts_core.stopping import TrainingStop

if TYPE_CHECKING:
    from rollouts_core.algorithms.loss import Metrics

logger = logging.getLogger(__name__)

MAX_NAMED_SAMPLES = 16


async def update_policy(
    backend: TrainingBackend,
    micro_batches: Sequence[TrainBatch],
    *,
    on_nonfinite: Literal["stop", "skip"] = "stop",
    stop: TrainingStop | None = None,
) -> Metrics:
    """Add up the gradients of the micro-batches, then step.

    Args:
        stop: held before the weights change, so that it gives the step up before that or not at all.

    Returns:
        The update's metrics, with `num_nonfinite` = 0; or that as 1 and nothing else where the update was skipped.

    Raises:
        NonFiniteError: the loss or gradient is no finite number and `on_nonfinite` says stop. It names the samples
            that the loss was taken over; the weights are as before.
    """
    results: list[Metrics] = []
    late: list[tuple[TrainBatch, TrainFuture[Metrics]]] = []
    try:
        for micro_batch in micro_batches:
            added = backend.forward_backward(micro_batch)
            if isinstance(added, LateTrainFuture):  # a device works on it: the rest of the step can be asked for
                late.append((micro_batch, added))
            else:
                _collect(results, await _metrics_of(added, micro_batch))
        if stop and stop.may_give_up_step:
            await _collect_late(results, late)
        if stop:
            stop.hold()
        stepped = backend.optim_step()
        if isinstance(stepped, FailedTrainFuture):  # there may be no numbers of such a step, nor ranks that give them
            await stepped.result()
        await _collect_late(results, late)
        return {"num_nonfinite": 0.0, **sum_metrics(results), **await stepped.result()}
    except NonFiniteError as error:
        if on_nonfinite == "stop":
            raise
        logger.warning("skipped an update: %s", error)
        return {"num_nonfinite": 1.0}


class SkipCounter:
    """Counts the updates that were skipped one after the other, and ends a run that only skips.

    Args:
        limit: how many may be skipped in a row; 0 sets no limit.
        num_in_a_row: those before the first step, where a run goes on.
    """

    def __init__(self, limit: int, num_in_a_row: int = 0) -> None:
        self.limit = limit
        self.num_in_a_row = num_in_a_row

    def after_step(self, step: int, metrics: Metrics) -> None:
        """Count what a step skipped, by its metrics; a step that made an update begins the count anew.

        Raises:
            NonFiniteError: as many in a row as the limit allows were skipped, and then another one.
        """
        was_updated = "grad_norm" in metrics
        self.num_in_a_row = 0 if was_updated else self.num_in_a_row + int(metrics["num_nonfinite"])
        if 0 < self.limit < self.num_in_a_row:
            raise NonFiniteError(
                f"step {step}: {self.num_in_a_row} updates in a row were skipped because their loss or gradient was no "
                f"finite number, max_skipped_updates is {self.limit}: lower the learning rate, or look at the samples "
                "that the log names"
            )


def _collect(results: list[Metrics], metrics: Metrics) -> None:
    """Add a micro-batch's metrics to those of the others.

    Raises:
        ConfigError: they have other names.
    """
    results.append(metrics)
    if metrics.keys() != results[0].keys():
        differing = ", ".join(sorted(metrics.keys() ^ results[0].keys()))
        raise ConfigError(
            f"the loss function returned the metrics {differing} for some micro-batches of a step and not for "
            "others: return the same names each time, so that they can be added"
        )


async def _collect_late(results: list[Metrics], late: list[tuple[TrainBatch, TrainFuture[Metrics]]]) -> None:
    """Wait for the device, and take the metrics of its micro-batches out of `late`."""
    while late:
        micro_batch, added = late.pop(0)
        _collect(results, await _metrics_of(added, micro_batch))


async def _metrics_of(added: TrainFuture[Metrics], micro_batch: TrainBatch) -> Metrics:
    try:
        return await added.result()
    except NonFiniteError as error:
        named = ", ".join(micro_batch.sample_ids[:MAX_NAMED_SAMPLES])
        raise NonFiniteError(f"{error}; these were {named}") from error
