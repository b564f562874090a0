"""Whole pipelines for tests: a real Prefect server, real jobs, the `rollouts` command in processes of its own.

A server takes five seconds to start, so one runs for the whole test session, and the commands of most tests join it as
that of their store. Tests of servers, deployments and databases have one of their own (`rollouts_alone`): its new
database would take ten seconds of migrations, and is a copy of one that is made per session.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from rollouts.flows.own_server.lend import local_server
from rollouts.flows.quickstart_files import quickstart_folder, write_missing_quickstart
from rollouts.infra.locks import locked
from rollouts_core.checkpoint import verify_checkpoint
from tests.processes import dies_with_us
from tests.small_pipeline import write_small_pipeline
from tests.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
RUN_TIMEOUT_S = 480.0


@dataclass(frozen=True, slots=True)
class Rollouts:
    """The `rollouts` command over one store."""

    store: Path
    output: Path
    code: Path | None = None
    """The folder of the code that is run, also as the current folder; None for this project's."""

    def start(self, *arguments: str, with_store: bool = True) -> subprocess.Popen[bytes]:
        """Begin a command; what it prints goes to `output`."""
        store = ["--store", str(self.store)] if with_store else []
        with self.output.open("wb") as output:
            return subprocess.Popen(
                [*dies_with_us("INT"), sys.executable, "-m", "rollouts.flows.cli", *arguments, *store],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=self.code,
                env=clean_environment(self.code or ROOT),
                start_new_session=True,
            )

    def run(self, *arguments: str) -> tuple[int, str]:
        """Run a command to its end; returns its exit code and what it printed."""
        process = self.start(*arguments)
        return process.wait(RUN_TIMEOUT_S), self.said()

    def said(self) -> str:
        """What the last command has printed so far."""
        return self.output.read_text(errors="replace")

    def wait_until_said(self, text: str, process: subprocess.Popen[bytes]) -> None:
        """Return when the running command has printed `text`."""
        wait_until(lambda: text in self.said() or process.poll() is not None, what=f"{text!r} in {self.output}")
        assert text in self.said(), f"the command ended without saying {text!r}:\n{self.said()}"


def clean_environment(code: Path = ROOT) -> dict[str, str]:
    """The environment of a user who never set anything of Prefect's or of ours but what names a provider."""
    ours = ("PREFECT_", "ROLLOUTS_")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(ours) or key == "ROLLOUTS_SKY"}
    return kept | {"PYTHONPATH": str(code / "src")}


def processes_of(store: Path) -> list[str]:
    """The command lines of processes that mention the store, or whose job lies in it."""
    return list(pids_of(store).values())


def pids_of(store: Path) -> dict[int, str]:
    """The processes that mention the store, or whose job lies in it, with their command lines."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            is_zombie = b") Z" in (entry / "stat").read_bytes()
        except OSError:
            continue
        if str(store) in command and not is_zombie:
            found[int(entry.name)] = command
    return found


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


def copy_home(home: Path, store: Path) -> None:
    """Give a store the database of another one, whose server does not run."""
    shutil.copytree(home, store / "prefect", ignore=shutil.ignore_patterns("*.lock", "server.*", "ui"))


def join_home(home: Path, store: Path) -> None:
    """Make the running server of a home that of a store, too; what Prefect's clients write stays the store's own."""
    (store / "prefect").mkdir(parents=True)
    for path in home.iterdir():
        if path.is_file():  # locks, address, password, database
            (store / "prefect" / path.name).symlink_to(path)


def digest_trained_here(config: Path, home: Path, folder: Path) -> str:
    """The digest of the checkpoint to which the configuration leads on this machine, in a store of its own."""
    rollouts = Rollouts(folder / "other-store", folder / "other-output")
    join_home(home, rollouts.store)
    code, output = rollouts.run("run", str(config))
    assert code == 0, output
    return digest_of_the_run(rollouts)


def digest_of_the_run(rollouts: Rollouts) -> str:
    """The digest of the checkpoint of the only run of a store."""
    (run,) = (rollouts.store / "runs").iterdir()
    return verify_checkpoint(run / "checkpoint").digest


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
