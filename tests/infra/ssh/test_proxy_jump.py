"""Pins that a machine is reached through others, as safely as without them, and that nothing of that stays.

Without it whoever sits between could answer in the machine's place, a run would wait for a password that nobody types,
or processes that hold a way open would be left.
"""

import getpass
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from rollouts.infra.errors import HostKeyError, LoginError, NameUnknownError, NodeUnreachableError, PermanentInfraError
from rollouts.infra.node import SSHAccess
from rollouts.infra.ssh.connection import connect
from rollouts.infra.ssh.proxy_jump import proxy_command
from rollouts.infra.ssh.ssh_session import SSHSession
from tests.infra.splitting import chunks_of
from tests.infra.ssh_server import SSHServer, make_key, running_server
from tests.kit.waiting import wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("ssh") is None, reason="there is no OpenSSH client here"),
]

HOST = """
Host {name}
    HostName 127.0.0.1
    Port {port}
    User {user}
    IdentityFile {key}
    IdentitiesOnly yes
    IdentityAgent none
    UserKnownHostsFile {known_hosts}
    GlobalKnownHostsFile /dev/null
"""


class Bastions:
    """Two servers that stand between us and the machine, and a configuration that knows them as outer and inner."""

    def __init__(self, servers: dict[str, SSHServer], folder: Path) -> None:
        self.servers = servers
        self.config = folder / "config of ours, 100%h"
        self.known_hosts = folder / "known_hosts"
        self.known_hosts.touch()
        for name, server in servers.items():
            with self.config.open("a") as file:
                file.write(
                    HOST.format(
                        name=name,
                        port=server.port,
                        user=getpass.getuser(),
                        key=server.client_key_file,
                        known_hosts=self.known_hosts,
                    )
                )
            key = Path(f"{server.host_key_file}.pub").read_text()
            with self.known_hosts.open("a") as file:
                file.write(f"[127.0.0.1]:{server.port} {key}")

    def before(self, access: SSHAccess, jump: str) -> SSHAccess:
        return replace(access, proxy_jump=jump, ssh_config=str(self.config))


@pytest.fixture
def bastions(tmp_path: Path) -> Iterator[Bastions]:
    with ExitStack() as stack:
        servers = {name: stack.enter_context(running_server(tmp_path / name)) for name in ("outer", "inner")}
        yield Bastions(servers, tmp_path)


def processes_with(text: str) -> list[str]:
    """Command lines of this machine that contain it."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes() if entry.name.isdigit() else b""
        except OSError:
            continue
        if text.encode() in words:
            found.append(words.replace(b"\0", b" ").decode(errors="replace"))
    return found


@pytest.mark.parametrize("near_s", [0.0, 5.0], ids=["paramiko", "openssh"])
@pytest.mark.parametrize("jump", ["outer", "outer,inner"])
def test_commands_and_files_go_through_and_nothing_stays(
    ssh_server: SSHServer, bastions: Bastions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump: str, near_s: float
) -> None:
    monkeypatch.setattr("rollouts.infra.ssh.connection._NEAR_S", near_s)
    access = bastions.before(ssh_server.access, jump)
    content = os.urandom(2 << 20)
    with SSHSession(access, python=sys.executable, programs_dir=str(tmp_path / "programs")) as session:
        came_from = session.run(["sh", "-c", "echo $SSH_CONNECTION"], timeout_s=30, may_repeat=True).stdout
        session.write_chunks(str(tmp_path), chunks_of(content))
        with session.pipe(["cat", str(tmp_path / "file")]) as chunks:
            assert b"".join(chunks) == content
        assert came_from.split()[-1] == str(access.port).encode()
        assert processes_with(str(bastions.config)), "nothing went through the client"
    for server in bastions.servers.values() if "," in jump else [bastions.servers["outer"]]:
        assert "Accepted publickey" in (server.folder / "log").read_text()
    wait_until(lambda: not processes_with(str(bastions.config)), timeout_s=20)


def test_the_machines_own_key_is_checked_from_here(ssh_server: SSHServer, bastions: Bastions, tmp_path: Path) -> None:
    other = tmp_path / "other"
    make_key(other)
    wrong = "SHA256:" + "A" * 43
    with pytest.raises(HostKeyError, match="expected is"):
        connect(replace(bastions.before(ssh_server.access, "outer"), host_key=wrong))
    wait_until(lambda: not processes_with(str(bastions.config)), timeout_s=20)


def test_what_keeps_us_from_getting_through_is_one_sentence(
    ssh_server: SSHServer, bastions: Bastions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    access = bastions.before(ssh_server.access, "outer")
    with pytest.raises(NodeUnreachableError, match=r"through outer: .*(refused|closed|forwarding failed)"):
        connect(replace(access, port=1))
    nowhere = replace(access, proxy_jump="no-such-host.invalid")
    with pytest.raises(NodeUnreachableError, match="Could not resolve hostname no-such-host"):
        connect(nowhere)  # whose key is known, so it was found before
    with pytest.raises(NameUnknownError, match="Could not resolve hostname no-such-host"):
        connect(replace(nowhere, host_key=""))
    known = bastions.known_hosts.read_text()
    bastions.known_hosts.write_text("")
    with pytest.raises(LoginError, match=r"no way through outer \(Host key verification failed"):
        connect(access)
    bastions.known_hosts.write_text(known)
    authorized = bastions.servers["outer"].folder / "authorized_keys"
    authorized.write_text("")
    with pytest.raises(LoginError, match=r"no way through outer \(.*Permission denied"):
        connect(access)
    bastions.servers["outer"].stop()
    with pytest.raises(NodeUnreachableError, match=r"through outer: .*refused"):
        connect(access)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(PermanentInfraError, match="needs OpenSSH's client"):
        connect(access)


def test_a_way_that_breaks_is_a_connection_that_broke(
    ssh_server: SSHServer, bastions: Bastions, tmp_path: Path
) -> None:
    access = bastions.before(ssh_server.access, "outer")
    with SSHSession(access, python=sys.executable, programs_dir=str(tmp_path / "programs")) as session:
        session.run(["true"], timeout_s=30, may_repeat=True)
        bastions.servers["outer"].signal_sessions(signal.SIGKILL)
        bastions.servers["outer"].stop()
        with pytest.raises(NodeUnreachableError):
            session.run(["true"], timeout_s=30)
        bastions.servers["outer"].start()
        session.run(["true"], timeout_s=30, may_repeat=True)


def test_addresses_are_words_of_the_command_line() -> None:
    access = SSHAccess(host="fe80::1", port=2222, user="me", proxy_jump="a,me@[::1]:2200", ssh_config="~/x")
    words = proxy_command(access)
    assert words[words.index("-W") + 1] == "[fe80::1]:2222"
    (before,) = [word for word in words if word.startswith("ProxyCommand=")]
    assert before.endswith("-W '[%h]:%p' ssh://a") and words[-1] == "ssh://me@[::1]:2200"
    assert words[words.index("-F") + 1] == str(Path("~/x").expanduser())
