"""As many runs go at once as there are slots, the others are queued in Prefect, and tools wait for nobody.

Without these tests a second run could sit beside the first one on a GPU for nothing, a change of the number could need
a restart, or a run could not be finished because its own slot is taken.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from rollouts.flows.store import DEFAULT_GPU_SLOTS, load_gpu_slots, save_gpu_slots
from rollouts_core.errors import ConfigError
from tests.kit.commands import Rollouts
from tests.kit.runs import LONG, paused, program_of
from tests.kit.serving import api, set_state, state_of, trigger, up, wait_for_checkpoint, wait_for_state
from tests.kit.small_pipeline import write_small_pipeline
from tests.kit.waiting import wait_until


def test_the_number_is_kept_and_a_damaged_one_is_named(tmp_path: Path) -> None:
    assert load_gpu_slots(tmp_path) == DEFAULT_GPU_SLOTS
    save_gpu_slots(tmp_path, 12)
    assert load_gpu_slots(tmp_path) == 12
    for text in ("", "0", "many"):
        (tmp_path / "gpu_slots").write_text(text)
        with pytest.raises(ConfigError, match="gpu_slots does not contain a number of slots: delete it"):
            load_gpu_slots(tmp_path)


@pytest.mark.matrix
@pytest.mark.slow
def test_runs_beyond_the_slots_are_queued_until_there_is_one(served: Rollouts, tmp_path: Path) -> None:
    config = write_small_pipeline(tmp_path / "small", mode="sft", **LONG)
    began = up(served, str(config), "--gpu-slots", "1", "--keep-days", "30")
    assert "gpu slots      1: number of runs under way at once" in began
    assert "keep days      30: what no run used for so long is removed once a day" in began
    first = trigger(served, "small")
    with paused(program_of(wait_for_checkpoint(served, "sft"))):
        second = trigger(served, "small", "run.name=second")
        tool = trigger(served, "finish", "finish.run=nobody")
        wait_for_state(served, tool, "FAILED")
        wait_until(
            lambda: api(served, "GET", f"/flow_runs/{second}")["state_name"] == "Late", what="the queue", every_s=0.5
        )
        code, output = served.run("status")
        assert code == 0 and "gpu slots    1:" in output and re.search(r"run +second-\w+ +Late since", output), output

        assert "gpu slots      2: number of runs" in up(served, "--gpu-slots", "2")
        wait_for_state(served, second, "RUNNING")
        third = trigger(served, "small", "run.name=third")
        assert "gpu slots      1: number of runs" in up(served, "--gpu-slots", "1")
        assert [state_of(served, run) for run in (first, second, third)] == ["RUNNING", "RUNNING", "SCHEDULED"]
        for run in (third, second, first):
            set_state(served, run, "CANCELLING" if run != third else "CANCELLED")
    for run in (first, second, third):
        wait_for_state(served, run, "CANCELLED")

    served.run("down")
    assert "gpu slots      1: number of runs" in up(served)


@pytest.mark.matrix
@pytest.mark.slow
def test_a_change_that_cannot_be_taken_over_is_tried_again_and_ends_nothing(served: Rollouts) -> None:
    up(served)
    home = served.store / "prefect"
    pid = json.loads((home / "serving.json").read_text())["pid"]
    obstacle = home / f".serving.json.{pid}.partial"  # where it writes what takes the place of the other one
    obstacle.mkdir()
    save_gpu_slots(home, 2)
    log = home / "serving.log"
    wait_until(lambda: "could not be applied" in log.read_text(), what="the failure in its log", timeout_s=60)
    obstacle.rmdir()
    wait_until(lambda: json.loads((home / "serving.json").read_text())["gpu_slots"] == 2, what="the change")
    assert json.loads((home / "serving.json").read_text())["pid"] == pid
