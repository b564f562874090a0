"""Look after the runs of a store, beside the process that starts them.

Not here: what is done with runs whose process was killed (lost_runs.py), with machines that expired
(expired_machines.py). The serving process does it; with a server for several people `rollouts watch`, on the machine
whose workers have the store.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection
from functools import partial
from pathlib import Path
from uuid import UUID

LOST_S = 15.0
"""How often runs are looked for whose process is gone; one that is found twice is marked."""
EXPIRED_S = 120.0
"""How often rented machines are looked at."""

logger = logging.getLogger(__name__)


async def look_after(store: Path, deployments: Collection[UUID] = ()) -> None:
    """Look after the runs and machines of a store, until cancelled, whatever goes wrong at a single look.

    Args:
        deployments: those that this process serves; more may be added.

    Prefect has to know its server by then: it reads the environment when it is imported, which is here.
    """
    from rollouts.flows.expired_machines import end_expired
    from rollouts.flows.lost_runs import LostRuns

    lost, end = (
        LostRuns(store, deployments),
        partial(asyncio.to_thread, end_expired, store),
    )  # providers may take long to answer
    async with asyncio.TaskGroup() as both:
        both.create_task(again_and_again(lost.look, interval_s=LOST_S, first_after_s=LOST_S))
        both.create_task(again_and_again(end, interval_s=EXPIRED_S))


async def again_and_again(
    look: Callable[[], Awaitable[object]], *, interval_s: float, first_after_s: float = 0.0
) -> None:
    """Look after every interval, until cancelled; a look that fails is logged, and the next one comes.

    An exception must not escape: it would end the serving process, and with it the flows and the end of machines.
    """
    await asyncio.sleep(first_after_s)
    while True:
        try:
            await look()
        except Exception:
            logger.exception("looking after runs and machines failed, and is tried again in %.0f s", interval_s)
        await asyncio.sleep(interval_s)
