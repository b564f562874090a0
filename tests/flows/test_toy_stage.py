"""Pins that a stage is added by one folder and its rows in `rollouts_core/stages/__init__.py`.

The stage must then run from the form to the report, with retry and reuse. Without this test a name of a stage could be
written somewhere else again.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from rollouts_core.metrics import read_metrics
from tests.kit.commands import ROOT, Rollouts, clean_environment
from tests.kit.runs import run_until
from tests.kit.small_pipeline import write_small_pipeline
from tests.kit.waiting import wait_until

pytestmark = pytest.mark.slow

ROWS = (
    ("from rollouts_core.stages.rl import RL\n", "from rollouts_core.stages.polish import POLISH\n"),
    ('STAGES = {"sft": SFT, ', '"polish": POLISH, '),
    ("PIPELINES = {", '"sft+polish": (SFT, SELECT, POLISH, SELECT), '),
)
"""What is added to the file, and behind which text."""
SHOW_FORM = """
import json
from prefect.utilities.callables import parameter_schema
from rollouts.flows.pipeline import sft_rl
print(json.dumps(parameter_schema(sft_rl).definitions))
"""


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """This project's code with one more stage."""
    tree = tmp_path_factory.mktemp("code")
    for package in ("flows", "tasks", "infra", "rollouts_core"):
        shutil.copytree(ROOT / package, tree / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "src", tree / "src", symlinks=True, ignore=shutil.ignore_patterns("*.egg-info"))
    shutil.copytree(ROOT / "tests" / "toy_stage", tree / "rollouts_core" / "stages" / "polish")
    table = tree / "rollouts_core" / "stages" / "__init__.py"
    text = table.read_text()
    for behind, row in ROWS:
        assert text.count(behind) == 1
        text = text.replace(behind, behind + row)
    table.write_text(text)
    return tree


def test_the_form_offers_the_stage_its_mode_and_its_settings(code: Path) -> None:
    command, variables = [sys.executable, "-c", SHOW_FORM], clean_environment(code)
    shown = subprocess.run(command, cwd=code, env=variables, capture_output=True, text=True, check=True)
    form = json.loads(shown.stdout)
    assert "sft+polish" in json.dumps(form) and "select-polish" in json.dumps(form)
    assert form["TrainingConfig"]["properties"]["polish"]["description"] == "Polishing."
    assert "num_rows" in form["PolishConfig"]["properties"]


@pytest.mark.matrix
def test_the_stage_is_checked_interrupted_resumed_reused_and_reported(
    rollouts: Rollouts, tmp_path: Path, code: Path
) -> None:
    rollouts = replace(rollouts, code=code)
    polish = {"num_steps": 100, "num_rows": 24, "max_length": 128, "checkpoint_every": 1000, "log_every": 1}
    config = write_small_pipeline(tmp_path / "small", mode="sft+polish", training__polish=polish)
    small = write_small_pipeline(tmp_path / "checked", mode="sft+polish", training__polish={**polish, "num_steps": 2})
    code_of, output = rollouts.run("validate", str(small))
    assert code_of == 0 and 'mode "sft+polish" has no RL' in output
    assert "training.polish.num_steps 2 is less than num_rows 24" in output

    process, directory = run_until(rollouts, config, "polish", event="started")
    wait_until(lambda: len(read_metrics(directory / "metrics.jsonl")) >= 3, what="three steps")
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130, rollouts.said()
    saved = json.loads((directory / "exit-1.json").read_text())["saved_step"]

    code_of, output = rollouts.run("run", str(config))
    assert code_of == 0, output
    assert f"resumes from step {saved}" in output
    run = next(each for each in (rollouts.store / "runs").iterdir() if (each / "run.json").exists())
    record = json.loads((run / "run.json").read_text())
    assert [(stage["stage"], stage["how"]) for stage in record["stages"]] == [
        ("sft", "reused"), ("select-sft", "reused"), ("polish", "ran"), ("select-polish", "ran"), ("evaluate", "ran"),
    ]  # fmt: skip
    page = (run / "report.html").read_text()
    parts = ("then polishing", "the first 24 rows of", "Loss of polishing", "Polish checkpoints", ".polish svg .line")
    assert [part for part in parts if part not in page] == []

    code_of, output = rollouts.run("run", str(config))
    assert code_of == 0, output
    (again,) = {each for each in (rollouts.store / "runs").iterdir() if (each / "run.json").exists()} - {run}
    stages = json.loads((again / "run.json").read_text())["stages"]
    assert [stage["how"] for stage in stages] == ["reused"] * 5
