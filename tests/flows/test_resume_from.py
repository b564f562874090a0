"""A finished stage that is gone on with: `resume_from` in a configuration, through whole runs.

Without it "train on for some more steps" could start anew, take the wrong checkpoint, or end elsewhere than one long
training, and every record would still look right.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from rollouts_core.checkpoint import list_checkpoints, load_manifest
from rollouts_core.metrics import read_json_lines, read_metrics
from rollouts_core.quickstart import write_quickstart_files
from tests.kit.commands import Rollouts
from tests.kit.small_pipeline import small_settings
from tests.rollouts_core.histories import without_times
from tests.rollouts_core.make import TINY_SIZE

pytestmark = pytest.mark.slow

NUM_STEPS = {"sft": 20, "rl": 3}


def write_config(folder: Path, name: str, stage: str, num_steps: int, **training: Any) -> Path:  # Any: settings
    """A pipeline of one training stage, with rewards that differ and a constant learning rate."""
    settings = {
        "num_steps": num_steps,
        "checkpoint_every": NUM_STEPS[stage],
        "log_every": 1,
        "optim": {"lr": 1e-3, "schedule": "constant"},
        **training,
    }
    config = folder / f"{name}.toml"
    reward_fn = "tests.rollouts_core.kill_rewards:grade_even_digits"
    overrides = {f"training__{stage}__{key}": value for key, value in settings.items()}
    config.write_text(tomli_w.dumps(small_settings(mode=stage, rollout__reward_fn=reward_fn, **overrides)))
    return config


def run_stage(rollouts: Rollouts, config: Path, stage: str) -> Path:
    """Run a configuration to its end; returns the directory of the training stage that it did."""
    known = set(rollouts.store.glob(f"stages/{stage}-*"))
    code, output = rollouts.run("run", str(config))
    assert code == 0, output
    (directory,) = set(rollouts.store.glob(f"stages/{stage}-*")) - known
    return directory


def metrics_of(directory: Path) -> list[dict[str, float]]:
    return without_times(read_metrics(directory / "metrics.jsonl"))


@pytest.mark.matrix
@pytest.mark.parametrize("stage", ["sft", pytest.param("rl", marks=pytest.mark.matrix)])
def test_a_finished_stage_that_is_extended_ends_as_one_long_training(
    rollouts: Rollouts, tmp_path: Path, stage: str
) -> None:
    folder, num_steps = tmp_path / "small", NUM_STEPS[stage]
    write_quickstart_files(folder, size=TINY_SIZE)
    first = run_stage(rollouts, write_config(folder, "first", stage, num_steps), stage)
    source = os.path.relpath(first, folder)
    extended_config = write_config(folder, "extended", stage, 2 * num_steps, resume_from=source)
    extended = run_stage(rollouts, extended_config, stage)
    straight = run_stage(rollouts, write_config(folder, "straight", stage, 2 * num_steps), stage)

    assert [line["step"] for line in metrics_of(extended)] == list(range(num_steps + 1, 2 * num_steps + 1))
    assert metrics_of(first) + metrics_of(extended) == metrics_of(straight)
    ends = [list_checkpoints(directory / "checkpoints")[-1] for directory in (extended, straight)]
    assert load_manifest(ends[0]).step == 2 * num_steps
    assert load_manifest(ends[0]).files == load_manifest(ends[1]).files

    events = {line["event"]: line for line in read_json_lines(extended / "events.jsonl")}
    assert events["extended"]["exact"] is True
    # where it began is a candidate too
    result = json.loads((extended / "result.json").read_text())
    assert [entry["step"] for entry in result["checkpoints"]] == [num_steps, 2 * num_steps]
    assert (first / "result.json").is_file()

    code, output = rollouts.run("run", str(extended_config))
    assert code == 0, output
    assert len(list(rollouts.store.glob(f"stages/{stage}-*/exit-*.json"))) == 3  # nothing was done again
