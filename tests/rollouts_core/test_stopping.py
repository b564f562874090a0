"""Pins how long a training that is asked to stop says that it needs.

Without it a long step or a slow disk could cost the last step, or a short one hold a machine that costs money.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rollouts_core.stopping import TrainingStop


@pytest.mark.parametrize(
    ("steps_s", "saves_s", "grace_s"),
    [
        ([], [], 30),
        ([5.0] * 30, [3.0], 30),
        ([40.0, 27.0], [3.0], 65),  # 1.5 x (40 + 3), rounded up
        ([40.0, 27.0], [60.0, 3.0], 65),  # of the saves the last one counts
        ([40.0] + [27.0] * 19, [3.0], 65),
        ([40.0] + [27.0] * 20, [3.0], 45),  # of the steps the last 20
        ([400.0], [90.0], 735),  # run.stop_timeout_s limits it, not the training
    ],
)
def test_the_grace_period_has_room_for_the_longest_recent_step_and_a_save(
    tmp_path: Path, steps_s: list[float], saves_s: list[float], grace_s: int
) -> None:
    stop = TrainingStop(told=tmp_path / "stop.json", granted=tmp_path / "stop-1")
    for seconds in steps_s:
        stop.note_step(seconds)
    for seconds in saves_s:
        stop.note_saved(7, seconds)
    told = json.loads((tmp_path / "stop.json").read_text())
    assert (told["grace_s"], told["saved_step"]) == (grace_s, 7 if saves_s else 0)
    assert stop.grace_s == pytest.approx(stop.wanted_s)
    (tmp_path / "stop-1").write_text("12.5")
    assert stop.grace_s == 12.5
