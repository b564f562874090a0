"""The interface `TrainingBackend`, through which the training loops train a model, and its futures."""

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
"""The state of a training loop as JSON values, for instance its position in the data, without the model's state."""


class TrainFuture(Protocol[T_co]):
    """A future of work that was requested from a training backend."""

    async def result(self) -> T_co:
        """Wait until the work is done. Returns its result or raises its error."""
        ...

    def done(self) -> bool:
        """True if `result` would return at once."""
        ...


class ImmediateTrainFuture(Generic[T]):
    """A future of work that is already done."""

    def __init__(self, value: T) -> None:
        self._value = value

    async def result(self) -> T:
        """Return the value at once."""
        return self._value

    def done(self) -> bool:
        """Always true."""
        return True


class ThreadTrainFuture(Generic[T]):
    """A future of work that runs in a new thread. The interpreter does not exit before the thread has ended."""

    def __init__(self, work: Callable[[], T]) -> None:
        executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="train future")
        self._future: Future[T] = executor.submit(work)
        executor.shutdown(wait=False)

    async def result(self) -> T:
        """Wait for the thread. Cancelling the wait does not stop the work."""
        return await asyncio.shield(asyncio.wrap_future(self._future))

    def done(self) -> bool:
        """True if the thread has ended."""
        return self._future.done()


class LateTrainFuture(Generic[T]):
    """A future of work that is queued on a device. Only the first call of `result` waits for the device.

    Args:
        read: waits for the device, and returns the value or raises the error.
        is_read: True if `read` would return at once.
    """

    def __init__(self, read: Callable[[], T], is_read: Callable[[], bool]) -> None:
        self._read, self._is_read = read, is_read
        self._outcome: TrainFuture[T] | None = None
        """The value or error, or None before the first call of `result`."""

    async def result(self) -> T:
        """Wait for the device to finish this work and all earlier work in its queue."""
        if self._outcome is None:
            self._outcome = future_of(self._read)
        return await self._outcome.result()

    def done(self) -> bool:
        """True if `result` would not wait."""
        return self._outcome is not None or self._is_read()


class FailedTrainFuture:
    """A future of work that already failed. `result` never returns, so the future fits any result type."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    async def result(self) -> NoReturn:
        """Raise the error of the work."""
        raise self._error

    def done(self) -> bool:
        """Always true."""
        return True


def future_of(work: Callable[[], T]) -> TrainFuture[T]:
    """Run `work` now, and return a future with the value or the error of `work`."""
    return future_from(lambda: ImmediateTrainFuture(work()))


def future_from(begin: Callable[[], TrainFuture[T]]) -> TrainFuture[T]:
    """Return the future that `begin` returns. If `begin` raises, return a future with its error."""
    try:
        return begin()
    except Exception as error:  # noqa: BLE001 - a future carries any exception of its work
        return FailedTrainFuture(error)


class TrainingBackend(Protocol):
    """A model in training, with its optimizer and learning-rate schedule.

    `forward_backward` accumulates the gradients of micro-batches. `optim_step` updates the weights with the accumulated
    gradient and clears it.

    Optional members:
        save_model_config(path)  writes the model's config.json. Without this method, RL needs a `PublishTarget`
        start_sample             the `sample_weights` of the start weights. With them, RL reports how much of the weight
                                 changes remains after rounding in engines
    A backend that also implements `TrainsAdapters` can publish only its adapters.
    """

    @property
    def num_ranks(self) -> int:
        """Number of devices that share the rows of each micro-batch. A micro-batch may be larger by this factor than on
        one device."""
        ...

    @property
    def weight_version(self) -> int:
        """Number of optimizer steps so far."""
        ...

    def forward_backward(self, batch: TrainBatch) -> TrainFuture[Metrics]:
        """Add the gradient of a micro-batch, and return metrics, which the caller sums over the micro-batches of a
        step.

        If the future is a `LateTrainFuture`, the caller may request the rest of the step before it awaits the metrics.
        If a loss or the gradient of the step is not finite, the weights stay unchanged, and the futures of
        `forward_backward` and `optim_step` raise NonFiniteError.
        """
        ...

    def score(self, batch: TrainBatch, *, reference: bool = False) -> TrainFuture[TokenScores]:
        """Compute the scores (such as log-probs) of a batch's tokens without a gradient, and return them on the CPU.

        Args:
            reference: use the start weights instead of the current weights.
        """
        ...

    def optim_step(self) -> TrainFuture[Metrics]:
        """Clip the gradient, update the weights, advance the schedule, and return gradient norm and learning rate."""
        ...

    def get_weights(self) -> TrainFuture[dict[str, Tensor]]:
        """Return the weights by Hugging Face name."""
        ...

    def load_weights(self, weights: Mapping[str, Tensor]) -> TrainFuture[None]:
        """Replace the weights. The optimizer keeps its state."""
        ...

    def release_cache(self) -> TrainFuture[None]:
        """Free the device memory that the backend caches but does not use, so that other processes can use it."""
        ...

    def save_checkpoint(self, path: Path, state: TrainingState) -> TrainFuture[None]:
        """Write weights, optimizer, schedule, random state and `state` as a checkpoint directory.

        The checkpoint has the state at the time of the call. Training may continue while the files are written. Before
        the next save, the caller must await the future.

        Args:
            state: state of the training loop. `step`, `settings` and `is_early` also go into the manifest. The file
                whose path is in `served_file`, if any, becomes `trainer/served.safetensors`.
        """
        ...

    def load_checkpoint(self, path: Path) -> TrainFuture[TrainingState]:
        """Load a checkpoint, and return the `state` that `save_checkpoint` stored in it."""
        ...


@runtime_checkable
class TrainsAdapters(Protocol):
    """A training backend that can train only low-rank adapters (LoRA)."""

    def get_adapters(self) -> TrainFuture[dict[str, Tensor]]:
        """Return copies of the adapters in host memory, by name, or empty if the backend trains all weights.

        Names are `<layer>.lora_A.weight` (rank, inputs) and `<layer>.lora_B.weight` (outputs, rank). B includes the
        adapter's scale, so B (A x) is added to the layer's output.
        """
        ...

    def get_base_weights(self) -> TrainFuture[dict[str, Tensor]]:
        """Return the frozen weights of the model, without the adapters, by Hugging Face name."""
        ...


def adapters_of(backend: TrainingBackend) -> TrainFuture[dict[str, Tensor]]:
    """Return the adapters of a backend, or empty if the backend does not train adapters."""
    return backend.get_adapters() if isinstance(backend, TrainsAdapters) else ImmediateTrainFuture({})


def base_weights_of(backend: TrainingBackend) -> TrainFuture[dict[str, Tensor]]:
    """Return the frozen weights of a backend that trains adapters, without the adapters."""
    assert isinstance(backend, TrainsAdapters), f"{type(backend).__name__} has no adapters"
    return backend.get_base_weights()
