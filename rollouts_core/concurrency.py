"""Wait for several things at once.

Not here: how long one of them may take (time_limits.py).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import anyio

ResultT = TypeVar("ResultT")


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
