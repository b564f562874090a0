"""Handle the lost runs and the expired machines of a store at regular intervals.

Not here: the handling of lost runs (lost_runs.py) and of expired machines (expired_machines.py). The serving process
calls this module. With a shared Prefect server, `rollouts watch` calls it, on the machine with the workers and the
store.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection
from functools import partial
from pathlib import Path
from uuid import UUID

LOST_S = 15.0
"""Seconds between two checks for runs whose process is gone. A run is marked Crashed if two checks in a row find that
its process is gone."""
EXPIRED_S = 120.0
"""Seconds between two checks of rented machines."""

logger = logging.getLogger(__name__)


async def look_after(store: Path, deployments: Collection[UUID] = ()) -> None:
    """Handle lost runs and expired machines of a store until cancelled. If a check fails, the exception is logged, and
    later checks go on.

    Args:
        deployments: ids of the deployments that this process serves. The caller may add ids later.

    Prefect, which this function imports, reads the server's address from the environment, so set the environment first.
    """
    from rollouts.flows.expired_machines import end_expired
    from rollouts.flows.lost_runs import LostRuns

    lost, end = (
        LostRuns(store, deployments),
        partial(asyncio.to_thread, end_expired, store),
    )  # runs in a thread, because providers may answer slowly
    async with asyncio.TaskGroup() as both:
        both.create_task(again_and_again(lost.look, interval_s=LOST_S, first_after_s=LOST_S))
        both.create_task(again_and_again(end, interval_s=EXPIRED_S))


async def again_and_again(
    look: Callable[[], Awaitable[object]], *, interval_s: float, first_after_s: float = 0.0
) -> None:
    """Call `look` in every interval until cancelled.

    Exceptions are logged and not raised, because they would end the serving process with all its flows.
    """
    await asyncio.sleep(first_after_s)
    while True:
        try:
            await look()
        except Exception:
            logger.exception("a check of runs or machines failed; retrying in %.0f s", interval_s)
        await asyncio.sleep(interval_s)
