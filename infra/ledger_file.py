"""The SQLite file of a ledger: migrations, reads without waiting, and atomic transactions.

    a file of an older format ── migrations ──> _SCHEMA_VERSION
    a full or read-only disk ──> a copy in memory, so that `status` and ending rented machines still work

Not here: the content of the ledger's tables (ledger.py, renting/rentals.py, registry.py, retrainings.py).
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
    ("CREATE TABLE run_plans (run TEXT PRIMARY KEY, stages TEXT NOT NULL) STRICT, WITHOUT ROWID",),
)
"""Item n has the statements that migrate a ledger from format n to format n + 1. Format 0 is an empty file."""
_SCHEMA_VERSION = len(_MIGRATIONS)
_DISK_PROBLEMS = {sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN}
"""SQLite's error codes for problems that waiting does not solve."""


class LedgerFile:
    """An open ledger file, for use by one thread. Other processes may have the same ledger open.

    The methods raise LedgerUnwritableError if the disk is full or broken. The methods raise TransientInfraError if the
    file is busy.
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
        """Return the current rows. Concurrent writers do not delay the read."""
        with self._as_errors_of_ours():
            return self._database.execute(query, values).fetchall()

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Run the block as one atomic transaction. A transaction inside another transaction joins the outer
        transaction."""
        if self._database.in_transaction:
            yield self._database
            return
        if self._is_copy:
            opened = self._opened()  # the disk may have room by now
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
                if database.in_transaction:  # if the disk is full, SQLite has already rolled back
                    with suppress(sqlite3.OperationalError):  # the first error is more useful than an error of ROLLBACK
                        database.execute("ROLLBACK")
                raise

    @contextmanager
    def _as_errors_of_ours(self) -> Iterator[None]:
        """Convert SQLite's errors to InfraErrors. Errors that our own statements cause, such as violated constraints,
        stay unchanged."""
        try:
            yield
        except sqlite3.OperationalError as error:
            if _code_of(error) in _DISK_PROBLEMS:
                raise LedgerUnwritableError(
                    f"the ledger {self.path} cannot be written ({error}): free space on its disk, or repair it"
                ) from error
            raise TransientInfraError(f"the ledger {self.path} is busy or unreachable: {error}") from error
        except sqlite3.DatabaseError as error:
            if type(error) is not sqlite3.DatabaseError:  # the error is, for example, a violated constraint
                raise
            raise PermanentInfraError(
                f"{self.path} is not a ledger, or is damaged: {error}; use another path"
            ) from error

    def _opened(self) -> sqlite3.Connection:
        """Open the file. A file of an older format is migrated. Opening a file of the present format writes nothing."""
        database = sqlite3.connect(self.path, timeout=BUSY_TIMEOUT_S, isolation_level=None)
        try:
            self._switch_to_wal(database)
            with self._as_errors_of_ours():
                is_present = _version_of(database) == _SCHEMA_VERSION
            if not is_present:
                with self._all_or_nothing(database):
                    self._migrate(database)
        except BaseException:
            database.close()
            raise
        return database

    def _migrate(self, database: sqlite3.Connection) -> None:
        version = _version_of(database)
        if version > _SCHEMA_VERSION:
            raise PermanentInfraError(
                f"the ledger {self.path} has format {version}, this version reads {_SCHEMA_VERSION}: "
                "use the version of the software that wrote it, or another path"
            )
        for statements in _MIGRATIONS[version:]:
            for statement in statements:
                database.execute(statement)
        database.execute(f"PRAGMA user_version = {_SCHEMA_VERSION}")

    def _copied_into_memory(self) -> sqlite3.Connection:
        """Return an in-memory copy of the ledger, because SQLite cannot create its shared WAL index on a full disk."""
        copy = sqlite3.connect(":memory:", isolation_level=None)
        try:
            with (
                self._readable_path() as path,
                self._as_errors_of_ours(),
                closing(sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None)) as alone,
            ):
                alone.execute("PRAGMA locking_mode = EXCLUSIVE")  # makes SQLite keep the WAL index in memory
                _version_of(alone)  # waits for other processes with a timeout; `backup` would wait forever
                alone.backup(copy)
                self._migrate(copy)
        except BaseException:
            copy.close()
            raise
        return copy

    @contextmanager
    def _readable_path(self) -> Iterator[Path]:
        """Yield the path of the ledger's file. If the file is read-only, yield a temporary copy with its WAL file,
        because SQLite must be able to write."""
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
        # If two processes open a new file at the same time, SQLite fails here at once, without its busy timeout.
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
    """Return SQLite's primary error code, or 0 if the error does not come from SQLite."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF
