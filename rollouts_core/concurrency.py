"""Wait for several things at once, and not for ever for one; compute beside the event loop."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from time import monotonic
from types import FrameType
from typing import TypeVar

import anyio

ResultT = TypeVar("ResultT")
MIN_TIMER_S = 0.001


async def gather(calls: Sequence[Callable[[], Awaitable[ResultT]]], *, max_concurrent: int = 1024) -> list[ResultT]:
    """The results of the calls in their order, `max_concurrent` of them under way at a time.

    When one raises, the others are cancelled, and its own error is raised: not a group of errors.
    """
    results: dict[int, ResultT] = {}
    limiter = anyio.CapacityLimiter(max_concurrent)

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


@contextmanager
def interrupt_after(timeout_s: float | None, message: str) -> Iterator[None]:
    """Raise TimeoutError with `message` inside the block when it takes longer, whatever it computes.

    By a signal, so in the main thread only; elsewhere, and on systems without that signal, there is no limit.
    """
    if timeout_s is None or threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGALRM"):
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(message)

    previous = signal.signal(signal.SIGALRM, interrupt)
    began = monotonic()
    others_s, _ = signal.setitimer(signal.ITIMER_REAL, timeout_s)
    try:
        yield
    finally:
        # Whoever had set the timer before gets what is left of it.
        left_s = max(others_s - (monotonic() - began), MIN_TIMER_S) if others_s else 0.0
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
        signal.setitimer(signal.ITIMER_REAL, left_s)
