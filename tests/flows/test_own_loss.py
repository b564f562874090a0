"""Pins that a loss of the user's own goes the whole way: checked, sent to a machine, trained with by two processes.

Without it `training.rl.loss_fn` could work in a notebook and be unknown to the machine that trains, or an edited loss
could be taken for what the old one trained.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.infra.ssh_server import running_server
from tests.kit.commands import Rollouts
from tests.kit.small_pipeline import write_small_pipeline
from tests.kit.ssh_nodes import node_settings

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "own_loss.py"
SETTINGS = {
    "training__sft__num_steps": 4,
    "training__sft__checkpoint_every": 4,
    "training__rl__num_steps": 2,
    "training__rl__loss_fn": "own_loss:sapo_loss",
    "deployment__trainer_processes": 2,
}


@pytest.mark.slow
@pytest.mark.matrix  # tests/test_plugins.py takes the same way with an installed package
def test_a_loss_beside_the_configuration_trains_on_another_machine_and_is_part_of_the_identity(
    rollouts: Rollouts, tmp_path: Path
) -> None:
    with running_server(tmp_path / "sshd") as server:
        node = node_settings(server, tmp_path / "node")
        config = write_small_pipeline(tmp_path / "small", node=node, **SETTINGS)
        own = Path(shutil.copy(EXAMPLE, config.parent))
        code, output = rollouts.run("run", str(config))
        assert code == 0, output
        assert "own_loss (1 file" in output
        [stage] = (rollouts.store / "stages").glob("rl-*")
        lines = [json.loads(line) for line in (stage / "metrics.jsonl").read_text().splitlines()]
        assert len(lines) == 2 and all("far_share" in line and "clip_share" not in line for line in lines)

        own.write_text(own.read_text().replace("1.0, 1.05", "1.0, 1.5"))
        code, output = rollouts.run("run", str(config))
        assert code == 0, output
    assert len([*(rollouts.store / "stages").glob("rl-*")]) == 2
    assert len([*(rollouts.store / "stages").glob("sft-*")]) == 1


@pytest.mark.slow
def test_a_loss_that_raises_is_told_before_anything_is_trained(
    rollouts_without_server: Rollouts, tmp_path: Path
) -> None:
    config = write_small_pipeline(tmp_path / "small", training__rl__loss_fn="losses_of_a_test:loss")
    (config.parent / "losses_of_a_test.py").write_text("def loss(scores, batch):\n    return scores.logits\n")
    code, output = rollouts_without_server.run("validate", str(config))
    assert code == 2
    assert "training.rl.loss_fn: the loss function losses_of_a_test:loss raised AttributeError: " in output
    assert "(losses_of_a_test.py, line 2)" in output and "Traceback" not in output
