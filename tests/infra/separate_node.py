"""Nodes that share no file, no port and no process with us: an sshd in Linux namespaces of its own, behind one link.

this machine  10.73.n.1 ── veth, can be cut ── 10.73.n.2  sshd and its jobs
                                                          a folder in memory, theirs alone; ours are hidden
                                               10.74.n.1 ── veth ── 10.74.n.2  another node: a network of theirs alone
"""

from __future__ import annotations

import getpass
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from rollouts.infra.node import SSHAccess
from tests.infra.ssh_server import fingerprint_of, make_key, sshd_config
from tests.kit.excuses import ExcusedSkip, is_want_of_rights
from tests.kit.processes import dies_with_us

ROOT = Path(__file__).resolve().parents[2]
PORT = 22
MAX_LINKS = 16384
"""So many networks of four addresses are in 10.73.0.0/16."""
_PATH = f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin:/sbin"
_UNSHARE = ("unshare", "--net", "--mount", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc")
_PRIVILEGE_SEPARATION_DIR = Path("/run/sshd")
_INSIDE = r"""
set -e
printf "%s\n" "$HIDDEN" | while read -r folder; do mount -t tmpfs tmpfs "$folder"; done
mount -t tmpfs tmpfs /dev/shm
mkdir "$NODE/keys"
cp "$KEYS"/* "$NODE/keys"
mount -t tmpfs tmpfs "$KEYS"
ip link set lo up
echo ready
read -r linked
ip address add "$THERE/30" dev "$LINK"
ip link set "$LINK" up
exec "$SSHD" -D -e -f "$NODE/keys/sshd_config"
"""
"""The keys are copied into the node's own memory before everything of ours is out of sight."""


@dataclass(frozen=True, kw_only=True)
class SeparateNode:
    """The node as it is seen from here."""

    folder: Path
    """Where the node has its own files; empty for us."""
    address: str
    client_key_file: Path
    host_key_file: Path
    link: str
    """Our end."""
    init_pid: int
    """The first process of the node; with its end, all of the node's processes end."""

    @property
    def access(self) -> SSHAccess:
        """How to log in, with the host's key pinned."""
        return SSHAccess(
            host=self.address,
            port=PORT,
            user=getpass.getuser(),
            key_file=str(self.client_key_file),
            host_key=fingerprint_of(self.host_key_file),
            known_hosts=(),
        )

    def files(self, pattern: str, *, folder: Path | None = None) -> list[Path]:
        """The node's own files, as somebody who can look into every namespace sees them; those of its folder if None.

        Another one that is its own is /dev/shm, which every node has.
        """
        inside = Path(f"/proc/{self.init_pid}/root{folder or self.folder}")
        return sorted(inside.glob(pattern))

    def commands(self) -> list[str]:
        """The command lines of the node's processes, except those that sshd itself consists of."""
        inside = f"/proc/{self.init_pid}/root/proc"
        found = []
        for entry in Path(inside).iterdir():
            try:
                words = (entry / "cmdline").read_bytes() if entry.name.isdigit() else b""
            except OSError:
                continue
            command = words.replace(b"\0", b" ").decode(errors="replace").strip()
            if command and not command.startswith("sshd") and "sshd_config" not in command:
                found.append(command)
        return found

    def kill_job(self, name: str) -> None:
        """Kill all processes of jobs whose directory's name begins like this, as if memory had run out."""
        inside = Path(f"/proc/{self.init_pid}/ns/pid").readlink()
        for entry in Path("/proc").iterdir():
            with suppress(OSError):  # not a process, or none any more
                command = (entry / "cmdline").read_bytes()
                if (entry / "ns/pid").readlink() == inside and f"/stages/{name}".encode() in command:
                    os.kill(int(entry.name), signal.SIGKILL)

    @contextmanager
    def cut_off(self) -> Iterator[None]:
        """No packet passes inside the block."""
        _ip("link", "set", self.link, "down")
        try:
            yield
        finally:
            _ip("link", "set", self.link, "up")


@contextmanager
def separate_node(folder: Path, *, hidden: Sequence[Path], client_key: Path | None = None) -> Iterator[SeparateNode]:
    """A node that is gone, with all of its processes, at the end of the block.

    Args:
        folder: for keys, and the place of the node's own files.
        hidden: our folders that the node must not see; the packages of this project are hidden as well.
        client_key: one that may log in; a new one if None.
    """
    programs = {name: shutil.which(name, path=_PATH) for name in ("sshd", "ip", "unshare")}
    if missing := [name for name, found in programs.items() if found is None]:
        pytest.skip(f"there is no {' and no '.join(missing)} on this machine: install openssh-server and iproute2")
    if problem := _why_not_isolated():
        reason = f"this machine makes no network namespaces ({problem})"
        raise ExcusedSkip(reason) if is_want_of_rights(problem) else pytest.skip.Exception(reason)
    keys, own = folder / "keys", folder / "own"
    for made in (keys, own, _PRIVILEGE_SEPARATION_DIR):
        made.mkdir(parents=True, exist_ok=True)
    host_key = keys / "host_key"
    make_key(host_key)
    if client_key is None:
        client_key = folder / "client_key"
        make_key(client_key)
    shutil.copy(f"{host_key}.pub", f"{folder / 'host_key'}.pub")
    shutil.copy(f"{client_key}.pub", keys / "authorized_keys")
    number = _free_number()
    here, there = (f"10.73.{number // 64}.{number % 64 * 4 + end}" for end in (1, 2))
    (keys / "sshd_config").write_text(sshd_config(there, PORT, own / "keys/host_key", own / "keys/authorized_keys"))
    ours, theirs = f"rn{number}a", f"rn{number}b"
    packages = [ROOT / name for name in ("flows", "tasks", "infra", "rollouts_core")]
    covered = "\n".join(str(path) for path in (own, *hidden, *packages))  # not an argument: it names the store
    values = {"HIDDEN": covered, "KEYS": str(keys), "NODE": str(own), "LINK": theirs, "THERE": there}
    values |= {"SSHD": str(programs["sshd"]), "PATH": _PATH}
    with (folder / "log").open("ab") as log:
        process = subprocess.Popen(
            [*dies_with_us(), *_UNSHARE, "sh", "-c", _INSIDE],
            env=os.environ | values,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
        )
    try:
        assert process.stdout is not None and process.stdin is not None
        assert process.stdout.readline() == b"ready\n", (folder / "log").read_text()
        init_pid = _only_child_of(process.pid)
        _ip("link", "add", ours, "type", "veth", "peer", "name", theirs)
        _ip("link", "set", theirs, "netns", str(init_pid))
        _ip("address", "add", f"{here}/30", "dev", ours)
        _ip("link", "set", ours, "up")
        process.stdin.write(b"linked\n")
        process.stdin.flush()
        _wait_for(there)
        yield SeparateNode(
            folder=own,
            address=there,
            client_key_file=client_key,
            host_key_file=folder / "host_key",
            link=ours,
            init_pid=init_pid,
        )
    finally:
        process.kill()
        process.communicate()
        with suppress(subprocess.CalledProcessError):  # it goes with the node's end, at once or soon
            _ip("link", "del", ours)


@dataclass(frozen=True, kw_only=True)
class PrivateLink:
    """A network of two nodes alone."""

    addresses: tuple[str, str]
    """Of the first and of the second node."""
    ends: tuple[str, str]
    init_pids: tuple[int, int]

    @contextmanager
    def cut_off(self) -> Iterator[None]:
        """No packet passes inside the block."""
        self._set("down")
        try:
            yield
        finally:
            self._set("up")

    @contextmanager
    def one_way(self) -> Iterator[None]:
        """The second node knows no way to the first one inside the block."""
        hole = ("blackhole", f"{self.addresses[0]}/32")
        _inside(self.init_pids[1], "ip", "route", "add", *hole)
        try:
            yield
        finally:
            _inside(self.init_pids[1], "ip", "route", "del", *hole)

    def route_everything(self) -> None:
        """Let both nodes take it for the way to everywhere."""
        for end, pid in zip(self.ends, self.init_pids, strict=True):
            _inside(pid, "ip", "route", "add", "default", "dev", end)

    def _set(self, state: str) -> None:
        for end, pid in zip(self.ends, self.init_pids, strict=True):
            _inside(pid, "ip", "link", "set", end, state)


@contextmanager
def private_link(first: SeparateNode, second: SeparateNode) -> Iterator[PrivateLink]:
    """A link between two nodes, which goes with them."""
    number = _free_number()
    ends, pids = (f"rn{number}p", f"rn{number}q"), (first.init_pid, second.init_pid)
    addresses = tuple(f"10.74.{number // 64}.{number % 64 * 4 + end}" for end in (1, 2))
    _ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
    for end, pid, address in zip(ends, pids, addresses, strict=True):
        _ip("link", "set", end, "netns", str(pid))
        _inside(pid, "ip", "address", "add", f"{address}/30", "dev", end)
        _inside(pid, "ip", "link", "set", end, "up")
    yield PrivateLink(addresses=(addresses[0], addresses[1]), ends=ends, init_pids=pids)


def _free_number() -> int:
    """The number of a link that no test of any process has now."""
    while True:
        number = secrets.randbelow(MAX_LINKS)
        if not any(Path(f"/sys/class/net/rn{number}{end}").exists() for end in "abpq"):
            return number


def _inside(pid: int, *command: str) -> None:
    """Run a command in the network of a node."""
    subprocess.run(["nsenter", f"--net=/proc/{pid}/ns/net", *command], check=True, env=os.environ | {"PATH": _PATH})


def _why_not_isolated() -> str:
    """Why namespaces and links between them cannot be had here; empty where they can."""
    name = f"rn{os.getpid() % 16384}"
    for command in (
        [*_UNSHARE, "mount", "-t", "tmpfs", "tmpfs", "/tmp"],
        ["ip", "link", "add", f"{name}x", "type", "veth", "peer", "name", f"{name}y"],
    ):
        in_english = os.environ | {"PATH": _PATH, "LC_ALL": "C"}
        tried = subprocess.run(command, capture_output=True, text=True, env=in_english)
        if tried.returncode != 0:
            return tried.stderr.strip().partition("\n")[0] or f"{command[0]} ended with {tried.returncode}"
    _ip("link", "del", f"{name}x")
    return ""


def _only_child_of(pid: int) -> int:
    (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(child)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, env=os.environ | {"PATH": _PATH})


def _wait_for(address: str) -> None:
    deadline = time.monotonic() + 30
    while True:
        try:
            socket.create_connection((address, PORT), 1).close()
            return
        except OSError:
            assert time.monotonic() < deadline, f"nobody listens at {address}"
            time.sleep(0.05)
