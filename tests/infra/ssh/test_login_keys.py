"""Pins with which keys of ours a machine is logged in to: those of a variable, of files, and of the agent.

Without it a machine is not let in on whose key was saved as a secret, or a message of a failed login shows the key; or
a login fails that `ssh` makes, because of a key that nobody meant.
"""

import base64
import getpass
import os
import re
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import dsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from rollouts.infra.chunks import Chunk
from rollouts.infra.errors import KeyAgentError, LoginError, PermanentInfraError
from rollouts.infra.node import SSHAccess
from rollouts.infra.ssh.connection import connect
from rollouts.infra.ssh.login_keys import load_keys, read_key_variable, read_public_key, require_login_key
from rollouts.infra.ssh.ssh_session import SSHSession
from tests.infra.ssh_agent import give_to_agent, running_agent
from tests.infra.ssh_server import SSHServer, make_key, running_server

VARIABLE = "ROLLOUTS_SSH_KEY"


@pytest.mark.parametrize("key_type", ["ed25519", "ecdsa", "rsa"])
@pytest.mark.parametrize(
    "mangle",
    [
        lambda text: text,
        lambda text: text.strip(),
        lambda text: text.replace("\n", " "),  # what a field of one line makes of it
        lambda text: text.replace("\n", ""),
        lambda text: text.replace("\n", "\\n"),
        lambda text: text.replace("\n", "\r\n"),
    ],
    ids=["as it is", "stripped", "spaces", "joined", "escaped", "windows"],
)
def test_a_key_of_every_type_is_read_however_its_lines_arrived(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key_type: str, mangle: Callable[[str], str]
) -> None:
    make_key(tmp_path / "key", key_type=key_type)
    monkeypatch.setenv(VARIABLE, mangle((tmp_path / "key").read_text()))
    public = " ".join((tmp_path / "key.pub").read_text().split()[:2])
    assert read_public_key(key_file="", key_variable=VARIABLE) == public
    assert read_public_key(key_file=str(tmp_path / "key"), key_variable="") == public


def test_what_cannot_be_used_is_said_without_repeating_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(PermanentInfraError, match=r"is not set: export it with the private key .* run\.credentials"):
        read_key_variable(VARIABLE)
    make_key(tmp_path / "encrypted", passphrase="passphrase")
    make_key(tmp_path / "key")
    encrypted, key = (tmp_path / "encrypted").read_text(), (tmp_path / "key").read_text()
    for text, reason in (
        (encrypted, "is encrypted"),
        ("hunter2", "does not contain a usable private key"),
        (key[:200], "does not contain a usable private key"),
    ):
        monkeypatch.setenv(VARIABLE, text)
        with pytest.raises(PermanentInfraError, match=reason) as refusal:
            read_key_variable(VARIABLE)
        assert not any(line in str(refusal.value) for line in text.splitlines()[1:-1] or [text])


def test_only_the_public_half_of_a_key_is_read(tmp_path: Path) -> None:
    make_key(tmp_path / "key")
    assert re.fullmatch(
        r"ssh-ed25519 [A-Za-z0-9+/=]+", read_public_key(key_file=str(tmp_path / "key"), key_variable="")
    )
    with pytest.raises(PermanentInfraError, match="ssh-keygen"):
        read_public_key(key_file=str(tmp_path / "none"), key_variable="")
    (tmp_path / "odd.pub").write_text("-----BEGIN OPENSSH PRIVATE KEY-----\n")
    with pytest.raises(PermanentInfraError, match="is not a public key"):
        read_public_key(key_file=str(tmp_path / "odd"), key_variable="")


def test_a_login_takes_the_key_of_the_variable_and_no_other(
    ssh_server: SSHServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    access = replace(ssh_server.access, key_file="", key_variable=VARIABLE)
    monkeypatch.setenv(VARIABLE, ssh_server.client_key_file.read_text())
    connect(access).close()
    monkeypatch.setenv(VARIABLE, ssh_server.host_key_file.read_text())
    with pytest.raises(LoginError, match="cannot log in with"):
        connect(access)
    monkeypatch.delenv(VARIABLE)
    with pytest.raises(LoginError, match=f"node.key_variable {VARIABLE} is not set"):
        load_keys(replace(access, key_file=str(ssh_server.client_key_file)))


def test_a_key_variable_comes_before_a_key_file(ssh_server: SSHServer, monkeypatch: pytest.MonkeyPatch) -> None:
    access: SSHAccess = replace(ssh_server.access, key_file="/nowhere", key_variable=VARIABLE)
    monkeypatch.setenv(VARIABLE, ssh_server.client_key_file.read_text())
    [key] = load_keys(access).keys
    assert key.file == ""


def security_key() -> str:
    """What `ssh-keygen -t ed25519-sk` writes: where the key lies on the device that has it."""

    def string(content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + content

    public = string(b"sk-ssh-ed25519@openssh.com") + string(os.urandom(32)) + string(b"ssh:")
    private = 2 * os.urandom(1) * 4 + public + b"\1" + string(os.urandom(48)) + string(b"") + string(b"me")
    private += bytes(range(1, 1 + -len(private) % 8))
    head = b"openssh-key-v1\0" + string(b"none") + string(b"none") + string(b"") + struct.pack(">I", 1)
    body = base64.encodebytes(head + string(public) + string(private)).decode()
    return f"-----BEGIN OPENSSH PRIVATE KEY-----\n{body}-----END OPENSSH PRIVATE KEY-----\n"


def old_key() -> str:
    encoding = (Encoding.PEM, PrivateFormat.TraditionalOpenSSL, NoEncryption())
    return dsa.generate_private_key(1024).private_bytes(*encoding).decode()


@pytest.mark.parametrize("make", [security_key, old_key])
def test_a_key_of_a_type_that_cannot_be_used_is_said_to_be_one(tmp_path: Path, make: Callable[[], str]) -> None:
    (tmp_path / "key").write_text(make())
    (tmp_path / "key").chmod(0o600)
    with pytest.raises(LoginError, match=r"key has an unsupported type of key: make one by"):
        require_login_key(key_file=str(tmp_path / "key"), key_variable="")


@pytest.mark.parametrize("answer", [b"", b"\0\0\0\1\5"], ids=["breaks off", "refuses"])
def test_an_agent_that_does_not_work_is_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: bytes
) -> None:
    def answer_one() -> None:
        client, _ = agent.accept()
        with client:
            client.recv(100)
            client.sendall(answer)

    make_key(tmp_path / "key")
    monkeypatch.setenv("SSH_AUTH_SOCK", str(tmp_path / "agent"))
    with socket.socket(socket.AF_UNIX) as agent:
        agent.bind(str(tmp_path / "agent"))
        agent.listen()
        threading.Thread(target=answer_one, daemon=True).start()
        access = SSHAccess(host="node", port=22, user="me", key_file=str(tmp_path / "key"), host_key="", known_hosts=())
        [key] = load_keys(access).keys
    assert key.file == str(tmp_path / "key")


def test_a_usual_key_that_cannot_be_used_does_not_keep_another_from_being_offered(
    ssh_server: SSHServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".ssh").mkdir()
    access = replace(ssh_server.access, key_file="")
    make_key(tmp_path / ".ssh" / "id_rsa", key_type="rsa", passphrase="passphrase")
    with pytest.raises(LoginError, match="id_rsa is encrypted"):
        connect(access)
    make_key(tmp_path / ".ssh" / "id_ed25519")
    with pytest.raises(LoginError, match=r"cannot log in with SHA256:\S+: .*; not tried: .*id_rsa is encrypted"):
        connect(access)
    (tmp_path / ".ssh" / "id_ed25519").write_bytes(ssh_server.client_key_file.read_bytes())
    connect(access).close()


@pytest.fixture
def ssh_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An agent that has nothing yet; `ssh-add` knows it."""
    with running_agent(tmp_path / "ssh-agent") as path:
        monkeypatch.setenv("SSH_AUTH_SOCK", str(path))
        yield path


@pytest.mark.slow
@pytest.mark.usefixtures("ssh_agent")
@pytest.mark.parametrize("there", ["encrypted", "encrypted.pub", "both", "named by its public half"])
def test_a_key_that_the_agent_has_is_found_by_whatever_is_here_of_it(
    ssh_server: SSHServer, tmp_path: Path, there: str
) -> None:
    """As OpenSSH finds those of hardware and of password managers, of which there is a public half alone."""
    key = tmp_path / "encrypted"
    make_key(key, passphrase="passphrase")
    give_to_agent(key, tmp_path, passphrase="passphrase")
    name = "encrypted.pub" if there == "named by its public half" else "encrypted"
    for path in (key, Path(f"{key}.pub")):
        if there in ("encrypted", "encrypted.pub") and path.name != there:
            path.unlink()
    [found] = load_keys(replace(ssh_server.access, key_file=str(tmp_path / name))).keys
    assert found.file == "" and found.key.sign_ssh_data(b"challenge"), "the agent's"


def test_a_public_key_is_not_taken_for_a_private_one_that_others_may_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    make_key(tmp_path / "key")
    access = SSHAccess(host="node", port=22, user="me", key_file=f"{tmp_path / 'key'}.pub")
    with pytest.raises(LoginError, match=r"key\.pub is a public key, and the SSH agent does not have the private one"):
        load_keys(access)


@pytest.mark.slow
@pytest.mark.usefixtures("ssh_agent")
def test_a_server_that_hangs_up_because_of_too_many_keys_is_not_one_that_does_not_answer(
    ssh_server: SSHServer, tmp_path: Path
) -> None:
    for number in range(7):
        make_key(tmp_path / f"key {number}")
        give_to_agent(tmp_path / f"key {number}", tmp_path)
    with pytest.raises(
        LoginError, match=r"disconnected after \d of \d+ keys \(Too many authentication failures.*\): name the right"
    ):
        connect(replace(ssh_server.access, key_file=""))


@pytest.mark.slow
@pytest.mark.parametrize("of_others", [True, False])
def test_a_key_with_a_certificate_is_offered_with_it_and_alone(tmp_path: Path, of_others: bool) -> None:
    for name in ("authority", "other authority", "key"):
        make_key(tmp_path / name)
    by = tmp_path / ("other authority" if of_others else "authority")
    sign = ["ssh-keygen", "-q", "-s", str(by), "-I", "a test", "-n", getpass.getuser(), str(tmp_path / "key.pub")]
    subprocess.run(sign, check=True)
    config = f'TrustedUserCAKeys "{tmp_path / "authority.pub"}"'
    with running_server(tmp_path / "sshd", more_config=config) as server:
        if of_others:
            (server.folder / "authorized_keys").write_bytes((tmp_path / "key.pub").read_bytes())
        access = replace(server.access, key_file=str(tmp_path / "key"))
        connect(access).close()
        with SSHSession(access, python=sys.executable, programs_dir=str(tmp_path)) as session:
            session.write_chunks(str(tmp_path), [Chunk("written", 0, [b"content"])])
            assert session.agents.may_use_openssh, "OpenSSH's client does the same"


@pytest.mark.slow
@pytest.mark.usefixtures("ssh_agent")
@pytest.mark.parametrize("key_type", ["ed25519", "ecdsa", "rsa"])
@pytest.mark.parametrize("named", ["nothing", "private", "public"])
def test_a_certificate_that_the_agent_has_is_offered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key_type: str, named: str
) -> None:
    """As those are that a company's login gives for a day."""
    monkeypatch.setenv("HOME", str(tmp_path))
    make_key(tmp_path / "authority")
    make_key(tmp_path / "key", key_type=key_type, passphrase="passphrase")
    sign = ["ssh-keygen", "-q", "-s", str(tmp_path / "authority"), "-I", "a test", "-n", getpass.getuser()]
    subprocess.run([*sign, str(tmp_path / "key.pub")], check=True)
    give_to_agent(tmp_path / "key", tmp_path, passphrase="passphrase")
    if named == "nothing":  # the certificate alone is there
        (tmp_path / "key-cert.pub").unlink()
        subprocess.run(["ssh-add", "-q", "-d", str(tmp_path / "key.pub")], check=True)
    key_file = {"nothing": "", "private": str(tmp_path / "key"), "public": str(tmp_path / "key.pub")}[named]
    with running_server(tmp_path / "sshd", more_config=f"TrustedUserCAKeys {tmp_path / 'authority.pub'}") as server:
        connect(replace(server.access, key_file=key_file)).close()


@pytest.mark.slow
@pytest.mark.usefixtures("ssh_agent")
def test_a_key_with_which_the_agent_does_not_sign_is_passed_over_and_said(
    ssh_server: SSHServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one is that a person has to allow each time, and nobody sits there."""
    monkeypatch.setenv("HOME", str(tmp_path))
    make_key(tmp_path / "guarded")
    give_to_agent(tmp_path / "guarded", tmp_path, "-c")
    access = replace(ssh_server.access, key_file="")
    with pytest.raises(KeyAgentError, match=r"no login at \S+: the SSH agent refuses to sign with \S+: unlock it"):
        connect(access)
    make_key(tmp_path / "of nobody")
    give_to_agent(tmp_path / "of nobody", tmp_path)
    with pytest.raises(
        KeyAgentError, match=r"cannot log in with SHA256:\S+: .*; not tried: the SSH agent refuses to sign"
    ):
        connect(access)
    give_to_agent(ssh_server.client_key_file, tmp_path)
    connect(access).close()


@pytest.mark.slow
def test_an_agent_whose_person_does_not_come_is_not_taken_for_a_machine_that_does_not_answer(
    ssh_server: SSHServer, ssh_agent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("rollouts.infra.ssh.connection.SIGNING_TIMEOUT_S", 1.0)
    give_to_agent(ssh_server.client_key_file, tmp_path)
    is_over = threading.Event()

    def list_keys_alone() -> None:
        client, _ = waiting.accept()
        with client, socket.socket(socket.AF_UNIX) as agent:
            agent.connect(str(ssh_agent))
            agent.sendall(client.recv(100))
            client.sendall(agent.recv(10_000))
            is_over.wait(30)

    with socket.socket(socket.AF_UNIX) as waiting:
        waiting.bind(str(tmp_path / "waiting"))
        waiting.listen()
        threading.Thread(target=list_keys_alone, daemon=True).start()
        access = replace(ssh_server.access, key_file="", agent=str(tmp_path / "waiting"))
        with pytest.raises(KeyAgentError, match=r"the SSH agent did not sign with SHA256:\S+ within 1 s: confirm its"):
            connect(access)
        is_over.set()


@pytest.mark.slow
@pytest.mark.usefixtures("ssh_agent")
def test_a_comment_of_a_key_may_be_in_any_encoding(
    ssh_server: SSHServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    key = tmp_path / "key"
    key.write_bytes(ssh_server.client_key_file.read_bytes())
    key.chmod(0o600)
    subprocess.run(["ssh-keygen", "-q", "-c", "-C", "müller".encode("latin-1"), "-f", str(key)], check=True)
    give_to_agent(key, tmp_path)
    for named in ("", str(key), f"{key}.pub"):
        connect(replace(ssh_server.access, key_file=named)).close()
    assert read_public_key(key_file=str(key), key_variable="").startswith("ssh-ed25519 ")


@pytest.mark.slow
def test_a_server_that_wants_more_than_a_key_is_said_to(tmp_path: Path) -> None:
    with (
        running_server(tmp_path / "sshd", more_config="AuthenticationMethods publickey,publickey") as server,
        pytest.raises(LoginError, match="accepts our key, but also requires publickey"),
    ):
        connect(server.access)
