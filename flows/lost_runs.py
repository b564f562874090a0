"""Runs that Prefect believes to be under way although their process is gone: killed by -9, or the machine went down.

Not here: runs that end by themselves. Prefect has no eye for these; a run that stays Running can neither be retried
nor cancelled.

    Running    and no process  ->  Crashed: Retry attaches to its jobs
    Cancelling and no process  ->  its jobs end, Cancelled
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from uuid import UUID

import httpx
from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterState, FlowRunFilterStateType
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.states import Cancelled, Crashed, State

from flows.cancellation import release_leases
from infra.errors import TransientInfraError
from infra.ledger import Ledger

logger = logging.getLogger(__name__)

UNDER_WAY = FlowRunFilter(
    state=FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.RUNNING, StateType.CANCELLING]))
)


class LostRuns:
    """What was found at the last look: a run counts as lost when two looks find the same."""

    def __init__(self, store: Path) -> None:
        self._ledger_path = store / "ledger.db"
        self._suspects: set[tuple[UUID, UUID]] = set()

    async def look(self) -> None:
        """Mark the runs that were lost at the last look already."""
        try:
            async with get_client() as client:
                runs = await client.read_flow_runs(flow_run_filter=UNDER_WAY, limit=200)
                suspects = {(run.id, run.state_id): run for run in runs if run.state_id and self._is_lost(run)}
                for known in suspects.keys() & self._suspects:
                    await _mark(client, suspects[known])
        except (httpx.HTTPError, TransientInfraError) as error:
            logger.warning("lost runs could not be looked for: %s", error)
            return
        self._suspects = set(suspects)

    def _is_lost(self, run: FlowRun) -> bool:
        with Ledger(self._ledger_path) as ledger:
            return ledger.has_died(str(run.id))


async def _mark(client: PrefectClient, run: FlowRun) -> None:
    state: State
    if run.state_type is StateType.CANCELLING:
        said = await asyncio.to_thread(release_leases, run)
        state = Cancelled(message=f"its process was gone; {said}")
    else:
        state = Crashed(message="its process is gone; its jobs, if any, go on, and Retry attaches to them")
    await client.set_flow_run_state(run.id, state, force=True)
    logger.warning("run %s (%s) was marked %s: %s", run.name, run.id, state.name, state.message)
