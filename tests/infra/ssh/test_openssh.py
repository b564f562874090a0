"""Pins that files that go through the installed OpenSSH client are as safe as those that go through our own connection.

Without it the client would believe another host, read somebody's configuration, or fail where paramiko would not.
"""

import logging
import os
import resource
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from rollouts.infra.errors import NodeUnreachableError
from rollouts.infra.node import SSHAccess
from rollouts.infra.ssh.connection import connect
from rollouts.infra.ssh.openssh import OpenSSH
from rollouts.infra.ssh.proxy_jump import HEARTBEAT_INTERVAL_S, NUM_HEARTBEATS
from rollouts.infra.ssh.ssh_session import SSHSession
from tests.infra.shell_jobs import is_alive, read_pid
from tests.infra.splitting import chunks_of
from tests.infra.ssh_server import SSHServer, running_server
from tests.kit.waiting import wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("ssh") is None, reason="there is no OpenSSH client here"),
]

CLIENT = """#!/bin/sh
for word in "$@"; do printf '%s\\n' "$word" >> {log}; done
{action}
"""


@pytest.fixture(autouse=True)
def _near(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine, however busy it is."""
    monkeypatch.setattr("rollouts.infra.ssh.connection._NEAR_S", 5.0)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[SSHServer]:
    """One that a test may disturb."""
    with running_server(tmp_path / "own-sshd") as server:
        yield server


def session_on(access: SSHAccess, tmp_path: Path) -> SSHSession:
    return SSHSession(access, python=sys.executable, programs_dir=str(tmp_path / "programs"))


def wrap_client(folder: Path, monkeypatch: pytest.MonkeyPatch, *, action: str = "") -> Path:
    """Stand in for the client; returns the file with the words of its command lines."""
    folder.mkdir()
    script = CLIENT.format(log=folder / "words", action=action or f'exec {shutil.which("ssh")} "$@"')
    (folder / "ssh").write_text(script)
    (folder / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder / "words"


def test_a_file_goes_through_the_client_which_is_told_everything_that_counts(
    ssh_server: SSHServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = wrap_client(tmp_path / "bin", monkeypatch)
    content = os.urandom(3 << 20)
    with session_on(ssh_server.access, tmp_path) as session:
        for _ in range(2):
            session.write_chunks(str(tmp_path), chunks_of(content))
        with session.pipe(["cat", str(tmp_path / "file")]) as chunks:
            assert b"".join(chunks) == content
    said = words.read_text().splitlines()
    said = said[said.index("-F") :]  # it may be asked before what it can
    assert said[:2] == ["-F", "none"] and said.count("-F") == 1, "one login for all files"
    needed = {"StrictHostKeyChecking=yes", "BatchMode=yes", "IdentityAgent=none", "IdentitiesOnly=yes"}
    assert needed <= set(said) and "PasswordAuthentication=no" in said and "ForwardAgent=no" in said


def test_the_client_believes_no_other_key_than_the_one_that_was_believed(
    ssh_server: SSHServer, server: SSHServer
) -> None:
    believed = connect(ssh_server.access)
    client = OpenSSH(replace(ssh_server.access, port=server.port), believed)
    channel = client.open_command("echo let in")
    assert channel.receive(100) == b"" and channel.exit_code() is None
    assert b"Host key verification failed" in channel.receive_stderr()
    assert "Accepted" not in (server.folder / "log").read_text()
    channel.close()
    client.close()
    believed.close()


def test_a_key_exchange_is_asked_for_that_takes_no_time(
    ssh_server: SSHServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = wrap_client(tmp_path / "bin", monkeypatch)
    with session_on(ssh_server.access, tmp_path) as session:
        session.write_chunks(str(tmp_path), chunks_of(b"content"))
    [wanted] = [word for word in words.read_text().splitlines() if word.startswith("KexAlgorithms=")]
    assert wanted.startswith("KexAlgorithms=^") and wanted.endswith("curve25519-sha256")


def test_a_server_that_has_none_of_the_fast_key_exchanges_is_logged_in_to(tmp_path: Path) -> None:
    config = "KexAlgorithms ecdh-sha2-nistp384"
    with (
        running_server(tmp_path / "sshd", more_config=config) as server,
        session_on(server.access, tmp_path) as session,
    ):
        session.write_chunks(str(tmp_path), chunks_of(b"content"))
        assert session.agents.may_use_openssh
    assert (tmp_path / "file").read_bytes() == b"content"


def test_a_client_that_does_not_say_what_it_can_is_told_of_no_key_exchange(
    ssh_server: SSHServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    action = f'[ "$1" = -Q ] && exit 1; exec {shutil.which("ssh")} "$@"'
    words = wrap_client(tmp_path / "bin", monkeypatch, action=action)
    with session_on(ssh_server.access, tmp_path) as session:
        session.write_chunks(str(tmp_path), chunks_of(b"content"))
    assert "KexAlgorithms" not in words.read_text() and (tmp_path / "file").read_bytes() == b"content"


def test_a_key_file_may_have_any_name(
    ssh_server: SSHServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    words = wrap_client(tmp_path / "bin", monkeypatch)
    key = tmp_path / """it's 100%h ${HOME} "the" key \\ """
    shutil.copy2(ssh_server.client_key_file, key)
    with session_on(replace(ssh_server.access, key_file=str(key)), tmp_path) as session:
        session.write_chunks(str(tmp_path), chunks_of(b"content"))
    assert (tmp_path / "file").read_bytes() == b"content"
    assert words.exists() and not caplog.records


@pytest.mark.parametrize("action", ["echo no such option >&2; exit 255", "exec sleep 0", "kill -9 $$"])
def test_a_client_that_fails_is_replaced_by_our_own_connection(
    ssh_server: SSHServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    action: str,
) -> None:
    words = wrap_client(tmp_path / "bin", monkeypatch, action=action)
    with caplog.at_level(logging.WARNING), session_on(ssh_server.access, tmp_path) as session:
        for content in (b"one", b"two"):
            session.write_chunks(str(tmp_path), chunks_of(content))
            assert (tmp_path / "file").read_bytes() == content
    assert "files use our own connection" in caplog.text
    assert words.read_text().splitlines().count("-F") == 1, "it is not tried again and again"


def test_a_large_file_reaches_a_distant_node_whose_client_fails(
    far_session: SSHSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollouts.infra.ssh.connection._NEAR_S", 0.005)
    wrap_client(tmp_path / "bin", monkeypatch, action="exit 255")
    content = os.urandom(1 << 20)
    far_session.write_chunks(str(tmp_path), chunks_of(content * 32))
    assert (tmp_path / "file").read_bytes() == content * 32


def test_commands_that_were_started_at_once_all_end_with_the_client(
    ssh_server: SSHServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrap_client(tmp_path / "bin", monkeypatch, action="exec sleep 600")
    believed = connect(ssh_server.access)
    client = OpenSSH(ssh_server.access, believed)
    with ThreadPoolExecutor(16) as threads:
        channels = list(threads.map(client.open_command, ["true"] * 64))
    client.close()
    wait_until(lambda: all(channel.has_ended for channel in channels))
    for channel in channels:
        channel.close()
    believed.close()


def test_a_client_is_heard_also_where_more_than_a_thousand_files_are_open(ssh_server: SSHServer) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    believed = connect(ssh_server.access)
    client = OpenSSH(ssh_server.access, believed)
    taken = [os.dup(0) for _ in range(1100)]
    try:
        channel = client.open_command("echo up; sleep 60")
        assert channel.receive(100, timeout_s=30) == b"up\n"
        with pytest.raises(TimeoutError):
            channel.receive(100, timeout_s=0.1)
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    client.close()
    channel.close()
    believed.close()


def test_without_a_client_our_own_connection_does_it(
    ssh_server: SSHServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    access = ssh_server.access
    monkeypatch.setenv("PATH", str(tmp_path))
    with session_on(access, tmp_path) as session:
        session.write_chunks(str(tmp_path), chunks_of(b"content"))
    assert (tmp_path / "file").read_bytes() == b"content"


def test_what_a_distant_node_sends_does_not_go_through_the_client(
    far_session: SSHSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollouts.infra.ssh.connection._NEAR_S", 0.005)
    words = wrap_client(tmp_path / "bin", monkeypatch)
    far_session.write_chunks(str(tmp_path), chunks_of(b"content"))
    assert (tmp_path / "file").read_bytes() == b"content"
    words.unlink()  # it was asked to send
    with far_session.pipe(["cat", str(tmp_path / "file")]) as chunks:
        assert b"".join(chunks) == b"content"
    assert not words.exists()


def test_a_server_that_hangs_is_found_by_its_silence(
    server: SSHServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert HEARTBEAT_INTERVAL_S * (NUM_HEARTBEATS + 1) < 60
    monkeypatch.setattr("rollouts.infra.ssh.openssh.HEARTBEAT_INTERVAL_S", 1.0)
    session = session_on(server.access, tmp_path)
    with session, pytest.raises(NodeUnreachableError), session.pipe(["sh", "-c", "echo up; sleep 60"]) as chunks:
        assert next(chunks) == b"up\n"
        server.signal_sessions(signal.SIGSTOP)
        try:
            started = time.monotonic()
            next(chunks)
        finally:
            assert time.monotonic() - started < 30
            server.signal_sessions(signal.SIGKILL)


def test_leaving_the_session_ends_a_transfer_of_another_thread(ssh_server: SSHServer, tmp_path: Path) -> None:
    ended: list[BaseException] = []

    def read() -> None:
        try:
            with session.pipe(["sh", "-c", f"echo $$ > {tmp_path}/pid; sleep 60"]) as chunks:
                list(chunks)
        except NodeUnreachableError as error:
            ended.append(error)

    with session_on(ssh_server.access, tmp_path) as session:
        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        pid = read_pid(tmp_path / "pid")
    reader.join(20)
    assert len(ended) == 1
    wait_until(lambda: not is_alive(pid))
