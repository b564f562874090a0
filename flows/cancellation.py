"""Release the resources of a cancelled run: its leases on jobs, the jobs that no other run uses, and its node.

Not here: runs that fail or are interrupted (pipeline.py). A run is cancelled in Prefect's UI or through its API:

    state Cancelling ──> the serving process ──SIGTERM──> the flow: reads its state, releases its resources
                                   └── after the flow ended, or was killed after 30 s: releases the remaining resources

A SIGTERM in any other state does not cancel a run: its jobs go on, and the run's next start attaches to the jobs.

Each run's process also polls the run's state, for two reasons. A run of `rollouts run` has no serving process, so
Cancel must have the effect of Ctrl-C. A serving process stops polling permanently after the server refused requests for
some seconds, so the runs that it started must end themselves.

A user or a program may also set another state while the run's process is alive. The process reads the state by polling:

    Cancelled, Failed, Completed  ──> the process releases its resources and ends; the state stays
    Crashed                       ──> the process ends, and its jobs go on
    Crashed by automations.py     ──> the process sets Running again, because only its heartbeats were lost
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import Enum
from pathlib import Path
from uuid import UUID

import httpx
from prefect import Flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun, State
from prefect.exceptions import ObjectNotFound, PrefectException
from prefect.logging.loggers import flow_run_logger
from prefect.states import Cancelled, Running
from pydantic import BaseModel, TypeAdapter, ValidationError

from rollouts.flows.automations import was_silent
from rollouts.flows.credentials import run_with_credentials
from rollouts.flows.form import HeldNode
from rollouts.flows.short_form import held_tables
from rollouts.flows.store import with_store
from rollouts.flows.trusted_code import is_node_trusted
from rollouts.infra.errors import InfraError, PermanentInfraError, TransientInfraError
from rollouts.infra.interrupts import interrupted_if
from rollouts.infra.ledger import LEDGER_FILE, Ledger
from rollouts.infra.node import LocalNode, NodeSettings, RentedNode, without_further_nodes
from rollouts.infra.providers import provision_node
from rollouts.infra.providers.rented import find_rented, release_rentals
from rollouts.infra.renting.rentals import open_rentals
from rollouts.infra.repeating import repeating
from rollouts.tasks.provision import describe_given_up, give_back
from rollouts.tasks.records import RunScope
from rollouts.tasks.stage import drop_leases, stop_leased_jobs
from rollouts_core.errors import ConfigError

LOOK_S = 5.0
SERVED_LOOK_S = 15.0
SERVED_END_S = 60.0
"""Seconds after which a cancelled run ends itself if its serving process did not end the run. The serving process needs
time to poll, and kills the run 30 s after its SIGTERM."""
NODE_SETTINGS: TypeAdapter[NodeSettings] = TypeAdapter(HeldNode)
_ended_by_themselves: set[str] = set()
"""Ids of runs of this process that ended because a user set their state in Prefect."""
NOT_PAUSED = (
    "runs cannot be paused: this run goes on. Cancel saves a checkpoint, from which a new run with the same settings "
    "resumes"
)
"""State message for a run that a user paused. Prefect does not notify the run's process of a pause, and would mark the
run Failed some minutes later."""
NOT_SILENT = "the run's process is alive, and its heartbeats arrive again"
NOT_ENDED = "its jobs could not be ended ({error}): end them on the node, or start the run again and cancel it"


class HeldByRun(BaseModel):
    """The settings of a run that are needed to release its jobs and machines after its process is gone."""

    run_id: str
    run_name: str
    store: str
    node: NodeSettings
    stop_timeout_s: float = 600.0


class Wish(Enum):
    """The action that a run's state in Prefect requests from the run's process."""

    GO_ON = "go on"
    END_UNLESS_ENDED = "release everything and end, unless the serving process does it"
    END = "release everything and end"
    LEAVE = "end, and leave the jobs to the next start of the run"


def read_wish(run_id: str) -> Wish:
    """Read the run's state in Prefect, and return the requested action (GO_ON if the server does not answer)."""
    try:
        with get_client(sync_client=True) as client:
            state = client.read_flow_run(UUID(run_id)).state
    except ObjectNotFound as error:
        return Wish.END_UNLESS_ENDED if is_of_deleted_run(error) else Wish.GO_ON
    except (httpx.HTTPError, PrefectException):
        return Wish.GO_ON  # an unreachable server must not end runs
    if state is None or was_silent(state):
        return Wish.GO_ON
    if state.is_cancelling():
        return Wish.END_UNLESS_ENDED
    if state.is_crashed():
        return Wish.LEAVE
    return Wish.END if state.is_final() else Wish.GO_ON


def is_cancelled(run_id: str) -> bool:
    """True if the run was cancelled, set to a final state other than Crashed, or deleted in Prefect."""
    return run_id in _ended_by_themselves or read_wish(run_id) in (Wish.END_UNLESS_ENDED, Wish.END)


def was_ended_by_state() -> bool:
    """Whether a run of this process ended because of its state in Prefect, and not because of Ctrl-C."""
    return bool(_ended_by_themselves)


def is_of_deleted_run(error: Exception) -> bool:
    """Whether the error means that the run was deleted in Prefect. A proxy's 404 error does not mention a flow run."""
    return isinstance(error, ObjectNotFound) and "Flow run" in str(error.http_exc)


def call_running(run_id: str) -> None:
    """Set a run back to Running if a user paused it, or if it was marked Crashed because of missing heartbeats.

    A retraining that waits for approval stays paused. If the server does not answer, the state is not changed.
    """
    with suppress(httpx.HTTPError, PrefectException), get_client(sync_client=True) as client:
        run = client.read_flow_run(UUID(run_id))
        if run.state is None:
            return
        is_paused = run.state.is_paused() and run.state.state_details.run_input_keyset is None
        if is_paused or was_silent(run.state):
            message = NOT_PAUSED if is_paused else NOT_SILENT
            client.set_flow_run_state(run.id, Running(message=message), force=True)
            flow_run_logger(run).warning(message)


@contextmanager
def ended_when_cancelled(run_id: str, *, is_served: bool) -> Iterator[None]:
    """While the block runs, poll the run's state in Prefect, and end this process if the state requests it."""
    patience_s = SERVED_END_S if is_served else 0.0
    asked_at: float | None = None
    is_told = False

    def look() -> None:
        nonlocal asked_at, is_told
        if is_told:
            return  # a second signal would interrupt the cleanup that the first signal started
        wish = read_wish(run_id)
        if wish is Wish.GO_ON:
            asked_at = None
            call_running(run_id)
            return
        asked_at = time.monotonic() if asked_at is None else asked_at
        if wish is Wish.END_UNLESS_ENDED and time.monotonic() - asked_at < patience_s:
            return
        is_told = True
        if wish is not Wish.LEAVE:
            _ended_by_themselves.add(run_id)
        os.kill(os.getpid(), signal.SIGTERM if is_served or wish is Wish.LEAVE else signal.SIGINT)

    looking = repeating(look, interval_s=SERVED_LOOK_S if is_served else LOOK_S, thread_name="cancellation")
    with interrupted_if(lambda: run_id in _ended_by_themselves), looking:
        yield


def cancelled_if_asked(flow: Flow, flow_run: FlowRun, state: State) -> None:  # type: ignore[type-arg]
    """Hook for Crashed: if the run's process ended because a user set a state, set this state again."""
    if flow_run.deployment_id is not None:
        if str(flow_run.id) not in _ended_by_themselves:
            return  # the serving process sets the state
        release_after_cancellation(flow, flow_run, state)  # also releases resources of earlier attempts
    with get_client(sync_client=True) as client:
        before = [each for each in client.read_flow_run_states(flow_run.id) if not each.is_crashed()]
        asked = max(before, key=lambda each: each.timestamp, default=None)
        if asked is not None and asked.is_cancelling():
            client.set_flow_run_state(flow_run.id, Cancelled(message=state.message), force=True)
        elif asked is not None and asked.is_final():
            kept: State = State(type=asked.type, name=asked.name, message=asked.message)
            client.set_flow_run_state(flow_run.id, kept, force=True)


def release_after_cancellation(flow: Flow, flow_run: FlowRun, state: State) -> None:  # type: ignore[type-arg]
    """Hook for Cancelled: release resources that the run still holds because its process was killed."""
    flow_run_logger(flow_run, flow).info("cancelled: %s", release_for(flow_run))


def release_for(flow_run: FlowRun, *, is_trusted: bool = False) -> str:
    """Release the run's jobs and machines, with the run's credentials, and return a sentence about the actions.

    Every user with the server's password can change a run's parameters after they were checked. An untrusted node of a
    run of a deployment is therefore not used: only the run's local jobs and rented machines are released.

    Args:
        is_trusted: True to use the node without a check, for a command of the store's user.
    """
    tables = held_tables(flow_run.parameters)
    if "node" not in tables:  # the run of a tool has no jobs or machines
        return "nothing was left to give back"
    options = with_store(tables.get("run", {}))
    try:
        node = NODE_SETTINGS.validate_python(tables["node"])
    except ValidationError:  # the run was cancelled before it checked its settings
        return release_without_settings(str(flow_run.id), Path(options.get("store", ".rollouts")).resolve())
    if flow_run.deployment_id is not None and not (is_trusted or is_node_trusted(node)):
        return release_without_settings(str(flow_run.id), Path(options.get("store", ".rollouts")).resolve())
    held = HeldByRun(
        run_id=str(flow_run.id),
        run_name=options.get("name", flow_run.name),
        store=str(Path(options.get("store", ".rollouts")).resolve()),
        node=node,
        stop_timeout_s=options.get("stop_timeout_s", 600.0),
    )
    if not (credentials := options.get("credentials", "")):
        return release_leases(held)
    try:
        return run_with_credentials(credentials, __spec__.name, [held.model_dump_json()])
    except (ConfigError, TransientInfraError) as error:
        return NOT_ENDED.format(error=error)


def release_leases(held: HeldByRun) -> str:
    """End the jobs that only this run uses, release the run's node, and return a sentence about the actions."""
    scope = RunScope(run_id=held.run_id, run_name=held.run_name, store=held.store, stop_timeout_s=held.stop_timeout_s)
    settings = held.node
    try:
        if isinstance(settings, RentedNode):
            return "; ".join(give_back_rented(settings, scope)) or "nothing was left to give back"
        with Ledger(scope.ledger_path) as ledger:
            if not ledger.leases_of(scope.run_id):
                return "nothing was left to give back"
        return "; ".join(give_back_reached(settings, scope))
    except (PermanentInfraError, TransientInfraError) as error:
        return NOT_ENDED.format(error=error)


def release_beside(settings: NodeSettings, scope: RunScope) -> None:
    """Start a process that waits until the run's jobs have saved their checkpoints, then releases jobs and machines."""
    held = HeldByRun(
        run_id=scope.run_id,
        run_name=scope.run_name,
        store=scope.store,
        node=settings,
        stop_timeout_s=scope.stop_timeout_s,
    )
    scope.output_dir.parent.mkdir(parents=True, exist_ok=True)
    with (scope.output_dir.parent / f"{scope.output_dir.name}-release.txt").open("ab") as said:
        subprocess.Popen(
            [sys.executable, "-P", "-m", __spec__.name, held.model_dump_json()],
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            start_new_session=True,
        )


def release_without_settings(run_id: str, store: Path) -> str:
    """Release the local jobs and the rented machines of a run whose settings are lost.

    The run's leases on jobs of other machines stay in the ledger. Returns a sentence about the actions.
    """
    scope = RunScope(run_id=run_id, run_name=run_id, store=str(store))
    here = provision_node(LocalNode(), store)
    done: list[str] = []
    try:
        with Ledger(scope.ledger_path) as ledger:
            leases = ledger.leases_of(run_id)
            rented = {rental.name for rental in open_rentals(ledger) if rental.run_id == run_id}
        if jobs := [lease for lease in leases if lease.node == here.name]:
            done += describe_given_up(stop_leased_jobs(scope, here, jobs))
        drop_leases(scope, [lease for lease in leases if lease.node in rented])  # these jobs end with their machines
        done += release_rentals(store, run_id)
    except InfraError as error:
        done.append(NOT_ENDED.format(error=error))
    return "; ".join(done) or "nothing was left to give back"


def give_back_reached(settings: NodeSettings, scope: RunScope) -> list[str]:
    """Release the machines of an ended run, and return a sentence per action.

    If the run's further machines are unreachable, only its leader is released.
    """
    store = Path(scope.store)
    try:
        return give_back(provision_node(settings, store), scope)
    except InfraError as error:
        alone = without_further_nodes(settings)
        if alone == settings:
            raise
        leader, reason = provision_node(alone, store), error
    with Ledger(scope.ledger_path) as ledger:
        drop_leases(scope, [lease for lease in ledger.leases_of(scope.run_id) if lease.node != leader.name])
    return [f"the jobs on its further machines end by themselves within a minute ({reason})", *give_back(leader, scope)]


def give_back_rented(settings: RentedNode, scope: RunScope) -> list[str]:
    """Release the rented machines of an ended run, without renting new ones, and return a sentence per action."""
    store, done = Path(scope.store), []
    try:
        if (node := find_rented(settings, store, scope.run_id)) is not None:
            done = give_back(node, scope)
    except InfraError as error:
        done = [f"its jobs end with the machine ({error})"]
    drop_leases(scope)
    return done + release_rentals(store, scope.run_id)


def main() -> None:
    """Release the jobs and machines of the run that the command line describes (`HeldByRun` as JSON).

    During the release, the run counts as alive.
    """
    held = HeldByRun.model_validate_json(sys.argv[1])
    with Ledger(Path(held.store) / LEDGER_FILE) as ledger, ledger.living_run(held.run_id):
        sys.stdout.write(release_leases(held))


if __name__ == "__main__":
    main()
