"""Detect that the background services of Prefect's server hang while the server still answers requests.

The services plan scheduled runs, mark late runs and record polls. One worker in the server's event loop executes all
services as tasks. In two of forty starts on a busy machine (Prefect 3.8.8, pydocket 0.27.0, burner-redis 0.1.7), this
worker stopped executing tasks after some seconds, without a log line, so that no schedule would have started a run.
Therefore this module adds a task that records the time. When this task stops, server_process.py restarts the server.
Upstream: https://github.com/chrisguidry/docket.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

BEAT_EVERY = timedelta(seconds=5)
STANDSTILL_S = 60.0
"""Seconds without a run of the task after which the services count as hanging. Even a busy machine delays the task only
by some seconds."""


class SchedulerWatchdog:
    """Records when the worker of the server's background services last ran a task."""

    def __init__(self) -> None:
        self._beat_at: float | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def register(self) -> None:
        """Add the task `beat` to the services of the next server that this process creates."""
        from docket import Perpetual
        from prefect.server.services.perpetual_services import perpetual_service

        repeated = Perpetual(automatic=True, every=BEAT_EVERY)

        @perpetual_service(enabled_getter=lambda: True)
        async def beat(perpetual: Perpetual = repeated) -> None:
            self._beat_at = time.monotonic()

    def begin(self) -> None:
        """Start watching. Call this in the server's event loop after the server has started."""
        self._beat_at, self._loop = time.monotonic(), asyncio.get_running_loop()

    def pardon(self) -> None:
        """Reset the recorded time after the whole process was suspended, because the services could not run either."""
        if self._beat_at is not None:
            self._beat_at = time.monotonic()

    @property
    def has_stopped(self) -> bool:
        """True if the task `beat` has not run for STANDSTILL_S seconds. Other threads may read this property."""
        return self._beat_at is not None and time.monotonic() - self._beat_at > STANDSTILL_S

    def describe(self) -> str:
        """A line per task of the event loop, with the source lines at which it waits. Callable from other threads."""
        tasks = asyncio.all_tasks(self._loop) if self._loop is not None else set()
        return "\n".join(f"{task.get_name()}: {' > '.join(_places(task.get_coro()))}" for task in tasks)


def _places(waiting: Any) -> Iterator[str]:  # Any: coroutines, generators and awaitables of every kind
    """The source line at which a coroutine waits, followed by the lines of the coroutines that it awaits."""
    while waiting is not None:
        frame = getattr(waiting, "cr_frame", None) or getattr(waiting, "gi_frame", None)
        yield f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else repr(waiting)
        waiting = getattr(waiting, "cr_await", None) or getattr(waiting, "gi_yieldfrom", None)
