"""Two runs that want the same GPU: one trains, the other says what it waits for, and both come to their end.

Without it the locks of the supervisor could be right, and no job of a pipeline take one, or a run die of waiting.
"""

from __future__ import annotations

import dataclasses
import json
from datetime import datetime
from pathlib import Path

import pytest

from rollouts_core.metrics import read_json_lines
from tests.kit import commands
from tests.kit.commands import Rollouts
from tests.kit.nvidia_smi import install_nvidia_smi
from tests.kit.runs import events_of, paused, program_of, run_until
from tests.kit.small_pipeline import write_small_pipeline

pytestmark = pytest.mark.slow


@pytest.fixture
def on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands see a GPU, by its program alone, that nobody else of this machine uses."""
    install_nvidia_smi(tmp_path / "bin", monkeypatch)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    environment = commands.clean_environment() | {"ROLLOUTS_GPU_LOCKS": str(tmp_path / "locks")}
    monkeypatch.setattr(commands, "clean_environment", lambda: environment)


@pytest.mark.matrix
@pytest.mark.usefixtures("on_a_gpu")
def test_the_second_run_waits_with_its_engine_and_trains_when_the_first_has_ended(
    rollouts: Rollouts, tmp_path: Path
) -> None:
    config = write_small_pipeline(tmp_path / "small", mode="rl", run={"name": "one"})
    other = write_small_pipeline(tmp_path / "other", mode="rl", run={"name": "two"}, rollout__seed=8)
    second = dataclasses.replace(rollouts, output=tmp_path / "second.txt")
    process, first_rl = run_until(rollouts, config, "rl", event="started")
    with paused(program_of(first_rl)):
        waiting = second.start("run", str(other))
        second.wait_until_said("engine         waits for GPU 0, held by run one-", waiting)
        assert f"(job {first_rl})" in second.said()
        code, status = dataclasses.replace(rollouts, output=tmp_path / "status.txt").run("status")
        assert code == 0 and "waits for GPU 0, held by run one-" in status, status
        assert process.poll() is None and waiting.poll() is None
    process.wait(commands.RUN_TIMEOUT_S)
    waiting.wait(commands.RUN_TIMEOUT_S)

    [second_rl] = set(rollouts.store.glob("stages/rl-*")) - {first_rl}
    for directory in (first_rl, second_rl):
        assert (directory / "result.json").is_file(), second.said()
        assert read_json_lines(directory / "gpu_use.jsonl")[0]["gpus"][0]["use_percent"] == 97.0
    [engine] = [path for path in rollouts.store.glob("stages/engine-*") if events_of(path, "waits_for_gpus")]
    [had_gpu] = events_of(engine, "has_gpus")
    first_ended = datetime.fromisoformat(json.loads((first_rl / "exit-1.json").read_text())["ended_at"]).timestamp()
    assert first_ended < had_gpu["time"] < events_of(second_rl, "started")[0]["time"]
    assert not events_of(second_rl, "waits_for_gpus"), "its engine has the GPU for it"
