"""What the runs of a store need besides a process that starts them: somebody who looks after them.

Not here: what is done with runs whose process was killed (lost_runs.py), with machines that expired
(expired_machines.py). Who does it: the process that serves the deployments; with a server for several people
`rollouts watch`, on the machine whose workers have the store.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

LOST_S = 15.0
"""How often runs are looked for whose process is gone; one that is found twice is marked."""
EXPIRED_S = 120.0
"""How often rented machines are looked at."""


async def look_after(store: Path) -> None:
    """Look after the runs and machines of a store, until cancelled.

    Prefect has to know its server by then: it reads the environment when it is imported, which is here.
    """
    async with asyncio.TaskGroup() as both:
        both.create_task(_find_lost_runs(store))
        both.create_task(_end_expired_machines(store))


async def _find_lost_runs(store: Path) -> None:
    from flows.lost_runs import LostRuns

    lost = LostRuns(store)
    while True:
        await asyncio.sleep(LOST_S)
        await lost.look()


async def _end_expired_machines(store: Path) -> None:
    """In a thread: providers may take long to answer."""
    from flows.expired_machines import end_expired

    while True:
        await asyncio.to_thread(end_expired, store)
        await asyncio.sleep(EXPIRED_S)
