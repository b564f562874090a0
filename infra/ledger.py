"""The ledger records which runs need which job. The ledger is a file, which all processes of a store share.

Two runs that need the same job, for example the same SFT, share the job. Each run holds a lease on the job. When the
last lease is dropped, the job is stopped.

    add_lease(job, run A), add_lease(job, run B) ── drop_lease(job, run A) -> 1 ── drop_lease(job, run B) -> 0: stop it

A job runs on only one node at a time. A run therefore claims the job (`claim`) before it uploads files to the node,
which may take long. The run adds its lease when it starts the job.

A killed run does not drop its leases. Each run therefore holds a lock on the file ledger.runs/<run>, which the kernel
frees when the run's process ends. A claim does not count if the lock of its run is free, because the node of a dead run
may never come back. The jobs of a dead run may still run on its node (`nodes_left`) while another run does the same job
on another node.

The ledger is one SQLite file, which also has the tables of rentals.py, registry.py and retrainings.py. Not here: the
file (ledger_file.py), and the lease of an engine itself, which is a file on the node (`lease_s` of jobs.py).
"""

import fcntl
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from rollouts.infra.ledger_file import LedgerFile
from rollouts.infra.locks import lock_file, locked, try_lock

LEDGER_FILE = "ledger.db"
"""Name of the ledger's file in a store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    run_dir: str
    run_id: str
    node: str
    created_at: float
    """Time of the creation in seconds since 1970, by the clock of the ledger's machine."""
    is_started: bool
    """False while the run only claims the job and uploads files to the node. A claim keeps runs from starting the job
    on another node, but does not keep a running job alive."""


class StageUse(NamedTuple):
    stage: str
    """The name of the stage's directory."""
    run_id: str
    run: str
    """The name of the run's results folder."""
    num_steps: int
    used_at: float
    """Latest time at which the run began or reused the stage, in seconds since 1970."""
    began_at: float
    """First time at which the run began or reused the stage, in seconds since 1970."""


class Ledger(LedgerFile):
    """Leases of runs on jobs, uses of stages, and locks of live runs."""

    def claim(self, run_dir: str, run_id: str, node: str) -> set[str]:
        """Claim a job for a run that will start it on a node.

        Returns the other nodes on which other runs need the job. If the returned set is not empty, the job is not
        claimed. Only one of several concurrent claims on different nodes succeeds.
        """
        with self.transaction():
            elsewhere = self.nodes_at_work(run_dir.rpartition("/")[2], besides=run_id) - {node}
            if not elsewhere:
                self._database.execute(
                    "INSERT INTO job_leases (run_dir, run_id, node, created_at, is_started) VALUES (?, ?, ?, ?, 0) "
                    "ON CONFLICT DO UPDATE SET node = excluded.node",
                    (run_dir, run_id, node, time.time()),
                )
        return elsewhere

    def drop_claim(self, run_dir: str, run_id: str) -> None:
        """Drop the run's claim if the run has not started the job. A started job keeps its lease."""
        drop = "DELETE FROM job_leases WHERE run_dir = ? AND run_id = ? AND is_started = 0"
        with self.transaction() as database:
            database.execute(drop, (run_dir, run_id))

    def add_lease(self, run_dir: str, run_id: str, node: str) -> None:
        """Add a lease for a run that is about to start the job. The call is idempotent.

        If another run is ending the job (in `dropped_lease`), the call waits until the job has ended.
        """
        with self._changing_leases(run_dir):
            self._hold_lease(run_dir, run_id, node)

    def _hold_lease(self, run_dir: str, run_id: str, node: str) -> None:
        with self.transaction() as database:
            database.execute(
                "INSERT INTO job_leases (run_dir, run_id, node, created_at, is_started) VALUES (?, ?, ?, ?, 1) "
                "ON CONFLICT DO UPDATE SET node = excluded.node, is_started = 1",
                (run_dir, run_id, node, time.time()),
            )

    def drop_lease(self, run_dir: str, run_id: str) -> int:
        """Drop a run's lease on a job, if the run has a lease. Returns how many leases on the job remain.

        Claims are not counted, and neither are leases on other nodes, which belong to other jobs. Leases of dead runs
        are dropped too. If several runs drop their leases concurrently, only one run gets 0.
        """
        drop = "DELETE FROM job_leases WHERE run_dir = ? AND run_id = ?"
        with self.transaction():  # one process at a time, because `has_died` takes a run's lock for a moment
            own = "SELECT node FROM job_leases WHERE run_dir = ? AND run_id = ?"
            node = self._database.execute(own, (run_dir, run_id)).fetchone()
            self._database.execute(drop, (run_dir, run_id))
            leases = "SELECT run_id, node FROM job_leases WHERE run_dir = ? AND is_started = 1"
            found = self._database.execute(leases, (run_dir,)).fetchall()
            others = [other for other, place in found if node is None or place == node[0]]
            dead = [other for other in others if self.has_died(other)]
            self._database.executemany(drop, [(run_dir, other) for other in dead])
        return len(others) - len(dead)

    @contextmanager
    def dropped_lease(self, run_dir: str, run_id: str) -> Iterator[int]:
        """Drop a run's lease as `drop_lease` does. While the block ends the job, other runs cannot add a lease on the
        job.

        If the block fails, the job may still be running, so the run gets its lease back. A later attempt to end the job
        and the list of running jobs need this lease.
        """
        with self._changing_leases(run_dir):
            held = [lease for lease in self.leases_of(run_id) if lease.run_dir == run_dir]
            try:
                yield self.drop_lease(run_dir, run_id)
            except BaseException:
                for lease in held:
                    self._hold_lease(run_dir, run_id, lease.node)
                raise

    def drop_leases_on(self, node: str) -> None:
        """Drop all leases and claims on the jobs of a node that no longer exists."""
        with self.transaction() as database:
            database.execute("DELETE FROM job_leases WHERE node = ?", (node,))

    @contextmanager
    def _changing_leases(self, run_dir: str) -> Iterator[None]:
        path = self.path.with_suffix(".changing") / run_dir.rpartition("/")[2]
        path.parent.mkdir(mode=0o700, exist_ok=True)
        with locked(path):  # keep the file, or a waiting process would get the lock of a deleted file
            yield

    def nodes_at_work(self, directory_name: str, *, besides: str = "") -> set[str]:
        """Return the nodes on which live runs, except the run `besides`, have a lease or claim on the job with this
        directory name."""
        claims = self.read("SELECT run_dir, run_id, node FROM job_leases")
        wanted = [claim for claim in claims if claim[0].rpartition("/")[2] == directory_name and claim[1] != besides]
        return {node for _, run_id, node in wanted if not self.has_died(run_id)}

    def nodes_left(self, directory_name: str) -> set[str]:
        """Return the nodes on which dead runs started the job with this directory name. The job may still be running
        there."""
        with self.transaction():  # one process at a time, because `has_died` takes locks
            started = [lease for lease in self.leases() if lease.is_started]
            of_job = [lease for lease in started if lease.run_dir.rpartition("/")[2] == directory_name]
            return {lease.node for lease in of_job if self.has_died(lease.run_id)}

    def leases_of(self, run_id: str) -> list[Lease]:
        return [lease for lease in self.leases() if lease.run_id == run_id]

    def leases(self) -> list[Lease]:
        """Return all leases and claims of all runs, including dead runs, oldest first."""
        columns = "run_dir, run_id, node, created_at, is_started"
        rows = self.read(f"SELECT {columns} FROM job_leases ORDER BY created_at, run_dir")
        return [
            Lease(run_dir=run_dir, run_id=owner, node=node, created_at=created_at, is_started=bool(is_started))
            for run_dir, owner, node, created_at, is_started in rows
        ]

    def note_use(self, stage: str, run_id: str, *, run: str = "", num_steps: int = 0) -> None:
        """Record that a run has begun or reused a stage. The live pages show this use. `rollouts prune` keeps stages of
        live runs.

        Args:
            stage: the name of the stage's directory.
            run: the name of the run's results folder.
            num_steps: number of the stage's metric steps.
        """
        with self.transaction() as database:
            now = time.time()
            database.execute(
                "INSERT INTO stage_uses (stage, run_id, run, num_steps, used_at, began_at) VALUES (?, ?, ?, ?, ?, ?) "
                "ON CONFLICT DO UPDATE "
                "SET run = excluded.run, num_steps = excluded.num_steps, used_at = excluded.used_at",
                (stage, run_id, run, num_steps, now, now),
            )

    def note_plan(self, run: str, stages: Sequence[str]) -> None:
        """Record the names of all stages of a run, in order.

        Args:
            run: the name of the run's results folder.
        """
        with self.transaction() as database:
            database.execute("INSERT OR REPLACE INTO run_plans (run, stages) VALUES (?, ?)", (run, " ".join(stages)))

    def planned_stages(self, run: str) -> tuple[str, ...]:
        """Return the names of all stages of a run, in order, or an empty tuple if unknown."""
        rows = self.read("SELECT stages FROM run_plans WHERE run = ?", (run,))
        return tuple(str(rows[0][0]).split()) if rows else ()

    def stage_uses(self) -> list[StageUse]:
        columns = "stage, run_id, run, num_steps, used_at, began_at"
        return [StageUse(*row) for row in self.read(f"SELECT {columns} FROM stage_uses ORDER BY used_at, stage")]

    def first_use(self, stage: str) -> StageUse | None:
        """Return the use of a stage by the run that began it first, or None if unknown."""
        uses = [use for use in self.stage_uses() if use.stage == stage and use.run]
        return min(uses, key=lambda use: use.began_at, default=None)

    def forget_uses(self, stage: str) -> None:
        with self.transaction() as database:
            database.execute("DELETE FROM stage_uses WHERE stage = ?", (stage,))

    def is_alive(self, run_id: str) -> bool:
        """Return whether the run has registered itself as living and its process is alive."""
        return self._run_lock_path(run_id).is_file() and not self.has_died(run_id)

    def living_runs(self) -> dict[str, float]:
        """Return the live runs: for each run id, the latest possible time of the run's start in seconds since 1970."""
        found = {}
        for path in self._run_lock_path("").glob("*"):
            with suppress(FileNotFoundError):  # the run may have ended since the listing
                began_at = path.stat().st_mtime
                if self.is_alive(path.name):
                    found[path.name] = began_at
        return found

    @contextmanager
    def living_run(self, run_id: str) -> Iterator[None]:
        """Register the run as living while the block runs and this process is alive.

        Several processes of a run may be in this block. The run counts as living until the last process has left the
        block.
        """
        path = self._run_lock_path(run_id)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        with _locked_where_it_lies(path) as lock:
            try:
                yield
            finally:
                # If the run leaves leases or machines behind, the file must stay: it shows that the run has died.
                is_needed = self.leases_of(run_id) or self._rents(run_id)
                if not is_needed and try_lock(lock, fcntl.LOCK_EX):  # try_lock fails while another process has the lock
                    path.unlink(missing_ok=True)

    def has_died(self, run_id: str) -> bool:
        """Return whether the run has registered itself as living and its process is gone.

        A run that never registered itself has not died. The empty run id, which stands in the rows of machines that
        were missing from the ledger, has not died either.
        """
        path = self._run_lock_path(run_id)
        if not run_id or not path.exists():
            return False
        # Allow one check at a time. The check takes the run's lock, so a concurrent check would find a dead run alive.
        with _alone_in(path.parent):
            try:
                lock = os.open(path, os.O_RDWR)
            except FileNotFoundError:
                return False
            try:
                return try_lock(lock, fcntl.LOCK_EX)
            finally:
                os.close(lock)

    @property
    def identity(self) -> str:
        """Eight hexadecimal digits that are unique to this ledger. The names of the ledger's rented machines contain
        these digits."""
        query = "SELECT id FROM identity"
        if known := self.read(query):
            return str(known[0][0])
        with self.transaction() as database:
            row = database.execute(query).fetchone()
            if row is None:
                row = (secrets.token_hex(4),)
                database.execute("INSERT INTO identity VALUES (?)", row)
        return str(row[0])

    @contextmanager
    def renting(self, run_id: str) -> Iterator[None]:
        """Let only one process at a time rent machines for a run. Other processes of the run wait."""
        path = self.path.with_suffix(".renting") / run_id
        path.parent.mkdir(mode=0o700, exist_ok=True)
        with locked(path):  # the lock file is not deleted, as in `_changing_leases`
            yield

    def start_lock(self, stage: str) -> Path:
        """Return the path of a stage's lock file. A run holds this lock while it uploads the stage's inputs to other
        machines and starts the stage."""
        path = self.path.with_suffix(".starting") / stage
        path.parent.mkdir(mode=0o700, exist_ok=True)
        return path

    def _rents(self, run_id: str) -> bool:
        query = "SELECT 1 FROM rentals WHERE run_id = ? AND ended_at IS NULL LIMIT 1"
        return bool(self.read(query, (run_id,)))

    def _run_lock_path(self, run_id: str) -> Path:
        return self.path.with_suffix(".runs") / run_id


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Hold an exclusive lock on a folder. Does nothing if the file system does not support locks on folders."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def _locked_where_it_lies(path: Path) -> Iterator[int]:
    """Hold a shared lock on the file at this path. If another process deleted the file during the wait for the lock,
    lock the new file."""
    with ExitStack() as stack:
        while True:
            lock = stack.enter_context(lock_file(path))
            fcntl.flock(lock, fcntl.LOCK_SH)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(lock), path.stat()):
                    break
        yield lock
