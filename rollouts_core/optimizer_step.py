"""Make one optimizer update from its micro-batches. SFT and RL share this code."""

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
    """Add the gradients of the micro-batches, then take an optimizer step.

    Args:
        stop: a stop request may abandon the step until its weights change; afterwards, the request waits for the step.

    Returns:
        The update's metrics with `num_nonfinite` = 0; for a skipped update, only `num_nonfinite` = 1.

    Raises:
        NonFiniteError: the loss or gradient is NaN or infinite and `on_nonfinite` is "stop". The message names the
            samples whose loss it was. The weights are unchanged.
    """
    results: list[Metrics] = []
    late: list[tuple[TrainBatch, TrainFuture[Metrics]]] = []
    try:
        for micro_batch in micro_batches:
            added = backend.forward_backward(micro_batch)
            # The device still computes a LateTrainFuture, so submit the rest of the step before waiting for the
            # metrics.
            if isinstance(added, LateTrainFuture):
                late.append((micro_batch, added))
            else:
                _collect(results, await _metrics_of(added, micro_batch))
        if stop and stop.may_give_up_step:
            await _collect_late(results, late)
        if stop:
            stop.hold()
        stepped = backend.optim_step()
        # Raise the error of a failed step before waiting for metrics, because the ranks that send them may have ended.
        if isinstance(stepped, FailedTrainFuture):
            await stepped.result()
        await _collect_late(results, late)
        return {"num_nonfinite": 0.0, **sum_metrics(results), **await stepped.result()}
    except NonFiniteError as error:
        if on_nonfinite == "stop":
            raise
        logger.warning("skipped an update: %s", error)
        return {"num_nonfinite": 1.0}


class SkipCounter:
    """Counts consecutive skipped updates, and ends a run in which too many are skipped.

    Args:
        limit: largest permitted number of skipped updates in a row; 0 sets no limit.
        num_in_a_row: the count at the start, from the checkpoint of a resumed run.
    """

    def __init__(self, limit: int, num_in_a_row: int = 0) -> None:
        self.limit = limit
        self.num_in_a_row = num_in_a_row

    def after_step(self, step: int, metrics: Metrics) -> None:
        """Count the skipped updates of a step. A successful update resets the count.

        Raises:
            NonFiniteError: more updates in a row were skipped than `limit`.
        """
        was_updated = "grad_norm" in metrics
        self.num_in_a_row = 0 if was_updated else self.num_in_a_row + int(metrics["num_nonfinite"])
        if 0 < self.limit < self.num_in_a_row:
            raise NonFiniteError(
                f"step {step}: {self.num_in_a_row} updates in a row were skipped because their loss or gradient was "
                f"not finite; max_skipped_updates is {self.limit}. Lower the learning rate, or check the samples "
                "named in the log"
            )


def _collect(results: list[Metrics], metrics: Metrics) -> None:
    """Append a micro-batch's metrics to `results`.

    Raises:
        ConfigError: the names of the metrics differ from those of the first micro-batch.
    """
    results.append(metrics)
    if metrics.keys() != results[0].keys():
        differing = ", ".join(sorted(metrics.keys() ^ results[0].keys()))
        raise ConfigError(
            f"the loss function returned the metrics {differing} for only some micro-batches of a step: return the "
            "same names each time, so that they can be added"
        )


async def _collect_late(results: list[Metrics], late: list[tuple[TrainBatch, TrainFuture[Metrics]]]) -> None:
    """Wait for the micro-batches in `late`, and append their metrics to `results`."""
    while late:
        micro_batch, added = late.pop(0)
        _collect(results, await _metrics_of(added, micro_batch))


async def _metrics_of(added: TrainFuture[Metrics], micro_batch: TrainBatch) -> Metrics:
    try:
        return await added.result()
    except NonFiniteError as error:
        named = ", ".join(micro_batch.sample_ids[:MAX_NAMED_SAMPLES])
        raise NonFiniteError(f"{error}; samples: {named}") from error
