"""The database of a new store: a copy of the empty database that the user's first store got from Prefect.

Prefect makes a new database by a hundred migrations with 34,000 statements. On an idle machine with two cores, a server
then starts in 9.7 s, and with a copy in 5.0 s. The copy has tables and no rows, and belongs to one version of Prefect.

    first store    -> migrations -> server starts -> tables without rows -> ~/.cache/rollouts/prefect-3.8.1.db
    next stores    <- copy ---------------------------------------------------+

Prefect's migrations still run at every start. On a copy, there are none left to do.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
from contextlib import closing, suppress
from pathlib import Path

from rollouts.infra.errors import PermanentInfraError
from rollouts.infra.secret_file import OWN_FILE, own_folder

DATABASE = "prefect.db"
"""Name of Prefect's database in its home."""
OTHERS_MAY_WRITE = 0o022


def is_database_missing(home: Path, connection_url: str) -> bool:
    """True if Prefect would make a new database in `home`.

    Args:
        connection_url: the server's setting, which a prefect.toml in the store may change.
    """
    database = home / DATABASE
    return connection_url.startswith("sqlite") and connection_url.endswith(str(database)) and not database.exists()


def template_path(version: str) -> Path | None:
    """The empty database of a version of Prefect, in the user's cache. None if the user has no home folder."""
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    except RuntimeError:
        return None
    return cache / "rollouts" / f"prefect-{version}.db" if cache.is_absolute() else None


def copy_template(template: Path, home: Path) -> bool:
    """Copy the empty database to `home`. False if it is missing, damaged, or a file that others could have changed."""
    partial = home / f".{DATABASE}.partial"
    with suppress(OSError, sqlite3.Error):
        if not all(_is_own(path) for path in (template, template.parent)):
            return False
        shutil.copyfile(template, partial)
        with closing(sqlite3.connect(partial)) as database:
            is_whole = database.execute("PRAGMA quick_check").fetchall() == [("ok",)]
            rows = database.execute("SELECT count(*) FROM alembic_version").fetchall()
        if is_whole and rows == [(1,)]:
            partial.rename(home / DATABASE)
            return True
    _remove(partial)
    return False


def keep_template(home: Path, template: Path) -> None:
    """Write the tables of a new database, without rows, to the user's cache. Nothing is written if that fails, or if
    other users could write into the cache. Until its rows are deleted, the copy may hold secrets."""
    partial = template.with_name(f"{template.name}.{os.getpid()}.partial")
    with suppress(OSError, sqlite3.Error, PermanentInfraError):
        own_folder(template.parent)
        partial.touch(mode=OWN_FILE, exist_ok=False)  # SQLite would follow a link, and let other users read the copy
        with closing(sqlite3.connect(home / DATABASE)) as database:
            database.execute("VACUUM INTO ?", (str(partial),))
        with closing(sqlite3.connect(partial, isolation_level=None)) as database:
            tables = database.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
            for (table,) in tables:
                if table != "alembic_version" and not table.startswith("sqlite_"):
                    database.execute(f'DELETE FROM "{table}"')
            database.execute("VACUUM")  # deleted rows are otherwise still in the file
        partial.rename(template)
    _remove(partial)


def _remove(path: Path) -> None:
    with suppress(OSError):  # its folder may be missing
        path.unlink(missing_ok=True)


def _is_own(path: Path) -> bool:
    found = path.stat()
    return found.st_uid == os.geteuid() and not found.st_mode & OTHERS_MAY_WRITE
