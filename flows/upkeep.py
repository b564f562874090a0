"""Handle the lost runs, the expired machines and the unused folders of a store at regular intervals.

Not here: the handling of lost runs (lost_runs.py) and of expired machines (expired_machines.py), the choice of unused
folders (tasks/prune.py). The serving process
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

from rollouts.flows.store import load_keep_days
from rollouts.infra.ledger import LEDGER_FILE, Ledger
from rollouts.tasks.prune import plan_prune, remove_folders

LOST_S = 15.0
"""Seconds between two checks for runs whose process is gone. A run is marked Crashed if two checks in a row find that
its process is gone."""
EXPIRED_S = 120.0
"""Seconds between two checks of rented machines."""
PRUNE_S = 86_400.0
"""Seconds between two removals of unused folders (`rollouts up --keep-days`)."""

logger = logging.getLogger(__name__)


async def look_after(store: Path, deployments: Collection[UUID] = ()) -> None:
    """Handle lost runs, expired machines and unused folders of a store until cancelled. If a check fails, the exception
    is logged, and later checks go on.

    Args:
        deployments: ids of the deployments that this process serves. The caller may add ids later.

    Prefect, which this function imports, reads the server's address from the environment, so set the environment first.
    """
    from rollouts.flows.expired_machines import end_expired
    from rollouts.flows.lost_runs import LostRuns

    lost = LostRuns(store, deployments)
    # In threads, because providers may answer slowly, and removing many files takes long.
    end, remove = (partial(asyncio.to_thread, each, store) for each in (end_expired, remove_unused))
    async with asyncio.TaskGroup() as checks:
        checks.create_task(again_and_again(lost.look, interval_s=LOST_S, first_after_s=LOST_S))
        checks.create_task(again_and_again(end, interval_s=EXPIRED_S))
        checks.create_task(again_and_again(remove, interval_s=PRUNE_S))


def remove_unused(store: Path) -> list[str]:
    """Remove the folders that no run used for the days of `rollouts up --keep-days`, and return their names."""
    days = load_keep_days(store / "prefect")
    if not days:
        return []
    with Ledger(store / LEDGER_FILE) as ledger:
        removed = remove_folders(store, ledger, plan_prune(store, ledger, unused_days=days))
    for folder in removed:
        logger.info("removed %s, which no run used for %d days", folder.name, days)
    return [folder.name for folder in removed]


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
