"""Wait for several things at once; compute beside the event loop.

Not here: how long one of them may take (time_limits.py).
"""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from types import TracebackType
from typing import Self, TypeVar

import anyio

from rollouts_core.system.processors import count_processors

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")

MAX_READING_THREADS = 4
"""They compute no torch, and all else waits for them: what a process does besides is not slowed by them for long."""
MIN_BYTES_PER_THREAD = 16 * 2**20
"""A thread for less costs more than it saves: 2.4 ms instead of 0.5 ms for 0.6 MB on two cores."""


async def gather(calls: Sequence[Callable[[], Awaitable[ResultT]]], *, max_concurrent: int = 1024) -> list[ResultT]:
    """The results of the calls in their order, `max_concurrent` of them under way at a time.

    When one raises, the others are cancelled, and its own error is raised: not a group of errors.
    """
    results: dict[int, ResultT] = {}
    # A limiter makes every call wait one turn of the event loop, also where it lets all of them in.
    limiter = anyio.CapacityLimiter(max_concurrent) if len(calls) > max_concurrent else nullcontext()

    async def run(number: int) -> None:
        async with limiter:
            results[number] = await calls[number]()

    failure: Exception | None = None
    try:
        async with anyio.create_task_group() as tasks:
            for number in range(len(calls)):
                tasks.start_soon(run, number)
    except ExceptionGroup as errors:
        failure = errors.exceptions[0]
    if failure is not None:
        raise failure
    return [results[number] for number in range(len(calls))]


def read_each(read: Callable[[ItemT], ResultT], items: Iterable[ItemT], *, num_bytes: int) -> list[ResultT]:
    """What `read`, which digests or compares bytes, gives for each item, in order.

    Where they are many bytes in all, threads do it, which end with it. Of several errors the first item's is raised.
    """
    num_threads = min(MAX_READING_THREADS, count_processors(), num_bytes // MIN_BYTES_PER_THREAD)
    if num_threads <= 1:
        return [read(item) for item in items]
    with ThreadPoolExecutor(max_workers=num_threads, thread_name_prefix="read") as executor:
        return list(executor.map(read, items))


def start_short_thread(work: Callable[[], ResultT]) -> Future[ResultT]:
    """The future of what `work` returns in a thread that ends with it.

    Not a thread of a pool: a thread that computed with torch keeps its OpenMP workers as long as it lives, and with
    those beside the main thread's there are more than cores, which slows everything in the process down.
    """
    executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="short")
    future = executor.submit(work)
    executor.shutdown(wait=False)
    return future


async def in_short_thread(work: Callable[[], ResultT]) -> ResultT:
    """What `work` returns in a thread that ends with it; the thread goes on when nobody waits for it any more."""
    results: list[ResultT] = []  # a future that was wrapped refers to itself, and would keep its result for a while
    await asyncio.shield(asyncio.wrap_future(start_short_thread(lambda: results.append(work()))))
    return results.pop()


async def in_daemon_thread(work: Callable[[], ResultT]) -> ResultT:
    """The same for work that nothing can break off where it never ends: the process ends without it."""
    done: Future[ResultT] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:  # noqa: BLE001 - a future carries whatever its work raised
            done.set_exception(error)

    threading.Thread(target=run, name="daemon", daemon=True).start()
    return await asyncio.shield(asyncio.wrap_future(done))


class ClosedOnExit(ABC):
    """What owns connections, and closes them at the end of `async with`."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    @abstractmethod
    async def aclose(self) -> None:
        """Close the connections."""
