"""The deployments of a store: `rollouts up`, triggers, `status`, `down`, and what a killed process leaves.

Without these tests a second `up` could start a second server, `down` could end training that somebody pays for, a
killed process could pass for a living one, and a run that nobody does could stay Running for ever.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from rollouts.flows.commands.serving_state import find_serving, is_starting
from rollouts.infra.ledger import Ledger
from rollouts_core.checkpoint import list_checkpoints, verify_checkpoint
from tests.kit.commands import ROOT, Rollouts, clean_environment, processes_of
from tests.kit.runs import LONG, NUM_STEPS, assert_goes_on, events_of, exits_of, paused, program_of
from tests.kit.serving import (
    ASK_S,
    address_of,
    api,
    children_of,
    flows_of,
    kill_serving_and_flow,
    logs_of,
    set_state,
    state_of,
    trigger,
    up,
    wait_for_checkpoint,
    wait_for_state,
)
from tests.kit.small_pipeline import OWN_REWARD, write_own_reward, write_small_pipeline
from tests.kit.waiting import wait_until

pytestmark = pytest.mark.slow

CANCEL_S = 30.0
"""Prefect kills a flow that does not end this long after it was cancelled."""


@pytest.mark.matrix
def test_up_outlives_its_terminal_is_joined_runs_what_is_asked_for_and_is_ended_by_down(
    served: Rollouts, tmp_path: Path
) -> None:
    folder = tmp_path / "small"
    config = write_small_pipeline(folder, mode="sft", rollout__reward_fn=OWN_REWARD)
    write_own_reward(folder)
    shutil.rmtree(served.store / "quickstart")  # as it is before the first `up`
    said = up(served)
    assert "looking for the server" in said.partition("started")[0]
    assert "started" in said
    assert list(served.store.glob("quickstart/seed-0/*.toml"))
    assert "deployments    quickstart, rl_math, sft_openwebtext, sft_qwen, sft_rl_gsm8k" in said
    assert "/v2/deployments" in said
    password = (served.store / "prefect/password").read_text()
    assert f"log in with    {password}" in said
    first = find_serving(served.store)
    said = up(served, str(config))
    assert "joined" in said
    serving = find_serving(served.store)
    assert first is not None and serving is not None
    assert serving.pid == first.pid
    assert serving.deployments.keys() - first.deployments.keys() == {"small", "small-form", "small-evaluate"}

    by_command = trigger(served, "small", "run.name=asked")
    address = address_of(served)
    found = api(served, "GET", "/deployments/name/sft-rl/small")
    curl = ["curl", "--silent", "--retry", "5", "--user", password, "--header", "Content-Type: application/json"]
    curl += [
        "--cacert",
        str(served.store / "prefect/certificate.pem"),
        "--data",
        '{"parameters": {"run": {"name": "by-http"}}}',
        f"{address.api_url}/deployments/{found['id']}/create_flow_run",
    ]
    answer = subprocess.run(curl, capture_output=True, text=True, check=True, timeout=30)
    assert "id" in answer.stdout, answer.stdout
    by_http = json.loads(answer.stdout)["id"]
    wait_for_state(served, by_command, "COMPLETED")
    wait_for_state(served, by_http, "COMPLETED")
    assert len(list(served.store.glob("stages/sft-*"))) == 1
    assert {path.name.rpartition("-")[0] for path in served.store.glob("runs/*")} == {"asked", "by-http"}

    assert '"graders_beside:score"' in next(served.store.glob("stages/evaluate-*/job.json")).read_text()

    mistaken = trigger(
        served, "small", f"data.prompts={folder / 'missing.jsonl'}", "rollout.reward_fn=graders_beside:no"
    )
    wait_for_state(served, mistaken, "FAILED")
    message = api(served, "GET", f"/flow_runs/{mistaken}")["state"]["message"]
    assert f"data.prompts: {folder / 'missing.jsonl'} does not exist\nrollout.reward_fn: " in message
    assert "provision" not in logs_of(served, mistaken)

    code, output = served.run("status")
    assert code == 0
    assert f"server       {address.ui_url}" in output
    link = r"http\S+/runs/asked-\w{8}/report"
    completed = rf"^run +asked-\w{{8}} +Completed since \S+ on local\n +The report is {link}\n +http\S+/runs/flow-run/"
    assert re.search(completed, output, re.M), output
    reason = r"data\.prompts: \S+ does not exist"
    assert re.search(rf"^run +small-{mistaken[:8]} +Failed since \S+ on local\n +.*{reason}\n", output, re.M), output
    code, output = served.run("run", str(config))  # joins the server, with its password
    assert code == 0, output
    assert f"follow it at   {address.ui_url}" in output

    code, output = served.run("down")
    assert code == 0
    assert f"ended          process {serving.pid}" in output
    wait_until(lambda: not processes_of(served.store), what="the end of everything", timeout_s=30)
    code, output = served.run("status")
    assert "server       none" in output and "serving      none" in output


@pytest.mark.matrix
def test_a_killed_serving_process_is_noticed_and_up_starts_another(served: Rollouts) -> None:
    up(served)
    killed = find_serving(served.store)
    assert killed is not None
    os.kill(killed.pid, signal.SIGKILL)
    wait_until(lambda: find_serving(served.store) is None, what="the death being noticed")
    assert (served.store / "prefect/serving.json").exists()
    code, output = served.run("run", "--deployment", "quickstart")
    assert code == 2
    assert output.splitlines() == [
        f"rollouts: nothing serves the deployments of {served.store}: rollouts up --store {served.store} starts it"
    ]
    assert "started" in up(served)


@pytest.mark.matrix
def test_what_an_interrupted_up_began_is_ended_by_down(served: Rollouts) -> None:
    """It outlives its terminal from the moment on in which it is started, and says what it is when it is ready."""
    starting = served.start("up")
    wait_until(lambda: is_starting(served.store), what="the start of what serves")
    starting.send_signal(signal.SIGINT)
    assert starting.wait(60) == 130, served.said()
    code, output = served.run("down")
    assert code == 0
    assert re.search(r"^ended          process \d+$", output, re.MULTILINE), output
    wait_until(lambda: not processes_of(served.store), what="the end of everything", timeout_s=30)


@pytest.mark.matrix
def test_a_port_that_was_asked_for_is_taken_again(served: Rollouts) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    assert f"http://127.0.0.1:{port}" in up(served, "--port", str(port))
    assert served.run("down")[0] == 0
    assert f"http://127.0.0.1:{port}" in up(served)
    assert served.run("down")[0] == 0
    with socket.create_server(("127.0.0.1", port)):
        assert f"http://127.0.0.1:{port}" not in up(served)


@pytest.mark.matrix
def test_what_cannot_be_is_one_sentence(served: Rollouts, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        code, output = served.run("up", "--port", str(taken.getsockname()[1]))
    assert code == 2
    assert re.fullmatch(
        r"rollouts: port \d+ is in use .*: choose another port with --port, or leave --port out\n", output
    )
    broken = tmp_path / "broken.toml"
    broken.write_text("mode = 'dpo'\nmodel.path = 'm'\ndata.sft = 'd'")
    code, output = served.run("up", str(broken))
    assert (code, len(output.splitlines())) == (2, 1) and "mode: input should be 'sft', 'rl' or" in output, output
    assert find_serving(served.store) is None
    code, output = served.run("down")
    assert (code, output) == (0, f"nothing serves the deployments of {served.store}\n")

    up(served)
    for arguments, words in (
        (["--deployment", "quickstat"], "there is no deployment quickstat; did you mean quickstart?"),
        (["--deployment", "quickstart", "training.sft.steps=3"], "unknown key training.sft.steps"),
        (["--deployment", "quickstart", "training.sft.num_steps=few"], "training.sft.num_steps"),
        (["--deployment", "quickstart", "fast"], "'fast' is not of the form key=value"),
    ):
        code, output = served.run("run", *arguments)
        assert code == 2, output
        assert words in output
        assert len(output.splitlines()) == 1


@pytest.mark.matrix
def test_a_deployment_that_was_deleted_in_prefect_is_made_again_by_up(served: Rollouts, folder: Path) -> None:
    config = str(folder / "small.toml")
    up(served, config)
    deleted = api(served, "GET", "/deployments/name/sft-rl/small")["id"]
    api(served, "DELETE", f"/deployments/{deleted}")
    code, output = served.run("run", "--deployment", "small")
    assert code == 2
    assert "the deployment small was deleted in Prefect: call rollouts up with its configuration again" in output
    assert "joined" in up(served, config)
    run_id = trigger(served, "small")
    api(served, "DELETE", f"/flow_runs/{run_id}")


@pytest.mark.matrix
def test_down_leaves_a_training_job_alone(served: Rollouts, tmp_path: Path) -> None:
    config = write_small_pipeline(tmp_path / "small", mode="sft", **LONG)
    up(served, str(config))
    trigger(served, "small")
    sft = wait_for_checkpoint(served, "sft")
    with paused(program_of(sft)):
        code, output = served.run("down")
        assert code == 0
        assert f"left alone     {sft} goes on on local, without a run" in output
        code, output = served.run("status")
        assert f"job          {sft} goes on on local" in output
    assert_goes_on(sft)


@pytest.mark.matrix
def test_a_cancelled_run_ends_its_job_and_leaves_a_whole_checkpoint(served: Rollouts, tmp_path: Path) -> None:
    config = write_small_pipeline(tmp_path / "small", mode="rl", **LONG)
    up(served, str(config))
    run_id = trigger(served, "small")
    rl = wait_for_checkpoint(served, "rl")
    set_state(served, run_id, "CANCELLING")
    wait_until(lambda: exits_of(rl) == ["exit-1.json"], what="the end of the job", timeout_s=CANCEL_S)
    wait_for_state(served, run_id, "CANCELLED")
    assert json.loads((rl / "exit-1.json").read_text())["cancelled"]
    (engine,) = served.store.glob("stages/engine-*")
    assert exits_of(engine) == ["exit-1.json"]
    wait_until(lambda: f"ended the job in {rl}" in logs_of(served, run_id), what="what was ended being said")
    assert "gave back local node" in logs_of(served, run_id)
    assert find_serving(served.store) is not None
    # What the next run goes on from is whole.
    last = verify_checkpoint(list_checkpoints(rl / "checkpoints")[-1])
    assert last.step == events_of(rl, "checkpoint")[-1]["step"] < NUM_STEPS


@pytest.mark.matrix
def test_a_run_whose_processes_were_killed_can_be_cancelled(served: Rollouts, tmp_path: Path) -> None:
    longer = LONG | {"training__sft__num_steps": 2_000}
    up(served, str(write_small_pipeline(tmp_path / "small", mode="sft", **longer)))
    run_id = trigger(served, "small")
    sft = wait_for_checkpoint(served, "sft")
    kill_serving_and_flow(served)
    assert_goes_on(sft)
    with paused(program_of(sft)):
        up(served)
        assert state_of(served, run_id) == "RUNNING"
        set_state(served, run_id, "CANCELLING")
        wait_until((sft / ".job/cancel-1").exists, what=f"the cancel request of {sft}")
    wait_for_state(served, run_id, "CANCELLED")
    assert json.loads((sft / "exit-1.json").read_text())["cancelled"]


@pytest.mark.matrix
def test_a_run_whose_process_is_killed_is_started_again_as_often_as_it_may_be(served: Rollouts, tmp_path: Path) -> None:
    config = write_small_pipeline(tmp_path / "small", mode="sft", run={"name": "small", "restarts": 1}, **LONG)
    up(served, str(config))
    run_id = trigger(served, "small")
    sft = wait_for_checkpoint(served, "sft")
    with paused(program_of(sft)):
        kill_flow(served)
        wait_until(
            lambda: "attached to the running job" in logs_of(served, run_id), what="the second start", every_s=ASK_S
        )
        states = api(served, "GET", f"/flow_run_states/?flow_run_id={run_id}")
        said = "started again, because its process was killed (1 of 1); it attaches to its jobs"
        assert [state["message"] for state in states if state["name"] == "AwaitingRetry"] == [said]
        kill_serving_and_flow(served)
        up(served)
        wait_for_state(served, run_id, "CRASHED")
        log = served.store / "prefect/serving.log"
        wait_until(lambda: f"({run_id}) was marked Crashed" in log.read_text(), what="the mark")
        set_state(served, run_id, "SCHEDULED", name="AwaitingRetry")  # a person may, however often
    wait_for_state(served, run_id, "COMPLETED")
    assert exits_of(sft) == ["exit-1.json"]


def kill_flow(rollouts: Rollouts) -> None:
    """kill -9 of the only flow."""
    serving = find_serving(rollouts.store)
    assert serving is not None
    (flow,) = flows_of(serving.pid)
    os.kill(flow, signal.SIGKILL)


@pytest.mark.matrix
def test_a_run_counts_as_living_while_its_settings_are_checked(served: Rollouts, folder: Path) -> None:
    up(served, str(folder / "small.toml"))
    run_id = trigger(served, "small")
    wait_until(lambda: check_of_flow(served) != [], what="the check of the settings")
    (check,) = check_of_flow(served)
    with paused(check), Ledger(served.store / "ledger.db") as ledger:
        assert ledger.is_alive(run_id)
        os.kill(check, signal.SIGKILL)
    wait_for_state(served, run_id, "FAILED")


def check_of_flow(rollouts: Rollouts) -> list[int]:
    """The process that checks the settings of the only flow, while there is one."""
    serving = find_serving(rollouts.store)
    assert serving is not None
    return [pid for flow in flows_of(serving.pid) for pid in children_of(flow, "rollouts.flows.check")]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs namespaces")
def test_down_in_another_container_kills_nothing_and_says_where_the_store_is_served(served: Rollouts) -> None:
    """The number of the process that serves means another process there, which was killed."""
    up(served)
    serving = find_serving(served.store)
    assert serving is not None
    command = [sys.executable, "-m", "rollouts.flows.cli", "down", "--store", str(served.store)]
    elsewhere = subprocess.run(
        ["unshare", "--pid", "--fork", "--mount-proc", *command],
        env=clean_environment(),
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert elsewhere.returncode == 2, elsewhere.stderr
    assert f"served by process {serving.pid} of {serving.process.host}, which is another container" in elsewhere.stderr
    assert serving.process.is_here
