"""The first thing that a newcomer runs, as it is: real size, real Prefect server, three seeds.

Without it the recipe could stop to work on some seed, and a newcomer's first run would end with "did not improve".
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rollouts_core.checkpoint import verify_checkpoint
from tests.kit.commands import Rollouts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.matrix) for seed in (1, 2))])
def test_the_quickstart_improves_held_out_accuracy_at_every_stage(rollouts: Rollouts, seed: int) -> None:
    code, output = rollouts.run("quickstart", "--seed", str(seed))
    assert code == 0, output
    (run,) = (rollouts.store / "runs").iterdir()
    (evaluation,) = (rollouts.store / "stages").glob("evaluate-*")
    scored = {entry["name"]: entry for entry in json.loads((evaluation / "result.json").read_text())["checkpoints"]}
    assert scored["base"]["num_rows"] >= 200
    assert scored["base"]["high"] < scored["sft"]["low"]
    assert scored["sft"]["high"] < scored["rl"]["low"]
    verify_checkpoint(run / "checkpoint")
    report = (run / "report.html").read_text()
    assert "RL improved on the selected SFT checkpoint" in report
    assert len(report.encode()) <= 250_000, "with 5,120 completions of RL and 2,400 held-out answers"
    assert all(f'id="data-{name}"' in report for name in ("index", "chunk-0", "rows", "curves", "vocabulary"))
    assert f"Report:      {run / 'report.html'}" in output
    for command in ("report", "samples", "chat", "serve"):
        assert f" {command} {run.name}" in output
    assert f" ui --store {rollouts.store}" in output
    shown = rollouts.run("samples", run.name, "--model", "rl", "--limit", "1", "--json")
    assert shown[0] == 0 and '"kind": "sample"' in shown[1]
    assert "/v2/runs/flow-run/" in output
    assert Path(run, "config.toml").is_file()
