"""Pins that a run on a machine without an engine installs vLLM for the CPU by itself, and trains with it.

Without it every person would install an engine by hand before the first RL.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tomli_w

from rollouts_core.metrics import read_metrics
from tests.engines.test_pipeline import assert_every_step_had_new_weights, settings_of
from tests.flows.conftest import prefect_home, rollouts, served_home
from tests.kit.commands import Rollouts
from tests.rollouts_core import kill_rewards

__all__ = ["prefect_home", "rollouts", "served_home"]  # fixtures of another folder


@pytest.mark.engine
@pytest.mark.matrix
@pytest.mark.timeout(2400)
def test_a_run_installs_vllm_for_the_cpu_and_trains_with_it(
    rollouts: Rollouts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "small"
    settings = settings_of(folder, {"kind": "vllm"})
    settings["rollout"]["engine"]["start_timeout_s"] = 600.0
    settings["rollout"]["reward_fn"] = "even_digits:grade_even_digits"
    (folder / "even_digits.py").write_text(Path(kill_rewards.__file__).read_text())
    (folder / "small.toml").write_text(tomli_w.dumps(settings))
    monkeypatch.chdir(folder)  # .engines of this repository is not beside it
    process = rollouts.start("run", str(folder / "small.toml"))
    code, output = process.wait(2000), rollouts.said()
    assert code == 0, output
    assert "rollout.engine: the run installs vLLM 0.32.0 by pip" in output
    assert "tests vLLM with a prompt for a tiny model" in output
    [engine] = rollouts.store.glob("engines/vllm-0.32.0-*")
    assert json.loads((engine / "trial/result.json").read_text())["num_tokens"] == 8
    (rl,) = rollouts.store.glob("stages/rl-*")
    assert json.loads((rl / "result.json").read_text())["engines"] == ["vllm 0.32.0"]
    assert len(read_metrics(rl / "metrics.jsonl")) == 4
    assert_every_step_had_new_weights(rl)
    code, output = rollouts.run("run", str(folder / "small.toml"))
    assert code == 0 and "is installed by an earlier run" in output
