"""`TrainingBackend`: the interface between the training loops and a model in training, with futures."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NoReturn, Protocol, TypeVar, runtime_checkable

from torch import Tensor

from rollouts_core.batch import TrainBatch

if TYPE_CHECKING:
    from rollouts_core.algorithms.loss import Metrics, TokenScores

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

TrainingState = Mapping[str, Any]  # Any: JSON
"""A loop's state besides the model: cursors and counters, as JSON values."""


class TrainFuture(Protocol[T_co]):
    """Work requested from a backend. `result` raises the work's errors."""

    async def result(self) -> T_co:
        """Wait for the work and return its result, or raise its error."""
        ...

    def done(self) -> bool:
        """True if `result` would not wait."""
        ...


class ImmediateTrainFuture(Generic[T]):
    """A future of finished work."""

    def __init__(self, value: T) -> None:
        self._value = value

    async def result(self) -> T:
        """The value, without waiting."""
        return self._value

    def done(self) -> bool:
        """Always true."""
        return True


class ThreadTrainFuture(Generic[T]):
    """A future of work in its own thread, started now. The interpreter does not exit before it is done."""

    def __init__(self, work: Callable[[], T]) -> None:
        executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="train future")
        self._future: Future[T] = executor.submit(work)
        executor.shutdown(wait=False)

    async def result(self) -> T:
        """Wait for the thread; cancelling the wait does not stop the work."""
        return await asyncio.shield(asyncio.wrap_future(self._future))

    def done(self) -> bool:
        """True if the thread has ended."""
        return self._future.done()


class LateTrainFuture(Generic[T]):
    """A future of work queued on a device; only `result` waits for the device, once.

    Args:
        read: returns the value or raises the error.
        is_read: True if `read` would not wait.
    """

    def __init__(self, read: Callable[[], T], is_read: Callable[[], bool]) -> None:
        self._read, self._is_read = read, is_read
        self._outcome: TrainFuture[T] | None = None
        """None before the first `result`."""

    async def result(self) -> T:
        """Wait for the device, including earlier work in its queue."""
        if self._outcome is None:
            self._outcome = future_of(self._read)
        return await self._outcome.result()

    def done(self) -> bool:
        """True if `result` would not wait."""
        return self._outcome is not None or self._is_read()


class FailedTrainFuture:
    """A future of work that already failed; fits any result type."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    async def result(self) -> NoReturn:
        """Raise the error."""
        raise self._error

    def done(self) -> bool:
        """Always true."""
        return True


def future_of(work: Callable[[], T]) -> TrainFuture[T]:
    """Do the work now; `result` returns its value or raises its error."""
    return future_from(lambda: ImmediateTrainFuture(work()))


def future_from(begin: Callable[[], TrainFuture[T]]) -> TrainFuture[T]:
    """The future from `begin`, or a failed one if `begin` raises."""
    try:
        return begin()
    except Exception as error:  # noqa: BLE001 - a future carries any exception of its work
        return FailedTrainFuture(error)


class TrainingBackend(Protocol):
    """A model, its optimizer and its schedule.

    `forward_backward` accumulates gradients; `optim_step` applies and clears them. Metrics of a step's micro-batches
    are summed.

    Optional members: with `save_model_config(path)`, which writes the model's config.json, RL needs no
    `PublishTarget`. With `start_sample`, the `sample_weights` of the start weights, RL reports how much of an update
    survives rounding in engines. A backend that also `TrainsAdapters` can publish them without the other weights.
    """

    @property
    def num_ranks(self) -> int:
        """Number of devices that share the rows of each batch; a micro-batch may be that many times larger."""
        ...

    @property
    def weight_version(self) -> int:
        """Number of optimizer steps taken."""
        ...

    def forward_backward(self, batch: TrainBatch) -> TrainFuture[Metrics]:
        """Add the batch's gradient; returns metrics to sum over the step's micro-batches.

        With a `LateTrainFuture`, the rest of the step may be requested before its result. If a loss or gradient is not
        finite, the step then changes no weights, and the results of this call and of `optim_step` raise NonFiniteError.
        """
        ...

    def score(self, batch: TrainBatch, *, reference: bool = False) -> TrainFuture[TokenScores]:
        """Scores of the batch without a gradient, on the CPU.

        Args:
            reference: use the start weights instead of the current ones.
        """
        ...

    def optim_step(self) -> TrainFuture[Metrics]:
        """Clip, step, and advance the schedule; returns the gradient's norm and the learning rate."""
        ...

    def get_weights(self) -> TrainFuture[dict[str, Tensor]]:
        """The weights by Hugging Face name."""
        ...

    def load_weights(self, weights: Mapping[str, Tensor]) -> TrainFuture[None]:
        """Replace the weights; the optimizer keeps its state."""
        ...

    def release_cache(self) -> TrainFuture[None]:
        """Free unused cached memory of the device for other processes."""
        ...

    def save_checkpoint(self, path: Path, state: TrainingState) -> TrainFuture[None]:
        """Write weights, optimizer, schedule, random state and `state` as a checkpoint directory.

        The content is that at the time of the call; training may continue meanwhile. The caller waits for the future
        before the next save.

        Args:
            state: `step`, `score` and `settings` also go into the manifest. The file at `served_file`, if any, becomes
                `trainer/served.safetensors`.
        """
        ...

    def load_checkpoint(self, path: Path) -> TrainFuture[TrainingState]:
        """Load a checkpoint; returns the `state` that was saved with it."""
        ...


@runtime_checkable
class TrainsAdapters(Protocol):
    """A backend that may train low-rank adapters alone."""

    def get_adapters(self) -> TrainFuture[dict[str, Tensor]]:
        """Copies of the adapters in host memory; empty if all weights are trained.

        Named `<layer>.lora_A.weight` (rank, inputs) and `<layer>.lora_B.weight` (outputs, rank). A layer adds B (A x),
        so B includes the adapters' scale.
        """
        ...

    def get_base_weights(self) -> TrainFuture[dict[str, Tensor]]:
        """The weights that the adapters belong to, by Hugging Face name; training does not change them."""
        ...


def adapters_of(backend: TrainingBackend) -> TrainFuture[dict[str, Tensor]]:
    """A backend's adapters; empty if it trains none."""
    return backend.get_adapters() if isinstance(backend, TrainsAdapters) else ImmediateTrainFuture({})


def base_weights_of(backend: TrainingBackend) -> TrainFuture[dict[str, Tensor]]:
    """The weights that a backend's adapters belong to."""
    assert isinstance(backend, TrainsAdapters), f"{type(backend).__name__} has no adapters"
    return backend.get_base_weights()
