"""Notice that the services inside Prefect's server stand still, though it answers.

The services plan scheduled runs, mark late ones and note polls, as tasks of one worker in the server's event loop. In
two of forty starts on a machine with much else to do (Prefect 3.8.8, pydocket 0.27.0, burner-redis 0.1.7), that worker
took up no task any more after some seconds, without a word in the log: no schedule would ever have fired. So one of
these tasks is ours and notes the time. When it stops, server_process.py starts the server anew. Upstream:
https://github.com/chrisguidry/docket.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

BEAT_EVERY = timedelta(seconds=5)
STANDSTILL_S = 60.0
"""After so long without a beat nothing is expected any more: a busy machine delays one by some seconds."""


class SchedulerWatchdog:
    """When a service of the server was last done."""

    def __init__(self) -> None:
        self._beat_at: float | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def register(self) -> None:
        """Have the server that is made next do our task among its own."""
        from docket import Perpetual
        from prefect.server.services.perpetual_services import perpetual_service

        repeated = Perpetual(automatic=True, every=BEAT_EVERY)

        @perpetual_service(enabled_getter=lambda: True)
        async def beat(perpetual: Perpetual = repeated) -> None:
            self._beat_at = time.monotonic()

    def begin(self) -> None:
        """Count from now on; called in the event loop of the server, once it has started."""
        self._beat_at, self._loop = time.monotonic(), asyncio.get_running_loop()

    def pardon(self) -> None:
        """Count anew, because this process itself stood still, and the services can have done nothing meanwhile."""
        if self._beat_at is not None:
            self._beat_at = time.monotonic()

    @property
    def has_stopped(self) -> bool:
        """True when nothing was done for STANDSTILL_S; may be asked by another thread."""
        return self._beat_at is not None and time.monotonic() - self._beat_at > STANDSTILL_S

    def describe(self) -> str:
        """The places at which the tasks of the event loop wait, as lines of text; may be asked by another thread."""
        tasks = asyncio.all_tasks(self._loop) if self._loop is not None else set()
        return "\n".join(f"{task.get_name()}: {' > '.join(_places(task.get_coro()))}" for task in tasks)


def _places(waiting: Any) -> Iterator[str]:  # Any: coroutines, generators and awaitables of every kind
    """The place at which a coroutine waits, and the coroutines that it waits for."""
    while waiting is not None:
        frame = getattr(waiting, "cr_frame", None) or getattr(waiting, "gi_frame", None)
        yield f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else repr(waiting)
        waiting = getattr(waiting, "cr_await", None) or getattr(waiting, "gi_yieldfrom", None)
