"""Pins whose claims on a job count: those of runs that live.

Without it a run that was killed once keeps a job alive for ever: no Ctrl-C of a later run that attached to it ends it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from infra.ledger import Ledger

LIVING_RUN = """
import sys, time
from pathlib import Path
from infra.ledger import Ledger
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
        env={**os.environ, "PYTHONPATH": str(root)},
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
