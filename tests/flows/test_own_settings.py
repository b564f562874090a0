"""The Prefect server of a store depends on the store alone, and its clients give the password to no other program.

What breaks silently without these: two stores that share a database, so that a run trains another store's
configuration, and a program at the port of a killed server that is sent the password.
"""

from __future__ import annotations

import base64
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from rollouts.flows.own_server.https import HOST, own_certificate, server_context
from rollouts.flows.own_server.lend import ServerError, local_server, prefect_environment
from rollouts.flows.prefect_api import ask
from tests.flows.test_server import is_healthy, keeper_pid
from tests.kit.commands import ROOT, Rollouts, clean_environment, copy_home
from tests.kit.waiting import wait_until

PREFECT_CLIENT = """
import asyncio
from prefect.client.orchestration import get_client
from prefect.events.clients import get_events_client
from prefect.events import Event, Resource

async def call():
    try:
        async with get_client() as client:
            await client.read_flows()
    except Exception as error:
        print(type(error).__name__)
    try:
        async with get_events_client() as events:
            await events.emit(Event(event="seen", resource=Resource({"prefect.resource.id": "a"})))
    except Exception as error:
        print(type(error).__name__)

asyncio.run(call())
"""


@pytest.fixture(autouse=True)
def without_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ.keys() - clean_environment().keys():
        monkeypatch.delenv(name)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "PREFECT_API_DATABASE_CONNECTION_URL",
        pytest.param("PREFECT_SERVER_DATABASE_CONNECTION_URL", marks=pytest.mark.matrix),
        pytest.param("prefect_server_database_connection_url", marks=pytest.mark.matrix),
    ],
)
def test_a_database_in_the_environment_is_ignored_and_named(
    name: str, prefect_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    database = tmp_path / "other.db"
    shutil.copy(prefect_home / "prefect.db", database)
    monkeypatch.setenv(name, f"sqlite+aiosqlite:///{database}")
    monkeypatch.setenv("PREFECT_SERVER_API_BASE_PATH", "/elsewhere")
    monkeypatch.setenv("PREFECT_SERVER_CSRF_PROTECTION_ENABLED", "true")
    monkeypatch.setenv("PREFECT_API_DATABASE_NAME", "elsewhere")
    monkeypatch.setenv("PREFECT_FLOWS_HEARTBEAT_FREQUENCY", "60")  # of runs, where it has an effect
    flows = {}
    for store in (tmp_path / "a", tmp_path / "b"):
        copy_home(prefect_home, store)
        caplog.clear()
        with local_server(store) as address:
            ask(address, "POST", "/flows/", {"name": f"of-{store.name}"})
            flows[store.name] = [flow["name"] for flow in ask(address, "POST", "/flows/filter", {})]
        (warning,) = [
            record.getMessage() for record in caplog.records if record.name == "rollouts.flows.own_server.lend"
        ]
        assert name in warning
        assert "PREFECT_SERVER_API_BASE_PATH" in warning
        assert "HEARTBEAT" not in warning
    assert flows == {"a": ["of-a"], "b": ["of-b"]}


@pytest.mark.slow
def test_settings_in_the_store_are_those_of_its_server(prefect_home: Path, tmp_path: Path) -> None:
    copy_home(prefect_home, tmp_path / "store")
    (tmp_path / "store/prefect/prefect.toml").write_text("[server.api]\ndefault_limit = 3\n")
    with local_server(tmp_path / "store") as address:
        assert ask(address, "GET", "/admin/settings")["server"]["api"]["default_limit"] == 3


@pytest.mark.slow
@pytest.mark.matrix
def test_a_deployment_trains_the_configuration_of_its_own_store(
    rollouts_alone: Rollouts, tmp_path: Path, prefect_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command ended with exit code 0 after it had the other store train."""
    shutil.copy(prefect_home / "prefect.db", tmp_path / "shared.db")
    own = clean_environment() | {"PREFECT_API_DATABASE_CONNECTION_URL": f"sqlite+aiosqlite:///{tmp_path / 'shared.db'}"}
    other = tmp_path / "other"
    copy_home(prefect_home, other)
    command = [sys.executable, "-m", "rollouts.flows.cli"]
    for arguments in (["up"], ["run", "--deployment", "finish", "finish.run=none"]):
        for store in (rollouts_alone.store, other):
            done = subprocess.run(
                [*command, *arguments, "--store", str(store)], env=own, capture_output=True, text=True
            )
            assert done.returncode == 0, done.stderr
            assert "PREFECT_API_DATABASE_CONNECTION_URL: ignored" in done.stderr
    for store in (rollouts_alone.store, other):
        with local_server(store) as address:
            runs = ask(address, "POST", "/flow_runs/filter", {})
        assert [run["parameters"]["finish"]["store"] for run in runs if not run["auto_scheduled"]] == [str(store)]
        subprocess.run([*command, "down", "--store", str(store)], env=own, check=True, capture_output=True)


@pytest.mark.slow
@pytest.mark.parametrize("speaks_tls", [False, pytest.param(True, marks=pytest.mark.matrix)])
def test_a_program_at_the_port_of_a_killed_server_is_sent_no_password(
    speaks_tls: bool, prefect_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_API_TLS_INSECURE_SKIP_VERIFY", "true")  # a setting for another server
    store, other = tmp_path / "store", tmp_path / "other"
    copy_home(prefect_home, store)
    other.mkdir()
    own_certificate(other)
    with socket.create_server((HOST, 0)) as free:
        port = free.getsockname()[1]
    with local_server(store, port=port) as address:
        environment = clean_environment() | prefect_environment(store, address)
        monkeypatch.setattr(
            "rollouts.flows.own_server.lend._start_process", lambda *_, **__: None
        )  # it would have the port first
        os.kill(keeper_pid(store), signal.SIGKILL)
        wait_until(lambda: not is_healthy(address), what="the end of the server")
        with stranger(port, server_context(other) if speaks_tls else None) as heard:
            with pytest.raises(ServerError, match=r"another program answers|does not answer"):
                ask(address, "POST", "/flow_runs/filter", {})
            called = subprocess.run(
                [sys.executable, "-c", PREFECT_CLIENT], env=environment, cwd=ROOT, capture_output=True, timeout=120
            )
    assert called.stdout.count(b"Error") == 2, called.stdout + called.stderr
    assert len(heard) >= 3
    secret = address.password.partition(":")[2].encode()
    sent = b"".join(heard)
    assert secret not in sent
    assert base64.b64encode(address.password.encode()) not in sent


@contextmanager
def stranger(port: int, tls: ssl.SSLContext | None) -> Iterator[list[bytes]]:
    """A program that listens on the port, answers everything with 200 and keeps what it is sent."""
    heard: list[bytes] = []

    def answer(connection: socket.socket) -> None:
        with suppress(OSError), connection:
            heard.append(b"")
            if tls is None:
                heard.append(connection.recv(65536))
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]")
                return
            with tls.wrap_socket(connection, server_side=True) as wrapped:
                heard.append(wrapped.recv(65536))
                wrapped.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]")

    def listen() -> None:
        with suppress(OSError):
            while True:
                connection, _ = listener.accept()
                threading.Thread(target=answer, args=(connection,), daemon=True).start()

    with socket.create_server((HOST, port)) as listener:
        threading.Thread(target=listen, daemon=True).start()
        yield heard
        listener.shutdown(socket.SHUT_RDWR)
