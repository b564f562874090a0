"""Find runs whose process is gone although Prefect shows them as running, and restart runs whose process was killed.

Prefect does not notice that a run's process is gone if the serving process died, too, or if the run's process could not
report its final state. Prefect then shows the run as Running, and the run can be neither retried nor cancelled.

    Running    and no process     ->  Crashed; also if the process died before it took its run's lock
    Pending    for minutes        ->  AwaitingRetry, because the process that should start the run is gone
    Cancelling and no process     ->  the run's jobs end; Cancelled
    Cancelled, Failed or Completed, set while the run had no process  ->  the run's jobs end
    Crashed    by a signal        ->  AwaitingRetry, at most `run.restarts` times; the run attaches to its jobs
    Crashed    by automations.py  ->  AwaitingRetry in the same way
    Crashed    by a lost concurrency slot  ->  AwaitingRetry in the same way; the machine was suspended for minutes
    AwaitingRetry  without a deployment  ->  Crashed, because Prefect cannot start the run
    Running, Cancelling or Crashed, but the process saved another final state  ->  that state (run_ends.py)
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable, Collection
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from uuid import UUID

import httpx
from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterDeploymentId,
    FlowRunFilterEndTime,
    FlowRunFilterId,
    FlowRunFilterState,
    FlowRunFilterStateName,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.exceptions import ObjectNotFound, PrefectException
from prefect.logging.loggers import flow_run_logger
from prefect.states import Cancelled, Crashed, Scheduled

from rollouts.flows.automations import was_silent
from rollouts.flows.cancellation import release_for
from rollouts.flows.earlier_states import recall_states
from rollouts.flows.form import RunOptions
from rollouts.flows.own_server.lend import named_url
from rollouts.flows.run_ends import RunEnd, forget_end, read_end, read_ends
from rollouts.flows.short_form import held_tables
from rollouts.infra.errors import TransientInfraError
from rollouts.infra.ledger import Ledger
from rollouts.infra.renting.rentals import open_rentals

logger = logging.getLogger(__name__)

UNDER_WAY = FlowRunFilter(
    state=FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.RUNNING, StateType.CANCELLING]))
)
PENDING_S = 300.0
"""Seconds after which a Pending run counts as lost. A new process needs some seconds for its imports, and a minute on a
busy machine."""
UNBEGUN_S = 120.0
"""Seconds after which a Running run whose lock no process has taken counts as lost. A new process takes its run's lock
within seconds."""
GONE = "its process is gone; its jobs, if any, go on, and Retry attaches to them"
GONE_FROM_TERMINAL = "its process is gone; its jobs, if any, go on, and the same command attaches to them"
"""State message for a lost run without a deployment. Prefect cannot retry such a run."""
BY_SIGNAL = re.compile(r"exited with (non-zero )?status code:? -\d+")
"""Prefect's state message for a run whose process was ended by a signal."""
AGAIN = "AwaitingRetry"
NOT_BEGUN = "started again, because the process that should have started it was gone"
AWAY = timedelta(days=1)
"""Runs that the server marked Crashed while this machine was down are restarted after a downtime of at most this."""
STARTED_AGAIN = "started again, because its process was killed"
LOST_SLOT = "Execution was cancelled by the runtime environment."
"""Prefect's state message for a run whose concurrency slot expired because its lease was not renewed in time."""
NO_DEPLOYMENT = (
    "its deployment was deleted, so it cannot be started again; rollouts cancel ends its jobs, if any, and a run with "
    "the same settings attaches to them"
)
UNREPORTED_S = 90.0
"""A run's process saves its final state in a file and reports it to the server. If the server does not have the state
after this many seconds, this module reports the state. Prefect's client in the run's process retries for less time."""


def crashed_since(moment: datetime) -> FlowRunFilter:
    """A filter for runs of deployments that crashed after this moment."""
    return FlowRunFilter(
        state=FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.CRASHED])),
        end_time=FlowRunFilterEndTime(after_=moment),
        deployment_id=FlowRunFilterDeploymentId(is_null_=False),
    )


class LostRuns:
    """Finds and handles lost runs. A run counts as lost if two checks in a row find no process and the same state.

    Args:
        deployments: ids of the deployments whose runs this process starts.
    """

    def __init__(self, store: Path, deployments: Collection[UUID] = ()) -> None:
        self._deployments = deployments
        self._waiting_since: dict[tuple[UUID, UUID | None], float] = {}
        """When a run that never had a process was first found in its current state: monotonic seconds, by run id and
        state id."""
        self._store = store
        self._ledger_path = store / "ledger.db"
        self._suspects: set[tuple[UUID, UUID]] = set()
        self._given_back: set[UUID | None] = set()
        """Ids of states of ended runs whose jobs this object tried to end. Each attempt is made only once, so a user
        must end the remaining jobs."""
        self._began = datetime.now(UTC)

    async def look(self) -> None:
        """Mark lost runs, restart killed runs, and end the jobs of runs that ended without a process."""
        try:
            async with get_client() as client:
                runs = await client.read_flow_runs(flow_run_filter=UNDER_WAY, limit=200)
                suspects = {(run.id, run.state_id): run for run in runs if run.state_id and self._is_lost(run)}
                for known in suspects.keys() & self._suspects:
                    await _tried(_mark, client, suspects[known])
                for run in await self._never_begun(client):
                    await _tried(_begin_anew if run.state_type is StateType.PENDING else _mark, client, run)
                for run in await client.read_flow_runs(flow_run_filter=crashed_since(self._began - AWAY), limit=200):
                    if self._is_new(run) and self._is_gone(run):
                        await _tried(_start_again, client, run)
                for run in await self._without_deployment(client):
                    await _tried(_give_up_retry, client, run)
                for run, end in await self._unreported(client):
                    await _tried(partial(_report, self._store, end), client, run)
                for run in await self._ended_and_holding(client):
                    self._given_back.add(run.state_id)
                    await _tried(_give_back, client, run)
        except (httpx.HTTPError, PrefectException, TransientInfraError) as error:
            logger.warning("the search for lost runs failed, and will be retried: %s", error)
            return
        self._suspects = set(suspects)

    async def _never_begun(self, client: PrefectClient) -> list[FlowRun]:
        """Runs of this store that a serving process should have started long ago, and that still have no process."""
        if named_url() and not self._deployments:
            return []
        begun = [StateType.PENDING, StateType.RUNNING, StateType.CANCELLING]
        taken_up = FlowRunFilter(
            state=FlowRunFilterState(type=FlowRunFilterStateType(any_=begun)),
            deployment_id=FlowRunFilterDeploymentId(any_=list(self._deployments)) if named_url() else None,
        )
        runs = await client.read_flow_runs(flow_run_filter=taken_up, limit=200)
        unbegun = [run for run in runs if self._never_lived(run)]
        now, known = time.monotonic(), self._waiting_since
        self._waiting_since = {(run.id, run.state_id): known.get((run.id, run.state_id), now) for run in unbegun}
        return [
            run
            for run in unbegun
            if now - self._waiting_since[run.id, run.state_id]
            >= (PENDING_S if run.state_type is StateType.PENDING else UNBEGUN_S)
        ]

    async def _without_deployment(self, client: PrefectClient) -> list[FlowRun]:
        """Runs of this store that wait for a retry although their deployment was deleted."""
        waiting = FlowRunFilter(state=FlowRunFilterState(name=FlowRunFilterStateName(any_=[AGAIN])))
        runs = [run for run in await client.read_flow_runs(flow_run_filter=waiting, limit=200) if self._is_ours(run)]
        return [run for run in runs if not await has_deployment(client, run)]

    async def _unreported(self, client: PrefectClient) -> list[tuple[FlowRun, RunEnd]]:
        """Runs whose process saved a final state that Prefect does not know, each with the saved state.

        Saved states that Prefect knows are deleted.
        """
        ends = read_ends(self._store, older_than_s=UNREPORTED_S)
        if not ends:
            return []
        of_ends = FlowRunFilter(id=FlowRunFilterId(any_=[UUID(run_id) for run_id in ends]))
        runs = {str(run.id): run for run in await client.read_flow_runs(flow_run_filter=of_ends, limit=200)}
        found = []
        for run_id, end in list(ends.items())[:200]:
            run = runs.get(run_id)
            is_known = run is None or run.state is None or (run.state.is_final() and not run.state.is_crashed())
            if is_known or (run is not None and run.state_type is StateType.CRASHED and end.type == "CRASHED"):
                forget_end(self._store, run_id)
            elif run is not None and run.state_type in (StateType.RUNNING, StateType.CANCELLING, StateType.CRASHED):
                found.append((run, end))
        return found

    def _is_ours(self, run: FlowRun) -> bool:
        """Whether the run belongs to this store: its process died here, or its parameters name the store."""
        options = held_tables(run.parameters).get("run")
        named = options.get("store", "") if isinstance(options, dict) else ""
        return self._is_lost(run) or (bool(named) and Path(named) == self._store)

    async def _ended_and_holding(self, client: PrefectClient) -> list[FlowRun]:
        """Runs without a process that a user set to a final state, and that still hold jobs or machines.

        If a user cancels a run that waits for a restart, Prefect sets it to Cancelled at once, without notifying a
        process. A user may also set a run to Failed or Completed. A Failed or Completed run keeps its rented machine
        until the machine expires, because the run's settings may require this after a failure.
        """
        with Ledger(self._ledger_path) as ledger:
            renters = {rental.run_id for rental in open_rentals(ledger)}
            holders = {lease.run_id for lease in ledger.leases()} | renters
            left = {UUID(run_id) for run_id in holders if ledger.has_died(run_id)}
        if not left:
            return []
        ended = FlowRunFilter(
            id=FlowRunFilterId(any_=list(left)),
            state=FlowRunFilterState(
                type=FlowRunFilterStateType(any_=[StateType.CANCELLED, StateType.FAILED, StateType.COMPLETED])
            ),
        )
        return [
            run
            for run in await client.read_flow_runs(flow_run_filter=ended, limit=200)
            if run.state_id not in self._given_back
            and (run.state_type is StateType.CANCELLED or str(run.id) not in renters)
        ]

    def _is_new(self, run: FlowRun) -> bool:
        """Whether the run crashed after this object was created, or was marked Crashed for missing heartbeats."""
        crashed = run.end_time
        return (crashed is not None and crashed > self._began) or (run.state is not None and was_silent(run.state))

    def _is_lost(self, run: FlowRun) -> bool:
        with Ledger(self._ledger_path) as ledger:
            return ledger.has_died(str(run.id))

    def _never_lived(self, run: FlowRun) -> bool:
        """Whether the run belongs to this store and never had a process."""
        with Ledger(self._ledger_path) as ledger:
            has_lived = ledger.is_alive(str(run.id)) or ledger.has_died(str(run.id))
        is_started_here = run.deployment_id in self._deployments or (
            run.deployment_id is None and not named_url() and self._is_ours(run)
        )
        return is_started_here and not has_lived and read_end(self._store, str(run.id)) is None

    def _is_gone(self, run: FlowRun) -> bool:
        """Whether a crashed run belongs to this store and has no living process."""
        return self._is_lost(run) or self._never_lived(run)


async def _tried(act: Callable[[PrefectClient, FlowRun], Awaitable[None]], client: PrefectClient, run: FlowRun) -> None:
    """Call `act` for a run. An exception is logged and not raised, so that the other runs are handled, too."""
    try:
        await asyncio.to_thread(recall_states, str(run.id))
        await act(client, run)
    except (httpx.HTTPError, PrefectException) as error:
        logger.warning("run %s (%s) could not be marked; retrying: %s", run.name, run.id, error)
    except Exception:
        logger.exception("run %s (%s) could not be handled; retrying", run.name, run.id)


async def _mark(client: PrefectClient, run: FlowRun) -> None:
    state: State
    if run.state_type is StateType.CANCELLING:
        said = await asyncio.to_thread(release_for, run)
        state = Cancelled(message=f"its process was gone; {said}")
    else:
        state = mark_of_gone(run)
    await client.set_flow_run_state(run.id, state, force=True)
    logger.warning("run %s (%s) was marked %s: %s", run.name, run.id, state.name, state.message)


async def _give_back(_: PrefectClient, run: FlowRun) -> None:
    said = await asyncio.to_thread(release_for, run)
    ended = (run.state_name or "ended").lower()
    flow_run_logger(run).info("%s while its process was gone: %s", ended, said)
    logger.warning("run %s (%s) was %s while its process was gone: %s", run.name, run.id, ended, said)


def mark_of_gone(run: FlowRun) -> State:
    """The state Crashed for a run whose process is gone. The state's message tells how to continue the run."""
    return Crashed(message=GONE if run.deployment_id else GONE_FROM_TERMINAL)


async def _begin_anew(client: PrefectClient, run: FlowRun) -> None:
    """Schedule a run again that its serving process did not start. The new start does not count as a restart."""
    if not await has_deployment(client, run):
        await _give_up_retry(client, run)
        return
    again: State = Scheduled(name=AGAIN, message=NOT_BEGUN)
    await client.set_flow_run_state(run.id, again, force=True)
    logger.warning("run %s (%s) is %s", run.name, run.id, again.message)


async def has_deployment(client: PrefectClient, run: FlowRun) -> bool:
    """Whether the run's deployment exists. Without a deployment, Prefect cannot start the run again."""
    if run.deployment_id is None:
        return False
    try:
        await client.read_deployment(run.deployment_id)
    except ObjectNotFound:
        return False
    return True


async def _give_up_retry(client: PrefectClient, run: FlowRun) -> None:
    await client.set_flow_run_state(run.id, Crashed(message=NO_DEPLOYMENT), force=True)
    logger.warning("run %s (%s) is Crashed: %s", run.name, run.id, NO_DEPLOYMENT)


async def _report(store: Path, end: RunEnd, client: PrefectClient, run: FlowRun) -> None:
    """Set a run's state in Prefect to the final state that the run's process saved but could not report."""
    state = end.state()
    if run.state_type is StateType.CANCELLING:
        state = Cancelled(message=f"{await asyncio.to_thread(release_for, run)}; its process had ended: {state.name}")
    await client.set_flow_run_state(run.id, state, force=True)
    forget_end(store, str(run.id))
    logger.warning("run %s (%s) is %s: its process could not report this to Prefect", run.name, run.id, state.name)


async def _start_again(client: PrefectClient, run: FlowRun) -> None:
    """Schedule a run again whose process was killed, unless it was restarted `run.restarts` times already."""
    if run.state is None or not was_killed(run.state):
        return
    if not await has_deployment(client, run):
        await _give_up_retry(client, run)
        return
    allowed = held_tables(run.parameters).get("run", {}).get("restarts", RunOptions().restarts)
    states = await client.read_flow_run_states(run.id)
    number = 1 + sum(state.name == AGAIN and (state.message or "").startswith(STARTED_AGAIN) for state in states)
    if number > allowed:
        return
    again: State = Scheduled(name=AGAIN, message=f"{STARTED_AGAIN} ({number} of {allowed}); it attaches to its jobs")
    await client.set_flow_run_state(run.id, again, force=True)
    logger.warning("run %s (%s) is %s", run.name, run.id, again.message)


def was_killed(state: State) -> bool:
    """Whether a run crashed for an external reason: a signal, missing heartbeats, or an expired concurrency slot."""
    message = state.message or ""
    return message in (GONE, LOST_SLOT) or was_silent(state) or BY_SIGNAL.search(message) is not None
