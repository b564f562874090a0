"""Pins that a new store's database is a copy of an empty one, and never of one that is damaged or another user's.

Without the copy each new store waits for Prefect's migrations. With a wrong one no new store has a server.
"""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from rollouts.flows.own_server.lend import local_server
from rollouts.flows.own_server.new_database import DATABASE, copy_template, is_database_missing, keep_template
from tests.flows.test_notify import make_run


def make_database(path: Path) -> None:
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("CREATE TABLE alembic_version (version_num TEXT)")
        database.execute("INSERT INTO alembic_version VALUES ('head')")
        database.execute("CREATE TABLE secrets (value TEXT)")
        database.execute("INSERT INTO secrets VALUES ('hunter2')")


@pytest.fixture
def template(tmp_path: Path) -> Path:
    """What a store with a database has left in the cache."""
    (tmp_path / "first").mkdir()
    make_database(tmp_path / "first" / DATABASE)
    path = tmp_path / "cache" / "rollouts" / "prefect-3.db"
    keep_template(tmp_path / "first", path)
    (tmp_path / "home").mkdir()
    return path


def ask_database(path: Path, statement: str) -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(path)) as database:
        return database.execute(statement).fetchall()


def test_a_copy_has_tables_and_no_rows(template: Path, tmp_path: Path) -> None:
    assert copy_template(template, tmp_path / "home")
    copy = tmp_path / "home" / DATABASE
    assert ask_database(copy, "SELECT * FROM alembic_version") == [("head",)]
    assert ask_database(copy, "SELECT * FROM secrets") == []
    assert b"hunter2" not in template.read_bytes()
    assert [path.name for path in template.parent.iterdir()] == [template.name]


@pytest.mark.parametrize(
    "harm", ["missing", "cut", "of another kind", "file others may write", "folder others may write"]
)
def test_what_cannot_be_trusted_is_not_copied(template: Path, tmp_path: Path, harm: str) -> None:
    if harm == "missing":
        template.unlink()
    elif harm == "cut":
        template.write_bytes(template.read_bytes()[:-4096])
    elif harm == "of another kind":
        template.write_bytes(b"hello")
    else:
        (template if harm == "file others may write" else template.parent).chmod(0o777)
    assert not copy_template(template, tmp_path / "home")
    assert not any((tmp_path / "home").iterdir())


def test_nothing_is_kept_where_others_may_write(tmp_path: Path) -> None:
    """Other users could read the rows before these are deleted, or plant a link through which the copy is written."""
    make_database(tmp_path / DATABASE)
    cache = tmp_path / "cache"
    cache.mkdir()
    cache.chmod(0o777)
    keep_template(tmp_path, cache / "prefect-3.db")
    assert not any(cache.iterdir())


def test_a_copy_is_kept_for_its_user_alone_and_used_with_each_umask(tmp_path: Path) -> None:
    make_database(tmp_path / DATABASE)
    template = tmp_path / "cache" / "rollouts" / "prefect-3.db"
    before = os.umask(0o002)
    try:
        keep_template(tmp_path, template)
    finally:
        os.umask(before)
    assert [path.stat().st_mode & 0o777 for path in (template, template.parent)] == [0o600, 0o700]
    (tmp_path / "home").mkdir()
    assert copy_template(template, tmp_path / "home")


def test_a_cache_that_cannot_be_written_is_no_obstacle(tmp_path: Path) -> None:
    make_database(tmp_path / DATABASE)
    (tmp_path / "cache").write_text("a file")
    keep_template(tmp_path, tmp_path / "cache" / "prefect-3.db")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", DATABASE]


def test_a_database_elsewhere_is_not_made_here(tmp_path: Path) -> None:
    own = f"sqlite+aiosqlite:///{tmp_path / DATABASE}"
    assert is_database_missing(tmp_path, own)
    assert not is_database_missing(tmp_path, "postgresql+asyncpg://host/prefect")
    assert not is_database_missing(tmp_path, "sqlite+aiosqlite:////elsewhere/prefect.db")
    make_database(tmp_path / DATABASE)
    assert not is_database_missing(tmp_path, own)


@pytest.mark.slow
def test_the_second_store_of_a_user_needs_no_migration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with local_server(tmp_path / "first") as address:
        make_run(address, "a-run")
    [template] = (tmp_path / "cache" / "rollouts").iterdir()
    with local_server(tmp_path / "second") as address:
        make_run(address, "another")
    second = tmp_path / "second" / "prefect" / DATABASE
    # each statement of a migration would count it up
    [changes] = ask_database(template, "PRAGMA schema_version")
    assert ask_database(second, "PRAGMA schema_version") == [changes]
    assert ask_database(second, "SELECT name FROM flow_run") == [("another",)]
