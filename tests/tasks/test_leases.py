"""Pins whose claims on a job count: those of runs that live.

Without it a run that was killed once keeps a job alive for ever: no Ctrl-C of a later run that attached to it ends it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rollouts.infra.ledger import Ledger

LIVING_RUN = """
import sys, time
from pathlib import Path
from rollouts.infra.ledger import Ledger
with Ledger(Path(sys.argv[1])) as ledger, ledger.living_run("other"):
    ledger.add_lease("/job", "other", "local")
    print("ready", flush=True)
    time.sleep(60)
"""


def other_run(path: Path) -> subprocess.Popen[bytes]:
    """The process of another run, which holds a claim on the job and lives."""
    root = Path(__file__).resolve().parents[2]
    process = subprocess.Popen(
        [sys.executable, "-c", LIVING_RUN, str(path)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(root / "src")},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    return process


def test_the_claim_of_a_living_run_counts_and_that_of_a_killed_one_does_not(tmp_path: Path) -> None:
    with Ledger(tmp_path / "ledger.db") as ledger, ledger.living_run("own"), other_run(tmp_path / "ledger.db") as other:
        ledger.add_lease("/job", "own", "local")
        assert ledger.drop_lease("/job", "own") == 1
        other.send_signal(signal.SIGKILL)
        other.wait()
        ledger.add_lease("/job", "own", "local")
        assert ledger.drop_lease("/job", "own") == 0
        assert ledger.leases_of("other") == []


def test_a_run_that_comes_back_after_it_was_killed_counts_again(tmp_path: Path) -> None:
    with Ledger(tmp_path / "ledger.db") as ledger:
        with other_run(tmp_path / "ledger.db") as other:
            other.send_signal(signal.SIGKILL)
        with ledger.living_run("other"):
            assert ledger.drop_lease("/job", "own") == 1
        assert ledger.drop_lease("/job", "own") == 0


def test_a_run_that_gave_up_all_its_claims_leaves_no_file(tmp_path: Path) -> None:
    with Ledger(tmp_path / "ledger.db") as ledger:
        with ledger.living_run("own"):
            ledger.add_lease("/job", "own", "local")
            ledger.drop_lease("/job", "own")
        assert list((tmp_path / "ledger.runs").iterdir()) == []


def test_claims_on_another_node_are_another_job(tmp_path: Path) -> None:
    with Ledger(tmp_path / "ledger.db") as ledger:
        ledger.add_lease("/runs/sft-1", "own", "a@one:22")
        ledger.add_lease("/runs/sft-1", "other", "a@two:22")
        assert ledger.nodes_at_work("sft-1") == {"a@one:22", "a@two:22"}
        assert ledger.drop_lease("/runs/sft-1", "own") == 0
        assert ledger.nodes_at_work("sft-1") == {"a@two:22"}


def test_of_runs_that_claim_a_job_at_once_each_for_its_own_node_one_gets_it(tmp_path: Path) -> None:
    at_once = threading.Barrier(3)

    def claim(number: int) -> list[set[str]]:
        with Ledger(tmp_path / "ledger.db") as ledger:
            at_once.wait(60)
            return [ledger.claim(f"/runs/sft-{job}", f"run-{number}", f"node-{number}") for job in range(20)]

    with Ledger(tmp_path / "ledger.db"), ThreadPoolExecutor(3) as pool:
        found = list(pool.map(claim, range(3)))
    for of_one_job in zip(*found, strict=True):
        got_it = [f"node-{number}" for number, elsewhere in enumerate(of_one_job) if not elsewhere]
        assert len(got_it) == 1
        assert [elsewhere for elsewhere in of_one_job if elsewhere] == [set(got_it)] * 2


def test_a_claim_keeps_no_job_alive_until_its_run_starts_it(tmp_path: Path) -> None:
    with Ledger(tmp_path / "ledger.db") as ledger:
        ledger.add_lease("/job", "own", "local")
        assert ledger.claim("/job", "other", "local") == set()
        assert [lease.is_started for lease in ledger.leases_of("other")] == [False]
        assert ledger.drop_lease("/job", "own") == 0, "the other one has not come to start it"
        ledger.add_lease("/job", "own", "local")
        ledger.add_lease("/job", "other", "local")
        assert [lease.is_started for lease in ledger.leases_of("other")] == [True]
        assert ledger.drop_lease("/job", "own") == 1


def test_only_a_claim_that_led_to_nothing_is_given_up_with_the_try(tmp_path: Path) -> None:
    with Ledger(tmp_path / "ledger.db") as ledger:
        ledger.claim("/sft", "own", "local")
        ledger.add_lease("/rl", "own", "local")
        ledger.claim("/rl", "own", "local")  # tried again, while the job goes on
        for run_dir in ("/sft", "/rl"):
            ledger.drop_claim(run_dir, "own")
        assert [lease.run_dir for lease in ledger.leases_of("own")] == ["/rl"]


def test_a_run_that_has_another_machine_is_not_in_its_own_way(tmp_path: Path) -> None:
    with Ledger(tmp_path / "ledger.db") as ledger:
        ledger.add_lease("/root/rollouts/sft-1", "own", "the-first")
        assert ledger.claim("/root/rollouts/sft-1", "own", "the-second") == set()
        assert [lease.node for lease in ledger.leases_of("own")] == ["the-second"]


def test_nobody_takes_up_a_job_that_is_being_ended(tmp_path: Path) -> None:
    added: list[str] = []

    def add() -> None:
        with Ledger(tmp_path / "ledger.db") as ledger:
            ledger.add_lease("/job", "other", "local")
            added.append("other")

    with Ledger(tmp_path / "ledger.db") as ledger:
        ledger.add_lease("/job", "own", "local")
        other = threading.Thread(target=add)
        with ledger.dropped_lease("/job", "own") as num_left:
            other.start()
            time.sleep(0.3)
            assert num_left == 0 and added == [] == ledger.leases_of("other")
        other.join(60)
        assert added == ["other"]
