"""Finish now: a training that somebody has end early, in whole runs, and what later runs make of it.

Without these tests a shortened training could be taken for a whole one by every later run, take its checkpoints from
under the run that asked, or end elsewhere than a training that nobody ended.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rollouts.flows.cli import app
from rollouts.infra.ledger import LEDGER_FILE, Ledger
from rollouts_core.checkpoint import list_checkpoints, load_manifest
from rollouts_core.metrics import read_metrics
from tests.infra.ssh_server import SSHServer
from tests.kit.commands import Rollouts
from tests.kit.runs import digests_of, events_of, exits_of, last_run, paused, program_of, run_dir, run_until
from tests.kit.serving import api, logs_of, trigger, up, wait_for_checkpoint, wait_for_state
from tests.kit.small_pipeline import write_small_pipeline
from tests.kit.ssh_nodes import node_settings
from tests.kit.waiting import wait_until
from tests.rollouts_core.histories import without_times

pytestmark = pytest.mark.slow

NUM_STEPS = {"sft": 200, "rl": 40}
CHECKPOINT_EVERY = 10


def write_config(folder: Path, stage: str, **overrides: Any) -> Path:  # Any: settings of every type
    """A pipeline of one training stage, long enough to be hit in its middle, with rewards that differ."""
    training = {"num_steps": NUM_STEPS[stage], "checkpoint_every": CHECKPOINT_EVERY, "log_every": 1}
    settings = {f"training__{stage}__{key}": value for key, value in training.items()}
    reward_fn = "tests.rollouts_core.kill_rewards:grade_even_digits"
    return write_small_pipeline(folder, mode=stage, rollout__reward_fn=reward_fn, **settings, **overrides)


def finish_in_the_middle(rollouts: Rollouts, config: Path, stage: str) -> tuple[subprocess.Popen[bytes], Path, str]:
    """A run whose training was asked to finish while it stood still; with its directory and what the command said."""
    process, directory = run_until(rollouts, config, stage)
    other = dataclasses.replace(rollouts, output=rollouts.output.with_name("other.txt"))
    with paused(program_of(directory)):
        code, said = other.run("finish", "small")
        assert code == 0, said
        wait_until((directory / "finish-1").exists, what="the request beside the job")
    return process, directory, said


@pytest.mark.matrix
def test_a_run_goes_on_with_what_it_has_and_the_next_one_trains_the_rest_as_if_nobody_had_asked(
    rollouts: Rollouts, tmp_path: Path
) -> None:
    stage, num_steps = "rl", NUM_STEPS["rl"]
    config = write_config(tmp_path / "small", stage)
    process, early, said = finish_in_the_middle(rollouts, config, stage)
    assert f"{early.name} ends after the current step, and the run continues with its best checkpoint" in said
    assert process.wait(240) == 0, rollouts.said()
    assert f"{stage:<14} asked the job to finish after its current step" in rollouts.said()
    record = json.loads((early / "result.json").read_text())
    run = last_run(rollouts)
    step = record["finished_early"]["step"]
    assert record["finished_early"] == {"step": step, "num_steps": num_steps, "asked_by": run["run_id"]}
    assert CHECKPOINT_EVERY <= step < num_steps
    assert record["checkpoints"][-1]["step"] == step
    assert [event["step"] for event in events_of(early, "finished_early")] == [step]
    assert exits_of(early) == ["exit-1.json"]
    # What was selected, evaluated and handed over is one of the checkpoints that there are.
    assert run["selected"][stage] in {entry["name"] for entry in record["checkpoints"]}
    assert [each["stage"] for each in run["stages"]] == [stage, f"select-{stage}", "evaluate"]
    sentence = f"finished early at step {step} of {num_steps}"
    [report] = rollouts.store.glob("runs/*/report.html")
    assert sentence in report.read_text()
    kept = digests_of(early)

    code, output = rollouts.run("run", str(config))
    assert code == 0, output
    (rest,) = set(rollouts.store.glob(f"stages/{stage}-*")) - {early}
    assert f"{stage:<14} resumes from step {step}" in output
    assert [event["step"] for event in events_of(rest, "resumed")] == [step]
    assert last_run(rollouts)["stages"][0]["how"] == "ran"
    assert digests_of(early) == kept

    code, output = rollouts.run("run", str(config), "--fresh", stage)
    assert code == 0, output
    (straight,) = set(rollouts.store.glob(f"stages/{stage}-*")) - {early, rest}
    assert digests_of(rest) == digests_of(straight)
    ends = [list_checkpoints(directory / "checkpoints")[-1] for directory in (rest, straight)]
    assert load_manifest(ends[0]).files == load_manifest(ends[1]).files
    histories = [without_times(read_metrics(directory / "metrics.jsonl")) for directory in (rest, straight)]
    assert histories[0] == histories[1]


@pytest.mark.matrix
def test_the_deployment_finishes_a_run_whose_retry_keeps_the_shortened_training(
    served: Rollouts,
    tmp_path: Path,
) -> None:
    up(served, str(write_config(tmp_path / "small", "sft")))
    run_id = trigger(served, "small")
    sft = wait_for_checkpoint(served, "sft")
    with paused(program_of(sft)):
        second = trigger(served, "small", "run.name=second")
        serving_log = served.store / "prefect/serving.log"
        wait_until(lambda: "attached to the running job" in serving_log.read_text(), what="the second run to attach")
        refused = trigger(served, "finish", f"finish.run={run_id}")
        wait_for_state(served, refused, "FAILED")
        message = api(served, "GET", f"/flow_runs/{refused}")["state"]["message"]
        assert f"{sft.name} is also the training of second-{second[:8]}, which needs all its steps" in message
        api(served, "POST", f"/flow_runs/{second}/set_state", {"state": {"type": "CANCELLING"}, "force": False})
        wait_for_state(served, second, "CANCELLED")
        wait_until(
            lambda: f"left the job in {sft} running for another run" in logs_of(served, second), what="it being said"
        )
        asked = trigger(served, "finish", f"finish.run={run_id}")
        wait_for_state(served, asked, "COMPLETED")
        wait_until((sft / "finish-1").exists, what="the request beside the job")
    wait_for_state(served, run_id, "COMPLETED")
    step = json.loads((sft / "result.json").read_text())["finished_early"]["step"]
    assert exits_of(sft) == ["exit-1.json"]
    code, output = served.run("status")
    assert code == 0
    assert f"sft finished early at step {step} of {NUM_STEPS['sft']}" in output, output

    code, output = served.run("finish", "small")
    report = served.store / f"runs/small-{run_id[:8]}/report.html"
    assert (code, output) == (2, f"rollouts: small-{run_id[:8]} has finished: its report is {report}\n")
    retry = {"state": {"type": "SCHEDULED", "name": "AwaitingRetry"}, "force": True}
    api(served, "POST", f"/flow_runs/{run_id}/set_state", retry)
    wait_until(
        lambda: "sft            reused from" in (served.store / "prefect/serving.log").read_text(), what="the retry"
    )
    wait_for_state(served, run_id, "COMPLETED")
    assert last_run(served)["stages"][0]["how"] == "reused"
    assert run_dir(served, "sft") == sft


@pytest.mark.matrix
def test_a_training_on_another_machine_is_finished_there_and_the_next_run_trains_the_rest_there(
    rollouts: Rollouts,
    ssh_server: SSHServer,
    node_root: Path,
    tmp_path: Path,
) -> None:
    config = write_config(tmp_path / "small", "sft", node=node_settings(ssh_server, node_root))
    process = rollouts.start("run", str(config))
    wait_until(
        lambda: (
            any(events_of(path, "checkpoint") for path in node_root.glob("stages/sft-*")) or process.poll() is not None
        ),
        what="a checkpoint on the node",
        timeout_s=240,
    )
    (there,) = node_root.glob("stages/sft-*")
    other = dataclasses.replace(rollouts, output=tmp_path / "other.txt")
    with paused(program_of(there)):
        code, said = other.run("finish", "small")
        assert code == 0, said
        wait_until((there / "finish-1").exists, what="the request on the node")
    assert process.wait(240) == 0, rollouts.said()
    here = rollouts.store / "stages" / there.name
    early = json.loads((here / "result.json").read_text())["finished_early"]
    assert f"sft            finished early at step {early['step']} of {NUM_STEPS['sft']}" in rollouts.said()
    assert not (here / "finish-asked").exists()

    code, output = rollouts.run("run", str(config))
    assert code == 0, output
    (rest,) = set(node_root.glob("stages/sft-*")) - {there}
    assert [event["step"] for event in events_of(rest, "resumed")] == [early["step"]]
    trained = read_metrics(rollouts.store / "stages" / rest.name / "metrics.jsonl")
    assert [line["step"] for line in trained] == list(range(1, NUM_STEPS["sft"] + 1))
    assert list_checkpoints(rest / "checkpoints")[-1].name == "step_000200"

    code, output = rollouts.run("run", str(config), "--fresh", "sft")
    assert code == 0, output
    (straight,) = set(node_root.glob("stages/sft-*")) - {there, rest}
    assert digests_of(rest) == digests_of(straight)
    assert without_times(trained) == without_times(read_metrics(straight / "metrics.jsonl"))


def test_what_cannot_be_finished_is_one_sentence(tmp_path: Path) -> None:
    def refusal(given: str) -> str:
        outcome = CliRunner().invoke(app, ["finish", given, "--store", str(tmp_path)])
        assert outcome.exit_code == 2, outcome.output
        [sentence] = outcome.stderr.splitlines()
        return sentence

    assert "has no ledger" in refusal("small")
    with Ledger(tmp_path / LEDGER_FILE) as ledger:
        ledger.note_use("evaluate-1", "11111111-a", run="small-11111111")
        ledger.note_use("sft-2", "22222222-b", run="small-22222222")
        assert "there is no run large; running runs: none" in refusal("large")
        assert "small could mean small-11111111 or small-22222222: give one of these names" in refusal("small")
        with ledger.living_run("11111111-a"):
            assert "small-11111111 is not training at the moment" in refusal("small")
            assert "small-22222222 has no process" in refusal("22222222")
            report = tmp_path / "runs/small-22222222/report.html"
            report.parent.mkdir(parents=True)
            report.touch()
            assert f"small-22222222 has finished: its report is {report}" in refusal("22222222")
            ledger.add_lease(str(tmp_path / "stages/sft-2"), "11111111-a", "local")
            outcome = CliRunner().invoke(app, ["finish", "small-11111111", "--store", str(tmp_path)])
    assert outcome.exit_code == 0, outcome.output
    assert (tmp_path / "stages/sft-2/finish-asked").read_text() == "11111111-a"


def test_several_who_ask_at_once_ask_for_the_same(tmp_path: Path) -> None:
    run_id, training = "0123456789abcdef", f"sft-{16 * '0'}"
    command = [
        sys.executable,
        "-c",
        "from rollouts.flows.cli import app; app()",
        "finish",
        "small",
        "--store",
        str(tmp_path),
    ]
    with Ledger(tmp_path / LEDGER_FILE) as ledger, ledger.living_run(run_id):
        ledger.note_use(training, run_id, run="small-01234567")
        ledger.add_lease(str(tmp_path / "stages" / training), run_id, "local")
        asking = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
        said = {process.communicate()[0] for process in asking}
    assert [process.returncode for process in asking] == [0] * 4
    told = f"{training} ends after the current step, and the run continues with its best checkpoint"
    assert said == {f"small-01234567: {told}\n"}
    [request] = (tmp_path / "stages" / training).iterdir()
    assert request.read_text() == run_id
