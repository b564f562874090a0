"""What the training loops need of a model in training: a Protocol with futures.

Not here: PyTorch (pytorch.py), the loops (sft.py, rl.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NoReturn, Protocol, TypeVar

from torch import Tensor

from rollouts_core.batch import TrainBatch

if TYPE_CHECKING:
    from rollouts_core.algorithms.loss import Metrics, TokenScores

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

TrainingState = Mapping[str, Any]  # Any: JSON
"""What a loop keeps beside the model: cursors and counters, as JSON values."""


class TrainFuture(Protocol[T_co]):
    """Work that was asked of a backend. Errors of the work arrive at `result`."""

    async def result(self) -> T_co:
        """Wait until the work is done and return what it gave, or raise what it raised."""
        ...

    def done(self) -> bool:
        """True when `result` would not wait."""
        ...


class ImmediateTrainFuture(Generic[T]):
    """A future of work that is already done."""

    def __init__(self, value: T) -> None:
        self._value = value

    async def result(self) -> T:
        """The value, at once."""
        return self._value

    def done(self) -> bool:
        """True."""
        return True


class ThreadTrainFuture(Generic[T]):
    """A future of work that a thread of its own does from now on; the interpreter does not end before it is done."""

    def __init__(self, work: Callable[[], T]) -> None:
        executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="train future")
        self._future: Future[T] = executor.submit(work)
        executor.shutdown(wait=False)

    async def result(self) -> T:
        """Wait for the thread; who stops waiting does not stop the work."""
        return await asyncio.shield(asyncio.wrap_future(self._future))

    def done(self) -> bool:
        """True when the thread has ended."""
        return self._future.done()


class LateTrainFuture(Generic[T]):
    """A future of work that a device was given: only `result` waits for the device, once.

    Args:
        read: returns the value, or raises the error.
        is_read: whether `read` would not wait.
    """

    def __init__(self, read: Callable[[], T], is_read: Callable[[], bool]) -> None:
        self._read, self._is_read = read, is_read
        self._outcome: TrainFuture[T] | None = None
        """None before the first `result`."""

    async def result(self) -> T:
        """Wait for the device, and for what else it was given before this call."""
        if self._outcome is None:
            self._outcome = future_of(self._read)
        return await self._outcome.result()

    def done(self) -> bool:
        """True when `result` would not wait."""
        return self._outcome is not None or self._is_read()


class FailedTrainFuture:
    """A future of work that has failed already: any type of result, since there is none."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    async def result(self) -> NoReturn:
        """Raise the error."""
        raise self._error

    def done(self) -> bool:
        """True."""
        return True


def future_of(work: Callable[[], T]) -> TrainFuture[T]:
    """Do the work now; its value or its error arrives at `result`."""
    return future_from(lambda: ImmediateTrainFuture(work()))


def future_from(begin: Callable[[], TrainFuture[T]]) -> TrainFuture[T]:
    """The future that `begin` returns, or one of the error that it raises."""
    try:
        return begin()
    except Exception as error:  # noqa: BLE001 - a future carries whatever its work raised
        return FailedTrainFuture(error)


class TrainingBackend(Protocol):
    """A model, its optimizer and its schedule.

    `forward_backward` accumulates gradients; `optim_step` applies and clears them. Metrics of micro-batches of one
    step add up.

    It may have `save_model_config(path)`, which writes its model's config.json: then RL needs no `PublishTarget`. It
    may have `start_sample`, the `sample_weights` of what training started from: then RL says how much of an update
    arrives in engines that round weights.
    """

    @property
    def num_ranks(self) -> int:
        """Devices that share the rows of each batch: a micro-batch may be that many times as large as one holds."""
        ...

    @property
    def weight_version(self) -> int:
        """The number of optimizer steps that the weights have taken."""
        ...

    def forward_backward(self, batch: TrainBatch) -> TrainFuture[Metrics]:
        """Add the batch's gradient; returns metrics that add up over the step's micro-batches.

        A `LateTrainFuture` promises that the rest of the step may be asked for before its result: with a loss or
        gradient that is not finite the step changes no weights, and the results of that `forward_backward` and of
        `optim_step` are a NonFiniteError.
        """
        ...

    def score(self, batch: TrainBatch, *, reference: bool = False) -> TrainFuture[TokenScores]:
        """What the policy says about the batch, without a gradient, on the CPU.

        Args:
            reference: ask the weights that training started from instead of the current ones.
        """
        ...

    def optim_step(self) -> TrainFuture[Metrics]:
        """Clip, step, move the schedule on; returns the gradient's norm and the learning rate."""
        ...

    def get_weights(self) -> TrainFuture[dict[str, Tensor]]:
        """The weights by their Hugging Face names."""
        ...

    def load_weights(self, weights: Mapping[str, Tensor]) -> TrainFuture[None]:
        """Replace the weights; the optimizer keeps its state."""
        ...

    def release_cache(self) -> TrainFuture[None]:
        """Give memory of the device back that holds nothing, for other processes to use."""
        ...

    def save_checkpoint(self, path: Path, state: TrainingState) -> TrainFuture[None]:
        """Write weights, optimizer, schedule, random state and `state` as a checkpoint directory.

        What is written is as it was at the call; training may go on meanwhile. The future is waited for before the
        next save.

        Args:
            state: `step`, and where known `score` and `settings`, go into the manifest too. The file that
                `served_file` names, if any, becomes `trainer/served.safetensors`.
        """
        ...

    def load_checkpoint(self, path: Path) -> TrainFuture[TrainingState]:
        """Go on from a checkpoint; returns the `state` that was saved with it."""
        ...
