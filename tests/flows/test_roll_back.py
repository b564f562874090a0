"""A training that collapses and that a rule rolls back to its best checkpoint, in a whole run.

Without this test the run could hand over the collapsed weights, or a later run could take the shortened training for a
whole one.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.kit.commands import Rollouts
from tests.kit.runs import events_of, last_run, run_dir
from tests.kit.small_pipeline import write_small_pipeline

pytestmark = [pytest.mark.slow, pytest.mark.matrix]


def test_a_run_continues_with_the_best_checkpoint_and_only_the_same_settings_reuse_it(
    rollouts: Rollouts, tmp_path: Path
) -> None:
    """The learning rate rises until the training diverges."""
    training = {
        "num_steps": 60,
        "checkpoint_every": 10,
        "eval_every": 10,
        "keep_best": 1,
        "roll_back_on": ["loss_risen"],
        "optim": {"lr": 3.0, "num_warmup_steps": 40, "max_grad_norm": 1e9},
    }
    settings = {f"training__sft__{key}": value for key, value in training.items()}
    config = write_small_pipeline(tmp_path / "small", mode="sft", data__sft_eval="sft_eval.jsonl", **settings)
    rows = (config.parent / "sft.jsonl").read_text().splitlines(keepends=True)
    (config.parent / "sft.jsonl").write_text("".join(rows[20:]))
    (config.parent / "sft_eval.jsonl").write_text("".join(rows[:20]))
    code, output = rollouts.run("run", str(config))
    assert code == 0, output
    sft = run_dir(rollouts, "sft")
    result = json.loads((sft / "result.json").read_text())
    [event] = events_of(sft, "rolled_back")
    best = f"step_{event['step']:06d}"
    assert event["message"] in output and event["from_step"] < 60
    assert [entry["name"] for entry in result["checkpoints"]] == [best]
    run = last_run(rollouts)
    assert run["selected"] == {"sft": best}
    assert run["stages"][0]["rolled_back"] == result["rolled_back"]
    [report] = rollouts.store.glob("runs/*/report.html")
    page = report.read_text()
    assert event["message"] in page
    assert f"{event['from_step']} of 60 steps, rolled back to step {event['step']}" in page

    code, output = rollouts.run("run", str(config))
    assert code == 0 and event["message"] in output, output
    assert [each["how"] for each in last_run(rollouts)["stages"]] == ["reused"] * 3
    code, output = rollouts.run("validate", str(config), "training.sft.roll_back_on=[]")
    assert code == 0, output
    assert f'unlike {sft.name}: training.sft.roll_back_on was ["loss_risen"] and is its default' in output
    assert "at the pace of" not in output, "the time of a shortened training is not the time of a whole one"
