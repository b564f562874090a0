"""Remember, across processes and restarts, which runs want which job, in one SQLite file, which rentals.py, registry.py
and retrainings.py share.

A job is shared: two runs that need the same SFT hold a lease on it each, and who drops the last one stops it. Not here:
the file itself (ledger_file.py), and the lease by which an engine notices that nobody wants it, which lies on the node
(`lease_s` of jobs.py).

    add_lease(job, run A), add_lease(job, run B) ── drop_lease(job, run A) -> 1 ── drop_lease(job, run B) -> 0: stop it

A job is done on one node at a time. So a run claims it (`claim`) before it brings anything there, which may take long,
and adds its lease when it starts the job or attaches to it.

A run that was killed drops nothing. So a run holds a lock on ledger.runs/<run> as long as its process lives, which the
kernel frees; the claims of a run that held one, and holds it no more, do not count, because its node may never come
back. But its jobs may go on there (`nodes_left`), beside those that another run has on another node.
"""

import fcntl
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from infra.ledger_file import LedgerFile
from infra.locks import lock_file, locked, try_lock

LEDGER_FILE = "ledger.db"
"""Its name in a store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """One run's claim on one job."""

    run_dir: str
    run_id: str
    node: str
    """Name of the node on which the job lives."""
    created_at: float
    """Seconds since 1970, by the clock of the machine that holds the ledger."""
    is_started: bool
    """False while the run brings to the node what the job needs: it keeps the job from other nodes, and none alive."""


class StageUse(NamedTuple):
    """A stage that a run has come to."""

    stage: str
    """The name of its directory."""
    run_id: str
    run: str
    """The name of the folder with the run's results."""
    num_steps: int
    used_at: float
    """When it last came to it; seconds since 1970, as the other one."""
    began_at: float
    """When it first did."""


class Ledger(LedgerFile):
    """Which run wants what."""

    def claim(self, run_dir: str, run_id: str, node: str) -> set[str]:
        """Claim a job for a run that will start it on a node; returns the other nodes on which others want it, if any.

        Then nothing is claimed. Of several runs that claim a job at once, each on a node of its own, one gets it.
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
        """Give up a claim on a job that the run has not come to start; does nothing to one that it has."""
        drop = "DELETE FROM job_leases WHERE run_dir = ? AND run_id = ? AND is_started = 0"
        with self.transaction() as database:
            database.execute(drop, (run_dir, run_id))

    def add_lease(self, run_dir: str, run_id: str, node: str) -> None:
        """Hold a lease for a run that starts the job now; doing it again changes nothing.

        Waits for who ends the job in `dropped_lease`.
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
        """Give up a run's lease and return how many leases on the job are left; harmless when there is none.

        Leases on other nodes are of other jobs, and claims of runs that have not come to start it hold none. Leases of
        runs that died are given up with it. Of several runs that drop theirs at once, exactly one that had one sees 0.
        """
        drop = "DELETE FROM job_leases WHERE run_dir = ? AND run_id = ?"
        with self.transaction():  # one at a time: to look whether a run has died is to take its lock for a moment
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
        """`drop_lease` for who ends the job where none is left: nobody adds one until the block is left.

        Where the block fails the job may go on, so the run keeps its lease: who asks for the job's end again has to
        find it, and so has who looks what is at work.
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
        """Give up everybody's leases and claims on the jobs of a node that is no more."""
        with self.transaction() as database:
            database.execute("DELETE FROM job_leases WHERE node = ?", (node,))

    @contextmanager
    def _changing_leases(self, run_dir: str) -> Iterator[None]:
        path = self.path.with_suffix(".changing") / run_dir.rpartition("/")[2]
        path.parent.mkdir(mode=0o700, exist_ok=True)
        with locked(path):  # the file stays, as that of `renting`
            yield

    def nodes_at_work(self, directory_name: str, *, besides: str = "") -> set[str]:
        """The nodes on which living runs, but for one of this id, want the job whose run directory has this name."""
        claims = self.read("SELECT run_dir, run_id, node FROM job_leases")
        wanted = [claim for claim in claims if claim[0].rpartition("/")[2] == directory_name and claim[1] != besides]
        return {node for _, run_id, node in wanted if not self.has_died(run_id)}

    def nodes_left(self, directory_name: str) -> set[str]:
        """The nodes on which runs that died have started the job whose run directory has this name: it may go on."""
        with self.transaction():  # one at a time, as in `drop_lease`
            started = [lease for lease in self.leases() if lease.is_started]
            of_job = [lease for lease in started if lease.run_dir.rpartition("/")[2] == directory_name]
            return {lease.node for lease in of_job if self.has_died(lease.run_id)}

    def leases_of(self, run_id: str) -> list[Lease]:
        """All leases and claims of a run, oldest first."""
        return [lease for lease in self.leases() if lease.run_id == run_id]

    def leases(self) -> list[Lease]:
        """All leases and claims of all runs, also of those that died, oldest first."""
        columns = "run_dir, run_id, node, created_at, is_started"
        rows = self.read(f"SELECT {columns} FROM job_leases ORDER BY created_at, run_dir")
        return [
            Lease(run_dir=run_dir, run_id=owner, node=node, created_at=created_at, is_started=bool(is_started))
            for run_dir, owner, node, created_at, is_started in rows
        ]

    def note_use(self, stage: str, run_id: str, *, run: str = "", num_steps: int = 0) -> None:
        """Remember that a run has come to a stage: live pages show it, and what a living run uses is not pruned.

        Args:
            stage: the name of its directory.
            run: the name of the folder with the run's results.
            num_steps: how many metric steps the stage goes through.
        """
        with self.transaction() as database:
            now = time.time()
            database.execute(
                "INSERT INTO stage_uses (stage, run_id, run, num_steps, used_at, began_at) VALUES (?, ?, ?, ?, ?, ?) "
                "ON CONFLICT DO UPDATE "
                "SET run = excluded.run, num_steps = excluded.num_steps, used_at = excluded.used_at",
                (stage, run_id, run, num_steps, now, now),
            )

    def stage_uses(self) -> list[StageUse]:
        """Which runs came to which stages, and when they last did, oldest first."""
        columns = "stage, run_id, run, num_steps, used_at, began_at"
        return [StageUse(*row) for row in self.read(f"SELECT {columns} FROM stage_uses ORDER BY used_at, stage")]

    def first_use(self, stage: str) -> StageUse | None:
        """The run that came to a stage first; None where nobody knows."""
        uses = [use for use in self.stage_uses() if use.stage == stage and use.run]
        return min(uses, key=lambda use: use.began_at, default=None)

    def forget_uses(self, stage: str) -> None:
        """Forget who came to a stage that is no more."""
        with self.transaction() as database:
            database.execute("DELETE FROM stage_uses WHERE stage = ?", (stage,))

    def is_alive(self, run_id: str) -> bool:
        """True if the run said that it lives, and its process is there."""
        return self._run_lock_path(run_id).is_file() and not self.has_died(run_id)

    def living_runs(self) -> dict[str, float]:
        """When each run that lives began at the latest, seconds since 1970, by its id."""
        found = {}
        for path in self._run_lock_path("").glob("*"):
            with suppress(FileNotFoundError):  # it ended meanwhile
                began_at = path.stat().st_mtime
                if self.is_alive(path.name):
                    found[path.name] = began_at
        return found

    @contextmanager
    def living_run(self, run_id: str) -> Iterator[None]:
        """Let everybody know that the run lives, as long as the block runs and its process is there.

        Several processes of one run may be in such a block: it lives as long as one of them is.
        """
        path = self._run_lock_path(run_id)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        with _locked_where_it_lies(path) as lock:
            try:
                yield
            finally:
                # Else it has to tell that the run left them behind.
                is_needed = self.leases_of(run_id) or self._rents(run_id)
                if not is_needed and try_lock(lock, fcntl.LOCK_EX):  # else it is another process's as well
                    path.unlink(missing_ok=True)

    def has_died(self, run_id: str) -> bool:
        """True if the run was a living one and is no more; a run that never said that it lives counts as alive.

        So does the run without an id of a machine that was found, and was not in the ledger.
        """
        path = self._run_lock_path(run_id)
        if not run_id or not path.exists():
            return False
        # Who looks has the lock for a moment, in which the run would look alive to another one.
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
        """Eight hexadecimal digits that tell this ledger from all others; part of the names of what its runs rent."""
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
        """Only one process at a time rents for a run; others wait here."""
        path = self.path.with_suffix(".renting") / run_id
        path.parent.mkdir(mode=0o700, exist_ok=True)
        with locked(path):  # the file stays: who waits for it must not be left with one that has no name
            yield

    def start_lock(self, stage: str) -> Path:
        """The file whose lock is held by who brings a stage to other machines and starts it there."""
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
    """Be the only one in such a block for a folder, where its file system has locks of folders."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def _locked_where_it_lies(path: Path) -> Iterator[int]:
    """Hold a file's shared lock for the block; not that of one that was removed before the lock was had."""
    with ExitStack() as stack:
        while True:
            lock = stack.enter_context(lock_file(path))
            fcntl.flock(lock, fcntl.LOCK_SH)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(lock), path.stat()):
                    break
        yield lock
