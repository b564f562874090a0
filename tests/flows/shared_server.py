"""A Prefect server that several people share: a real PostgreSQL, Prefect's own server, a worker of a process pool.

Not here: what runs there (test_shared_server.py).
"""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from rollouts.flows.own_server.lend import ServerAddress, ServerError
from rollouts.flows.prefect_api import ask
from tests.kit.commands import clean_environment
from tests.kit.processes import dies_with_us
from tests.kit.waiting import wait_until

USER = "prefect"
AUTH = "people:secret"
OTHER_USERS = ("postgres", "nobody")
"""PostgreSQL refuses to run as root; one of these is used then."""
START_TIMEOUT_S = 180.0


@dataclass(slots=True)
class SharedServer:
    """A server that answers, as long as nobody kills it."""

    address: ServerAddress
    folder: Path
    """The Prefect home of everybody who asks it."""
    database_url: str
    _process: subprocess.Popen[bytes] | None = None

    @property
    def environment(self) -> dict[str, str]:
        """What everybody who uses it sets."""
        return clean_environment() | {
            "PREFECT_HOME": str(self.folder / "home"),
            "PREFECT_API_URL": self.address.api_url,
            "PREFECT_API_AUTH_STRING": AUTH,
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "DO_NOT_TRACK": "1",
        }

    def prefect(self, *arguments: str, cwd: Path | None = None) -> str:
        """What a command of Prefect's prints."""
        done = subprocess.run(
            [sys.executable, "-m", "prefect", "--no-prompt", *arguments],
            cwd=cwd or self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=START_TIMEOUT_S,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def ask(self, method: str, path: str, question: Any = None) -> Any:  # Any: JSON
        """What the server's API answers."""
        return ask(self.address, method, path, question)

    def start(self) -> None:
        """Have it answer, at the same address and with the same database as ever."""
        port = self.address.api_url.rpartition(":")[2].removesuffix("/api")
        with (self.folder / "server.log").open("ab") as log:
            process = self._process = subprocess.Popen(
                [*dies_with_us(), sys.executable, "-m", "prefect", "server", "start", "--no-ui", "--port", port],
                env=self.environment
                | {"PREFECT_API_DATABASE_CONNECTION_URL": self.database_url, "PREFECT_SERVER_API_AUTH_STRING": AUTH},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        wait_until(lambda: answers(self) or process.poll() is not None, what="the server", timeout_s=START_TIMEOUT_S)
        assert process.poll() is None, (self.folder / "server.log").read_text()

    def kill(self) -> None:
        """From now on connections are refused."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    @contextmanager
    def worker(self, pool: str, **variables: str) -> Iterator[Path]:
        """A worker of the pool, with these in its environment; yields what it says.

        It ends with its flows, and leaves their jobs.
        """
        said = self.folder / "worker.log"
        with said.open("ab") as log:
            process = subprocess.Popen(
                [*dies_with_us("TERM"), sys.executable, "-m", "prefect", "worker", "start", "--pool", pool],
                cwd=self.folder,
                env=self.environment
                | {"PREFECT_WORKER_QUERY_SECONDS": "1", "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30"}
                | variables,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            yield said
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(120)
            finally:
                process.kill()


@contextmanager
def shared_server(folder: Path) -> Iterator[SharedServer]:
    """A server with a new database, which ends with the block."""
    with postgres() as database_url:
        port = free_port()
        address = ServerAddress(
            api_url=f"http://127.0.0.1:{port}/api", ui_url=f"http://127.0.0.1:{port}", is_local=False, password=AUTH
        )
        server = SharedServer(address, folder, database_url)
        try:
            server.start()
            yield server
        finally:
            server.kill()


@contextmanager
def postgres() -> Iterator[str]:
    """A PostgreSQL with an empty database; yields the URL under which Prefect finds it."""
    programs = find_postgres()
    with TemporaryDirectory(prefix="postgres-") as folder:  # not pytest's, which nobody else may enter
        as_user: list[str] = []
        if os.geteuid() == 0:
            user = next(name for name in OTHER_USERS if has_user(name))
            shutil.chown(folder, user)
            as_user = ["setpriv", "--reuid", user, "--regid", str(pwd.getpwnam(user).pw_gid), "--init-groups"]
        data, port = f"{folder}/data", free_port()
        initdb = [*as_user, str(programs / "initdb"), "-D", data, "-U", USER, "-A", "trust", "--no-sync", "-E", "UTF8"]
        made = subprocess.run(initdb, cwd=folder, capture_output=True, text=True)
        assert made.returncode == 0, made.stdout + made.stderr
        options = ("listen_addresses=127.0.0.1", "unix_socket_directories=", "fsync=off")
        settings = [word for option in options for word in ("-c", option)]
        command = [*as_user, *dies_with_us("INT"), str(programs / "postgres"), "-D", data, "-p", str(port), *settings]
        with Path(folder, "log").open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder, start_new_session=True)
        try:
            is_there = [str(programs / "pg_isready"), "-h", "127.0.0.1", "-p", str(port), "-q"]
            wait_until(lambda: subprocess.run(is_there).returncode == 0, what="PostgreSQL")
            yield f"postgresql+asyncpg://{USER}@127.0.0.1:{port}/postgres"
        finally:
            process.send_signal(signal.SIGINT)  # at once, but its shared memory goes too
            process.wait(120)


def find_postgres() -> Path:
    """The folder with the programs of PostgreSQL; skips the test where there are none."""
    found = shutil.which("initdb")
    folders = [Path(found).resolve().parent] if found else []
    folders += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    for folder in folders:
        if all((folder / name).exists() for name in ("initdb", "postgres", "pg_isready")):
            return folder
    pytest.skip("there is no PostgreSQL on this machine: install postgresql")


def has_user(name: str) -> bool:
    return any(line.startswith(f"{name}:") for line in Path("/etc/passwd").read_text().splitlines())


def answers(server: SharedServer) -> bool:
    """Whether the API can be asked."""
    try:
        server.ask("POST", "/flow_runs/count", {})
    except ServerError:
        time.sleep(0.2)
        return False
    return True


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])
