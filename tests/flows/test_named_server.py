"""A team's Prefect server behind what teams put before it: TLS of a private authority, a proxy, tokens against forgery.

Without these tests `rollouts` cannot use a server that Prefect's own client can. The server is Prefect's, with its
protection against forged requests on; the proxy is a process's threads that end TLS and want a header.
"""

from __future__ import annotations

import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from rollouts.flows.own_server.https import own_certificate, server_context
from rollouts.flows.own_server.password import basic_authorization
from tests.flows.shared_server import free_port
from tests.flows.test_models_cli import register
from tests.flows.test_notify import WebhookServer, webhook  # noqa: F401
from tests.kit.commands import ROOT, clean_environment, copy_home
from tests.kit.processes import dies_with_us
from tests.kit.waiting import wait_until

pytestmark = pytest.mark.slow

AUTH = "team:secret"
HEADER = ("X-Team", "yes")
PASSING = {
    "PREFECT_API_AUTH_STRING": AUTH,
    "PREFECT_CLIENT_CUSTOM_HEADERS": f'{{"{HEADER[0]}": "{HEADER[1]}"}}',
}


@dataclass(frozen=True, slots=True)
class Guarded:
    """A server whose proxy answers."""

    url: str
    authority: Path
    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        """What everybody who uses it sets, but for the password."""
        return clean_environment() | {"PREFECT_API_URL": self.url, "PREFECT_HOME": str(self.folder / "home")}

    def rollouts(self, *arguments: str, **settings: str) -> tuple[int, str]:
        """The exit code of a command under these settings of Prefect's, and what it says."""
        done = subprocess.run(
            [sys.executable, "-m", "rollouts.flows.cli", *arguments, "--store", str(self.folder / "store")],
            env=self.environment | settings,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=240,
        )
        return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def guarded(prefect_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    folder = tmp_path_factory.mktemp("guarded")
    copy_home(prefect_home, folder / "server")
    (folder / "proxy").mkdir()
    port = free_port()
    settings = {
        "PREFECT_HOME": str(folder / "server/prefect"),
        "PREFECT_SERVER_API_AUTH_STRING": AUTH,
        "PREFECT_SERVER_CSRF_PROTECTION_ENABLED": "true",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
    }
    command = [*dies_with_us(), sys.executable, "-m", "prefect", "server", "start", "--no-ui", "--port", str(port)]
    with (folder / "server.log").open("wb") as log:
        server = subprocess.Popen(command, env=clean_environment() | settings, stdout=log, stderr=log)
    try:
        wait_until(lambda: is_open(port) or server.poll() is not None, what="the server", timeout_s=180.0)
        with proxy(port, server_context(folder / "proxy")) as proxy_port:
            url = f"https://127.0.0.1:{proxy_port}/api"
            yield Guarded(url, own_certificate(folder / "proxy"), folder)
    finally:
        server.kill()
        server.wait()


def is_open(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


@contextmanager
def proxy(port: int, tls: ssl.SSLContext) -> Iterator[int]:
    """A proxy before the server of a port: it ends TLS, and answers 403 to a connection without the header."""

    def pour(source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while received := source.recv(65536):
                target.sendall(received)
        with suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def serve(connection: socket.socket) -> None:
        with suppress(OSError), tls.wrap_socket(connection, server_side=True) as client:
            head = client.recv(65536)
            if f"{HEADER[0]}: {HEADER[1]}".lower().encode() not in head.lower():
                client.sendall(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 9\r\nConnection: close\r\n\r\nno header")
                return
            with socket.create_connection(("127.0.0.1", port)) as server:
                server.sendall(head)
                back = threading.Thread(target=pour, args=(server, client), daemon=True)
                back.start()
                pour(client, server)
                back.join()

    def listen() -> None:
        with suppress(OSError):
            while True:
                connection, _ = listener.accept()
                threading.Thread(target=serve, args=(connection,), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=listen, daemon=True).start()
        yield int(listener.getsockname()[1])
        listener.shutdown(socket.SHUT_RDWR)


@pytest.mark.matrix
@pytest.mark.parametrize("trust", ["authority", "no check"])
def test_every_command_passes_a_private_authority_a_proxy_and_tokens_against_forgery(
    trust: str, guarded: Guarded
) -> None:
    settings = PASSING | (
        {"PREFECT_API_SSL_CERT_FILE": str(guarded.authority)}
        if trust == "authority"
        else {"PREFECT_API_TLS_INSECURE_SKIP_VERIFY": "true"}
    )
    try:
        code, said = guarded.rollouts("up", **settings)
        assert code == 0, said
        code, said = guarded.rollouts("run", "--deployment", "reap", **settings)
        assert code == 0, said
        wait_until(lambda: run_is_completed(guarded, settings), what="a run", timeout_s=120.0, every_s=2.0)
        code, said = guarded.rollouts("status", **settings)
        assert code == 0 and f"server       {guarded.url.removesuffix('/api')}" in said, said
        code, said = guarded.rollouts("notify", **settings)
        assert code == 0, said
    finally:
        guarded.rollouts("down", **settings)


def test_a_promotion_by_hand_is_told_through_a_teams_server(
    guarded: Guarded,
    webhook: WebhookServer,  # noqa: F811
) -> None:
    """The command itself sends the message, by the block that the team's server keeps."""
    settings = PASSING | {"PREFECT_API_SSL_CERT_FILE": str(guarded.authority)}
    register(guarded.folder / "store", 1)
    code, said = guarded.rollouts("notify", "team", "--url-variable", "TEAM_URL", TEAM_URL=webhook.url, **settings)
    assert code == 0, said
    code, said = guarded.rollouts("models", "promote", "small-1", **settings)
    assert (code, len(said.splitlines())) == (0, 1), said
    assert [each["subject"] for each in webhook.messages] == ["rollouts", "small-1: Promoted"]


def run_is_completed(guarded: Guarded, settings: dict[str, str]) -> bool:
    """Whether the server says that a run of a tool came to its end, as Prefect's own client asks it."""
    program = """
from prefect.client.orchestration import get_client
with get_client(sync_client=True) as client:
    print([run.state_type for run in client.read_flow_runs()])
"""
    done = subprocess.run(
        [sys.executable, "-c", program], env=guarded.environment | settings, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return "COMPLETED" in done.stdout


@pytest.mark.parametrize(
    ("left_out", "said"),
    [
        ("PREFECT_API_SSL_CERT_FILE", "its certificate is not trusted"),
        ("PREFECT_CLIENT_CUSTOM_HEADERS", "headers for a proxy in PREFECT_CLIENT_CUSTOM_HEADERS"),
    ],
)
def test_what_is_missing_for_a_server_is_named_in_one_sentence(left_out: str, said: str, guarded: Guarded) -> None:
    settings = PASSING | {"PREFECT_API_SSL_CERT_FILE": str(guarded.authority)}
    del settings[left_out]
    code, output = guarded.rollouts("notify", **settings)
    assert code != 0
    assert said in output
    assert "Traceback" not in output
    assert basic_authorization(AUTH) not in output


def test_a_password_in_a_profile_is_that_of_the_server(guarded: Guarded) -> None:
    home = guarded.folder / "profile"
    home.mkdir()
    (home / "profiles.toml").write_text(
        f'active = "team"\n\n[profiles.team]\nPREFECT_API_AUTH_STRING = "{AUTH}"\n'
        f'PREFECT_API_SSL_CERT_FILE = "{guarded.authority}"\n'
        f'PREFECT_CLIENT_CUSTOM_HEADERS = \'{{"{HEADER[0]}": "{HEADER[1]}"}}\'\n'
    )
    code, output = guarded.rollouts("notify", PREFECT_HOME=str(home))
    assert code == 0, output
