"""Pins that engines with a key, and engines on the trainer's GPUs, work from the settings to the report.

Without it each part could handle the key, and a job in between not get it, or leave it in a file.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from rollouts_core.metrics import read_metrics
from tests.kit.commands import Rollouts
from tests.kit.small_pipeline import write_small_pipeline

pytestmark = pytest.mark.slow

KEY = "77a0-known-to-nobody"


@pytest.mark.matrix
def test_a_run_with_a_key_and_shared_gpus_ends_well_and_leaves_the_key_nowhere(
    rollouts: Rollouts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = write_small_pipeline(
        tmp_path / "small",
        mode="rl",
        rollout__engine={"api_key_variable": "ENGINE_KEY"},
        rollout__reward_fn="tests.rollouts_core.kill_rewards:grade_even_digits",
        training__rl__optim__lr=1e-2,
        deployment__colocated=True,
        deployment__num_engines=2,
    )
    code, output = rollouts.run("run", str(config))
    assert code == 2, output
    assert "rollout.engine: api_key_variable ENGINE_KEY is not set" in " ".join(output.split())
    monkeypatch.setenv("ENGINE_KEY", KEY)
    code, output = rollouts.run("run", str(config))
    assert code == 0, output
    (rl,) = rollouts.store.glob("stages/rl-*")
    steps = read_metrics(rl / "metrics.jsonl")
    assert [step["step"] for step in steps] == [1, 2, 3, 4]
    assert max(abs(step["mismatch_kl"]) for step in steps) < 1e-6
    leaks = [path for path in rollouts.store.rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()]
    assert not leaks, leaks
    assert KEY not in output
