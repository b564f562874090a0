"""Run a training backend in a thread, so that the event loop continues while the backend computes.

    event loop      run(train_on_rollouts) ----+   get_weights --+   save_checkpoint --+
    thread                                     +-> the whole step +-> copies            +-> ...

A single thread does all work of a run. Several threads could change the model at the same time, and a forward pass
without dropout would disable the dropout of a concurrent training step. OpenMP would also keep workers for each thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import anyio
import torch
from torch import Tensor

from rollouts_core.algorithms.loss import Metrics, TokenScores
from rollouts_core.backends.protocol import (
    TrainFuture,
    TrainingBackend,
    TrainingState,
    adapters_of,
    base_weights_of,
)
from rollouts_core.batch import TrainBatch

T = TypeVar("T")


class RelayedFuture(Generic[T]):
    """A future of work that the backend's thread will request from the backend later."""

    def __init__(self, asked: Future[TrainFuture[T]]) -> None:
        self._asked = asked

    async def result(self) -> T:
        """Wait until the thread has requested the work, then wait for the work."""
        inner = await asyncio.shield(asyncio.wrap_future(self._asked))
        return await inner.result()

    def done(self) -> bool:
        """True if `result` would not wait."""
        return self._asked.done() and (self._asked.exception() is not None or self._asked.result().done())


class ThreadedBackend:
    """A `TrainingBackend` that runs all calls of another backend in one thread, in order.

    Args:
        backend: the backend to run. No other caller may use it.
    """

    def __init__(self, backend: TrainingBackend) -> None:
        device = torch.cuda.current_device() if torch.cuda.is_available() else None
        self._backend = backend
        self._thread = ThreadPoolExecutor(
            max_workers=1,
            thread_name_prefix="trainer",
            # By default a new thread uses the first GPU.
            initializer=None if device is None else partial(torch.cuda.set_device, device),
        )
        self.is_busy = False
        """True while `run` is running, when other calls would wait. Also true after `aclose`."""

    async def run(self, work: Callable[[TrainingBackend], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine that uses the backend in the backend's thread, without other calls in between."""
        self.is_busy = True
        done = self._thread.submit(lambda: asyncio.run(work(self._backend)))
        try:
            return await asyncio.shield(asyncio.wrap_future(done))
        finally:
            self.is_busy = False

    async def aclose(self) -> None:
        """Wait until the thread has done its work, which cannot be interrupted."""
        self.is_busy = True
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(self._thread.shutdown)

    @property
    def num_tokens(self) -> int | None:
        """`num_tokens` of the backend, or None if the backend has no such attribute."""
        return getattr(self._backend, "num_tokens", None)

    @property
    def start_sample(self) -> Mapping[str, Tensor]:
        """`start_sample` of the backend, or empty if the backend has no such attribute."""
        return getattr(self._backend, "start_sample", {})

    @property
    def num_ranks(self) -> int:
        return self._backend.num_ranks

    @property
    def weight_version(self) -> int:
        return self._backend.weight_version

    @property
    def backend(self) -> TrainingBackend:
        """The backend behind the thread."""
        return self._backend

    def forward_backward(self, batch: TrainBatch) -> TrainFuture[Metrics]:
        return self._relay(lambda: self._backend.forward_backward(batch))

    def score(self, batch: TrainBatch, *, reference: bool = False) -> TrainFuture[TokenScores]:
        return self._relay(lambda: self._backend.score(batch, reference=reference))

    def optim_step(self) -> TrainFuture[Metrics]:
        return self._relay(self._backend.optim_step)

    def get_weights(self) -> TrainFuture[dict[str, Tensor]]:
        return self._relay(self._backend.get_weights)

    def get_adapters(self) -> TrainFuture[dict[str, Tensor]]:
        return self._relay(lambda: adapters_of(self._backend))

    def get_base_weights(self) -> TrainFuture[dict[str, Tensor]]:
        return self._relay(lambda: base_weights_of(self._backend))

    def load_weights(self, weights: Mapping[str, Tensor]) -> TrainFuture[None]:
        return self._relay(lambda: self._backend.load_weights(weights))

    def release_cache(self) -> TrainFuture[None]:
        return self._relay(self._backend.release_cache)

    def save_checkpoint(self, path: Path, state: TrainingState) -> TrainFuture[None]:
        as_it_is = dict(state)
        return self._relay(lambda: self._backend.save_checkpoint(path, as_it_is))

    def load_checkpoint(self, path: Path) -> TrainFuture[TrainingState]:
        return self._relay(lambda: self._backend.load_checkpoint(path))

    def _relay(self, ask: Callable[[], TrainFuture[T]]) -> RelayedFuture[T]:
        return RelayedFuture(self._thread.submit(ask))


@asynccontextmanager
async def beside_event_loop(backend: TrainingBackend, *, is_needed: bool) -> AsyncIterator[TrainingBackend]:
    """Run a backend in a thread for the duration of the `with` block. Without `is_needed`, yield the backend itself."""
    if not is_needed:
        yield backend
        return
    threaded = ThreadedBackend(backend)
    try:
        yield threaded
    finally:
        await threaded.aclose()


async def run_with(backend: TrainingBackend, work: Callable[[TrainingBackend], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine that uses a backend. If the backend has a thread, the coroutine runs in this thread."""
    return await (backend.run(work) if isinstance(backend, ThreadedBackend) else work(backend))


def without_thread(backend: TrainingBackend) -> TrainingBackend:
    """Return the backend without its thread, for callers that cannot wait for the thread."""
    return backend.backend if isinstance(backend, ThreadedBackend) else backend
