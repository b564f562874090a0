"""Pins what the verdict on RL says besides its numbers: that little or nothing was trained.

Without it a run that trained nothing would look like one whose training did not help.
"""

from __future__ import annotations

from typing import Any

import pytest

from rollouts_core.config import Config
from tasks.records import StageRecord
from tasks.report import judge_rl
from tests.small_pipeline import small_settings


def record(stage: str, result: dict[str, Any]) -> StageRecord:  # Any: JSON
    return StageRecord(stage=stage, fingerprint="f", run_dir="d", how="ran", why="", seconds=0.0, result=result)


@pytest.mark.parametrize("max_p_value", [0.01, 1.0])
def test_the_verdict_says_that_rl_made_no_update(max_p_value: float) -> None:
    settings = small_settings(evaluation__max_p_value=max_p_value)
    config = Config.model_validate({name: settings[name] for name in ("model", "data", "evaluation")})
    scores = {"checkpoints": [{"name": name, "scores": [0.0, 1.0]} for name in ("base", "rl")]}
    warning = "no step of 4 made an update"
    verdict = judge_rl(record("evaluate", scores), record("rl", {"warning": warning}), config)
    assert verdict.sentence.endswith(f"; {warning}")
    assert verdict.is_accepted == (max_p_value == 1.0)
