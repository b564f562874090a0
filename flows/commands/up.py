"""`rollouts up` and `rollouts down`: start and stop a Prefect server with deployments in the background.

Not here: the state of the serving process (serving_state.py), the process itself (serving.py), the server
(own_server/), and the deployments (deployments.py).

    up     joins or starts the server, then starts the serving process, which keeps the server running
    down   ends the serving process and its flows; the server then stops by itself, and training jobs go on
"""

from __future__ import annotations

import fcntl
import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from rollouts.flows.commands.notify import renew_notifications
from rollouts.flows.commands.serving_state import (
    Serving,
    describe_deployments,
    describe_gpu_slots,
    find_serving,
    is_serving,
    is_starting,
    served_elsewhere,
)
from rollouts.flows.commands.status import describe_machines, going_jobs
from rollouts.flows.commands.terminal import (
    DEFAULT_STORE,
    LOOKING_FOR_SERVER,
    AsJson,
    Port,
    Store,
    console,
    emit,
    served_at,
)
from rollouts.flows.deployments import (
    Deployment,
    check_names,
    deployments_of,
    load_deployments,
    offered_name,
    preset_deployments,
    save_deployments,
    tool_deployments,
)
from rollouts.flows.live import find_live_pages
from rollouts.flows.own_server.lend import (
    ROOT,
    ServerAddress,
    ServerError,
    local_server,
    named_url,
    remember_port,
    running_server,
)
from rollouts.flows.own_server.password import password_file
from rollouts.flows.own_server.server_log import log_tail
from rollouts.flows.preflight import check_writable
from rollouts.flows.quickstart_files import quickstart_folder, write_missing_quickstart
from rollouts.flows.store import load_keep_days, save_gpu_slots, save_keep_days
from rollouts.infra.locks import lock_file, open_lock, try_lock
from rollouts.infra.secret_file import open_own_log, own_folder
from rollouts.infra.supervisor.program import with_absolute_paths
from rollouts_core.errors import InputError

READY_TIMEOUT_S = 180.0
DOWN_TIMEOUT_S = 45.0
SERVER_END_S = 12.0
"""How long `rollouts down` waits for the server to stop. The server stops about two seconds after the last process
that uses it has ended."""
POLL_S = 0.05


def up(
    configs: Annotated[
        list[Path] | None, typer.Argument(metavar="[CONFIG]...", help="Configurations to deploy besides the presets.")
    ] = None,
    store: Store = DEFAULT_STORE,
    port: Port = 0,
    gpu_slots: Annotated[
        int,
        typer.Option(
            min=0,
            help="Most runs at once; further runs are queued. Saved in the store. 0: unchanged (initially 5).",
        ),
    ] = 0,
    keep_days: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Once a day, remove what no run used for this many days, as `rollouts prune` does. Saved in the "
            "store. 0: remove nothing. Default: unchanged (initially 0).",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Start a Prefect server in the background, with a deployment for each preset and each CONFIG. `rollouts down`
    stops it.

    If the server runs already, the deployment of each CONFIG is added to it.
    """
    own = [deployment for path in configs or [] for deployment in deployments_of(path)]
    check_names(own)
    check_writable(store)
    check_server(store)
    is_new = False
    if keep_days is not None:
        own_folder(store.resolve() / "prefect")
        save_keep_days(store.resolve() / "prefect", keep_days)
    console.print(LOOKING_FOR_SERVER)

    def begin(address: ServerAddress) -> None:
        nonlocal is_new
        is_new = begin_serving(store.resolve(), own, gpu_slots=gpu_slots)
        console.print(f"server         {address.ui_url}", markup=False)
        more = ", and starting their serving process" if is_new else ""
        console.print(f"deployments    registering them{more}")

    with local_server(store, port=port, meanwhile=begin) as address:
        serving = wait_until_served(store.resolve(), gpu_slots=gpu_slots)
        if port and not named_url():
            remember_port(store.resolve() / "prefect", port)
        for name in renew_notifications(address):
            said = f"{name} now also gets messages about no-improvement: such runs no longer count as failed"
            console.print(f"notify         {said}", markup=False)
    how = "started" if is_new else "joined"
    console.print(f"{how:<14} process {serving.pid}, which serves the deployments, even after this terminal is closed")
    console.print(f"deployments    {describe_deployments(serving)}")
    if named := offered_name(store.resolve(), ""):
        console.print(
            f"named          NAME{named} at this server, because other stores may use the server, too", markup=False
        )
    console.print(f"gpu slots      {describe_gpu_slots(serving)}")
    if days := load_keep_days(store.resolve() / "prefect"):
        console.print(f"keep days      {days}: what no run used for so long is removed once a day")
    at_store = "" if store == DEFAULT_STORE else f" --store {shlex.quote(str(store))}"
    begin_by = f"rollouts run --deployment quickstart{at_store}"
    console.print(f"start a run    {address.ui_url}/deployments, or {begin_by}", markup=False, soft_wrap=True)
    if live := find_live_pages(store):
        console.print(f"watch runs     {live.url}", markup=False)
    if address.password:
        user, _, _ = address.password.partition(":")
        console.print(f"log in with    {address.password}", markup=False)
        said = f"(in Prefect the whole text; on the live pages user {user} and the part after the colon)"
        console.print(f"               {said}", markup=False)
        console.print(f"               (saved in {password_file(store.resolve() / 'prefect')})", markup=False)
    if port and f":{port}/" not in address.api_url:
        console.print(f"port           {port} is for the next server of the store: the current one has another port")
    if as_json:
        emit([{**served_at(address.ui_url), "process": serving.pid, "deployments": sorted(serving.deployments)}])
    console.print(f"see the runs   rollouts status{at_store}", markup=False, soft_wrap=True)
    console.print(f"end it         rollouts down{at_store} (training jobs go on)", markup=False, soft_wrap=True)


def down(store: Store = DEFAULT_STORE, as_json: AsJson = False) -> None:
    """Stop the Prefect server and the runs of `rollouts up`. The training jobs of these runs go on."""

    def say(outcome: str, about: str) -> None:
        console.print(f"{outcome:<15}{about}" if outcome else about, markup=False)
        if as_json:
            emit([{"kind": "ended" if outcome == "ended" else "left", "outcome": outcome, "message": about}])

    home = store.resolve() / "prefect"
    serving = _wait_until_begun(store)
    if serving is None:
        say("", f"nothing serves the deployments of {store}")
    else:
        for number in (signal.SIGTERM, signal.SIGKILL):
            if is_serving(home):
                _send_signal(serving, number, store)
                _wait_until_free(home, DOWN_TIMEOUT_S)
        say("ended", f"process {serving.pid}")
    deadline = time.monotonic() + SERVER_END_S
    while (address := running_server(store)) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    if address:
        say("kept", f"the Prefect server at {address.ui_url}: another command or a run uses it")
    for job in going_jobs(store.resolve()):
        say("left alone", job.sentence())
    for line in describe_machines(store.resolve()):
        say("still rented", f"{line}: rollouts nodes release ends it")


def _send_signal(serving: Serving, number: signal.Signals, store: Path) -> None:
    """Send a signal to the serving process.

    Raises:
        ServerError: the process runs in another container or machine, so its process id is not valid here.
    """
    if not serving.process.is_here:
        raise ServerError(
            f"the deployments of {store} are served by process {serving.pid} of {serving.process.host}, which "
            "is another container or machine: call rollouts down there"
        )
    os.kill(serving.pid, number)


def begin_serving(store: Path, own: list[Deployment], *, gpu_slots: int = 0) -> bool:
    """Save the deployments in `own`, and start the serving process, which registers them in Prefect.

    Returns False if a serving process runs already, which then registers `own`. The store's Prefect server may still be
    starting when this function is called.

    Args:
        gpu_slots: new maximum number of concurrent runs (0 leaves it unchanged).
    """
    home = store / "prefect"
    own_folder(home)
    with lock_file(home / "up.lock") as up_lock:
        fcntl.flock(up_lock, fcntl.LOCK_EX)
        is_new = not is_serving(home)
        if is_new:
            quickstart = write_missing_quickstart(quickstart_folder(store, seed=0))
            save_deployments(home, [*preset_deployments(Path.cwd(), quickstart), *tool_deployments()])
        save_deployments(home, [replace(each, offered_at=time.time()) for each in own])
        if gpu_slots:
            save_gpu_slots(home, gpu_slots)
        if is_new:
            _start_serving(store, home)
    return is_new


def wait_until_served(store: Path, *, gpu_slots: int = 0) -> Serving:
    """Wait until the serving process has registered every deployment of the store.

    Args:
        gpu_slots: also wait until the process uses this number of slots (0 accepts any number).

    Raises:
        ServerError: the process does not start in time. The error has the end of the process's log.
    """
    home = store / "prefect"
    log = home / "serving.log"
    wanted = {name: each.digest for name, each in load_deployments(home).items()}
    deadline = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < deadline:
        serving = find_serving(store)
        if serving and wanted.items() <= serving.deployments.items() and gpu_slots in (0, serving.gpu_slots):
            return serving
        if serving is None and not is_serving(home):
            raise ServerError(f"the deployments could not be served; {log} ends with: {log_tail(log)}")
        time.sleep(POLL_S)
    raise ServerError(f"the deployments were not served within {READY_TIMEOUT_S:.0f} s; see {log}")


def check_server(store: Path) -> None:
    """Raise InputError if the serving process of the store uses another Prefect server than this command."""
    serving = find_serving(store)
    if serving and (elsewhere := served_elsewhere(serving)):
        raise InputError(f"{store}: {elsewhere}")


def require_serving(store: Path) -> Serving:
    """The process that serves the store's deployments.

    Raises:
        ServerError: the store has no serving process, so that a requested run would never start.
        InputError: the serving process uses another Prefect server than this command.
    """
    check_server(store)
    if (serving := find_serving(store)) is None:
        raise ServerError(f"nothing serves the deployments of {store}: rollouts up --store {store} starts it")
    return serving


def _wait_until_begun(store: Path) -> Serving | None:
    """The serving process. Waits for a starting process until it is ready and has written its process id.

    Raises:
        ServerError: the process did not become ready in time.
    """
    if is_starting(store):
        console.print("waiting        until the starting process is ready and can be ended")
    deadline = time.monotonic() + READY_TIMEOUT_S
    while is_starting(store):
        if time.monotonic() > deadline:
            log = store.resolve() / "prefect" / "serving.log"
            raise ServerError(f"the process did not start within {READY_TIMEOUT_S:.0f} s; see {log}")
        time.sleep(POLL_S)
    return find_serving(store)


def _start_serving(store: Path, home: Path) -> None:
    """Take the lock serving.lock, and start the serving process, which inherits the lock."""
    lock = open_lock(home / "serving.lock")
    try:
        if not try_lock(lock, fcntl.LOCK_EX):
            raise ServerError(f"another process holds {home / 'serving.lock'}")
        (home / "serving.json").unlink(missing_ok=True)
        (home / "serving.log").unlink(missing_ok=True)
        variables = {**os.environ, **with_absolute_paths(os.environ, Path.cwd())}
        path = os.pathsep.join(filter(None, [variables.get("PYTHONPATH"), str(ROOT)]))
        with open_own_log(home / "serving.log") as log:
            subprocess.Popen(
                [sys.executable, "-P", "-m", "rollouts.flows.serving", str(store)],
                env={**variables, "PYTHONPATH": path},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(lock,),
                start_new_session=True,
            )
    finally:
        os.close(lock)


def _wait_until_free(home: Path, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while is_serving(home):
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True
