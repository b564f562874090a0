"""Pins that whatever goes wrong at a look after runs and machines, the next look comes, and the process goes on.

Without it one error there ends `rollouts up` with all the flows that it has, and nobody ends machines any more.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

import pytest
from prefect.client.schemas.objects import FlowRun
from prefect.exceptions import ObjectNotFound

from rollouts.flows.lost_runs import mark_of_gone, was_killed
from rollouts.flows.own_server.lend import local_server, prefect_environment
from rollouts.flows.store import save_keep_days
from rollouts.flows.upkeep import look_after, remove_unused
from rollouts_core.errors import ConfigError
from tests.kit.commands import Rollouts


def test_a_look_that_fails_is_logged_and_the_next_one_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[str] = []
    logged: list[BaseException | None] = []

    async def look(_: object) -> None:
        looks.append("runs")
        raise ObjectNotFound(KeyError("a run that was deleted"))

    def end(_: Path) -> list[str]:
        looks.append("machines")
        raise sqlite3.OperationalError("disk I/O error")

    async def look_for_a_while() -> None:
        task = asyncio.create_task(look_after(tmp_path))
        while not task.done() and min(looks.count("runs"), looks.count("machines")) < 3:
            await asyncio.sleep(0.01)
        assert not task.done(), "it ended with the first error"
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    monkeypatch.setattr("rollouts.flows.lost_runs.LostRuns.look", look)
    monkeypatch.setattr("rollouts.flows.expired_machines.end_expired", end)
    monkeypatch.setattr("rollouts.flows.upkeep.logger.exception", lambda *_: logged.append(sys.exception()))
    monkeypatch.setattr("rollouts.flows.upkeep.LOST_S", 0.01)
    monkeypatch.setattr("rollouts.flows.upkeep.EXPIRED_S", 0.01)
    asyncio.run(asyncio.wait_for(look_for_a_while(), 60))
    assert {type(error) for error in logged} == {ObjectNotFound, sqlite3.OperationalError}


def test_what_no_run_used_for_the_days_to_keep_is_removed_and_nothing_without_them(tmp_path: Path) -> None:
    old, new = (tmp_path / "stages" / f"sft-{16 * number}" for number in "01")
    for path, days in ((old, 31), (new, 29)):
        path.mkdir(parents=True)
        used_at = time.time() - days * 86_400
        os.utime(path, (used_at, used_at))
    (tmp_path / "prefect").mkdir()
    assert remove_unused(tmp_path) == []
    save_keep_days(tmp_path / "prefect", 30)
    assert remove_unused(tmp_path) == [f"stages/{old.name}"]
    assert (old.exists(), new.exists()) == (False, True)
    save_keep_days(tmp_path / "prefect", 0)
    assert remove_unused(tmp_path) == []
    (tmp_path / "prefect/keep_days").write_text("many")
    with pytest.raises(ConfigError, match="keep_days does not contain a number of days: delete it"):
        remove_unused(tmp_path)


def test_a_run_that_is_gone_is_told_to_go_on_by_what_there_is_for_it() -> None:
    """Prefect has no Retry for the runs of a terminal."""
    served = FlowRun(flow_id=uuid4(), deployment_id=uuid4())
    assert "and Retry attaches to them" in str(mark_of_gone(served).message)
    of_terminal = FlowRun(flow_id=uuid4())
    assert "and the same command attaches to them" in str(mark_of_gone(of_terminal).message)
    assert was_killed(mark_of_gone(served))


def run_with_server(program: str, rollouts: Rollouts) -> list[str]:
    """The lines that a program prints which is given the store and speaks to its server."""
    with local_server(rollouts.store) as address:
        environment = {**os.environ, **prefect_environment(rollouts.store, address)}
        command = [sys.executable, "-c", program, str(rollouts.store)]
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.splitlines()


DELETED_MEANWHILE = """
import asyncio, sys
from pathlib import Path
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State, StateType
from rollouts.flows import lost_runs

@flow
def nothing(): ...

deleted = []

def delete_it(run):
    deleted.append(run)
    with get_client(sync_client=True) as client:
        client.delete_flow_run(run.id)
    return "nothing was left to give back"

async def main(store):
    async with get_client() as client:
        runs = []
        for kind in (StateType.CANCELLING, StateType.RUNNING, StateType.CANCELLING):
            run = await client.create_flow_run(nothing)
            await client.set_flow_run_state(run.id, State(type=kind), force=True)
            (store / "ledger.runs" / str(run.id)).touch()  # as of a process that is gone
            runs.append(run)
        lost = lost_runs.LostRuns(store)
        for _ in range(3):
            await lost.look()
        left = await client.read_flow_run(runs[1].id)
        print(f"{len(deleted)} deleted, the other one {left.state.name}")

lost_runs.release_for = delete_it
store = Path(sys.argv[1])
(store / "ledger.runs").mkdir(exist_ok=True)
asyncio.run(main(store))
"""


@pytest.mark.slow
def test_runs_that_are_deleted_while_their_jobs_end_hinder_no_other(rollouts: Rollouts) -> None:
    assert run_with_server(DELETED_MEANWHILE, rollouts)[-1] == "2 deleted, the other one Crashed"


LEFT_PENDING = """
import asyncio, sys
from pathlib import Path
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State, StateType
from rollouts.flows import lost_runs

@flow
def nothing(): ...

async def main(store):
    async with get_client() as client:
        deployment_id = await client.create_deployment(await client.create_flow(nothing), "one")
        run = await client.create_flow_run_from_deployment(deployment_id, state=State(type=StateType.PENDING))
        lost, of_others = lost_runs.LostRuns(store, {deployment_id}), lost_runs.LostRuns(store)
        await lost.look()
        print((await client.read_flow_run(run.id)).state.name)  # it may be about to begin
        lost_runs.PENDING_S = 0.0
        await of_others.look()
        print((await client.read_flow_run(run.id)).state.name)
        await lost.look()
        run = await client.read_flow_run(run.id)
        print(run.state.name, run.state.message)

asyncio.run(main(Path(sys.argv[1])))
"""


@pytest.mark.slow
def test_a_run_that_nobody_is_left_to_start_is_started(rollouts: Rollouts) -> None:
    """Its serving process died a moment before its own process began, and no other one takes up what is Pending."""
    assert run_with_server(LEFT_PENDING, rollouts) == [
        "Pending",
        "Pending",
        "AwaitingRetry started again, because the process that should have started it was gone",
    ]


KILLED_BEFORE_ITS_FUNCTION = """
import asyncio, os, signal, subprocess, sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State, StateType
from rollouts.flows import lost_runs
from rollouts.infra.ledger import Ledger

@flow
def nothing(): ...

PROCESS = '''
import sys, time
from uuid import UUID
from prefect import flow, flow_engine
from prefect.client.orchestration import get_client

@flow
def nothing(): ...

flow_engine.FlowRunEngine.call_flow_fn = lambda _: time.sleep(1000)  # as if it was slow to come to the function
with get_client(sync_client=True) as client:
    flow_engine.run_flow(nothing, flow_run=client.read_flow_run(UUID(sys.argv[1])))
'''

async def until(client, run, name):
    while (run := await client.read_flow_run(run.id)).state.name != name:
        await asyncio.sleep(0.1)
    return run

async def main(store):
    async with get_client() as client:
        deployment_id = await client.create_deployment(await client.create_flow(nothing), "one")
        of_terminal = {"parameters": {"run": {"store": str(store)}}}
        killed = await client.create_flow_run_from_deployment(deployment_id)
        lives = await client.create_flow_run_from_deployment(deployment_id, state=State(type=StateType.RUNNING))
        await client.set_flow_run_state(lives.id, State(type=StateType.RUNNING), force=True)
        elsewhere = await client.create_flow_run(nothing, state=State(type=StateType.RUNNING))
        await client.set_flow_run_state(elsewhere.id, State(type=StateType.RUNNING), force=True)
        process = subprocess.Popen([sys.executable, "-c", PROCESS, str(killed.id)])
        killed = await until(client, killed, "Running")
        process.kill()
        process.wait()
        lost = lost_runs.LostRuns(store, {deployment_id})
        with Ledger(store / "ledger.db") as ledger, ledger.living_run(str(lives.id)):
            await lost.look()
            await lost.look()
            print((await client.read_flow_run(killed.id)).state.name)  # it may be about to begin
            lost_runs.UNBEGUN_S = 0.0
            await lost.look()
            killed = await client.read_flow_run(killed.id)
            print(killed.state.name, killed.state.message)
            for run in (lives, elsewhere):
                print((await client.read_flow_run(run.id)).state.name)

asyncio.run(main(Path(sys.argv[1])))
"""


@pytest.mark.slow
def test_a_run_whose_process_was_killed_before_its_function_began_is_started_again(rollouts: Rollouts) -> None:
    """It is Running, and has no lock by which its process could be found gone."""
    assert run_with_server(KILLED_BEFORE_ITS_FUNCTION, rollouts) == [
        "Running",
        "AwaitingRetry started again, because its process was killed (1 of 2); it attaches to its jobs",
        "Running",
        "Running",
    ]


KILLED_TOOLS = """
import asyncio, subprocess, sys, time
from pathlib import Path
from prefect.client.orchestration import get_client
from rollouts.flows import lost_runs
from rollouts.flows.finish_flow import finish_run
from rollouts.flows.reap import reap_machines
from rollouts.infra.ledger import Ledger

PROCESS = '''
import sys, time
from uuid import UUID
from prefect import flow_engine
from prefect.client.orchestration import get_client
from rollouts.flows import finish_flow, reap

reap.look_at_machines = finish_flow.finish_training = lambda *_, **__: time.sleep(1000)
flow = {"reap": reap.reap_machines, "finish": finish_flow.finish_run}[sys.argv[2]]
with get_client(sync_client=True) as client:
    flow_engine.run_flow(flow, flow_run=client.read_flow_run(UUID(sys.argv[1])), parameters=eval(sys.argv[3]))
'''

async def main(store):
    async with get_client() as client:
        runs, processes, deployments = [], [], set()
        for tool, parameters in (("reap", {"store": str(store)}), ("finish", {"store": str(store), "run": "small"})):
            flow_id = await client.create_flow({"reap": reap_machines, "finish": finish_run}[tool])
            deployments.add(deployment_id := await client.create_deployment(flow_id, tool))
            run = await client.create_flow_run_from_deployment(deployment_id, name=tool)
            given = repr({tool: parameters})
            processes.append(subprocess.Popen([sys.executable, "-c", PROCESS, str(run.id), tool, given]))
            runs.append(run)
        with Ledger(store / "ledger.db") as ledger:
            while not all(ledger.is_alive(str(run.id)) for run in runs):
                assert all(process.poll() is None for process in processes)
                await asyncio.sleep(0.1)
        lost = lost_runs.LostRuns(store, deployments)
        for process in (None, *processes):
            if process is not None:
                process.kill()
                process.wait()
            await lost.look()
        await lost.look()
        for run in runs:
            run = await client.read_flow_run(run.id)
            print(run.name, run.state.name, run.state.message)

asyncio.run(main(Path(sys.argv[1])))
"""


@pytest.mark.slow
def test_a_tool_whose_process_is_killed_is_found_gone_and_started_again(rollouts: Rollouts) -> None:
    """`finish` and `reap` hold nothing by which it would be found otherwise."""
    again = "AwaitingRetry started again, because its process was killed (1 of 2); it attaches to its jobs"
    assert run_with_server(KILLED_TOOLS, rollouts) == [f"reap {again}", f"finish small {again}"]


CANCELLED_WHILE_QUEUED = """
import asyncio, sys
from pathlib import Path
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State, StateType
from rollouts.flows import lost_runs
from rollouts.infra.ledger import Ledger

@flow
def nothing(): ...

released = []

def release(run):
    released.append(run.name)
    return "ended the job"

async def main(store):
    async with get_client() as client:
        deployment_id = await client.create_deployment(await client.create_flow(nothing), "one")
        for name, is_cancelled in (("cancelled", True), ("waits", False), ("lives", True)):
            again = State(type=StateType.SCHEDULED, name="AwaitingRetry")
            run = await client.create_flow_run_from_deployment(deployment_id, state=again, name=name)
            with Ledger(store / "ledger.db") as ledger:
                ledger.add_lease(f"/stages/sft-{name}", str(run.id), "local")
            if name != "lives":
                (store / "ledger.runs" / str(run.id)).touch()  # as of a process that is gone
            if is_cancelled:
                await client.set_flow_run_state(run.id, State(type=StateType.CANCELLING))
            print(name, (await client.read_flow_run(run.id)).state.name)
        lost = lost_runs.LostRuns(store)
        for _ in range(3):
            await lost.look()
        print("released", *released)

lost_runs.release_for = release
store = Path(sys.argv[1])
(store / "ledger.runs").mkdir(exist_ok=True)
asyncio.run(main(store))
"""


@pytest.mark.slow
def test_a_killed_run_that_is_cancelled_while_it_is_queued_again_gives_back_what_it_holds(rollouts: Rollouts) -> None:
    """All slots are taken, so it waits to be started again, while its job trains on: Prefect tells nobody of Cancel."""
    said = ["cancelled Cancelled", "waits AwaitingRetry", "lives Cancelled", "released cancelled"]
    assert run_with_server(CANCELLED_WHILE_QUEUED, rollouts) == said
