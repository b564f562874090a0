"""A training backend whose every call is made by one thread: it computes while the event loop goes on.

Not here: the backends themselves (pytorch.py, fsdp.py, jax.py), who is asked meanwhile (rollout/manager.py).

    loop            run(train_on_rollouts) ----+   get_weights --+   save_checkpoint --+
    its thread                                 +-> the whole step +-> copies            +-> ...

One thread for the whole run: calls from two threads would change one model at the same time, and a forward pass without
dropout amid a step would take the dropout from that step. Besides, OpenMP keeps workers for every thread that ever
computed: those of this one, and of the one that created the backend.
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
from rollouts_core.backends.protocol import TrainFuture, TrainingBackend, TrainingState
from rollouts_core.batch import TrainBatch

T = TypeVar("T")


class RelayedFuture(Generic[T]):
    """A future of work that a thread will ask a backend for."""

    def __init__(self, asked: Future[TrainFuture[T]]) -> None:
        self._asked = asked

    async def result(self) -> T:
        """Wait until the thread has asked, and then for the work."""
        inner = await asyncio.shield(asyncio.wrap_future(self._asked))
        return await inner.result()

    def done(self) -> bool:
        """True when `result` would not wait."""
        return self._asked.done() and (self._asked.exception() is not None or self._asked.result().done())


class ThreadedBackend:
    """A backend behind a thread; implements `TrainingBackend`. Calls are done in their order.

    Args:
        backend: nobody else calls it any more.
    """

    def __init__(self, backend: TrainingBackend) -> None:
        device = torch.cuda.current_device() if torch.cuda.is_available() else None
        self._backend = backend
        self._thread = ThreadPoolExecutor(
            max_workers=1,
            thread_name_prefix="trainer",
            # A new thread would take the first GPU.
            initializer=None if device is None else partial(torch.cuda.set_device, device),
        )
        self.is_busy = False
        """Whether `run` is under way, so that whoever asks for anything waits until it is over; at the end for ever."""

    async def run(self, work: Callable[[TrainingBackend], Coroutine[Any, Any, T]]) -> T:
        """What a coroutine returns that uses the backend in its thread; no other call comes in between."""
        self.is_busy = True
        done = self._thread.submit(lambda: asyncio.run(work(self._backend)))
        try:
            return await asyncio.shield(asyncio.wrap_future(done))
        finally:
            self.is_busy = False

    async def aclose(self) -> None:
        """Wait for the thread, whose work cannot be broken off."""
        self.is_busy = True
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(self._thread.shutdown)

    @property
    def num_tokens(self) -> int | None:
        """The backend's, if it says one."""
        return getattr(self._backend, "num_tokens", None)

    @property
    def start_sample(self) -> Mapping[str, Tensor]:
        """The backend's, if it has one."""
        return getattr(self._backend, "start_sample", {})

    @property
    def num_ranks(self) -> int:
        """Devices that share the rows of each batch."""
        return self._backend.num_ranks

    @property
    def weight_version(self) -> int:
        """The number of optimizer steps that the weights have taken."""
        return self._backend.weight_version

    @property
    def backend(self) -> TrainingBackend:
        """The backend behind the thread."""
        return self._backend

    def forward_backward(self, batch: TrainBatch) -> TrainFuture[Metrics]:
        """Add the batch's gradient to that of its step."""
        return self._relay(lambda: self._backend.forward_backward(batch))

    def score(self, batch: TrainBatch, *, reference: bool = False) -> TrainFuture[TokenScores]:
        """What the policy, or the reference, says about the batch."""
        return self._relay(lambda: self._backend.score(batch, reference=reference))

    def optim_step(self) -> TrainFuture[Metrics]:
        """Clip the gradient, step, and move the learning rate on."""
        return self._relay(self._backend.optim_step)

    def get_weights(self) -> TrainFuture[dict[str, Tensor]]:
        """The weights by their Hugging Face names."""
        return self._relay(self._backend.get_weights)

    def load_weights(self, weights: Mapping[str, Tensor]) -> TrainFuture[None]:
        """Replace the weights; the optimizer keeps its state."""
        return self._relay(lambda: self._backend.load_weights(weights))

    def release_cache(self) -> TrainFuture[None]:
        """Give memory of the device back that holds nothing."""
        return self._relay(self._backend.release_cache)

    def save_checkpoint(self, path: Path, state: TrainingState) -> TrainFuture[None]:
        """Write a checkpoint of what was trained so far; training may go on meanwhile."""
        as_it_is = dict(state)
        return self._relay(lambda: self._backend.save_checkpoint(path, as_it_is))

    def load_checkpoint(self, path: Path) -> TrainFuture[TrainingState]:
        """Go on from a checkpoint; returns the loop's state."""
        return self._relay(lambda: self._backend.load_checkpoint(path))

    def _relay(self, ask: Callable[[], TrainFuture[T]]) -> RelayedFuture[T]:
        return RelayedFuture(self._thread.submit(ask))


@asynccontextmanager
async def beside_event_loop(backend: TrainingBackend, *, is_needed: bool) -> AsyncIterator[TrainingBackend]:
    """The backend behind a thread of its own for as long as the block runs; itself where that is not needed."""
    if not is_needed:
        yield backend
        return
    threaded = ThreadedBackend(backend)
    try:
        yield threaded
    finally:
        await threaded.aclose()


async def run_with(backend: TrainingBackend, work: Callable[[TrainingBackend], Coroutine[Any, Any, T]]) -> T:
    """What a coroutine returns that uses the backend, in the backend's thread where it has one."""
    return await (backend.run(work) if isinstance(backend, ThreadedBackend) else work(backend))


def without_thread(backend: TrainingBackend) -> TrainingBackend:
    """The backend itself, for a caller that cannot wait until its thread has time."""
    return backend.backend if isinstance(backend, ThreadedBackend) else backend
