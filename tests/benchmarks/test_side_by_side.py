"""How contenders take turns and how their figures are compared (benchmarks/side_by_side.py).

Without these a table could compare turns of different rounds, or a worker could run while it is another's turn.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from side_by_side import (  # noqa: E402
    Contender,
    Turn,
    check_equal_losses,
    parse_contender,
    range_of,
    render_table,
    speed_ratios,
)

WORKER = f"""
import sys
sys.path.insert(0, {str(BENCHMARKS)!r})
from side_by_side import Gate
gate = Gate()
print("a library prints")
gate.start()
step = 0
while True:
    step += 1
    gate.step_done(units=10, loss=float(step), waited_s=0.5)
"""


def make_turn(*, units: float, seconds: float, losses: list[float] | None = None) -> Turn:
    return Turn(units=units, seconds=seconds, cpu_seconds=seconds, num_steps=1, losses=losses or [])


def test_worker_stops_after_its_steps_and_goes_on_where_it_was(tmp_path: Path) -> None:
    with Contender("worker", [sys.executable, "-c", WORKER], num_threads=1, log=tmp_path / "log") as worker:
        worker.wait_until_ready()
        first, second = worker.take_turn(steps=2), worker.take_turn(steps=3)
    assert first.losses == [1.0, 2.0]
    assert second.losses == [3.0, 4.0, 5.0]
    assert second.units == 30
    assert second.parts == {"waited_s": 1.5}
    assert "a library prints" in (tmp_path / "log").read_text()


def test_worker_that_fails_is_named_with_its_last_words(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "raise ValueError('no such model')"]
    with (
        Contender("peer", command, num_threads=1, log=tmp_path / "log") as worker,
        pytest.raises(RuntimeError, match=r"(?s)peer ended with code 1.*no such model"),
    ):
        worker.wait_until_ready()


def test_ratio_is_taken_within_each_round() -> None:
    turns = {
        "ours": [make_turn(units=200, seconds=1), make_turn(units=20, seconds=1)],
        "peer": [make_turn(units=100, seconds=1), make_turn(units=5, seconds=1)],
    }
    ratio = speed_ratios(turns, "ours", "peer")
    assert (ratio.low, ratio.middle, ratio.high) == (2, 3, 4)


def test_losses_that_differ_are_an_error() -> None:
    warmups = {
        "a": make_turn(units=1, seconds=1, losses=[2.0, 1.5]),
        "b": make_turn(units=1, seconds=1, losses=[2.0, 1.6]),
    }
    assert check_equal_losses(warmups, ["a", "b"], tolerance=0.2) == pytest.approx(0.1)
    with pytest.raises(AssertionError, match="step 2"):
        check_equal_losses(warmups, ["a", "b"], tolerance=0.05)


def test_settings_after_a_name_have_their_types() -> None:
    parsed = parse_contender("trl bfd|packing=true|rows=8|optim=sgd")
    assert parsed == ("trl bfd", {"packing": True, "rows": 8, "optim": "sgd"})


def test_table_has_one_line_per_row() -> None:
    assert render_table(["name", "speed"], [["ours|x=1", range_of([1, 2, 4]).render(1)]]).splitlines() == [
        "| name | speed |",
        "|---|---:|",
        "| ours, x=1 | 2.0 (1.0 to 4.0) |",
    ]
