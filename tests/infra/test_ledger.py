"""Pins that leases on jobs are counted right by any number of processes.

Without it two runs both think that they are not the last one, and a job runs for nobody, or one stops the other's.
"""

import fcntl
import multiprocessing
import os
import sqlite3
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest

from rollouts.infra.errors import LedgerUnwritableError, PermanentInfraError
from rollouts.infra.ledger import Ledger
from rollouts.infra.renting.rentals import RentalState, all_rentals, change_rental
from tests.kit.mounts import fill

LEASES_OF_THE_FIRST_FORMAT = (
    "CREATE TABLE job_leases (run_dir TEXT NOT NULL, run_id TEXT NOT NULL, node TEXT NOT NULL, "
    "created_at REAL NOT NULL, PRIMARY KEY (run_dir, run_id)) STRICT, WITHOUT ROWID"
)


def test_the_last_lease_dropped_leaves_none(tmp_path: Path) -> None:
    with Ledger(tmp_path / "state" / "ledger.sqlite") as ledger:
        ledger.add_lease("/runs/sft", "run-a", "local")
        ledger.add_lease("/runs/sft", "run-a", "local")
        ledger.add_lease("/runs/sft", "run-b", "local")
        ledger.add_lease("/runs/rl", "run-a", "local")
        assert [lease.run_dir for lease in ledger.leases_of("run-a")] == ["/runs/sft", "/runs/rl"]
        assert ledger.drop_lease("/runs/sft", "run-a") == 1
        assert ledger.drop_lease("/runs/sft", "run-a") == 1
        assert ledger.drop_lease("/runs/sft", "run-b") == 0
        assert [lease.run_dir for lease in ledger.leases_of("run-a")] == ["/runs/rl"]


def test_leases_outlive_the_process(tmp_path: Path) -> None:
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        ledger.add_lease("/runs/sft", "run-a", "local")
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        [lease] = ledger.leases_of("run-a")
    assert (lease.run_dir, lease.run_id, lease.node) == ("/runs/sft", "run-a", "local")


def test_a_ledger_of_another_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    with sqlite3.connect(path) as database:
        database.execute("PRAGMA user_version = 99")
    database.close()
    with pytest.raises(PermanentInfraError, match="format 99"):
        Ledger(path)


def test_a_ledger_of_the_first_format_is_read_on(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    with sqlite3.connect(path) as database:
        database.execute(LEASES_OF_THE_FIRST_FORMAT)
        database.execute("INSERT INTO job_leases VALUES ('/runs/sft', 'run-a', 'local', 1.0)")
        database.execute("PRAGMA user_version = 1")
    database.close()
    with Ledger(path) as ledger:
        assert [(lease.run_dir, lease.is_started) for lease in ledger.leases_of("run-a")] == [("/runs/sft", True)]
        identity = ledger.identity
    with Ledger(path) as ledger:
        assert ledger.identity == identity and all_rentals(ledger) == []


def test_a_ledger_from_before_failed_runs_kept_machines_is_read_on_with_its_machines(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    with sqlite3.connect(path) as database:
        database.execute(LEASES_OF_THE_FIRST_FORMAT)
        database.execute(
            "CREATE TABLE rentals (name TEXT PRIMARY KEY, run_id TEXT NOT NULL, provider TEXT NOT NULL, "
            "purpose TEXT NOT NULL, state TEXT NOT NULL, instance_id TEXT NOT NULL, gpu TEXT NOT NULL, "
            "region TEXT NOT NULL, usd_per_hour REAL NOT NULL, intended_at REAL NOT NULL, rented_at REAL, "
            "ended_at REAL, expires_at REAL NOT NULL, host_key TEXT NOT NULL, note TEXT NOT NULL, "
            "credentials TEXT NOT NULL DEFAULT '') STRICT, WITHOUT ROWID"
        )
        database.execute(
            "CREATE TABLE stage_uses (stage TEXT NOT NULL, run_id TEXT NOT NULL, run TEXT NOT NULL, "
            "num_steps INTEGER NOT NULL, used_at REAL NOT NULL, PRIMARY KEY (stage, run_id)) STRICT, WITHOUT ROWID"
        )
        database.execute("INSERT INTO stage_uses VALUES ('sft-1', 'run-a', 'a', 20, 7.0)")
        database.execute(
            "INSERT INTO rentals VALUES ('rollouts-1', 'run-a', 'runpod', 'p', 'ready', 'm1', '1x H100', 'EU', 2.5, "
            "1.0, 2.0, NULL, 9e9, 'SHA256:key', '', 'team')"
        )
        database.execute("PRAGMA user_version = 4")
    database.close()
    for _ in range(2):  # the second time it has the new format
        with Ledger(path) as ledger:
            [rental] = all_rentals(ledger)
            assert (rental.name, rental.state, rental.credentials) == ("rollouts-1", RentalState.READY, "team")
            [use] = ledger.stage_uses()
            assert (use.run, use.began_at) == ("a", 7.0)
            assert (rental.kept_until, rental.is_kept, rental.ends_at) == (None, False, 9e9)
    with Ledger(path) as ledger:
        kept = change_rental(ledger, rental, kept_until=5.0)
        assert kept is not None and kept.is_kept and kept.ends_at == 5.0
        assert change_rental(ledger, rental, note="late") is None, "it is kept by now"


def test_whoever_came_to_a_stage_first_stays_the_first(tmp_path: Path) -> None:
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        assert ledger.first_use("sft-1") is None
        for run_id in ("a", "b", "a"):
            ledger.note_use("sft-1", run_id, run=f"run-{run_id}")
            time.sleep(0.002)
        assert [use.run_id for use in ledger.stage_uses()] == ["b", "a"], "by their last visit"
        first = ledger.first_use("sft-1")
        assert first is not None and first.run == "run-a" and first.began_at < first.used_at


def test_a_file_that_is_no_ledger_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    path.write_bytes(b"not a database, " * 100)
    with pytest.raises(PermanentInfraError, match="is not a ledger"):
        Ledger(path)


def test_a_ledger_is_opened_and_read_while_somebody_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollouts.infra.ledger_file.BUSY_TIMEOUT_S", 0.05)
    path = tmp_path / "ledger.sqlite"
    with Ledger(path) as ledger:
        ledger.add_lease("/runs/sft", "run-a", "local")
        with ledger.transaction(), Ledger(path) as other:
            assert [lease.run_dir for lease in other.leases()] == ["/runs/sft"]
            assert all_rentals(other) == []


@pytest.mark.parametrize("is_open_before", [True, False])
def test_a_ledger_on_a_full_disk_is_read_says_why_nothing_is_written_and_goes_on_when_there_is_room(
    tiny_disk: Path, is_open_before: bool
) -> None:
    path = tiny_disk / "ledger.sqlite"
    with Ledger(path) as ledger:
        ledger.add_lease("/runs/sft", "run-a", "local")
        identity = ledger.identity
    filler = fill(tiny_disk) if not is_open_before else None
    with Ledger(path) as ledger:
        filler = filler or fill(tiny_disk)
        for _ in range(2):
            with pytest.raises(LedgerUnwritableError, match=r"sqlite cannot be written \(.+\): free space"):
                ledger.add_lease("/runs/rl", "run-a", "local")
            assert [lease.run_dir for lease in ledger.leases()] == ["/runs/sft"]
            assert ledger.identity == identity and all_rentals(ledger) == []
        filler.unlink()
        ledger.add_lease("/runs/rl", "run-a", "local")
        with Ledger(path) as other:
            assert [lease.run_dir for lease in other.leases()] == ["/runs/sft", "/runs/rl"]


def test_nobody_else_can_read_the_ledger_or_what_lies_beside_it(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with Ledger(tmp_path / "ledger.sqlite") as ledger, ledger.living_run("run"), ledger.renting("run"):
            ledger.add_lease("/runs/sft", "run", "local")
            found = {path.relative_to(tmp_path).as_posix(): path.stat().st_mode & 0o077 for path in tmp_path.rglob("*")}
    finally:
        os.umask(before)
    assert {"ledger.sqlite", "ledger.sqlite-wal", "ledger.runs/run", "ledger.renting/run"} <= found.keys()
    assert set(found.values()) == {0}


def test_a_run_lives_until_the_last_of_its_processes_has_left(tmp_path: Path) -> None:
    """Nothing is known of the second one so far but that it lives."""
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        with ledger.living_run("run"):
            with ledger.living_run("run"):
                pass
            assert ledger.is_alive("run") and ledger.living_runs().keys() == {"run"}
        assert not ledger.is_alive("run") and list((tmp_path / "ledger.runs").iterdir()) == []


def test_who_looks_at_once_whether_a_run_has_died_does_not_take_each_other_for_it(tmp_path: Path) -> None:
    """Else a run would be told that somebody does its stage, or leave its job to nobody."""
    with Ledger(tmp_path / "ledger.db") as ledger, ledger.living_run("dead"):
        ledger.add_lease("/s/sft-1", "dead", "local")

    def look(_: int) -> int:
        with Ledger(tmp_path / "ledger.db") as own:
            return sum(own.has_died("dead") for _ in range(2000))

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(look, range(2))) == [2000, 2000]


def test_a_run_whose_lock_is_removed_in_the_moment_in_which_it_begins_can_be_told_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock, locks = fcntl.flock, tmp_path / "ledger.runs"

    def remove_then_lock(lock: int, kind: int) -> None:
        if kind == fcntl.LOCK_SH and not (locks / "seen").exists():
            (locks / "seen").touch()
            (locks / "run").unlink()  # by the process that leaves
        flock(lock, kind)

    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        monkeypatch.setattr(fcntl, "flock", remove_then_lock)
        with ledger.living_run("run"):
            assert ledger.is_alive("run")


def _claim_and_drop(path: Path, name: str, barrier: Barrier, counts: "Queue[list[int]]") -> None:
    barrier.wait()
    with Ledger(path) as ledger:
        for job in range(20):
            ledger.add_lease(f"/runs/{job}", name, "local")
        barrier.wait()
        counts.put([ledger.drop_lease(f"/runs/{job}", name) for job in range(20)])


@pytest.mark.slow
def test_of_four_processes_exactly_one_drops_the_last_lease_of_each_job(tmp_path: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    barrier, counts = spawn.Barrier(4, timeout=60), spawn.Queue()
    path = tmp_path / "ledger.sqlite"
    processes = [spawn.Process(target=_claim_and_drop, args=(path, f"run-{n}", barrier, counts)) for n in range(4)]
    for process in processes:
        process.start()
    rows = [counts.get(timeout=60) for _ in processes]
    for process in processes:
        process.join(timeout=60)
    assert [process.exitcode for process in processes] == [0, 0, 0, 0]
    assert all(sorted(row[job] for row in rows) == [0, 1, 2, 3] for job in range(20))
