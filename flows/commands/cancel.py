"""`rollouts cancel`: cancel a run as Prefect's UI does, and also a run whose process is gone.

Not here: releasing a run's jobs and machines (cancellation.py), ending only the run's training (finish.py).

    run with a process              set Cancelling, and wait until the process has released the run's jobs and machines
    run with a process, whose final wait for the process, which polls the state; set Cancelling after a minute
      state a user set in Prefect
    run without a process           set Cancelled, and release the run's jobs and machines here
    run that was deleted in Prefect release here the jobs and machines that are known without the run's settings
"""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from rollouts.flows.commands.finish import MIN_ID_CHARS
from rollouts.flows.commands.models import open_registry
from rollouts.flows.commands.serving_state import find_serving
from rollouts.flows.commands.status import FLOWS, NOT_ENDED, full_name, name_of_run, of_store, without_later_looks
from rollouts.flows.commands.terminal import DEFAULT_STORE, AsJson, Store, console, tell
from rollouts.flows.commands.up import check_server
from rollouts.flows.own_server.lend import ServerAddress, local_server, named_url, prefect_environment, run_url
from rollouts.flows.prefect_api import ask
from rollouts.flows.short_form import held_tables
from rollouts.infra.jobs import MAX_GRACE_S
from rollouts.infra.ledger import Ledger
from rollouts.infra.renting.rentals import open_rentals
from rollouts_core.errors import InputError, RolloutsError

WAIT_S = 720.0
"""Seconds added to `run.stop_timeout_s`, because a download of results from another machine may take ten minutes."""
FOLLOW_S = 60.0
"""Seconds for a run's process, which polls every 15 s, to notice a final state that a user set in Prefect."""
POLL_S = 0.5
FULL_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
ENDED = ("COMPLETED", "FAILED", "CANCELLED")
"""Final states of a run. Crashed does not count as final here, because a crashed run is restarted."""

FlowRunJson = dict[str, Any]  # Any: JSON


def cancel(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="The run: its name, my-run-5793d50a, or its id in Prefect.")
    ],
    store: Store = DEFAULT_STORE,
    as_json: AsJson = False,
) -> None:
    """Cancel RUN: its jobs save a checkpoint and end, unless another run uses them; its machine is freed.

    RUN may also be a run whose process was killed, or a failed run that still keeps its machine. A new run with the
    same settings resumes from the checkpoint.
    """
    check_server(store)
    with open_registry(store) as ledger, local_server(store) as address:
        if deleted := find_deleted_run(address, ledger, run):
            console.print(f"cancelling     {deleted.run_name}, which was deleted in Prefect", markup=False)
            tell(
                f"{deleted.run_name}: {_give_back_deleted(address, ledger, store.resolve(), deleted)}", as_json=as_json
            )
            return
        found = find_flow_run(address, ledger, store.resolve(), run)
        console.print(f"cancelling     {full_name(found)}: {run_url(address, found['id'])}", markup=False)
        said = f"{full_name(found)}: {cancel_run(address, ledger, store.resolve(), found)}"
        if _holds(ledger, found["id"]):
            raise RolloutsError(said)
    tell(said, as_json=as_json)


def cancel_run(address: ServerAddress, ledger: Ledger, store: Path, run: FlowRunJson) -> str:
    """Cancel a run, and return a sentence about what was done.

    Raises:
        InputError: the run and its process have ended, and the run holds no jobs or machines.
        RolloutsError: the run's process did not release the run's jobs and machines in time.
    """
    has_ended, is_alive = run["state_type"] in ENDED, ledger.is_alive(run["id"])
    if has_ended and not is_alive and not _holds(ledger, run["id"]):
        raise InputError(
            f"{full_name(run)} is {run['state_name']} and holds no jobs or machines: there is nothing to cancel"
        )
    if ((has_ended or run["state_type"] == "CRASHED") and not is_alive) or is_left_alone(address, ledger, store, run):
        return _give_back_here(address, store, run)
    if not has_ended:
        _set_state(address, run["id"], "CANCELLING", force=run["state_type"] == "CRASHED")
    wait_s = WAIT_S + float(held_tables(run["parameters"]).get("run", {}).get("stop_timeout_s", MAX_GRACE_S))
    began = time.monotonic()
    while (waited_s := time.monotonic() - began) < wait_s:
        state = ask(address, "GET", f"/flow_runs/{run['id']}")
        # The process of `rollouts up` may have killed the run. Then the state is CANCELLED before jobs and machines are
        # released.
        if state["state_type"] == "CANCELLED" and not _holds(ledger, run["id"]) and not ledger.is_alive(run["id"]):
            return "cancelled"
        if state["state_type"] in ("COMPLETED", "FAILED"):
            if not has_ended:
                return f"it ended meanwhile: {state['state_name']}"
            if not _holds(ledger, run["id"]) and not ledger.is_alive(run["id"]):
                return f"its process ended; the run was {state['state_name']} already"
        if has_ended and waited_s > FOLLOW_S and state["state_type"] in ENDED and ledger.is_alive(run["id"]):
            _set_state(address, run["id"], "CANCELLING", force=True)
        if is_left_alone(address, ledger, store, run):
            return _give_back_here(address, store, state)
        time.sleep(POLL_S)
    raise RolloutsError(
        f"{full_name(run)} was cancelled, but has not ended within {wait_s / 60:.0f} minutes: see its page, "
        f"{run_url(address, run['id'])}"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DeletedRun:
    """A run that was deleted in Prefect, whose process is gone, and that still holds jobs or machines."""

    run_id: str
    run_name: str
    """The name of the run's folder in the store, or the run's id if the run used no stage."""


def find_deleted_run(address: ServerAddress, ledger: Ledger, given: str) -> DeletedRun | None:
    """The run that the user named, if it was deleted in Prefect and its process is gone (otherwise None)."""
    names = {use.run_id: use.run for use in ledger.stage_uses() if use.run}
    dead = [run_id for run_id in _holding(ledger) if ledger.has_died(run_id)]
    meant = [
        run_id
        for run_id in dead
        if given in (run_id, names.get(run_id)) or (len(given) >= MIN_ID_CHARS and run_id.startswith(given))
    ]
    known = {run["id"] for run in _filtered(address, id={"any_": meant})} if meant else set[str]()
    deleted = [run_id for run_id in meant if run_id not in known]
    if len(deleted) != 1 or known:
        return None
    return DeletedRun(run_id=deleted[0], run_name=names.get(deleted[0], deleted[0]))


def find_flow_run(address: ServerAddress, ledger: Ledger, store: Path, given: str) -> FlowRunJson:
    """The run that the user named. If several runs have the name, exactly one must be running or hold jobs or machines.

    Raises:
        InputError: no run, or several runs, have this name.
    """
    under_way = without_later_looks(
        ask(address, "POST", "/flow_runs/filter", {**NOT_ENDED, "sort": "EXPECTED_START_TIME_ASC"})
    )
    holding = _holding(ledger)
    by_id = [*sorted(holding), *([given] if FULL_ID.fullmatch(given) else [])]
    asked = [*_filtered(address, id={"any_": by_id}), *_filtered(address, name={"any_": _names(given)})]
    every = {run["id"]: run for run in of_store(address, store, [*under_way, *asked])}.values()
    meant = [run for run in every if _is_meant(run, given)]
    for those in (
        [run for run in meant if run["state_type"] not in (*ENDED, "CRASHED")],
        [run for run in meant if run["id"] in holding],
        meant,
    ):
        if len(those) == 1:
            return those[0]
        if those:
            names = " or ".join(f"{full_name(run)} ({run['state_name']})" for run in those)
            raise InputError(f"{given} could mean {names}: give one of these names")
    going = ", ".join(full_name(run) for run in every if run["id"] in holding or run in under_way) or "none"
    raise InputError(f"there is no run {given}; runs that can be cancelled: {going}")


def is_left_alone(address: ServerAddress, ledger: Ledger, store: Path, run: FlowRunJson) -> bool:
    """Whether a run's process is gone, and no serving process will release the run's jobs and machines."""
    if not ledger.has_died(run["id"]) or find_serving(store) is not None:
        return False
    if run["deployment_id"] is None or not named_url():
        return True
    # Prefect calls the deployment READY if a serving process, here or on another machine, polled in the last minute.
    return bool(ask(address, "GET", f"/deployments/{run['deployment_id']}")["status"] == "NOT_READY")


def _give_back_here(address: ServerAddress, store: Path, run: FlowRunJson) -> str:
    if run["state_type"] not in ENDED:  # set before the release, because a Crashed run would be restarted
        _set_state(address, run["id"], "CANCELLED", force=True)
    os.environ.update(prefect_environment(store, address))
    from prefect.client.schemas.objects import FlowRun  # importing prefect reads the environment

    from rollouts.flows.cancellation import release_for

    # In the run's parameters, the store's path may be relative to another folder than the current one.
    tables = held_tables(run["parameters"])
    settings = {**tables.get("run", {}), "store": str(store)}
    asked = FlowRun.model_validate({**run, "parameters": {**tables, "run": settings}})
    return release_for(asked, is_trusted=True)


def _give_back_deleted(address: ServerAddress, ledger: Ledger, store: Path, run: DeletedRun) -> str:
    """Release the jobs and machines of a deleted run, and return a sentence about the actions.

    Raises:
        RolloutsError: the run still holds jobs or machines afterwards.
    """
    os.environ.update(prefect_environment(store, address))
    from rollouts.flows.cancellation import release_without_settings  # importing prefect reads the environment

    said = release_without_settings(run.run_id, store)
    if left := sorted({lease.node for lease in ledger.leases_of(run.run_id)}):
        raise RolloutsError(
            f"{run.run_name}: {said}; the settings to reach {', '.join(left)} were deleted with the run: start a run "
            "with the same settings, which attaches to the jobs there, and cancel it"
        )
    if _holds(ledger, run.run_id):
        raise RolloutsError(f"{run.run_name}: {said}")
    return said


def _set_state(address: ServerAddress, run_id: str, state: str, *, force: bool) -> None:
    """Set the run's state. `force` bypasses Prefect's rules, which refuse to cancel an ended run."""
    ask(address, "POST", f"/flow_runs/{run_id}/set_state", {"state": {"type": state}, "force": force})


def _filtered(address: ServerAddress, **condition: object) -> list[FlowRunJson]:
    found: list[FlowRunJson] = ask(address, "POST", "/flow_runs/filter", {"flows": FLOWS, "flow_runs": condition})
    return found


def _holding(ledger: Ledger) -> set[str]:
    """The ids of all runs that hold jobs or machines."""
    holders = {lease.run_id for lease in ledger.leases()} | {rental.run_id for rental in open_rentals(ledger)}
    return holders - {""}  # machines that were found at a provider, without a ledger entry, have no run


def _holds(ledger: Ledger, run_id: str) -> bool:
    return bool(ledger.leases_of(run_id)) or any(rental.run_id == run_id for rental in open_rentals(ledger))


def _names(given: str) -> list[str]:
    return [given, given.rpartition("-")[0]]


def _is_meant(run: FlowRunJson, given: str) -> bool:
    is_start = len(given) >= MIN_ID_CHARS and run["id"].startswith(given)
    return is_start or given in (run["id"], run["name"], name_of_run(run), full_name(run))
