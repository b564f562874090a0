"""Whole pipelines for tests: a real Prefect server, real jobs, the `rollouts` command in processes of its own.

A server takes five seconds to start, so one runs for the whole test session, and the commands of most tests join it as
that of their store. Tests of servers, deployments and databases have one of their own (`rollouts_alone`): its new
database would take ten seconds of migrations, and is a copy of one that is made per session.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from rollouts.flows.own_server.lend import local_server
from rollouts.flows.quickstart_files import quickstart_folder, write_missing_quickstart
from rollouts.infra.locks import locked
from tests.infra.ssh_server import SSHServer, running_server
from tests.kit.commands import Rollouts, copy_home, join_home, pids_of, processes_of
from tests.kit.small_pipeline import write_small_pipeline
from tests.kit.waiting import wait_until


@pytest.fixture(scope="session")
def prefect_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Prefect home whose database is migrated; one for all processes of tests, since it takes one 6 s to make."""
    base = tmp_path_factory.getbasetemp()
    store = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "template"
    store.mkdir(exist_ok=True)
    with locked(store / "made.lock"):
        if not (store / "is-made").exists():
            with local_server(store):
                pass
            wait_until(lambda: not processes_of(store), what="the end of the template's server")
            (store / "is-made").touch()
    return store / "prefect"


@pytest.fixture(scope="session")
def served_home(tmp_path_factory: pytest.TempPathFactory, prefect_home: Path) -> Iterator[Path]:
    """A Prefect home whose server runs as long as the session."""
    store = tmp_path_factory.mktemp("served")
    copy_home(prefect_home, store)
    with local_server(store):
        yield store / "prefect"
    wait_until(lambda: not processes_of(store), what="the end of the session's server")


@pytest.fixture
def rollouts(tmp_path: Path, served_home: Path) -> Iterator[Rollouts]:
    """The `rollouts` command over an empty store; no process of it may be left when the test ends."""
    join_home(served_home, tmp_path / "store")
    yield from over_store(tmp_path)


@pytest.fixture
def rollouts_alone(tmp_path: Path, prefect_home: Path) -> Iterator[Rollouts]:
    """The same with a server that its commands start, and that ends with them."""
    copy_home(prefect_home, tmp_path / "store")
    yield from over_store(tmp_path)


@pytest.fixture
def rollouts_without_server(tmp_path: Path) -> Iterator[Rollouts]:
    """The same for commands that must end before they need one."""
    yield from over_store(tmp_path)


def over_store(folder: Path) -> Iterator[Rollouts]:
    """The command over `store` in a folder."""
    store = folder / "store"
    yield Rollouts(store, folder / "output.txt")
    wait_until(lambda: not processes_of(store), what=f"the end of {processes_of(store)}", timeout_s=30.0)


@pytest.fixture(scope="session")
def quickstart_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a store has in `quickstart` once its deployments were served."""
    store = tmp_path_factory.mktemp("quickstart")
    write_missing_quickstart(quickstart_folder(store, seed=0))
    return store / "quickstart"


@pytest.fixture(scope="session")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of the small pipeline, not to be changed."""
    folder = tmp_path_factory.mktemp("pristine") / "small"
    write_small_pipeline(folder)
    return folder


@pytest.fixture
def folder(pristine: Path, tmp_path: Path) -> Path:
    """The files of the small pipeline, to be changed."""
    return Path(shutil.copytree(pristine, tmp_path / "small"))


@pytest.fixture
def served(rollouts_alone: Rollouts, quickstart_files: Path) -> Iterator[Rollouts]:
    """A store in which `up` may be called; whatever it started is ended, jobs too.

    What the first `up` of a store makes for the quickstart is there already.
    """
    rollouts = rollouts_alone
    shutil.copytree(quickstart_files, rollouts.store / "quickstart")
    yield rollouts
    rollouts.run("down")
    for path in rollouts.store.glob("stages/*/.job/meta-*.json"):
        pid = json.loads(path.read_text())["supervisor_pid"]
        if pid in pids_of(rollouts.store):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)


@pytest.fixture
def ssh_server(tmp_path: Path) -> Iterator[SSHServer]:
    """A real SSH server of this machine."""
    with running_server(tmp_path / "sshd") as server:
        yield server


@pytest.fixture
def node_root(tmp_path: Path) -> Path:
    """The folder of a node on this machine."""
    return tmp_path / "node"
