"""Pins that a run keeps its engines while the process of RL loads, for however long, and starts lapsed ones again.

Without it a cold disk or a slow uplink costs five minutes of waiting for an engine that has ended, and then the run.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.kit.commands import Rollouts, pids_of
from tests.kit.small_pipeline import write_small_pipeline
from tests.kit.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

LONGER_THAN_A_LEASE_S = 75


def write(folder: Path, *, loads_s: int, start_timeout_s: float = 300.0) -> Path:
    """RL alone, whose process takes so long to load."""
    interpreter = folder / "python"
    interpreter.write_text(
        f"""#!/bin/sh
case "$*" in *"rollouts_core rl "*) test -e {folder}/warm || sleep {loads_s};; esac
exec {sys.executable} "$@"
"""
    )
    interpreter.chmod(0o755)
    timeout = {"rollout__engine__start_timeout_s": start_timeout_s}
    return write_small_pipeline(folder / "small", mode="rl", node__python=str(interpreter), **timeout)


def attempts(store: Path, stage: str) -> list[dict[str, object]]:
    """How the attempts at a job ended, in their order."""
    return [json.loads(path.read_text()) for path in sorted(store.glob(f"stages/{stage}-*/exit-*.json"))]


@pytest.mark.matrix
def test_an_engine_lives_while_the_process_of_rl_loads_for_longer_than_a_lease(
    rollouts: Rollouts, tmp_path: Path
) -> None:
    code, output = rollouts.run("run", str(write(tmp_path, loads_s=LONGER_THAN_A_LEASE_S)))
    assert code == 0, output
    (engine,) = attempts(rollouts.store, "engine")
    assert engine["cancelled"] and not engine["lease_expired"]
    assert "ended:" not in output


@pytest.mark.matrix
def test_an_engine_that_lapsed_while_the_run_stood_still_is_named_and_started_again_for_an_rl_that_loads(
    rollouts: Rollouts, tmp_path: Path
) -> None:
    output = stand_still(rollouts, write(tmp_path, loads_s=LONGER_THAN_A_LEASE_S + 30))
    assert "ended: its lease was not renewed for 60 s, because this run or its machine was suspended. " in output
    assert [each["lease_expired"] for each in attempts(rollouts.store, "engine")] == [True, False]
    assert len(attempts(rollouts.store, "rl")) == 1


@pytest.mark.matrix
def test_an_rl_that_gave_up_on_an_engine_that_lapsed_is_started_again_with_it(
    rollouts: Rollouts, tmp_path: Path
) -> None:
    output = stand_still(
        rollouts, write(tmp_path, loads_s=LONGER_THAN_A_LEASE_S - 10, start_timeout_s=20.0), still_s=120
    )
    assert "ended: its lease was not renewed for 60 s, because this run or its machine was suspended. " in output
    assert [each["code"] for each in attempts(rollouts.store, "rl")] == [1, 0]


@pytest.mark.matrix
def test_an_rl_whose_run_was_killed_names_the_lapsed_lease_and_the_next_start_has_both_go_on(
    rollouts: Rollouts, tmp_path: Path
) -> None:
    config = write(tmp_path, loads_s=LONGER_THAN_A_LEASE_S, start_timeout_s=20.0)
    process = rollouts.start("run", str(config))
    wait_for_rl(rollouts)
    process.kill()
    process.wait()
    wait_until(lambda: attempts(rollouts.store, "rl") != [], what="the end of RL", timeout_s=240.0, every_s=1.0)
    (log,) = rollouts.store.glob("stages/rl-*/log.txt")
    assert "ended because its lease was not renewed: the run was killed or blocked" in log.read_text()
    (tmp_path / "warm").touch()
    code, output = rollouts.run("run", str(config))
    assert code == 0, output
    assert [each["code"] for each in attempts(rollouts.store, "rl")] == [1, 0]
    assert [each["lease_expired"] for each in attempts(rollouts.store, "engine")] == [True, False]


def wait_for_rl(rollouts: Rollouts) -> None:
    """Return when the process of RL loads."""
    wait_until(
        lambda: any("rollouts_core rl " in each for each in pids_of(rollouts.store).values()),
        what="the process of RL",
        timeout_s=120.0,
    )


def stand_still(rollouts: Rollouts, config: Path, still_s: float = LONGER_THAN_A_LEASE_S) -> str:
    """Stop the run while RL loads, as a suspended machine does, and let it go on; returns what it says by its end."""
    process = rollouts.start("run", str(config))
    try:
        wait_for_rl(rollouts)
        process.send_signal(signal.SIGSTOP)
        time.sleep(still_s)
    finally:
        process.send_signal(signal.SIGCONT)
    (config.parent.parent / "warm").touch()
    assert process.wait(300) == 0, rollouts.said()
    return rollouts.said()
