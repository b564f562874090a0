"""Pins that a machine is called by the name that OpenSSH's configuration has for it, and checked as any other.

Without it whoever has a `~/.ssh/config` would repeat it here, or reach another machine than their own `ssh` does.
"""

import getpass
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from rollouts.infra.errors import HostKeyError, LoginError, PermanentInfraError
from rollouts.infra.node import SSHNode
from rollouts.infra.providers.ssh import reach_machine, read_access
from rollouts.infra.ssh.ssh_config import read_ssh_config
from tests.infra.ssh_agent import give_to_agent, running_agent
from tests.infra.ssh_server import SSHServer, fingerprint_of, make_key, running_server

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("ssh") is None, reason="there is no OpenSSH client here"),
]


def write(folder: Path, *lines: str) -> str:
    """The path of a configuration that says this about a machine called box."""
    path = folder / "config of ours"
    path.write_text("\n".join(["Host box", *(f"    {line}" for line in lines), ""]))
    return str(path)


def node(config: str, **settings: object) -> SSHNode:
    given = {"host": "box", "python": "/usr/bin/python3", "ssh_config": config, "root": "/tmp/rollouts"}
    return SSHNode.model_validate({**given, **settings})


def test_a_name_stands_for_what_the_configuration_says_and_settings_come_before_it(tmp_path: Path) -> None:
    make_key(tmp_path / "key")
    config = write(
        tmp_path,
        *("HostName 10.0.0.7", "Port 2222", "User me", f"IdentityFile {tmp_path / 'key'}", "ProxyJump a@b,c:2200"),
        f"UserKnownHostsFile {tmp_path / 'known'} {tmp_path / 'more'}",
        f"GlobalKnownHostsFile {tmp_path / 'of_all'}",
    )
    access = read_access(node(config), tmp_path)
    assert (access.user, access.host, access.port) == ("me", "10.0.0.7", 2222)
    assert (access.key_file, access.proxy_jump) == (str(tmp_path / "key"), "a@b,c:2200")
    files = tuple(str(tmp_path / name) for name in ("known", "more", "of_all", "known_hosts"))
    assert access.known_hosts == files and access.ssh_config == config
    own = read_access(node(config, key_file="/k", known_hosts="/h", proxy_jump="d"), tmp_path)
    assert (own.key_file, own.proxy_jump) == ("/k", "d") and own.known_hosts == ("/h", str(tmp_path / "known_hosts"))
    assert read_access(node(config, key_variable="ROLLOUTS_SSH_KEY"), tmp_path).key_file == ""


def test_all_keys_that_a_configuration_names_are_tried_whatever_they_are_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("OUR_KEYS", str(tmp_path))
    (tmp_path / ".ssh").mkdir()
    there = [tmp_path / name for name in (".ssh/id_rsa_gpu", "box-me@10.0.0.7", "100%", ".ssh/of_home", "of_agent.pub")]
    for path in there:
        path.touch()
    named = [
        "~/.ssh/id_rsa_gpu",
        f"{tmp_path}/%n-%r@%h",
        "${OUR_KEYS}/100%%",
        "%d/.ssh/of_home",
        "~/of_agent",
        "~/none",
    ]
    config = write(tmp_path, "HostName 10.0.0.7", "User me", *(f"IdentityFile {each}" for each in named))
    access = read_access(node(config), tmp_path)
    found = (access.key_file, *access.further_key_files)
    assert found == tuple(str(path).removesuffix(".pub") for path in there)
    own = read_access(node(config, key_file="/k"), tmp_path)
    assert (own.key_file, own.further_key_files) == ("/k", ())


def test_the_second_key_that_a_configuration_names_may_be_the_right_one(tmp_path: Path) -> None:
    with running_server(tmp_path / "sshd") as server:
        make_key(tmp_path / "other")
        config = write(tmp_path, f"IdentityFile {tmp_path / 'other'}", *described(server))
        pinned = node(config, host_key=fingerprint_of(server.host_key_file))
        assert reach_machine(pinned, tmp_path).root == "/tmp/rollouts"


def test_a_name_that_nothing_is_said_about_is_a_host_and_keys_are_the_usual_ones(tmp_path: Path) -> None:
    config = write(tmp_path)
    found = read_ssh_config("somewhere.example.org", config)
    assert (found.host, found.port, found.user) == ("somewhere.example.org", 22, getpass.getuser())
    assert (found.key_files, found.proxy_jump, found.agent, found.host_key_alias) == ((), "", "", "")
    assert len(found.known_hosts) == 4
    full = read_access(node(config, host="you@box:23"), tmp_path)
    assert (full.user, full.host, full.port) == ("you", "box", 23), "a whole address is looked up nowhere"
    of_store = str(tmp_path / "known_hosts")
    assert full.known_hosts == ("~/.ssh/known_hosts", "/etc/ssh/ssh_known_hosts", of_store)


def test_a_machine_is_logged_in_to_by_its_name_and_its_key_checked(tmp_path: Path) -> None:
    with running_server(tmp_path / "sshd") as server:
        config = write(tmp_path, *described(server), f"UserKnownHostsFile {tmp_path / 'known'}")
        (tmp_path / "known").touch()
        with pytest.raises(HostKeyError):
            reach_machine(node(config), tmp_path)
        key = Path(f"{server.host_key_file}.pub").read_text()
        (tmp_path / "known").write_text(f"[127.0.0.1]:{server.port} {key}")
        reached = reach_machine(node(config), tmp_path)
        pinned = node(config, host_key=fingerprint_of(server.host_key_file))
        assert (reached.believed_by, reach_machine(pinned, tmp_path).believed_by) == ("known_hosts", "pinned")
    assert reached.name == f"{getpass.getuser()}@127.0.0.1:{server.port}", "the machine's, whatever it is called"
    assert reached.access is not None and replace(reached.access, ssh_config="").host == "127.0.0.1"


def test_a_key_that_is_known_under_an_alias_or_to_all_users_is_believed(tmp_path: Path) -> None:
    """The first is what `gcloud compute config-ssh` writes."""
    with running_server(tmp_path / "sshd") as server:
        key = Path(f"{server.host_key_file}.pub").read_text()
        alias = ["HostKeyAlias compute.12", f"UserKnownHostsFile {tmp_path / 'known'}"]
        (tmp_path / "known").write_text(f"compute.12 {key}")
        assert reach_machine(node(write(tmp_path, *described(server), *alias)), tmp_path).believed_by == "known_hosts"
        (tmp_path / "known").write_text(f"[127.0.0.1]:{server.port} {key}")
        of_all = [f"GlobalKnownHostsFile {tmp_path / 'known'}", "UserKnownHostsFile none"]
        assert reach_machine(node(write(tmp_path, *described(server), *of_all)), tmp_path).believed_by == "known_hosts"


@pytest.mark.parametrize("named", ["{path}", '"%d/{name}"', "$OUR_AGENT"])
def test_the_agent_that_the_configuration_names_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    """As those of password managers are named, which are not in SSH_AUTH_SOCK."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    with running_server(tmp_path / "sshd") as server, running_agent(tmp_path / "its agent") as agent:
        monkeypatch.setenv("OUR_AGENT", str(agent))
        give_to_agent(server.client_key_file, tmp_path, agent=agent)
        path = named.format(path=f'"{agent}"', name=agent.name)
        lines = [line for line in described(server) if not line.startswith("IdentityFile")]
        config = write(tmp_path, *lines, f"IdentityAgent {path}".replace("%d", str(tmp_path)))
        pinned = node(config, host_key=fingerprint_of(server.host_key_file))
        assert reach_machine(pinned, tmp_path).root == "/tmp/rollouts"
        monkeypatch.setenv("SSH_AUTH_SOCK", str(agent))
        with pytest.raises(LoginError, match="have no key"):
            reach_machine(node(write(tmp_path, *lines, "IdentityAgent none")), tmp_path)


def described(server: SSHServer) -> list[str]:
    return ["HostName 127.0.0.1", f"Port {server.port}", f"IdentityFile {server.client_key_file}"]


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        (["ProxyCommand nc %h %p"], r"'box': OpenSSH's configuration reaches it by a ProxyCommand, .* as ProxyJump"),
        (["NoSuchSetting yes"], r"'box': `ssh -G box` failed: .* Bad configuration option: nosuchsetting"),
    ],
)
def test_what_cannot_be_done_as_the_configuration_says_is_one_sentence(
    tmp_path: Path, lines: list[str], problem: str
) -> None:
    with pytest.raises(PermanentInfraError, match=problem):
        read_access(node(write(tmp_path, *lines)), tmp_path)


def test_without_a_client_a_name_is_refused_and_an_address_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = write(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(PermanentInfraError, match=r"`ssh -G` on this machine \(No such file .* or give user@host"):
        read_access(node(config), tmp_path)
    assert read_access(node(config, host="me@box"), tmp_path).user == "me"
