"""The serving process of a store: start it, trigger runs of its deployments, and ask its Prefect server."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

from rollouts.flows.commands.serving_state import find_serving
from rollouts.flows.own_server.lend import ServerAddress, running_server
from rollouts.flows.prefect_api import ask
from tests.kit.commands import Rollouts
from tests.kit.runs import ENDLESS, events_of, give_way, run_dir
from tests.kit.small_pipeline import write_small_pipeline
from tests.kit.waiting import wait_until

RUN_LINK = re.compile(r"/runs/flow-run/([0-9a-f-]{36})")
ASK_S = 0.5
"""How often a server is asked: each question costs it and us some hundredths of a second."""


def up(rollouts: Rollouts, *arguments: str) -> str:
    """What a successful `up` says."""
    code, output = rollouts.run("up", *arguments)
    assert code == 0, output
    return output


def trigger(rollouts: Rollouts, name: str, *assignments: str) -> str:
    """The id of a run that the command asked for."""
    code, output = rollouts.run("run", "--deployment", name, *assignments)
    assert code == 0, output
    found = RUN_LINK.search(output)
    assert found is not None, output
    return found[1]


def address_of(rollouts: Rollouts) -> ServerAddress:
    """Where the store's server answers; it is waited for, since it may be silent for a while on a busy machine."""
    found: list[ServerAddress | None] = []

    def is_there() -> bool:
        found.append(running_server(rollouts.store))
        return found[-1] is not None

    wait_until(is_there, what="the server", every_s=ASK_S)
    address = found[-1]
    assert address is not None
    return address


def api(rollouts: Rollouts, method: str, path: str, question: Any = None) -> Any:  # Any: JSON
    """What the store's Prefect server answers."""
    return ask(address_of(rollouts), method, path, question)


def state_of(rollouts: Rollouts, run_id: str) -> str:
    return str(api(rollouts, "GET", f"/flow_runs/{run_id}")["state_type"])


def wait_for_state(rollouts: Rollouts, run_id: str, state: str, *, timeout_s: float = 480.0) -> None:
    wait_until(
        lambda: state_of(rollouts, run_id) in (state, "FAILED", "COMPLETED", "CRASHED", "CANCELLED"),
        what=f"{run_id} {state}",
        timeout_s=timeout_s,
        every_s=ASK_S,
    )
    run = api(rollouts, "GET", f"/flow_runs/{run_id}")
    log = (rollouts.store / "prefect/serving.log").read_text()
    assert run["state_type"] == state, f"{run['state_type']}: {run['state']['message']}\n{log[-3000:]}"


def logs_of(rollouts: Rollouts, run_id: str) -> str:
    """What a run said into Prefect."""
    lines = api(rollouts, "POST", "/logs/filter", {"logs": {"flow_run_id": {"any_": [run_id]}}, "limit": 200})
    return "\n".join(line["message"] for line in lines)


def wait_for_checkpoint(rollouts: Rollouts, stage: str) -> Path:
    """The stage's run directory, as soon as it has a checkpoint."""
    wait_until(
        lambda: any(events_of(path, "checkpoint") for path in rollouts.store.glob(f"stages/{stage}-*")),
        what=f"a checkpoint of {stage}",
    )
    directory = run_dir(rollouts, stage)
    give_way(directory)
    return directory


def train_endlessly(rollouts: Rollouts, folder: Path) -> tuple[str, Path]:
    """A served run in the middle of an SFT that does not end by itself: the run's id, and the stage's run directory."""
    up(rollouts, str(write_small_pipeline(folder, mode="sft", **ENDLESS)))
    run_id = trigger(rollouts, "small")
    return run_id, wait_for_checkpoint(rollouts, "sft")


def set_state(rollouts: Rollouts, run_id: str, state: str, **more: str) -> None:
    """What the UI's buttons send."""
    api(rollouts, "POST", f"/flow_runs/{run_id}/set_state", {"state": {"type": state, **more}, "force": False})


def kill_serving_and_flow(rollouts: Rollouts) -> None:
    """kill -9 of the process that serves, and of the only flow that it started."""
    serving = find_serving(rollouts.store)
    assert serving is not None
    (flow,) = flows_of(serving.pid)
    for pid in (serving.pid, flow):
        os.kill(pid, signal.SIGKILL)


def flows_of(pid: int) -> list[int]:
    """The processes of flows that a serving process started."""
    return children_of(pid, "spawn_main")


def children_of(pid: int, words: str) -> list[int]:
    """The processes that a process started and that have these words in their command."""
    listing = subprocess.run(["ps", "-A", "-ww", "-o", "pid=,ppid=,args="], capture_output=True, text=True, check=True)
    rows = [line.split(None, 2) for line in listing.stdout.splitlines()]
    return [int(row[0]) for row in rows if row[1] == str(pid) and words in row[2]]
