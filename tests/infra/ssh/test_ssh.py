"""Pins how a node is logged in on: verified before anything is sent, refused with one sentence, found dead in time.

Without it a run waits for ever for a machine that is gone, or hands its secrets to one that is not the right one.
"""

import itertools
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import paramiko
import pytest
from paramiko.common import cMSG_DISCONNECT

import rollouts.infra.ssh.connection
from rollouts.infra.errors import (
    BannedError,
    HostKeyError,
    LoginError,
    NameUnknownError,
    NodeUnreachableError,
    PermanentInfraError,
    TransientInfraError,
)
from rollouts.infra.node import SSHAccess, SSHNode
from rollouts.infra.providers.ssh import read_access
from rollouts.infra.ssh.agents import PURPOSES
from rollouts.infra.ssh.connection import connect
from rollouts.infra.ssh.host_keys import HostKeyEvidence
from rollouts.infra.ssh.login_keys import LoginKeys
from rollouts.infra.ssh.proxy_jump import HEARTBEAT_INTERVAL_S
from rollouts.infra.ssh.ssh_session import SSHSession
from tests.infra.ssh.slow_port import slow_port
from tests.infra.ssh_server import SSHServer, fingerprint_of, known_hosts_line, make_key, running_server, unpinned

pytestmark = pytest.mark.slow


@pytest.fixture
def server(tmp_path: Path) -> Iterator[SSHServer]:
    """One that a test may disturb."""
    with running_server(tmp_path / "own-sshd") as server:
        yield server


def evidence_of(access: SSHAccess) -> HostKeyEvidence:
    connection = connect(access)
    connection.close()
    return connection.host_key_evidence


def number_of_logins(server: SSHServer) -> int:
    return (server.folder / "log").read_text().count("Accepted publickey")


def test_the_reason_why_a_key_was_believed_is_known(ssh_server: SSHServer, tmp_path: Path) -> None:
    assert evidence_of(ssh_server.access) is HostKeyEvidence.PINNED
    known_hosts = tmp_path / "known_hosts"
    known_hosts.write_text(known_hosts_line(ssh_server))
    assert evidence_of(unpinned(ssh_server.access, known_hosts)) is HostKeyEvidence.KNOWN_HOSTS
    ours = tmp_path / "ours"
    trusting = unpinned(ssh_server.access, ours, first_use_file=ours)
    assert evidence_of(trusting) is HostKeyEvidence.FIRST_USE
    assert evidence_of(trusting) is HostKeyEvidence.KNOWN_HOSTS


def test_a_wrong_or_unknown_host_key_ends_it_before_a_login(server: SSHServer, tmp_path: Path) -> None:
    with pytest.raises(HostKeyError, match="expected is SHA256:other"):
        connect(replace(server.access, host_key="SHA256:other"))
    with pytest.raises(HostKeyError, match="that key is unconfirmed"):
        connect(unpinned(server.access))
    make_key(tmp_path / "other")
    known_hosts = tmp_path / "known_hosts"
    known_hosts.write_text(known_hosts_line(server, key_file=tmp_path / "other"))
    with pytest.raises(HostKeyError, match="has another one"):
        connect(unpinned(server.access, known_hosts))
    assert number_of_logins(server) == 0


def test_a_pinned_key_is_found_among_the_hosts_other_keys(tmp_path: Path) -> None:
    make_key(tmp_path / "rsa", key_type="rsa")
    with running_server(tmp_path / "sshd", more_config=f"HostKey {tmp_path}/rsa") as server:
        access = replace(server.access, host_key=fingerprint_of(tmp_path / "rsa"))
        assert evidence_of(access) is HostKeyEvidence.PINNED
        assert evidence_of(server.access) is HostKeyEvidence.PINNED


HOST_KEY_TYPES = ("rsa", "ecdsa")


@contextmanager
def server_with_all_types(folder: Path) -> Iterator[SSHServer]:
    for key_type in HOST_KEY_TYPES:
        make_key(folder / key_type, key_type=key_type)
    lines = [f"HostKey {folder}/{key_type}" for key_type in HOST_KEY_TYPES]
    with running_server(folder / "sshd", more_config="\n".join(["LogLevel VERBOSE", *lines])) as server:
        yield server


def connections_without_login(server: SSHServer) -> int:
    """OpenSSH counts these against us, and bans us for them; the test's own look at the port is one of them."""
    return (server.folder / "log").read_text().count("Connection from") - number_of_logins(server) - 1


@pytest.mark.parametrize("key_type", HOST_KEY_TYPES)
def test_the_type_of_a_pinned_key_is_found_once_and_asked_for_at_once_by_every_later_process(
    key_type: str, tmp_path: Path
) -> None:
    with server_with_all_types(tmp_path) as server:
        fingerprint = fingerprint_of(tmp_path / key_type)
        settings = SSHNode(
            host=f"{server.access.user}@127.0.0.1:{server.port}",
            python=sys.executable,
            key_file=server.access.key_file,
            host_key=fingerprint,
        )
        evidence_of(read_access(settings, tmp_path / "store"))
        first = connections_without_login(server)
        assert first <= len(HOST_KEY_TYPES)
        for _ in range(3):  # with nothing in memory, as in another process
            assert evidence_of(read_access(settings, tmp_path / "store")) is HostKeyEvidence.PINNED
        assert connections_without_login(server) == first
        assert read_access(settings, tmp_path / "store").first_use_file == ""  # noted, and no other key is believed


def test_a_pinned_key_that_known_hosts_has_is_asked_for_at_once(tmp_path: Path) -> None:
    with server_with_all_types(tmp_path) as server:
        lines = [known_hosts_line(server, key_file=tmp_path / each) for each in HOST_KEY_TYPES]
        (tmp_path / "known_hosts").write_text("".join([known_hosts_line(server), *lines]))
        for key_type in HOST_KEY_TYPES:
            access = replace(server.access, host_key=fingerprint_of(tmp_path / key_type))
            assert evidence_of(replace(access, known_hosts=(str(tmp_path / "known_hosts"),))) is HostKeyEvidence.PINNED
        assert connections_without_login(server) == 0


def test_a_session_asks_each_further_connection_for_the_type_that_fitted(tmp_path: Path) -> None:
    with server_with_all_types(tmp_path) as server:
        access = replace(server.access, host_key=fingerprint_of(tmp_path / "rsa"))
        with SSHSession(access, python="python3", programs_dir="/unused") as session:
            session.run(["true"], timeout_s=60)
            first = connections_without_login(server)
            for _ in range(3):
                session.agents.forget(PURPOSES)
                session.run(["true"], timeout_s=60)
            session.agents.connection("bulk")
        assert connections_without_login(server) == first


@pytest.mark.parametrize("said", ["Not allowed at this time", "Exceeded MaxStartups"])
@pytest.mark.parametrize("is_reset", [False, True])
def test_a_ban_is_named_and_is_no_wrong_address(said: str, is_reset: bool, ssh_server: SSHServer) -> None:
    with banning_port(said, is_reset=is_reset) as port, pytest.raises(BannedError) as raised:
        connect(replace(ssh_server.access, port=port))
    assert f"refuses connections from this machine for now ('{said}')" in str(raised.value)
    assert "check its address" not in str(raised.value)


def test_a_ban_by_a_machine_on_the_way_is_named(ssh_server: SSHServer) -> None:
    with banning_port("Not allowed at this time") as port, pytest.raises(BannedError, match="PerSourcePenal"):
        connect(replace(ssh_server.access, proxy_jump=f"somebody@127.0.0.1:{port}"))


def test_a_session_outlasts_the_shortest_ban(ssh_server: SSHServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollouts.infra.ssh.agents.BAN_PAUSE_S", 0.5)
    with banning_port("Not allowed at this time", num_banned=3, then=ssh_server.port) as port:
        access = replace(ssh_server.access, port=port)
        with SSHSession(access, python="python3", programs_dir="/unused") as session:
            assert session.run(["echo", "here"], timeout_s=60).stdout == b"here\n"


@contextmanager
def banning_port(said: str, *, is_reset: bool = False, num_banned: int = 1000, then: int = 0) -> Iterator[int]:
    """A port of a server that bans its clients, as OpenSSH 9.8 says so; after some of them it leads to another port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            for number in itertools.count():
                try:
                    client, _ = listener.accept()
                except OSError:
                    return
                if number >= num_banned:
                    far = socket.create_connection(("127.0.0.1", then))
                    for pair in ((client, far), (far, client)):
                        threading.Thread(target=carry, args=pair, daemon=True).start()
                    continue
                if is_reset:
                    client.recv(1, socket.MSG_PEEK)  # what stays unread makes the end a reset
                client.sendall(f"{said}\r\n".encode())
                client.close()

        threading.Thread(target=answer, daemon=True).start()
        yield int(listener.getsockname()[1])
        listener.shutdown(socket.SHUT_RDWR)


def carry(near: socket.socket, far: socket.socket) -> None:
    with suppress(OSError):
        while content := near.recv(65536):
            far.sendall(content)
        far.shutdown(socket.SHUT_WR)


def test_a_key_that_is_not_authorized_is_refused_with_its_fingerprint(ssh_server: SSHServer, tmp_path: Path) -> None:
    make_key(tmp_path / "stranger")
    with pytest.raises(LoginError, match=r"cannot log in with SHA256:.*authorized_keys"):
        connect(replace(ssh_server.access, key_file=str(tmp_path / "stranger")))


def test_keys_that_cannot_be_used_are_said_before_anything_is_sent(
    ssh_server: SSHServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    make_key(tmp_path / "encrypted", passphrase="secret")
    make_key(tmp_path / "open")
    (tmp_path / "open").chmod(0o644)
    (tmp_path / "text").write_text("hello\n")
    (tmp_path / "text").chmod(0o600)
    nowhere = replace(ssh_server.access, port=1)  # nobody listens there: it is not even tried
    for name, sentence in (
        ("encrypted", "is encrypted: give it to the agent by `ssh-add"),
        ("open", r"other users may read the key .* \(mode 0644\): chmod 600 it"),
        ("text", "is not a usable private key"),
        ("missing", "cannot be read: No such file"),
    ):
        with pytest.raises(LoginError, match=sentence):
            connect(replace(nowhere, key_file=str(tmp_path / name)))


def test_no_key_at_all_is_said(ssh_server: SSHServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(LoginError, match=r"the agent and ~/\.ssh have no key: name one as node\.key_file"):
        connect(replace(ssh_server.access, key_file=""))


def test_a_host_that_does_not_listen_or_has_no_name_is_said(ssh_server: SSHServer) -> None:
    with pytest.raises(NodeUnreachableError, match=r"127\.0\.0\.1:1 does not answer \(Connection refused\)"):
        connect(replace(ssh_server.access, port=1))
    with pytest.raises(NameUnknownError, match=r"there is no host called no-such-host\.invalid"):
        connect(unpinned(replace(ssh_server.access, host="no-such-host.invalid")))
    for host in ("two..dots.invalid", f"{'long' * 20}.invalid"):
        with pytest.raises(PermanentInfraError, match=f"{host} is not a valid host name: check node.host"):
            connect(replace(ssh_server.access, host=host))


def test_a_name_that_somebody_has_answered_to_and_nobody_knows_now_is_no_mistake_in_the_settings(
    ssh_server: SSHServer, tmp_path: Path
) -> None:
    """As while a VPN is away, or on a laptop that has just woken up: a retry may help, and the job goes on."""
    away = replace(ssh_server.access, host="no-such-host.invalid")
    known_hosts = tmp_path / "known_hosts"
    known_hosts.write_text(known_hosts_line(ssh_server).replace("127.0.0.1", "no-such-host.invalid"))
    for access in (away, unpinned(away, known_hosts)):
        with pytest.raises(NodeUnreachableError, match=r"there is no host called no-such-host\.invalid"):
            connect(access)


@pytest.mark.slow
@pytest.mark.parametrize(
    "algorithm", ["Ciphers chacha20-poly1305@openssh.com", "KexAlgorithms diffie-hellman-group18-sha512"]
)
def test_a_server_with_which_we_have_nothing_in_common_is_told_what_is_missing(tmp_path: Path, algorithm: str) -> None:
    missing = "ciphers" if algorithm.startswith("Ciphers") else "kex algorithm"
    with (
        running_server(tmp_path / "sshd", more_config=algorithm) as server,
        pytest.raises(PermanentInfraError, match=rf"without a safe algorithm in common \(no acceptable {missing}\)"),
    ):
        connect(server.access)


def test_a_server_that_says_nothing_is_given_up(ssh_server: SSHServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollouts.infra.ssh.connection, "CONNECT_TIMEOUT_S", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        started = time.monotonic()
        with pytest.raises(NodeUnreachableError):
            connect(replace(ssh_server.access, port=silent.getsockname()[1]))
        assert time.monotonic() - started < 10


def test_a_node_without_the_interpreter_is_said(ssh_server: SSHServer, tmp_path: Path) -> None:
    with (
        SSHSession(ssh_server.access, python="/nowhere/python3", programs_dir=str(tmp_path)) as session,
        pytest.raises(PermanentInfraError, match=r"cannot run /nowhere/python3 .*: install Python there, or set"),
    ):
        session.run(["true"], timeout_s=10)


def test_a_server_that_hangs_is_found_by_its_silence(
    server: SSHServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert HEARTBEAT_INTERVAL_S + rollouts.infra.ssh.connection.HEARTBEAT_LIMIT_S < 60
    monkeypatch.setattr(rollouts.infra.ssh.connection, "HEARTBEAT_INTERVAL_S", 0.3)
    monkeypatch.setattr(rollouts.infra.ssh.connection, "HEARTBEAT_LIMIT_S", 1.0)
    connection = connect(server.access)
    channel = connection.open_command("sleep 60")
    server.signal_sessions(signal.SIGSTOP)
    try:
        started = time.monotonic()
        assert channel.receive(10, timeout_s=30) == b""
        assert time.monotonic() - started < 20 and not connection.is_alive
    finally:
        server.signal_sessions(signal.SIGCONT)
        connection.close()


def test_a_server_that_hangs_before_it_lets_us_in_has_not_refused_our_key(
    server: SSHServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    log_in = rollouts.infra.ssh.connection._log_in

    def hang_and_log_in(transport: Any, access: SSHAccess, keys: LoginKeys) -> str:  # Any: paramiko
        server.signal_sessions(signal.SIGSTOP)
        transport.auth_timeout = 1.0
        return log_in(transport, access, keys)

    monkeypatch.setattr(rollouts.infra.ssh.connection, "_log_in", hang_and_log_in)
    try:
        with pytest.raises(NodeUnreachableError, match="timeout"):
            connect(server.access)
    finally:
        server.signal_sessions(signal.SIGCONT)


def test_a_server_that_hangs_when_it_has_let_us_in_is_found_by_its_silence(
    server: SSHServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollouts.infra.ssh.connection, "HEARTBEAT_LIMIT_S", 1.0)
    log_in = rollouts.infra.ssh.connection._log_in

    def log_in_and_hang(transport: Any, access: SSHAccess, keys: LoginKeys) -> str:  # Any: paramiko
        file = log_in(transport, access, keys)
        server.signal_sessions(signal.SIGSTOP)
        return file

    monkeypatch.setattr(rollouts.infra.ssh.connection, "_log_in", log_in_and_hang)
    try:
        with (
            ThreadPoolExecutor(1) as pool,
            pytest.raises(NodeUnreachableError, match="accepts the login and then does not answer"),
        ):
            pool.submit(connect, server.access).result(30)
    finally:
        server.signal_sessions(signal.SIGCONT)


@pytest.mark.parametrize("command", ["head -c 3000000 | wc -c", "head -c 3000000 /dev/zero; echo 3000000"])
def test_a_slow_line_on_which_much_is_under_way_is_not_taken_for_a_dead_one(
    ssh_server: SSHServer, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setattr(rollouts.infra.ssh.connection, "HEARTBEAT_INTERVAL_S", 0.2)
    monkeypatch.setattr(rollouts.infra.ssh.connection, "HEARTBEAT_LIMIT_S", 1.0)
    with slow_port(ssh_server.access.port, bytes_per_s=1e6) as port:
        connection = connect(replace(ssh_server.access, port=port))
        channel = connection.open_command(command)
        if "|" in command:
            channel.send(bytes(3_000_000))
        received = b""
        while piece := channel.receive(1 << 20, timeout_s=30):
            received += piece
        assert received.endswith(b"3000000\n")
        connection.close()


def test_a_quiet_connection_stays_open(ssh_server: SSHServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollouts.infra.ssh.connection, "HEARTBEAT_INTERVAL_S", 0.1)
    connection = connect(ssh_server.access)
    channel = connection.open_command("sleep 2; echo done")
    assert channel.receive(10, timeout_s=20) == b"done\n"
    connection.close()


def test_a_server_that_allows_no_more_channels_is_not_a_broken_connection(tmp_path: Path) -> None:
    with running_server(tmp_path / "sshd", more_config="MaxSessions 1") as server:
        connection = connect(server.access)
        connection.open_command("sleep 60")
        with pytest.raises(TransientInfraError, match="opens no further channel now"):
            connection.open_command("true")
        assert connection.is_alive
        connection.close()


class Unwelcoming(paramiko.ServerInterface):
    """Hangs up when it is offered a key, with words that are no UTF-8."""

    def __init__(self, transport: paramiko.Transport) -> None:
        self._transport = transport

    def get_allowed_auths(self, username: str) -> str:
        return "publickey"

    def check_auth_publickey(self, username: str, key: paramiko.PKey) -> int:
        goodbye = paramiko.Message()
        goodbye.add_byte(cMSG_DISCONNECT)
        goodbye.add_int(2)
        goodbye.add_string("zu viele Schlüssel".encode("latin-1"))
        goodbye.add_string("de")
        self._transport._send_message(goodbye)
        return int(paramiko.AUTH_FAILED)


def test_a_server_may_say_goodbye_in_any_encoding(tmp_path: Path) -> None:
    for name in ("host", "ours"):
        make_key(tmp_path / name)

    def hang_up() -> None:
        connection, _ = listener.accept()
        transport = paramiko.Transport(connection)
        transport.add_server_key(paramiko.PKey.from_path(tmp_path / "host"))
        transport.start_server(server=Unwelcoming(transport))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=hang_up, daemon=True).start()
        access = SSHAccess(
            host="127.0.0.1",
            port=listener.getsockname()[1],
            user="me",
            key_file=str(tmp_path / "ours"),
            host_key=fingerprint_of(tmp_path / "host"),
        )
        with pytest.raises(LoginError, match=r"disconnected after 1 of 1 keys \(zu viele Schl.ssel\)"):
            connect(access)
