"""Runs on a server that several people share: PostgreSQL, `prefect deploy`, a worker of a work pool.

Without these tests a team that outgrew `rollouts up` could find that its workers cannot load the flows, that Cancel
leaves training behind, or that Retry trains again.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from rollouts.flows.automations import SILENT, mark_silent_runs
from rollouts.flows.commands.prefect_yaml import render_prefect_yaml
from rollouts.flows.deployments import RETRAIN_FLOW, Deployment, deployments_of
from rollouts.flows.lost_runs import GONE
from rollouts.infra.ledger import Ledger
from rollouts_core.errors import ConfigError
from tests.flows.shared_server import SharedServer, shared_server
from tests.kit.commands import Rollouts, pids_of, processes_of
from tests.kit.processes import dies_with_us
from tests.kit.runs import ENDLESS, LONG, assert_goes_on, events_of, exits_of, paused, program_of
from tests.kit.serving import ASK_S
from tests.kit.small_pipeline import OWN_REWARD, write_own_reward, write_small_pipeline
from tests.kit.waiting import wait_until

POOL = "gpus"
NO_MORE_CANCEL = b"flow run cancellation will fail"
"""What Prefect's worker says when it stops looking for cancelled runs."""
ENDS = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedServer]:
    with shared_server(tmp_path_factory.mktemp("shared")) as running:
        running.prefect("work-pool", "create", POOL, "--type", "process")
        yield running


@pytest.mark.matrix
@pytest.mark.slow
def test_a_worker_runs_what_was_deployed_a_retry_attaches_and_cancel_ends_its_job(
    server: SharedServer, tmp_path: Path
) -> None:
    """Its rewards are those of a module beside the configuration, which the deployment tells the workers of."""
    settings = {**ENDLESS, "rollout__reward_fn": OWN_REWARD}
    config = write_small_pipeline(tmp_path / "small", mode="sft", **settings)
    write_own_reward(tmp_path / "small")
    store = tmp_path / "store"
    command = Rollouts(store, tmp_path / "prefect.yaml")
    code, text = command.run("prefect-yaml", str(config), "--pool", POOL)
    assert code == 0, text
    server.prefect("deploy", "--all", cwd=tmp_path)
    (tmp_path / "prefect.yaml").unlink()  # workers have neither it nor its folder
    with server.worker(POOL, ROLLOUTS_TRUSTED_CODE="graders_beside") as said:
        run_id = start(server, "small")
        sft = wait_for_sft(store)
        os.kill(flow_process(run_id), signal.SIGKILL)
        assert end_of(server, run_id, said) == "CRASHED"
        assert_goes_on(sft)
        retry = {"state": {"type": "SCHEDULED", "name": "AwaitingRetry"}, "force": True}
        server.ask("POST", f"/flow_runs/{run_id}/set_state", retry)
        wait_until(lambda: "attached to the running job" in logs_of(server, run_id), what="attaching", every_s=ASK_S)
        server.prefect("flow-run", "cancel", run_id)
        assert end_of(server, run_id, said) == "CANCELLED"
        wait_until(lambda: len(exits_of(sft)) == 1, what="the end of the job")
        assert len(events_of(sft, "started")) == 1
        assert f"ended the job in {sft}" in logs_of(server, run_id)
    wait_until(lambda: not processes_of(store), what=f"the end of {processes_of(store)}", timeout_s=30.0)


@pytest.mark.slow
@pytest.mark.matrix
def test_a_worker_completes_what_a_retry_attached_to_and_trains_it_once(server: SharedServer, tmp_path: Path) -> None:
    config = write_small_pipeline(tmp_path / "small", mode="sft", **LONG)
    store = tmp_path / "store"
    config = config.rename(config.with_name("whole.toml"))
    code, text = Rollouts(store, tmp_path / "prefect.yaml").run("prefect-yaml", str(config), "--pool", POOL)
    assert code == 0, text
    server.prefect("deploy", "--all", cwd=tmp_path)
    with server.worker(POOL) as said:
        run_id = start(server, "whole")
        sft = wait_for_sft(store)
        os.kill(flow_process(run_id), signal.SIGKILL)
        assert end_of(server, run_id, said) == "CRASHED"
        with paused(program_of(sft)):
            retry = {"state": {"type": "SCHEDULED", "name": "AwaitingRetry"}, "force": True}
            server.ask("POST", f"/flow_runs/{run_id}/set_state", retry)
            wait_until(
                lambda: "attached to the running job" in logs_of(server, run_id), what="attaching", every_s=ASK_S
            )
        assert end_of(server, run_id, said) == "COMPLETED"
        # a run with the same settings has nothing to train
        assert end_of(server, start(server, "whole"), said) == "COMPLETED"
    assert exits_of(sft) == ["exit-1.json"]
    assert len(events_of(sft, "started")) == 1


@pytest.mark.slow
@pytest.mark.matrix
def test_cancel_ends_a_run_whose_worker_stopped_looking_while_the_server_was_away(
    server: SharedServer, tmp_path: Path
) -> None:
    """A worker of Prefect 3.8 whose server refuses connections for some seconds never cancels its run again."""
    config = write_small_pipeline(tmp_path / "small", mode="sft", **ENDLESS)
    store = tmp_path / "store"
    config = config.rename(config.with_name("outage.toml"))
    code, text = Rollouts(store, tmp_path / "prefect.yaml").run("prefect-yaml", str(config), "--pool", POOL)
    assert code == 0, text
    server.prefect("deploy", "--all", cwd=tmp_path)
    with server.worker(POOL) as said:
        run_id = start(server, "outage")
        sft = wait_for_sft(store)
        said_before = said.stat().st_size
        server.kill()
        wait_until(lambda: NO_MORE_CANCEL in said.read_bytes()[said_before:], what="the worker's resignation")
        server.start()
        server.prefect("flow-run", "cancel", run_id)
        assert end_of(server, run_id, said) == "CANCELLED"
        wait_until(lambda: len(exits_of(sft)) == 1, what="the end of the job")
    wait_until(lambda: not processes_of(store), what=f"the end of {processes_of(store)}", timeout_s=30.0)
    assert server.ask("GET", f"/flow_runs/{run_id}")["state_type"] == "CANCELLED"  # whatever the worker said since


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("is_machine_gone", [False, True])
def test_a_run_whose_worker_died_with_it_is_found_and_started_again(
    server: SharedServer, tmp_path: Path, is_machine_gone: bool
) -> None:
    """By who watches on its machine; where that is gone too, the server marks it, and it starts when that is back."""
    config = write_small_pipeline(tmp_path / "small", mode="sft", run__restarts=2, **LONG)
    store = tmp_path / "store"
    config = config.rename(config.with_name("lost.toml"))
    code, text = Rollouts(store, tmp_path / "prefect.yaml").run("prefect-yaml", str(config), "--pool", POOL)
    assert code == 0, text
    server.prefect("deploy", "--all", cwd=tmp_path)
    if is_machine_gone:
        mark_silent_runs(server.address, after_minutes=1)
    with server.worker(POOL):
        run_id = start(server, "lost")
        sft = wait_for_sft(store)
        flow = flow_process(run_id)
        worker = int(Path(f"/proc/{flow}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(worker, signal.SIGKILL)  # first, so that it says nothing of its run
        os.kill(flow, signal.SIGKILL)
    with paused(program_of(sft)):
        if is_machine_gone:
            assert end_of(server, run_id, server.folder / "worker.log") == "CRASHED"
        with server.worker(POOL) as said, watching(server, store) as watched:
            wait_until(
                lambda: "attached to the running job" in logs_of(server, run_id),
                what=f"attaching; see {watched} and {said}",
                every_s=ASK_S,
            )
    states = server.ask("GET", f"/flow_run_states/?flow_run_id={run_id}")
    [crashed] = [state["message"] for state in states if state["type"] == "CRASHED"]
    assert crashed.startswith(SILENT if is_machine_gone else GONE)
    assert "(1 of 2)" in next(state["message"] for state in states if state["name"] == "AwaitingRetry")
    assert len(events_of(sft, "started")) == 1
    for pid in pids_of(store):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.timeout(900)
def test_a_serving_process_waits_for_a_server_that_is_away_for_minutes(server: SharedServer, tmp_path: Path) -> None:
    config = write_small_pipeline(tmp_path / "small", mode="sft")
    store = tmp_path / "store"
    rollouts_up = partial(rollouts_command, server, store, "up", str(config.rename(config.with_name("waiting.toml"))))
    assert rollouts_up() == 0
    try:
        serving = json.loads((store / "prefect/serving.json").read_text())["pid"]
        server.kill()
        time.sleep(280)  # Prefect's own patience is three to four minutes
        server.start()
        run_id = start(server, offered_by(store, "waiting"))
        assert end_of(server, run_id, store / "prefect/serving.log") == "COMPLETED"
        assert json.loads((store / "prefect/serving.json").read_text())["pid"] == serving
    finally:
        assert rollouts_command(server, store, "down") == 0


@pytest.mark.matrix
@pytest.mark.slow
def test_stores_with_deployments_of_one_name_do_their_own_runs_and_cannot_cancel_each_others(
    server: SharedServer, tmp_path: Path
) -> None:
    stores = [tmp_path / "ada", tmp_path / "ben"]
    try:
        for store in stores:
            config = write_small_pipeline(tmp_path / f"of-{store.name}", mode="sft", **ENDLESS)
            assert rollouts_command(server, store, "up", str(config)) == 0
        assert rollouts_command(server, stores[0], "run", "--deployment", "small", "run.name=mine") == 0
        sft = wait_for_sft(stores[0])
        [run] = server.ask("POST", "/flow_runs/filter", {"flow_runs": {"name": {"any_": ["mine"]}}})
        assert run["parameters"]["config"]["data"]["sft"] == str(tmp_path / "of-ada/sft.jsonl")
        assert not list(stores[1].glob("stages/*"))
        said = [said_by(server, store, "status") for store in stores]
        assert [run["id"] in text for text in said] == [True, False]
        assert all(f"server       {server.address.ui_url}/v2" in text for text in said)
        with pytest.raises(subprocess.CalledProcessError) as refused:
            said_by(server, stores[1], "cancel", "mine")
        assert "there is no run mine; runs that can be cancelled: none" in refused.value.stdout
        assert ": cancelled" in said_by(server, stores[0], "cancel", "mine")
        wait_until(lambda: len(exits_of(sft)) == 1, what="the end of the job")
    finally:
        for store in stores:
            assert rollouts_command(server, store, "down") == 0


def offered_by(store: Path, name: str) -> str:
    """What a deployment of a store is called on the server."""
    with Ledger(store / "ledger.db") as ledger:
        return f"{name}@{ledger.identity}"


def rollouts_command(server: SharedServer, store: Path, *arguments: str) -> int:
    """The exit code of a command of somebody who named the server."""
    command = [sys.executable, "-m", "rollouts.flows.cli", *arguments, "--store", str(store)]
    return subprocess.run(command, env=server.environment, stdin=subprocess.DEVNULL, timeout=180).returncode


def said_by(server: SharedServer, store: Path, *arguments: str) -> str:
    """What such a command says."""
    return subprocess.run(
        [sys.executable, "-m", "rollouts.flows.cli", *arguments, "--store", str(store)],
        env=server.environment | {"COLUMNS": "400"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=True,
        timeout=180,
    ).stdout


@contextmanager
def watching(server: SharedServer, store: Path) -> Iterator[Path]:
    """Somebody who watches the store on the workers' machine; yields what they see."""
    said = server.folder / "watched.txt"
    with said.open("wb") as output:
        process = subprocess.Popen(
            [*dies_with_us("TERM"), sys.executable, "-m", "rollouts.flows.cli", "watch", "--store", str(store)],
            env=server.environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    try:
        yield said
    finally:
        process.terminate()
        process.wait(30)


def start(server: SharedServer, name: str) -> str:
    """The id of a new run, of the latest deployment with this name."""
    deployment = server.ask("GET", f"/deployments/name/sft-rl/{name}")
    asked = {"state": {"type": "SCHEDULED"}}
    return str(server.ask("POST", f"/deployments/{deployment['id']}/create_flow_run", asked)["id"])


def end_of(server: SharedServer, run_id: str, said: Path) -> str:
    """How a run ended."""

    def state() -> str:
        return str(server.ask("GET", f"/flow_runs/{run_id}")["state_type"])

    wait_until(
        lambda: state() in ENDS,
        what=f"the end of {run_id}; the worker said {said.read_text()[-3000:]}",
        every_s=ASK_S,
    )
    return state()


def logs_of(server: SharedServer, run_id: str) -> str:
    lines = server.ask("POST", "/logs/filter", {"logs": {"flow_run_id": {"any_": [run_id]}}, "limit": 200})
    return "\n".join(line["message"] for line in lines)


def wait_for_sft(store: Path) -> Path:
    """The run directory of SFT, as soon as it trains."""

    def found() -> list[Path]:
        return [path for path in store.glob("stages/sft-*") if (path / "metrics.jsonl").is_file()]

    wait_until(lambda: bool(found()), what="SFT")
    (sft,) = found()
    return sft


def flow_process(run_id: str) -> int:
    """The process of a run's flow."""
    variable = f"PREFECT__FLOW_RUN_ID={run_id}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        try:
            environment = (entry / "environ").read_bytes().split(b"\0") if entry.name.isdigit() else []
            command = (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if variable in environment and b"rollouts_core" not in command and b"supervisor" not in command:
            found.append(int(entry.name))
    assert found, f"no process has {run_id}"
    return min(found)


def deployment(**more: Any) -> Deployment:
    parameters = {"config": {}, "node": {}, "run": {"name": "small", "store": "elsewhere"}}
    settings = {"name": "small", "description": "One.\nTwo.", "parameters": parameters, **more}
    return Deployment(**settings)


def test_the_file_names_pool_queue_variables_and_the_workers_store() -> None:
    variables = {"image": "rollouts:1", "cpu": 2}
    text = render_prefect_yaml([deployment()], Path("/data/runs"), pool="k8s", queue="night", job_variables=variables)
    [found] = yaml.safe_load(text)["deployments"]
    assert found["work_pool"] == {"name": "k8s", "work_queue_name": "night", "job_variables": variables}
    assert found["parameters"]["run"] == {"name": "small", "store": "/data/runs"}
    assert found["description"] == "One.\nTwo."
    assert "schedules" not in found
    assert yaml.safe_load(text)["pull"] == []


def test_the_file_names_the_folders_of_modules_beside_other_variables() -> None:
    folders = ("/home/me/small", "/home/me")
    given = {"image": "rollouts:1", "env": {"A": "b"}}
    text = render_prefect_yaml([deployment(code_folders=folders)], Path("/data/runs"), pool="k8s", job_variables=given)
    [found] = yaml.safe_load(text)["deployments"]
    env = {"ROLLOUTS_CODE_PATH": "/home/me/small:/home/me", "A": "b"}
    assert found["work_pool"]["job_variables"] == {"image": "rollouts:1", "env": env}


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ({"cron": "0 3 * * *", "time_zone": "Europe/Berlin"}, {"cron": "0 3 * * *", "timezone": "Europe/Berlin"}),
        ({"interval_minutes": 30}, {"interval": 1800, "anchor_date": "2020-01-01T00:00:00+00:00", "timezone": "UTC"}),
    ],
)
def test_a_retraining_keeps_its_schedule_and_runs_one_at_a_time(
    schedule: dict[str, object], expected: dict[str, object]
) -> None:
    retraining = deployment(flow=RETRAIN_FLOW, schedule={**schedule, "overlap": "skip"})
    [found] = yaml.safe_load(render_prefect_yaml([retraining], Path("/data"), pool="p"))["deployments"]
    assert found["schedules"] == [{**expected, "slug": "new-data"}]
    assert found["concurrency_limit"] == {"limit": 1, "collision_strategy": "CANCEL_NEW"}
    assert found["entrypoint"] == "rollouts.flows.retrain.retrain_model"


@pytest.mark.matrix
@pytest.mark.slow
def test_prefect_accepts_schedules_and_limits_as_they_are_written(server: SharedServer, tmp_path: Path) -> None:
    schedules = {
        "a": {"cron": "0 3 * * *", "time_zone": "Europe/Berlin", "overlap": "skip"},
        "b": {"interval_minutes": 30},
    }
    made = []
    for name, schedule in schedules.items():
        config = write_small_pipeline(tmp_path / "small", retrain={}, schedule=schedule)
        made.append(deployments_of(config.rename(config.with_name(f"{name}.toml")))[1])
    (tmp_path / "prefect.yaml").write_text(render_prefect_yaml(made, Path("/data"), pool=POOL))
    server.prefect("deploy", "--all", cwd=tmp_path)
    first, second = (server.ask("GET", f"/deployments/name/retrain/{each.name}") for each in made)
    assert first["schedules"][0]["schedule"] == {"cron": "0 3 * * *", "timezone": "Europe/Berlin", "day_or": True}
    assert first["concurrency_options"]["collision_strategy"] == "CANCEL_NEW"
    assert first["global_concurrency_limit"]["limit"] == 1
    assert second["schedules"][0]["schedule"]["interval"] == 1800
    assert second["schedules"][0]["slug"] == "new-data"
    automations = server.ask("POST", "/automations/filter", {})
    found = {automation["name"]: automation["trigger"] for automation in automations}
    assert found["data.updated: a-retrain"]["match"] == {"prefect.resource.id": ["rollouts.data", "rollouts.data.a"]}
    assert found["data.updated: b-retrain"]["expect"] == ["data.updated"]
    for each in (first, second):
        server.ask("DELETE", f"/deployments/{each['id']}")


@pytest.mark.parametrize(
    ("deployments", "store", "sentence"),
    [
        ([deployment()], "runs", "--store runs is relative: give an absolute path on the workers' machine"),
        ([deployment(), deployment()], "/data", "two configurations are named small"),
        ([deployment(description="{{ $HOME }}")], "/data", "which begins a placeholder in prefect.yaml"),
    ],
)
def test_what_cannot_be_deployed_is_one_sentence(deployments: list[Deployment], store: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        render_prefect_yaml(deployments, Path(store), pool="p")


@pytest.mark.slow
def test_a_job_variable_without_a_value_is_refused(rollouts_without_server: Rollouts, tmp_path: Path) -> None:
    config = write_small_pipeline(tmp_path / "small")
    code, said = rollouts_without_server.run("prefect-yaml", str(config), "--pool", "p", "--job-variable", "image")
    assert (code, said) == (
        2,
        "rollouts: --job-variable 'image' is not of the form key=value, like image=registry/rollouts:1\n",
    )
