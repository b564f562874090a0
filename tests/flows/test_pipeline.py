"""The pipeline as a person runs it: `rollouts run`, a real Prefect server, real jobs.

Without these tests the parts could each be right and the whole not: wrong order, wrong checkpoint, processes left.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tomli_w

from rollouts.flows.own_server.lend import local_server
from rollouts.flows.prefect_api import ask
from rollouts_core.checkpoint import verify_checkpoint
from tests.kit.commands import Rollouts
from tests.kit.small_pipeline import small_settings, write_small_pipeline

pytestmark = pytest.mark.slow


@pytest.mark.promise
def test_a_run_leaves_a_report_and_a_checkpoint_and_a_second_one_reuses_all_stages(
    rollouts_alone: Rollouts, tmp_path: Path
) -> None:
    rollouts = rollouts_alone
    config = write_small_pipeline(tmp_path / "small")

    code, output = rollouts.run("run", str(config))
    assert code == 0, output
    (first,) = (rollouts.store / "runs").iterdir()
    assert (first / "report.html").is_file()
    record = json.loads((first / "run.json").read_text())
    assert [stage["how"] for stage in record["stages"]] == ["ran"] * 5
    assert {stage["why"] for stage in record["stages"]} == {"no run had finished the same stage"}
    verify_checkpoint(first / "checkpoint")

    code, output = rollouts.run("run", str(config))
    assert code == 0, output
    (second,) = set((rollouts.store / "runs").iterdir()) - {first}
    record = json.loads((second / "run.json").read_text())
    assert [stage["how"] for stage in record["stages"]] == ["reused"] * 5
    assert {stage["why"] for stage in record["stages"]} == {f"finished before, first for run {first.name}"}
    assert f"finished before, first for run {first.name}" in (second / "report.html").read_text()
    assert len(list((rollouts.store / "stages").glob("*/exit-1.json"))) == 6  # five stages and the engine, once each


@pytest.mark.matrix
def test_stages_of_earlier_code_are_reused_whatever_prefect_remembers_their_record_by(
    rollouts: Rollouts, tmp_path: Path
) -> None:
    config = write_small_pipeline(tmp_path / "small", mode="sft")
    code, output = rollouts.run("run", str(config))
    assert code == 0, output
    remembered = [path for path in (rollouts.store / "prefect/results").iterdir() if "StageRecord" in path.read_text()]
    assert len(remembered) == 3
    for path in remembered:
        path.write_text(path.read_text().replace("rollouts.tasks.records", "tasks.records"))
    code, output = rollouts.run("run", str(config))
    assert code == 0, output
    records = [json.loads(path.read_text()) for path in (rollouts.store / "runs").glob("*/run.json")]
    assert sorted(stage["how"] for record in records for stage in record["stages"]) == ["ran"] * 3 + ["reused"] * 3


@pytest.mark.matrix
def test_rl_alone_and_rl_from_its_rollouts_without_an_engine_train_the_same(rollouts: Rollouts, tmp_path: Path) -> None:
    config = write_small_pipeline(tmp_path / "small", mode="rl")
    code, output = rollouts.run("run", str(config))
    assert code == 0, output
    (run,) = (rollouts.store / "runs").iterdir()
    record = json.loads((run / "run.json").read_text())
    assert [stage["stage"] for stage in record["stages"]] == ["rl", "select-rl", "evaluate"]
    (online,) = (rollouts.store / "stages").glob("rl-*")
    settings = small_settings(mode="rl", data__prompts="", data__rollouts=str(online / "samples"))
    (tmp_path / "small/offline.toml").write_text(tomli_w.dumps(settings))
    code, output = rollouts.run("run", str(tmp_path / "small/offline.toml"))
    assert code == 0, output
    (offline,) = set((rollouts.store / "stages").glob("rl-*")) - {online}
    assert len(list((rollouts.store / "stages").glob("engine-*"))) == 1, "that of the first run"
    weights = [(run / "checkpoints/step_000004/model.safetensors").read_bytes() for run in (online, offline)]
    assert weights[0] == weights[1]
    reports = [(run / "report.html").read_text() for run in (rollouts.store / "runs").iterdir()]
    assert any("Recorded rollouts" in report for report in reports)


@pytest.mark.matrix
def test_a_run_whose_rl_learns_nothing_fails_and_says_so(rollouts: Rollouts, tmp_path: Path) -> None:
    config = write_small_pipeline(
        tmp_path / "small",
        training__rl__optim={"lr": 0.0, "schedule": "constant"},
        training__rl__reward_shaping={},
        evaluation__max_p_value=0.01,
    )
    code, output = rollouts.run("run", str(config))
    assert code == 3
    assert "RL did not improve on the selected SFT checkpoint beyond noise" in output
    assert output.count("no step of 4 made an update (completions of each prompt had equal rewards: 4)") >= 2
    assert "Traceback" not in output
    *_, verdict, what_next = output.splitlines()
    assert verdict.startswith("rollouts: RL did not improve") and "not about the recipe; no step of 4" in verdict
    assert what_next.endswith("evaluation.max_p_value = 1.")
    (run,) = (rollouts.store / "runs").iterdir()
    assert (run / "report.html").is_file()
    with local_server(rollouts.store) as address:
        told = ask(address, "GET", f"/flow_runs/{json.loads((run / 'run.json').read_text())['run_id']}")
    assert (told["state_type"], told["state_name"]) == ("FAILED", "NoImprovement")
    assert told["state"]["message"].startswith("RL did not improve"), told["state"]

    # What Retry, or the same command, would do: take the finished stages, and come to the same end.
    code, output = rollouts.run("run", str(config))
    assert code == 3 and output.count("reused from") >= 5, output
    accepting = small_settings(training__rl__optim={"lr": 0.0, "schedule": "constant"}, training__rl__reward_shaping={})
    (tmp_path / "small/accepting.toml").write_text(tomli_w.dumps(accepting))
    code, output = rollouts.run("run", str(tmp_path / "small/accepting.toml"))
    assert code == 0 and "started in" not in output, output
