"""Pins that somebody who asks how things are learns why a job does nothing.

Without it a run that waits for a GPU looks like one that hangs.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rollouts.flows.cli import app
from rollouts.flows.commands.status import (
    describe_progress,
    describe_run,
    early_ends,
    name_of_run,
    of_store,
    status,
    uses_of_runs,
)
from rollouts.flows.own_server.lend import ServerAddress
from rollouts.infra.jobs import cancel_job, start_or_attach
from rollouts.infra.ledger import LEDGER_FILE, Ledger
from rollouts.infra.locks import locked
from rollouts.infra.node import LocalNode
from rollouts.infra.providers import provision_node
from rollouts.infra.session import LocalSession
from rollouts.infra.supervisor.gpu_slots import GPU_LOCKS_VARIABLE
from tests.infra.shell_jobs import shell_spec
from tests.kit.small_pipeline import write_small_pipeline


@pytest.mark.slow
def test_a_job_that_waits_for_a_gpu_says_for_whom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(GPU_LOCKS_VARIABLE, str(tmp_path / "locks"))
    session = LocalSession(sys.executable)
    first, second = (
        shell_spec(tmp_path / f"stages/sft-{each}", "sleep 60", gpus=("0",), run_name=f"run-{each}") for each in "ab"
    )
    node = provision_node(LocalNode(), tmp_path)
    with Ledger(tmp_path / LEDGER_FILE) as ledger:
        for spec in (first, second):
            ledger.add_lease(spec.run_dir, spec.run_name, node.name)
            start_or_attach(session, spec)
        alive = [ledger.living_run(spec.run_name) for spec in (first, second)]
        try:
            with alive[0], alive[1]:
                status(tmp_path)
        finally:
            for spec in (second, first):
                cancel_job(session, spec.run_dir, grace_s=0.2)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("job")]
    waits = f"waits for GPU 0, held by run run-a (job {first.run_dir}) since"
    assert [waits in line for line in lines if second.run_dir in line] == [True]
    assert not any("waits for" in line for line in lines if line.split()[1] == first.run_dir)


@pytest.mark.parametrize(
    ("served_at", "asked", "words"),
    [
        (
            "http://team:4200/api",
            "",
            "its deployments and runs are at the Prefect server http://team:4200/api: export PREFECT_API_URL=http://team:4200",
        ),
        ("", "http://team:4200/api/", "at the store's own Prefect server, not at PREFECT_API_URL: unset"),
    ],
)
def test_commands_say_at_which_other_server_the_deployments_are_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, served_at: str, asked: str, words: str
) -> None:
    """Without it somebody in a second terminal looks at an empty server, and starts what nobody runs."""
    monkeypatch.setenv("PREFECT_API_URL", asked)
    home = tmp_path / "prefect"
    home.mkdir()
    state = {"pid": os.getpid(), "since": 0.0, "deployments": {}, "named_url": served_at}
    (home / "serving.json").write_text(json.dumps(state))
    (tmp_path / "config").mkdir()
    config = str(write_small_pipeline(tmp_path / "config"))
    with locked(home / "serving.lock"):
        for arguments in (["up", config], ["cancel", "small"], ["run", "--deployment", "quickstart"]):
            outcome = CliRunner().invoke(app, [*arguments, "--store", str(tmp_path)])
            assert outcome.exit_code == 2, outcome.output
            assert words in outcome.stderr
        assert not (home / "deployments").exists()
        assert words in CliRunner().invoke(app, ["status", "--store", str(tmp_path)]).stdout
        monkeypatch.setenv("PREFECT_API_URL", served_at)
        assert "its deployments" not in CliRunner().invoke(app, ["status", "--store", str(tmp_path)]).stdout


def test_a_run_is_told_with_its_progress_its_failure_or_the_question_that_it_asks(tmp_path: Path) -> None:
    run_dir = tmp_path / "stages/rl-1"
    run_dir.mkdir(parents=True)
    lines = [{"step": step, "attempt": 1, "time": 1000.0 + 10 * step, "reward": 0.5} for step in range(1, 6)]
    (run_dir / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    with Ledger(tmp_path / LEDGER_FILE) as ledger:
        ledger.note_use("rl-1", "0123456789abcdef", run="mine-01234567", num_steps=10)
        uses = uses_of_runs(tmp_path)["0123456789abcdef"]
        run: dict[str, object] = {"id": "0123456789abcdef", "state": {"message": ""}}

        def said_of(state: str, message: str, name: str = "") -> list[str]:
            of_state = {"state_type": state, "state_name": name, "state": {"message": message}}
            return describe_progress(tmp_path, {**run, **of_state}, uses)

        with ledger.living_run("0123456789abcdef"):
            [step] = said_of("RUNNING", "")
    assert step.startswith("step 5 of 10, about 50.0 s left")
    assert said_of("FAILED", "the disk is full\nand more") == ["the disk is full"]
    of_prefect = "Flow run encountered an exception: JobFailedError: attempt 1 ended"
    assert said_of("FAILED", of_prefect) == ["attempt 1 ended"]
    assert said_of("SCHEDULED", "started again (1 of 2)", "AwaitingRetry") == ["started again (1 of 2)"]
    assert said_of("CANCELLED", "Flow run was cancelled successfully.") == said_of("SCHEDULED", "later") == []
    assert said_of("PAUSED", "", "Suspended")[0].startswith("a decision is waiting: Resume in the menu of its page")


def test_without_a_server_the_latest_reports_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for i in range(7):
        run = tmp_path / f"runs/small-{i}"
        run.mkdir(parents=True)
        (run / "report.html").touch()
        os.utime(run / "report.html", (i, i))
    (tmp_path / "runs/small-5/run.json").write_text(json.dumps({"verdict": "RL improved"}))
    (tmp_path / "runs/under-way").mkdir()
    status(tmp_path)
    reports = [line.split(maxsplit=2)[1:] for line in capsys.readouterr().out.splitlines() if line.startswith("report")]
    assert reports == [
        [f"{tmp_path}/runs/small-{i}/report.html", *(["RL improved"] if i == 5 else [])] for i in (6, 5, 4, 3, 2)
    ]


def test_of_a_server_for_several_people_only_the_stores_runs_are_shown(tmp_path: Path) -> None:
    """Those that began are known here; those that did not name the store."""
    server = ServerAddress(api_url="", ui_url="", is_local=False)
    runs = [
        {"id": name, "parameters": {"run": {"store": store}}}
        for name, store in (
            ("alive", "relative"),
            ("waits", str(tmp_path)),
            ("theirs", "relative"),
            ("other", "/other"),
        )
    ]
    assert [run["id"] for run in of_store(server, tmp_path, runs)] == ["waits"]
    with Ledger(tmp_path / LEDGER_FILE) as ledger, ledger.living_run("alive"):
        assert [run["id"] for run in of_store(server, tmp_path, runs)] == ["alive", "waits"]
    assert of_store(dataclasses.replace(server, is_local=True), tmp_path, runs) == runs


def test_flows_of_others_that_are_called_as_ours_hinder_nothing(tmp_path: Path) -> None:
    """Who shares a server may have a flow `evaluate`, or `retrain`, with parameters of any kind."""
    server = ServerAddress(api_url="", ui_url="", is_local=False)
    foreign = {"id": "1", "name": "wise-owl", "parameters": {"run": "2026-11", "node": ["gpu-1"]}, "start_time": None}
    assert of_store(server, tmp_path, [foreign]) == []
    assert name_of_run(foreign) == "wise-owl"
    state = {"timestamp": "2026-11-26T12:00:00Z"}
    run = {**foreign, "state_type": "PENDING", "state_name": "Pending", "auto_scheduled": False, "state": state}
    assert describe_run(run, [], {}).startswith("wise-owl-1           Pending since ")


def test_what_others_call_their_runs_moves_no_cursor() -> None:
    state = {"timestamp": "2026-11-26T12:00:00Z"}
    run: dict[str, object] = {
        "id": "1",
        "parameters": {},
        "start_time": None,
        "state_type": "PENDING",
        "auto_scheduled": False,
    }
    line = describe_run(
        {**run, "name": "a\x1b[2J\u202eb\nrun c", "state_name": "\x1b]0;title\x07Pending", "state": state},
        [],
        {},
    )
    assert line.startswith("a b run c-1 ") and " Pending " in line and line.isprintable()


def test_a_run_that_waits_is_called_what_it_will_be_called() -> None:
    asked: dict[str, object] = {"name": "wise-owl", "start_time": None, "parameters": {"run": {"name": "small"}}}
    assert name_of_run(asked) == "small"
    assert name_of_run({**asked, "parameters": {"store": "s"}}) == "wise-owl"
    assert name_of_run({**asked, "name": "renamed", "start_time": "2026-11-26T12:00:00Z"}) == "renamed"


def test_only_the_stages_of_runs_that_are_shown_are_looked_into(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store of some years has tens of thousands of them."""
    looked: list[str] = []
    monkeypatch.setattr("rollouts.tasks.early_end.read_early_end", lambda directory: looked.append(directory.name))
    with Ledger(tmp_path / LEDGER_FILE) as ledger:
        for run in range(20):
            ledger.note_use("sft-0", f"run-{run}")
            ledger.note_use(f"rl-{run}", f"run-{run}")
    assert early_ends(tmp_path, {"run-7"}) == {}
    assert sorted(looked) == ["rl-7", "sft-0"]


def test_a_store_that_is_a_file_or_none_is_told_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    for name, said in (("file", "is a file"), ("none", "does not exist")):
        status(tmp_path / name)
        assert f"store        {tmp_path / name} {said}: it has no runs yet" in capsys.readouterr().out
