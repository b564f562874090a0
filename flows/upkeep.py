"""Regularly handle lost runs and expired machines of a store.

Not here: how lost runs (lost_runs.py) and expired machines (expired_machines.py) are handled. The serving process calls
this module. With a shared server, `rollouts watch` calls it, on the machine of the workers that have the store.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection
from functools import partial
from pathlib import Path
from uuid import UUID

LOST_S = 15.0
"""Seconds between two looks for runs whose process is gone. Two looks in a row must find a run before the run is marked
Crashed."""
EXPIRED_S = 120.0
"""Seconds between two checks of rented machines."""

logger = logging.getLogger(__name__)


async def look_after(store: Path, deployments: Collection[UUID] = ()) -> None:
    """Handle lost runs and expired machines of a store until cancelled. If a look fails, the failure is logged, and the
    next look comes.

    Args:
        deployments: ids of the deployments that this process serves, to which the caller may add more.

    This imports Prefect, which then reads its server's address from the environment: set the environment before.
    """
    from rollouts.flows.expired_machines import end_expired
    from rollouts.flows.lost_runs import LostRuns

    lost, end = (
        LostRuns(store, deployments),
        partial(asyncio.to_thread, end_expired, store),
    )  # in a thread, because providers may answer slowly
    async with asyncio.TaskGroup() as both:
        both.create_task(again_and_again(lost.look, interval_s=LOST_S, first_after_s=LOST_S))
        both.create_task(again_and_again(end, interval_s=EXPIRED_S))


async def again_and_again(
    look: Callable[[], Awaitable[object]], *, interval_s: float, first_after_s: float = 0.0
) -> None:
    """Call `look` in every interval until cancelled. A call that fails is logged, and the next call comes.

    An exception must not escape, because it would end the serving process with all flows.
    """
    await asyncio.sleep(first_after_s)
    while True:
        try:
            await look()
        except Exception:
            logger.exception("looking after runs and machines failed, and is tried again in %.0f s", interval_s)
        await asyncio.sleep(interval_s)
