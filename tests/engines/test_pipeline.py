"""Pins that a whole run samples from SGLang or vLLM when it is told to, and leaves nothing of them behind.

Without it an engine could work for the tests that talk to it, and not for the pipeline that starts it.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from rollouts_core.config import EngineKind, WeightTransfer
from rollouts_core.metrics import read_metrics
from rollouts_core.quickstart import SMALL_SIZE, write_quickstart_files
from tests.engines.servers import engine_python
from tests.flows.clusters import two_machines
from tests.flows.conftest import prefect_home, rollouts, served_home
from tests.kit.commands import Rollouts
from tests.kit.small_pipeline import small_settings

__all__ = ["prefect_home", "rollouts", "served_home"]  # fixtures of another folder

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]

HIDDEN_SIZE = 128
"""Four heads of 32, the smallest that vLLM has on a CPU."""


@pytest.mark.parametrize(
    ("kind", "transfer"),
    [
        ("sglang", "auto"),
        # What test_sending.py does without a run.
        pytest.param("sglang", "gloo", marks=pytest.mark.matrix),
        pytest.param("sglang", "tensors", marks=pytest.mark.matrix),
        # test_evaluation.py has a run with vLLM.
        pytest.param("vllm", "auto", marks=pytest.mark.matrix),
        pytest.param("vllm", "gloo", marks=pytest.mark.matrix),
    ],
)
def test_a_run_samples_from_the_engine_it_names_and_the_trainer_agrees_with_its_logprobs(
    rollouts: Rollouts, tmp_path: Path, kind: EngineKind, transfer: WeightTransfer
) -> None:
    folder = tmp_path / "small"
    settings = settings_of(folder, {"kind": kind, "python": str(engine_python(kind)), "weight_transfer": transfer})
    (folder / "small.toml").write_text(tomli_w.dumps(settings))
    code, output = rollouts.run("run", str(folder / "small.toml"))
    assert code == 0, output
    (rl,) = rollouts.store.glob("stages/rl-*")
    published = [path.name for path in (rl / "weights").iterdir()]
    assert (published == ["config.json"]) == (transfer != "auto"), published
    assert_every_step_had_new_weights(rl)


@pytest.mark.matrix
@pytest.mark.namespaces
def test_sglang_on_another_machine_has_the_weights_that_cross_the_network(rollouts: Rollouts, tmp_path: Path) -> None:
    with two_machines(rollouts, tmp_path) as cluster:
        settings = settings_of(tmp_path / "small", {"kind": "sglang", "python": str(engine_python("sglang"))})
        settings["node"] = cluster.settings("engine_nodes")
        (tmp_path / "small/small.toml").write_text(tomli_w.dumps(settings))
        code, output = rollouts.run("run", str(tmp_path / "small/small.toml"))
        assert code == 0, output
        assert f"answers at http://{cluster.link.addresses[1]}:" in output
        (rl,) = cluster.leader.files("root/stages/rl-*")
        (engine,) = cluster.further.files("root/stages/*")
        assert "sglang" in (engine / "log.txt").read_text()
        assert [path.name for path in (rl / "weights").iterdir()] == ["config.json"]  # none lie on a disk
        assert_every_step_had_new_weights(rl)
        assert cluster.leader.commands() == cluster.further.commands() == []


def settings_of(folder: Path, engine: dict[str, str]) -> dict[str, Any]:  # Any: settings of every type
    """RL from a model that every engine can serve on a CPU, whose weights change much from step to step."""
    write_quickstart_files(folder, size=dataclasses.replace(SMALL_SIZE, hidden_size=HIDDEN_SIZE))
    return small_settings(
        mode="rl",
        rollout__engine=engine,
        rollout__reward_fn="tests.rollouts_core.kill_rewards:grade_even_digits",
        training__rl__optim__lr=1e-2,
        evaluation__engine="embedded",  # which is there at once
    )


def assert_every_step_had_new_weights(rl: Path) -> None:
    """The trainer finds the probabilities of the tokens that the engine sampled them with."""
    steps = read_metrics(rl / "metrics.jsonl")
    assert [step["step"] for step in steps] == [1, 2, 3, 4]
    # With the weights of any earlier step they would differ by far more: the learning rate is high.
    assert max(abs(step["mismatch_kl"]) for step in steps) < 1e-6
    assert max(step["mismatch_ratio_max"] for step in steps) < 1.001
