"""Pins that a run which is interrupted has saved the last step of its training, and says which.

Without these tests Ctrl-C could cost everything since the last checkpoint, or hold a terminal until a long step ends.
"""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from rollouts_core.checkpoint import list_checkpoints, verify_checkpoint
from rollouts_core.metrics import read_metrics
from tests.kit.commands import Rollouts
from tests.kit.runs import assert_last_step_is_saved, assert_nothing_is_left, events_of, paused, program_of, run_until
from tests.kit.small_pipeline import write_small_pipeline
from tests.kit.waiting import wait_until

pytestmark = pytest.mark.slow

RARE: dict[str, Any] = {  # Any: settings of every type
    "training__sft__num_steps": 150,
    "training__sft__checkpoint_every": 100_000,
    "training__sft__log_every": 1,
    "training__rl__num_steps": 12,
    "training__rl__checkpoint_every": 100_000,
}


@pytest.mark.parametrize("mode", ["sft", pytest.param("rl", marks=pytest.mark.matrix)])
@pytest.mark.promise
def test_ctrl_c_saves_the_last_step_and_the_next_run_goes_on_there(
    rollouts: Rollouts, tmp_path: Path, mode: str
) -> None:
    config = write_small_pipeline(tmp_path / "small", mode=mode, **RARE)
    process, directory = run_until(rollouts, config, mode, event="started")
    wait_until(lambda: len(read_metrics(directory / "metrics.jsonl")) >= 3, what="three steps")
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130, rollouts.said()
    assert_last_step_is_saved(directory)
    step = read_metrics(directory / "metrics.jsonl")[-1]["step"]
    assert step >= 3
    assert verify_checkpoint(list_checkpoints(directory / "checkpoints")[-1]).is_early
    assert f"ended the job in {directory}, step {step:.0f} is saved" in rollouts.said()
    assert_nothing_is_left(rollouts)
    assert f"{mode} stopped: step {step:.0f} is saved" in rollouts.run("status")[1]

    code, output = rollouts.run("run", str(config))
    assert code == 0, output
    assert f"resumes from step {step:.0f}" in output
    assert [line["step"] for line in read_metrics(directory / "metrics.jsonl")] == list(
        range(1, RARE[f"training__{mode}__num_steps"] + 1)
    )


@pytest.mark.matrix
def test_a_second_ctrl_c_stops_the_waiting_and_the_step_is_saved_all_the_same(
    rollouts: Rollouts, tmp_path: Path
) -> None:
    config = write_small_pipeline(tmp_path / "small", mode="sft", **RARE)
    process, directory = run_until(rollouts, config, "sft", event="started")
    wait_until(lambda: len(read_metrics(directory / "metrics.jsonl")) >= 3, what="three steps")
    with paused(program_of(directory)):
        process.send_signal(signal.SIGINT)
        rollouts.wait_until_said(f"waits until the job in {directory} has saved its last step", process)
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == 130, rollouts.said()
        assert f"the job in {directory} saves its last step and ends by itself" in rollouts.said()
        assert not (directory / "exit-1.json").exists()
    wait_until((directory / "exit-1.json").exists, what="the end of the job")
    ended = json.loads((directory / "exit-1.json").read_text())
    assert ended["cancelled"] and ended["saved_step"] >= 3
    assert events_of(directory, "stopped")[-1]["step"] == ended["saved_step"]
    assert "Traceback" not in rollouts.said()
