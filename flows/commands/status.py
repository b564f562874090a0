"""`rollouts status`: print the state of a store: its server, runs, jobs and rented machines.

Slow modules are imported only in the functions that need them. Without running runs, the command takes a fraction of a
second.

Not here: starting and ending the server and its deployments (up.py).
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path, PurePosixPath
from typing import Any

import typer

from rollouts.flows.commands.serving_state import (
    Serving,
    describe_deployments,
    describe_gpu_slots,
    find_server,
    find_serving,
    is_starting,
    served_elsewhere,
)
from rollouts.flows.commands.terminal import DEFAULT_STORE, AsJson, Store, emit
from rollouts.flows.flow_names import EVALUATE_FLOW, FLOW, RETRAIN_FLOW
from rollouts.flows.own_server.lend import ServerAddress, run_url
from rollouts.flows.short_form import held_tables
from rollouts.flows.store_runs import load_run, verdict_of
from rollouts.infra.errors import PermanentInfraError, TransientInfraError
from rollouts.infra.foreign_text import shown_line, shown_lines
from rollouts.infra.jobs import JobState, job_status
from rollouts.infra.ledger import LEDGER_FILE, Lease, Ledger, StageUse
from rollouts.infra.renting.rentals import Rental, describe_keeping, open_rentals
from rollouts.infra.run_ids import short_id
from rollouts.tasks.model_aliases import models_of_runs
from rollouts.tasks.store_paths import newest_first
from rollouts_core.metrics import read_last_lines
from rollouts_core.run_directory import RunDirectory
from rollouts_core.stopping import describe_stop

SUFFIX = re.compile(r"-[0-9a-f]{3}$")
"""Suffix that Prefect adds to the name of a task run."""
LATEST = 5
"""Number of ended runs to print. All runs that have not ended are printed, too."""
LIVE_FILE = "prefect/live.json"
"""File in a store with the port of its live pages (live.py)."""
MANY = 200
"""Number of ended runs to request from a shared server, because most of them may belong to other stores. Prefect
returns at most 200 runs per request."""
TOLD_TYPES = ("COMPLETED", "FAILED", "CRASHED")
"""States of Prefect whose message is printed, because the state's name alone says too little."""
OF_PREFECT = re.compile(r"^Flow run encountered an exception: (\w+: )?")
"""Prefix that Prefect adds to the message of an exception."""
UNDER_WAY = ("SCHEDULED", "PENDING", "RUNNING", "PAUSED", "CANCELLING")
FLOWS = {"name": {"any_": [FLOW, RETRAIN_FLOW, EVALUATE_FLOW]}}
NOT_ENDED = {"flows": FLOWS, "flow_runs": {"state": {"type": {"any_": UNDER_WAY}}}}
ENDED = {"flows": FLOWS, "flow_runs": {"state": {"type": {"not_any_": UNDER_WAY}}}}


def status(store: Store = DEFAULT_STORE, as_json: AsJson = False) -> None:
    """Show the Prefect server, the process that starts its runs, the runs, training jobs without a run, and rented
    machines."""
    address, said = find_server(store)
    serving = find_serving(store)
    if as_json:
        served = {"pid": serving.pid, "since": serving.since} if serving else {}
        emit(status_records(store.resolve(), address, served))
        return
    if not store.is_dir():
        state = "is a file" if store.exists() else "does not exist"
        typer.echo(f"store        {store} {state}: it has no runs yet, or --store should name another folder")
    typer.echo(f"server       {said}")
    for line in lines_about_serving(store, serving):
        typer.echo(line)
    if (store.resolve() / LIVE_FILE).exists():
        from rollouts.flows.live import find_live_pages  # loads the pages

        if live := find_live_pages(store):
            typer.echo(f"live pages   {live.url}")
    runs = describe_runs(address, store.resolve()) if address else []
    for lines in runs:
        typer.echo("\n             ".join((f"run          {lines[0]}", *lines[1:])))
    if runs:
        typer.echo("             (rollouts cancel, finish and evaluate accept the names of these runs)")
    for line in describe_reports(store) if not address else []:
        typer.echo(f"report       {line}")
    jobs = going_jobs(store.resolve())
    for job in (each for each in jobs if each.waits_for or not (each.has_run and address)):
        typer.echo(f"job          {job.sentence()}")
    for line in describe_machines(store.resolve()):
        typer.echo(f"machine      {line}")


def lines_about_serving(store: Path, serving: Serving | None) -> Iterator[str]:
    """The lines of `rollouts status` about the serving process."""
    if serving is None:
        state = "the process is starting" if is_starting(store) else "none: rollouts up starts it"
        yield f"serving      {state}"
        return
    if elsewhere := served_elsewhere(serving):
        yield f"             {elsewhere}"
    there = "" if serving.process.is_here else f" of {serving.process.host}"
    since = datetime.fromtimestamp(serving.since).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    yield f"serving      process {serving.pid}{there} since {since}: {describe_deployments(serving)}"
    yield f"gpu slots    {describe_gpu_slots(serving)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class GoingJob:
    """A job that runs on this machine, or that may run on another node. This command does not contact other nodes."""

    run_dir: str
    node: str
    is_known_to_run: bool
    """Whether the job certainly runs: True on this machine, False on another node, which is not contacted."""
    has_run: bool
    """Whether a run uses the job. False if the processes of all runs that used the job have died."""
    run: str
    """The name of the run that used the job last."""
    waits_for: str = ""
    """A sentence about the GPU that the job waits for, and about the job that occupies this GPU (empty if the job does
    not wait)."""

    def sentence(self) -> str:
        """Describe the job in a sentence: its state, its node and its run."""
        state = "goes on" if self.is_known_to_run else "may go on"
        ended_by = f", rollouts cancel {self.run} ends it" if self.run else ""
        owner = "" if self.has_run else f", without a run: the next run that needs it attaches to it{ended_by}"
        waits = f", {self.waits_for}" if self.waits_for else ""
        return f"{self.run_dir} {state} on {self.node}{waits}{owner}"


def describe_runs(address: ServerAddress, store: Path) -> list[list[str]]:
    """The output lines for each run that has not ended, and for each of the latest ended runs."""
    from rollouts.flows.prefect_api import ask

    runs, ended = _runs_of_store(address, store)
    tasks: list[dict[str, Any]] = []  # Any: JSON
    if runs:
        of_runs = {"flow_runs": {"id": {"any_": [run["id"] for run in runs]}}}
        running = {"task_runs": {"state": {"type": {"any_": ["RUNNING"]}}}}
        tasks = ask(address, "POST", "/task_runs/filter", {**of_runs, **running})
    nodes = {lease.run_id: lease.node for lease in _leases(store)}
    early = early_ends(store, {run["id"] for run in [*runs, *ended]})
    registered = models_of_runs(store)
    uses = uses_of_runs(store)
    return [
        [
            describe_run(run, tasks, nodes),
            *describe_progress(store, run, uses.get(run["id"], [])),
            *early.get(run["id"], []),
            *(f"made {model}" for model in registered.get(short_id(run["id"]), [])),
            run_url(address, run["id"]),
        ]
        for run in [*runs, *ended]
    ]


def latest_runs(address: ServerAddress, store: Path) -> list[dict[str, Any]]:  # Any: JSON
    """Every run that has not ended and the latest ended runs, as JSON of Prefect's API."""
    runs, ended = _runs_of_store(address, store)
    return [*runs, *ended]


def _runs_of_store(
    address: ServerAddress, store: Path
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:  # Any: JSON
    from rollouts.flows.prefect_api import ask

    latest = {**ENDED, "sort": "END_TIME_DESC", "limit": LATEST if address.is_local else MANY}
    ended = of_store(address, store, ask(address, "POST", "/flow_runs/filter", latest))[:LATEST]
    # The server returns a limited number of runs. The sort by start time puts runs that a schedule plans last, so that
    # the limit cuts off only such runs.
    under_way = ask(address, "POST", "/flow_runs/filter", {**NOT_ENDED, "sort": "EXPECTED_START_TIME_ASC"})
    return of_store(address, store, without_later_looks(under_way))[::-1], ended


def describe_reports(store: Path) -> list[str]:
    """A line for each report of the latest finished runs, printed if no Prefect server runs."""
    reports = newest_first((store / "runs").glob("*/report.html"))
    return [f"{path}  {verdict_of(path.with_name('run.json'))}".rstrip() for path in reports[:LATEST]]


def uses_of_runs(store: Path) -> dict[str, list[StageUse]]:
    """The stages that each run has reached, in order, by the run's id."""
    if not (store / LEDGER_FILE).is_file():
        return {}
    found: dict[str, list[StageUse]] = {}
    with Ledger(store / LEDGER_FILE) as ledger:
        for use in ledger.stage_uses():
            found.setdefault(use.run_id, []).append(use)
    return found


def describe_progress(store: Path, run: Mapping[str, Any], uses: Sequence[StageUse]) -> list[str]:  # Any: JSON
    """Describe a run's progress, the decision that it waits for, or the message of its final state."""
    from rollouts_core.config.messages import first_line
    from rollouts_core.report.live import describe_readable

    said = ""
    if run["state_type"] == "RUNNING" and uses:
        said = describe_readable(load_run(store, uses).stages[-1], now=time.time()).state
    elif run["state_type"] == "PAUSED":
        said = "a decision is waiting: Resume in the menu of its page puts its candidate into production, or rejects it"
    elif (run["state_type"] in TOLD_TYPES or run["state_name"] == "AwaitingRetry") and run["state"].get("message"):
        said = OF_PREFECT.sub("", first_line(RuntimeError(run["state"]["message"])))
    return [shown_lines(said).replace("\n", " ")] if said else []


def early_ends(store: Path, run_ids: Collection[str]) -> dict[str, list[str]]:
    """A sentence for each stage that one of these runs ended early or stopped, by the run's id."""
    if not (store / LEDGER_FILE).is_file():
        return {}
    from rollouts.tasks.early_end import read_early_end

    said: dict[str, list[str]] = {}
    with Ledger(store / LEDGER_FILE) as ledger:
        uses = [use for use in ledger.stage_uses() if use.run_id in run_ids]
    for use in uses:
        early = read_early_end(store / "stages" / use.stage)
        is_own = early is not None and early.asked_by == use.run_id
        sentence = early.sentence if is_own and early else read_stop(RunDirectory(store / "stages" / use.stage))
        if sentence:
            said.setdefault(use.run_id, []).append(f"{use.stage.rpartition('-')[0]} {sentence}")
    return said


def read_stop(directory: RunDirectory) -> str:
    """A sentence about the last saved step, if the stage is a training that was stopped and not resumed (else
    empty)."""
    events = read_last_lines(directory.events)
    if not events or events[-1].get("event") != "stopped":
        return ""
    return shown_line(describe_stop(int(events[-1].get("step", 0)), str(events[-1].get("problem", ""))))


def of_store(address: ServerAddress, store: Path, runs: list[dict[str, Any]]) -> list[dict[str, Any]]:  # Any: JSON
    """Select the runs of this store. A server of PREFECT_API_URL also has runs of other stores."""
    if address.is_local:
        return runs
    own: set[str] = set()
    if (path := store / LEDGER_FILE).is_file():
        with Ledger(path) as ledger:
            began = {run["id"] for run in runs if ledger.is_alive(run["id"]) or ledger.has_died(run["id"])}
            own = {use.run_id for use in ledger.stage_uses()} | began
    return [run for run in runs if run["id"] in own or parameter_of(run, "run").get("store") == str(store)]


def without_later_looks(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:  # Any: JSON
    """The runs, earliest first, with only the next scheduled run of each deployment."""
    now = datetime.now().astimezone()
    foreseen = [
        run
        for run in runs
        if run["auto_scheduled"]
        and run["state_type"] == "SCHEDULED"
        and datetime.fromisoformat(run["expected_start_time"]) > now
    ]
    following = {run["deployment_id"]: run for run in foreseen[::-1]}
    return [run for run in runs if run not in foreseen or run is following[run["deployment_id"]]]


def describe_run(
    run: Mapping[str, Any],  # Any: JSON
    tasks: list[dict[str, Any]],  # Any: JSON
    nodes: Mapping[str, str],
) -> str:
    """A line about a run: its name for other commands, its state, its stage, the time of the last change, its node."""
    # Task runs of a killed attempt stay Running forever, so only the latest task run counts.
    own = [each for each in tasks if each["flow_run_id"] == run["id"] and each["start_time"]]
    last = max(own, key=lambda each: str(each["start_time"]), default=None)
    is_running = run["state_type"] == "RUNNING" and last is not None
    is_foreseen = run["state_type"] == "SCHEDULED" and run["auto_scheduled"]
    began = last["start_time"] if is_running and last else run["state"]["timestamp"]
    when = f"for {_clock(run['expected_start_time'])}" if is_foreseen else f"since {_clock(began)}"
    stage = f", {SUFFIX.sub('', last['name'])}" if is_running and last else ""
    where = nodes.get(run["id"], parameter_of(run, "node").get("kind", "local"))
    line = f"{full_name(run):<20} {run['state_name']}{stage} {when} on {where}"
    return shown_lines(line).replace(
        "\n", " "
    )  # on a shared server, other users chose the names, so control characters are escaped


def name_of_run(run: Mapping[str, Any]) -> str:  # Any: JSON
    """A run's name. Before a run starts, Prefect shows a random name, so the name is read from the run's parameters."""
    return str((not run.get("start_time") and parameter_of(run, "run").get("name")) or run["name"])


def full_name(run: Mapping[str, Any]) -> str:  # Any: JSON
    """The unique name of a run, which is also the name of the folder with its results."""
    return f"{name_of_run(run)}-{short_id(run['id'])}"


def parameter_of(run: Mapping[str, Any], name: str) -> Mapping[str, Any]:  # Any: JSON
    """A table of a run's settings (empty for a run of another project's flow with the same name)."""
    value = held_tables(run.get("parameters", {})).get(name)
    return value if isinstance(value, Mapping) else {}


def going_jobs(store: Path) -> list[GoingJob]:
    """The running jobs of the store. Jobs on other machines are listed without contacting these machines."""
    by_place: dict[tuple[str, str], list[Lease]] = {}
    for lease in _leases(store):
        if lease.is_started:
            by_place.setdefault((lease.run_dir, lease.node), []).append(lease)
    if not by_place:
        return []  # provision_node would create a store
    from rollouts.infra.node import LocalNode
    from rollouts.infra.providers import provision_node

    local = provision_node(LocalNode(), store)
    found = []
    for (run_dir, node), leases in by_place.items():
        is_here = node == local.name
        if is_here and not _is_running(run_dir, store):
            continue
        mirror = store / "stages" / PurePosixPath(run_dir).name
        with Ledger(store / LEDGER_FILE) as ledger:
            has_run = not all(ledger.has_died(lease.run_id) for lease in leases)
            names = {use.run_id: use.run for use in ledger.stage_uses()}
        found.append(
            GoingJob(
                run_dir=run_dir,
                node=node,
                is_known_to_run=is_here,
                has_run=has_run,
                run=names.get(leases[-1].run_id, ""),
                waits_for=waits_for_gpus(RunDirectory(mirror)),
            )
        )
    return found


def waits_for_gpus(directory: RunDirectory) -> str:
    """A sentence about the GPUs that a job waits for, from the job's last event (empty if the job does not wait).

    Events of a job on another machine are read from their latest downloaded copy.
    """
    events = read_last_lines(directory.events)
    if not events or events[-1].get("event") != "waits_for_gpus":
        return ""
    return shown_line(str(events[-1].get("message", "")))


def status_records(
    store: Path, address: ServerAddress | None, served: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:  # Any: JSON
    """Yield the JSON objects of --json: one each for the server, the serving process, each run, job and machine."""
    yield {"kind": "server", "api_url": address and address.api_url, "ui_url": address and address.ui_url}
    yield {"kind": "serving", "is_served": bool(served), **served}
    if address:
        for run in latest_runs(address, store):
            about = {"run": full_name(run), "id": run["id"], "url": run_url(address, run["id"])}
            message = run["state"].get("message")
            yield {"kind": "prefect_run", **about, "state": run["state_name"], "message": message}
    for job in going_jobs(store):
        yield {"kind": "job", **asdict(job)}
    for rental in rented_now(store):
        yield {"kind": "machine", **asdict(rental), "usd": rental.usd(time.time())}


def describe_machines(store: Path) -> list[str]:
    """A line for each machine that the store currently rents, with its cost so far."""
    now = time.time()
    return [
        f"{rental.name} {rental.state.value}, {rental.gpu} at {rental.provider}, {rental.usd(now):.2f} USD so far"
        + (f", {kept}" if (kept := describe_keeping(rental)) else "")
        for rental in rented_now(store)
    ]


def rented_now(store: Path) -> list[Rental]:
    """The machines that the store currently rents."""
    path = store / LEDGER_FILE
    if not path.is_file():
        return []
    with Ledger(path) as ledger:
        return open_rentals(ledger)


def _is_running(run_dir: str, store: Path) -> bool:
    from rollouts.infra.node import LocalNode
    from rollouts.infra.providers import open_session, provision_node

    try:
        with open_session(provision_node(LocalNode(), store)) as session:
            return job_status(session, run_dir).state is JobState.RUNNING
    except (PermanentInfraError, TransientInfraError):
        return False


def _leases(store: Path) -> list[Lease]:
    path = store / LEDGER_FILE
    if not path.is_file():
        return []
    with Ledger(path) as ledger:
        return ledger.leases()


def _clock(timestamp: str) -> str:
    moment = datetime.fromisoformat(timestamp).astimezone()
    today = datetime.now().astimezone().date()
    return moment.strftime("%H:%M:%S" if moment.date() == today else "%Y-%m-%d %H:%M")
