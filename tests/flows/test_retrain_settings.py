"""Pins what a schedule and a retraining may say: whatever cannot work is refused before anything is started.

Without it a mistyped schedule would be noticed by the model that is not there a week later.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from prefect.client.schemas.schedules import CronSchedule
from typer.testing import CliRunner

from rollouts.flows.cli import app
from rollouts.flows.deployments import Deployment, deployments_of, load_deployments, overridden, save_deployments
from rollouts.flows.form import load_pipeline
from rollouts.flows.retrain_settings import ScheduleConfig, check_cron
from rollouts.flows.schedules import build_schedule
from rollouts_core.errors import InputError
from tests.flows.refusals import refusal
from tests.kit.commands import Rollouts
from tests.kit.small_pipeline import small_settings


def write(folder: Path, **tables: Any) -> Path:  # Any: tables of settings
    config = folder / "small.toml"
    config.write_text(tomli_w.dumps({**small_settings(), **tables}))
    return config


@pytest.mark.parametrize(
    "expression", ["0 3 * * *", "*/15 9-17 * * mon-fri", "0,30 0 1,15 jan-jun/2 *", "5/10 * * * 7", "0 0 29 2 *"]
)
def test_what_passes_for_cron_does_so_for_prefect(expression: str) -> None:
    check_cron(expression)
    CronSchedule(cron=expression)


@pytest.mark.parametrize(
    ("expression", "words"),
    [
        ("0 3 * *", "has 4 fields"),
        ("60 3 * * *", "'60' is not a valid minute: expected 0 to 59"),
        ("0 3 * * fry", "'fry' is not a valid day of week"),
        ("0 3 0 * *", "'0' is not a valid day of month"),
        ("0 17-9 * * *", "is not a valid range of hour"),
        ("*/0 * * * *", "its step is 0"),
        ("0 3 30 2 *", "names a day of month that its months do not have"),
        ("@daily", "has 1 fields"),
        ("0 3 ? * *", "is not a valid day of month"),
    ],
)
def test_what_is_no_cron_expression_is_said(expression: str, words: str) -> None:
    with pytest.raises(ValueError, match=words.replace("?", r"\?")):
        check_cron(expression)


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"schedule": {"cron": "0 3 * * *"}}, "the table schedule needs the table retrain: add it"),
        ({"retrain": {}, "schedule": {}}, "a schedule has either cron"),
        ({"retrain": {}, "schedule": {"cron": "0 3 * * *", "interval_minutes": 5}}, "a schedule has either cron"),
        ({"retrain": {}, "schedule": {"cron": "often"}}, "schedule: 'often' has 1 fields"),
        ({"retrain": {}, "schedule": {"cron": "0 3 * * *", "time_zone": "Berlin"}}, "time_zone 'Berlin' is not known"),
        ({"retrain": {}, "schedule": {"interval_minutes": 0.5}}, "schedule.interval_minutes"),
        ({"retrain": {}, "schedule": {"interval_minutes": 5, "overlap": "both"}}, "schedule.overlap"),
        ({"retrain": {"sources": ["nowhere"]}}, "nowhere, which is watched for new data, does not exist"),
        ({"retrain": {"sources": ["empty"]}}, "empty, which is watched for new data, is a folder without files"),
        ({"retrain": {"sources": [""]}}, "retrain.sources"),
        ({"retrain": {"margins": 0.1}}, "unknown key retrain.margins; did you mean margin"),
        ({"retrain": {"model": "a b"}}, "retrain.model"),
        ({"retrain": {"max_p_value": 0.0}}, "retrain.max_p_value"),
        ({"retrain": 3}, "retrain: expected a table of settings, found 3"),
    ],
)
def test_what_cannot_work_is_one_sentence(folder: Path, tables: dict[str, Any], words: str) -> None:
    (folder / "empty").mkdir()
    with pytest.raises(InputError) as caught:
        deployments_of(write(folder, **tables))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_python_file_may_describe_a_retraining(folder: Path) -> None:
    config = folder / "mine.py"
    lines = (
        "from pathlib import Path",
        "from rollouts.flows.form import load_pipeline",
        "from rollouts.flows.retrain_settings import RetrainConfig, ScheduleConfig",
        "from dataclasses import replace",
        f"small = load_pipeline(Path({str(folder / 'small.toml')!r}))",
        "retrain, schedule = RetrainConfig(sources=(SOURCE,)), ScheduleConfig(interval_minutes=5)",
        "config = replace(small, retrain=retrain, schedule=schedule)",
    )
    text = "\n".join(lines)
    config.write_text(text.replace("SOURCE", "'sft.jsonl'"))
    assert deployments_of(config)[1].parameters["retrain"]["sources"] == [str(folder / "sft.jsonl")]
    config.write_text(text.replace("SOURCE", "'nowhere.jsonl'"))
    with pytest.raises(InputError, match="which is watched for new data, does not exist"):
        deployments_of(config)


def test_a_python_file_shows_a_schedule_of_nothing_beside_its_other_mistakes(folder: Path) -> None:
    config = folder / "mine.py"
    lines = (
        "from pathlib import Path",
        "from rollouts.flows.form import load_pipeline",
        "from rollouts.flows.retrain_settings import ScheduleConfig",
        "from dataclasses import replace",
        f"small = load_pipeline(Path({str(folder / 'small.toml')!r}))",
        "def reward(sample): return 1.0",
        "rollout = small.config.rollout.model_copy(update={'reward_fn': reward})",
        "own = small.config.model_copy(update={'rollout': rollout})",
        "config = replace(small, config=own, schedule=ScheduleConfig(interval_minutes=5))",
    )
    config.write_text("\n".join(lines))
    with pytest.raises(InputError) as caught:
        load_pipeline(config)
    said = str(caught.value)
    assert "the table schedule needs the table retrain" in said and "rollout.reward_fn: the jobs" in said


def test_a_schedule_of_data_that_cannot_change_is_refused(folder: Path) -> None:
    settings = small_settings(mode="sft", data__sft=[{"path": "org/name", "revision": "0" * 40}])
    config = folder / "small.toml"
    config.write_text(tomli_w.dumps({**settings, "retrain": {}, "schedule": {"cron": "0 3 * * *"}}))
    with pytest.raises(InputError, match="the watched data can never change"):
        deployments_of(config)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("retrain", "words"),
    [
        ({"margin": 1.0}, "retrain.margin 1 would never promote a model"),
        pytest.param({"max_p_value": 0.00001}, "retrain.max_p_value 1e-05 accepts no result", marks=pytest.mark.matrix),
        pytest.param(
            {"sources": ["nowhere"]},
            "nowhere, which is watched for new data, does not exist",
            marks=pytest.mark.matrix,
        ),
        ({"sources": ["."]}, "/small, which is watched for new data, contains the store"),
    ],
)
def test_what_can_never_promote_is_refused(folder: Path, retrain: dict[str, float], words: str) -> None:
    config = write(folder, retrain=retrain)
    assert words in refusal(config)
    pipeline = load_pipeline(config)
    parts = {"config": pipeline.config, "node": pipeline.node, "run": pipeline.run, "retrain": pipeline.retrain}
    started = json.dumps({name: part.model_dump(mode="json") for name, part in parts.items() if part is not None})
    command = [sys.executable, "-m", "rollouts.flows.check"]  # what a retraining does first, in Prefect too
    checked = subprocess.run(command, input=started, capture_output=True, text=True, cwd=folder, check=False)
    assert (checked.returncode, words in checked.stderr) == (2, True), checked.stderr


def test_what_it_takes_to_promote_is_said(folder: Path) -> None:
    checked = CliRunner().invoke(app, ["validate", str(write(folder, retrain={"margin": 0.1})), "--store", str(folder)])
    assert (checked.exit_code, "at least 8 of 20 held-out prompts" in " ".join(checked.output.split())) == (0, True)


@pytest.mark.slow
def test_a_bad_schedule_ends_the_command_before_anything_is_started(
    rollouts_without_server: Rollouts, folder: Path
) -> None:
    config = write(folder, retrain={}, schedule={"cron": "0 25 * * *"})
    code, output = rollouts_without_server.run("up", str(config))
    assert code == 2
    assert len(output.splitlines()) == 1
    assert "'25' is not a valid hour: expected 0 to 23" in output
    assert not (rollouts_without_server.store / "prefect/deployments").exists()


@pytest.fixture
def retraining(folder: Path) -> Deployment:
    tables = {"retrain": {"sources": ["sft.jsonl"], "margin": 0.02}, "schedule": {"cron": "0 3 * * *"}}
    once, again, *_ = deployments_of(write(folder, **tables))
    assert (once.name, once.flow, once.schedule) == ("small", "sft-rl", None)
    assert "retrain" not in once.parameters
    return again


def test_a_retraining_is_a_deployment_beside_that_of_its_configuration(retraining: Deployment, folder: Path) -> None:
    assert (retraining.name, retraining.flow) == ("small-retrain", "retrain")
    assert retraining.schedule == {
        "cron": "0 3 * * *",
        "interval_minutes": None,
        "time_zone": "UTC",
        "overlap": "queue",
    }
    assert retraining.parameters["retrain"]["sources"] == [str(folder / "sft.jsonl")]
    changed = overridden(retraining.flow, retraining.parameters, ["retrain.margin=0.05", "run.name=second"])
    assert changed["retrain"] == {**retraining.parameters["retrain"], "margin": 0.05}
    assert changed["config"] == retraining.parameters["config"]


def test_a_configuration_without_its_retraining_keeps_it_without_the_schedule(
    retraining: Deployment, folder: Path, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    save_deployments(home, [retraining])
    save_deployments(home, deployments_of(write(folder)))
    assert load_deployments(home)["small-retrain"] == replace(retraining, schedule=None)


def test_a_schedule_keeps_its_time_zone_and_intervals_are_counted_from_its_midnight() -> None:
    daily = build_schedule(ScheduleConfig(cron="0 3 * * *", time_zone="Europe/Berlin"))
    assert (daily.cron, daily.timezone) == ("0 3 * * *", "Europe/Berlin")
    half_daily = build_schedule(ScheduleConfig(interval_minutes=720, time_zone="Europe/Berlin"))
    assert half_daily.interval == timedelta(hours=12)
    assert half_daily.anchor_date == datetime(2019, 12, 31, 23, tzinfo=UTC)
