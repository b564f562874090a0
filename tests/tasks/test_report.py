"""Pins what the verdict on RL says besides its numbers, that little or nothing was trained, and a report's commands.

Without it a run that trained nothing looks like one whose training did not help, and a command, copied, fails.
"""

from __future__ import annotations

import shlex
from typing import Any

import pytest

from rollouts.tasks.records import RunScope, StageRecord
from rollouts.tasks.report_input import build_report_input, judge_training
from rollouts_core.config import Config
from tests.kit.small_pipeline import small_settings


def record(stage: str, result: dict[str, Any]) -> StageRecord:  # Any: JSON
    return StageRecord(stage=stage, fingerprint="f", run_dir="d", how="ran", why="", seconds=0.0, result=result)


@pytest.mark.parametrize("max_p_value", [0.01, 1.0])
def test_the_verdict_says_that_rl_made_no_update(max_p_value: float) -> None:
    settings = small_settings(mode="rl", evaluation__max_p_value=max_p_value)
    config = Config.model_validate({name: settings[name] for name in ("mode", "model", "data", "evaluation")})
    scores = {"checkpoints": [{"name": name, "scores": [0.0, 1.0]} for name in ("base", "rl")]}
    warning = "no step of 4 made an update"
    verdict = judge_training(record("evaluate", scores), record("rl", {"warning": warning}), config)
    assert verdict.sentence.endswith(f"; {warning}")
    assert verdict.is_accepted == (max_p_value == 1.0)


def test_the_commands_of_a_report_are_for_a_shell_whatever_the_store_is_called() -> None:
    store = "/home/ada/My runs/$1"
    scope = RunScope(run_id="0123456789abcdef", run_name="small", store=store)
    config = Config.model_validate({name: small_settings()[name] for name in ("model", "data")})
    checkpoint = f"{store}/runs/small-01234567/checkpoint"
    by_stage = {"evaluate": record("evaluate", {})}
    report = build_report_input(by_stage, config, "", checkpoint, scope, None, None)
    assert shlex.split(report.use_command) == ["rollouts", "serve", checkpoint]
    settings = str(scope.output_dir / "config.toml")
    assert shlex.split(report.reproduce_command) == ["rollouts", "run", settings, "--store", store]
