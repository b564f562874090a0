"""The SQLite file of a ledger: opened in the present format, read without waiting, written whole or not at all.

Not here: what is in it (ledger.py, renting/rentals.py, registry.py, retrainings.py).

    a file of an older format ── migrations ──> SCHEMA_VERSION
    a full disk, or one that cannot be written ──> a copy in memory: `status`, and the end of rented machines, need it
"""

import os
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, Self

from rollouts.infra.errors import LedgerUnwritableError, PermanentInfraError, TransientInfraError

BUSY_TIMEOUT_S = 30.0

_MIGRATIONS = (
    (
        """
        CREATE TABLE job_leases (
            run_dir TEXT NOT NULL,
            run_id TEXT NOT NULL,
            node TEXT NOT NULL,
            created_at REAL NOT NULL,
            PRIMARY KEY (run_dir, run_id)
        ) STRICT, WITHOUT ROWID
        """,
    ),
    (
        "CREATE TABLE identity (id TEXT NOT NULL) STRICT",
        """
        CREATE TABLE rentals (
            name TEXT PRIMARY KEY,
            run_id TEXT NOT NULL,
            provider TEXT NOT NULL,
            purpose TEXT NOT NULL,
            state TEXT NOT NULL,
            instance_id TEXT NOT NULL,
            gpu TEXT NOT NULL,
            region TEXT NOT NULL,
            usd_per_hour REAL NOT NULL,
            intended_at REAL NOT NULL,
            rented_at REAL,
            ended_at REAL,
            expires_at REAL NOT NULL,
            host_key TEXT NOT NULL,
            note TEXT NOT NULL
        ) STRICT, WITHOUT ROWID
        """,
    ),
    (
        """
        CREATE TABLE models (
            id INTEGER PRIMARY KEY AUTOINCREMENT,
            line TEXT NOT NULL,
            version INTEGER NOT NULL,
            checkpoint TEXT NOT NULL,
            digest TEXT NOT NULL,
            run_id TEXT NOT NULL,
            stages TEXT NOT NULL,
            data TEXT NOT NULL,
            evaluation TEXT NOT NULL,
            registered_at REAL NOT NULL,
            registered_by TEXT NOT NULL,
            UNIQUE (line, version),
            UNIQUE (line, digest)
        ) STRICT
        """,
        """
        CREATE TABLE alias_changes (
            id INTEGER PRIMARY KEY AUTOINCREMENT,
            line TEXT NOT NULL,
            alias TEXT NOT NULL,
            model_id INTEGER,
            below INTEGER,
            changed_at REAL NOT NULL,
            changed_by TEXT NOT NULL,
            reason TEXT NOT NULL
        ) STRICT
        """,
        """
        CREATE TABLE retrainings (
            run_id TEXT PRIMARY KEY,
            line TEXT NOT NULL,
            state TEXT NOT NULL,
            data TEXT NOT NULL,
            model_id INTEGER,
            baseline_id INTEGER,
            is_better INTEGER NOT NULL,
            approved INTEGER,
            approved_by TEXT NOT NULL,
            note TEXT NOT NULL,
            began_at REAL NOT NULL,
            ended_at REAL
        ) STRICT, WITHOUT ROWID
        """,
        """
        CREATE TABLE stage_uses (
            stage TEXT NOT NULL,
            run_id TEXT NOT NULL,
            run TEXT NOT NULL,
            num_steps INTEGER NOT NULL,
            used_at REAL NOT NULL,
            PRIMARY KEY (stage, run_id)
        ) STRICT, WITHOUT ROWID
        """,
    ),
    ("ALTER TABLE rentals ADD COLUMN credentials TEXT NOT NULL DEFAULT ''",),
    ("ALTER TABLE rentals ADD COLUMN kept_until REAL",),
    (
        "ALTER TABLE stage_uses ADD COLUMN began_at REAL NOT NULL DEFAULT 0",
        "UPDATE stage_uses SET began_at = used_at",
    ),
    (
        "ALTER TABLE rentals ADD COLUMN vram_gb REAL NOT NULL DEFAULT 0",
        "ALTER TABLE rentals ADD COLUMN host TEXT NOT NULL DEFAULT ''",
        "ALTER TABLE rentals ADD COLUMN is_unfit INTEGER NOT NULL DEFAULT 0",
    ),
    (
        "ALTER TABLE rentals ADD COLUMN expected_key TEXT NOT NULL DEFAULT ''",
        "ALTER TABLE rentals ADD COLUMN believed_by TEXT NOT NULL DEFAULT 'first_use'",
    ),
    ("ALTER TABLE job_leases ADD COLUMN is_started INTEGER NOT NULL DEFAULT 1",),
)
"""What brings a ledger from each format to the next; formats count from 0, an empty file."""
SCHEMA_VERSION = len(_MIGRATIONS)
_DISK_PROBLEMS = {sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN}
"""What SQLite says where waiting does not help."""


class LedgerFile:
    """An open file of a ledger; for one thread, while any number of processes may have the same file open.

    Its methods raise LedgerUnwritableError where its disk is full or broken, and TransientInfraError where it is busy.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch(mode=0o600)
        except OSError as error:
            if not path.is_file():
                raise LedgerUnwritableError(f"the ledger {path} cannot be made ({error.strerror})") from error
        try:
            self._database, self._is_copy = self._opened(), False
        except LedgerUnwritableError:
            self._database, self._is_copy = self._copied_into_memory(), True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._database.close()

    def read(self, query: str, values: Sequence[str | float] = ()) -> list[tuple[Any, ...]]:  # Any: values of columns
        """The rows as they are now; waits for nobody who writes."""
        with self._as_errors_of_ours():
            return self._database.execute(query, values).fetchall()

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Everything in the block or nothing of it, and nobody else's writes in between; within another one, a part."""
        if self._database.in_transaction:
            yield self._database
            return
        if self._is_copy:
            opened = self._opened()  # there may be room by now
            self._database.close()
            self._database, self._is_copy = opened, False
        with self._all_or_nothing(self._database):
            yield self._database

    @contextmanager
    def _all_or_nothing(self, database: sqlite3.Connection) -> Iterator[None]:
        with self._as_errors_of_ours():
            database.execute("BEGIN IMMEDIATE")
            try:
                yield
                database.execute("COMMIT")
            except BaseException:
                if database.in_transaction:  # SQLite has rolled back by itself where the disk is full
                    with suppress(sqlite3.OperationalError):  # what it is rolled back for says more
                        database.execute("ROLLBACK")
                raise

    @contextmanager
    def _as_errors_of_ours(self) -> Iterator[None]:
        """Raise what SQLite says as an InfraError; but for mistakes in what it was told."""
        try:
            yield
        except sqlite3.OperationalError as error:
            if _code_of(error) in _DISK_PROBLEMS:
                raise LedgerUnwritableError(
                    f"the ledger {self.path} cannot be written ({error}): make room on its disk, or mend it"
                ) from error
            raise TransientInfraError(f"the ledger {self.path} is busy or unreachable: {error}") from error
        except sqlite3.DatabaseError as error:
            if type(error) is not sqlite3.DatabaseError:  # a constraint that is violated, for one
                raise
            raise PermanentInfraError(
                f"{self.path} is no ledger, or a damaged one: {error}; use another path"
            ) from error

    def _opened(self) -> sqlite3.Connection:
        """The file, of the present format; one that has it is not written."""
        database = sqlite3.connect(self.path, timeout=BUSY_TIMEOUT_S, isolation_level=None)
        try:
            self._switch_to_wal(database)
            with self._as_errors_of_ours():
                is_present = _version_of(database) == SCHEMA_VERSION
            if not is_present:
                with self._all_or_nothing(database):
                    self._migrate(database)
        except BaseException:
            database.close()
            raise
        return database

    def _migrate(self, database: sqlite3.Connection) -> None:
        version = _version_of(database)
        if version > SCHEMA_VERSION:
            raise PermanentInfraError(
                f"the ledger {self.path} has format {version}, this version reads {SCHEMA_VERSION}: "
                "use the version of the software that wrote it, or another path"
            )
        for statements in _MIGRATIONS[version:]:
            for statement in statements:
                database.execute(statement)
        database.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")

    def _copied_into_memory(self) -> sqlite3.Connection:
        """What is in the file, which SQLite cannot open for several if no index can be made beside it."""
        copy = sqlite3.connect(":memory:", isolation_level=None)
        try:
            with (
                self._readable_path() as path,
                self._as_errors_of_ours(),
                closing(sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None)) as alone,
            ):
                alone.execute("PRAGMA locking_mode = EXCLUSIVE")  # who is alone keeps that index in memory
                _version_of(alone)  # waits for others as long as it may, which a backup does for ever
                alone.backup(copy)
                self._migrate(copy)
        except BaseException:
            copy.close()
            raise
        return copy

    @contextmanager
    def _readable_path(self) -> Iterator[Path]:
        """The file, or a copy with its log if the file or its file system cannot be written: SQLite needs that."""
        if os.access(self.path, os.W_OK):
            yield self.path
            return
        with tempfile.TemporaryDirectory() as folder:
            for name in (self.path.name, f"{self.path.name}-wal"):
                try:
                    shutil.copyfile(self.path.with_name(name), Path(folder, name))
                except FileNotFoundError:
                    continue
                except OSError as error:
                    raise PermanentInfraError(f"the ledger {self.path} cannot be read: {error.strerror}") from error
            yield Path(folder, self.path.name)

    def _switch_to_wal(self, database: sqlite3.Connection) -> None:
        # SQLite does not wait for its busy timeout here when two processes open a fresh file at once.
        deadline = time.monotonic() + BUSY_TIMEOUT_S
        while True:
            try:
                with self._as_errors_of_ours():
                    database.execute("PRAGMA journal_mode = WAL")
                return
            except LedgerUnwritableError:
                raise
            except TransientInfraError:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(0.05)


def _version_of(database: sqlite3.Connection) -> int:
    [(version,)] = database.execute("PRAGMA user_version")
    return int(version)


def _code_of(error: sqlite3.Error) -> int:
    """SQLite's code of the error, without what it says besides; 0 where the error is not SQLite's own."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF
