"""A whole run on a GPU that is too small for its micro-batches: it completes by itself and says what it changed.

Without it each part could be right, and no supervisor restart the job, or the report keep silent about the change.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.kit import commands
from tests.kit.commands import Rollouts
from tests.kit.small_pipeline import write_small_pipeline
from tests.rollouts_core.small_gpu import FOLDER, lowered_in

pytestmark = pytest.mark.slow


@pytest.mark.matrix
def test_a_run_whose_gpu_is_full_lowers_its_micro_batches_and_completes(
    rollouts: Rollouts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = commands.clean_environment()
    small = {"PYTHONPATH": f"{usual['PYTHONPATH']}:{FOLDER}", "CUDA_SMALL_TOKENS": str(2 * 128)}
    monkeypatch.setattr(commands, "clean_environment", lambda code: usual | small)
    config = write_small_pipeline(tmp_path / "small", mode="sft", training__sft__num_steps=4)
    code, said = rollouts.run("run", str(config))
    assert code == 0, said
    [sft] = rollouts.store.glob("stages/sft-*")
    assert lowered_in(sft) == [("micro_batch_size", 8, 4), ("micro_batch_size", 4, 2)]
    ended = json.loads((sft / "exit-1.json").read_text())
    assert (ended["code"], ended["restarts"]) == (0, 2)
    [report] = rollouts.store.glob("runs/*/report.html")
    for value, before in ((4, 8), (2, 4)):
        sentence = f"training.sft.micro_batch_size = {value} (was {before})"
        assert said.count(sentence) == 1, said
        assert sentence in report.read_text()
