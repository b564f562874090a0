"""How we reach servers that ban clients: OpenSSH 9.8 and newer, with the default PerSourcePenalties.

Such a server bans an address for 16 s or more after four failed logins, or after sixteen connections without a login.
Without these tests our own connections could cause a ban, or a ban could look like a wrong address.
"""

from __future__ import annotations

import getpass
import shutil
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from rollouts.infra.errors import BannedError, HostKeyError, InfraError, LoginError
from rollouts.infra.node import SSHAccess, SSHNode
from rollouts.infra.providers.ssh import read_access
from rollouts.infra.ssh.connection import connect
from rollouts.infra.ssh.host_keys import HostKeyEvidence
from rollouts.infra.ssh.ssh_session import SSHSession
from tests.infra.ssh_server import SSHServer, find_banning_sshd, fingerprint_of, make_key, running_server

pytestmark = [pytest.mark.slow, pytest.mark.matrix]

BAN = "activating ipv4 penalty"
"""What the server logs when it bans an address."""
MOST_FAILURES = 20


@pytest.fixture
def server(tmp_path: Path) -> Iterator[SSHServer]:
    """A server with keys of all types that bans as OpenSSH does by default."""
    sshd = find_banning_sshd()
    if sshd is None:
        pytest.skip("no sshd of OpenSSH 9.8 or newer: run `make newer-sshd`, or set ROLLOUTS_TEST_SSHD to one")
    for key_type in ("rsa", "ecdsa", "other"):
        make_key(tmp_path / key_type, key_type="ed25519" if key_type == "other" else key_type)
    config = f"LogLevel VERBOSE\nHostKey {tmp_path}/rsa\nHostKey {tmp_path}/ecdsa"
    with running_server(tmp_path / "sshd", more_config=config, sshd=sshd) as server:
        yield server


def log_of(server: SSHServer) -> str:
    return (server.folder / "log").read_text()


def log_in(access: SSHAccess) -> HostKeyEvidence:
    connection = connect(access)
    connection.close()
    return connection.host_key_evidence


def fail_until_banned(access: SSHAccess, failure: type[InfraError]) -> BannedError:
    """The error that ends a row of failures."""
    for _ in range(MOST_FAILURES):
        try:
            log_in(access)
        except BannedError as error:
            return error
        except failure:
            continue
    raise AssertionError(f"no ban after {MOST_FAILURES} failures")


def get_banned(server: SSHServer) -> None:
    """Connect without a login until the server bans this address."""
    for _ in range(MOST_FAILURES):
        socket.create_connection(("127.0.0.1", server.port)).close()
    time.sleep(1.0)  # the server notices the ends of the connections
    assert BAN in log_of(server)


@pytest.mark.parametrize("key_type", ["rsa", "ecdsa"])
def test_logins_with_a_pinned_key_of_any_type_cause_no_ban(key_type: str, server: SSHServer, tmp_path: Path) -> None:
    node = SSHNode(
        host=f"{server.access.user}@127.0.0.1:{server.port}",
        python=sys.executable,
        key_file=server.access.key_file,
        host_key=fingerprint_of(tmp_path / key_type),
    )
    for _ in range(20):  # each as in a process of its own
        assert log_in(read_access(node, tmp_path / "store")) is HostKeyEvidence.PINNED
    assert BAN not in log_of(server)
    assert log_of(server).count("[preauth]") <= 2, "only the first login looks for the key's type"


@pytest.mark.parametrize("failure", [LoginError, HostKeyError])
def test_a_ban_after_failures_is_named_and_is_no_wrong_address(
    failure: type[InfraError], server: SSHServer, tmp_path: Path
) -> None:
    wrong_login = replace(server.access, key_file=str(tmp_path / "other"))
    wrong_host = replace(server.access, host_key="SHA256:other")
    said = str(fail_until_banned(wrong_login if failure is LoginError else wrong_host, failure))
    assert BAN in log_of(server)
    assert "refuses connections from this machine for now ('Not allowed at this time')" in said
    assert "check its address" not in said
    with pytest.raises(BannedError):  # also with the right keys
        log_in(server.access)


def test_a_session_outlasts_a_ban(server: SSHServer, tmp_path: Path) -> None:
    get_banned(server)
    with SSHSession(server.access, python=sys.executable, programs_dir=str(tmp_path / "programs")) as session:
        assert session.run(["echo", "here"], timeout_s=60).stdout == b"here\n"
    assert "drop connection" in log_of(server)


@pytest.mark.skipif(shutil.which("ssh") is None, reason="there is no OpenSSH client here")
def test_a_ban_by_a_jump_host_is_named_and_outlasted(server: SSHServer, tmp_path: Path) -> None:
    with running_server(tmp_path / "far") as far:
        access = through(server, far.access, tmp_path)
        get_banned(server)
        with pytest.raises(BannedError, match=r"through .*kex_exchange_identification.*PerSourcePenaltyExemptList"):
            log_in(access)
        with SSHSession(access, python=sys.executable, programs_dir=str(tmp_path / "programs")) as session:
            assert session.run(["echo", "here"], timeout_s=60).stdout == b"here\n"


def through(jump: SSHServer, access: SSHAccess, folder: Path) -> SSHAccess:
    """The same login with a server as the jump host, whose keys the client finds in a configuration of its own."""
    key = Path(f"{jump.host_key_file}.pub").read_text()
    (folder / "known_hosts").write_text(f"[127.0.0.1]:{jump.port} {key}")
    (folder / "config").write_text(
        f"Host *\nIdentityFile {jump.client_key_file}\nIdentitiesOnly yes\nIdentityAgent none\n"
        f"UserKnownHostsFile {folder}/known_hosts\n"
    )
    return replace(access, proxy_jump=f"{getpass.getuser()}@127.0.0.1:{jump.port}", ssh_config=str(folder / "config"))
