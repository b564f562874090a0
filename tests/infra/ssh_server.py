"""An SSH server on a loopback port, with keys and a configuration of its own, for one user: whoever tests.

It is OpenSSH's, or where that is not installed the one of stand_in_sshd.py, which has no configuration: what depends on
OpenSSH's is skipped there.
"""

from __future__ import annotations

import getpass
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from rollouts.infra.node import SSHAccess
from tests.kit.processes import dies_with_us
from tests.kit.waiting import wait_until

_PRIVILEGE_SEPARATION_DIR = Path("/run/sshd")
"""Where sshd locks itself up when root starts it."""
NO_BASHRC = "SetEnv SHLVL=1"
"""Bash reads the user's file where sshd starts it and it is the first shell. What pyenv has there takes longer than the
command, and waits a minute for the lock of one that a test has killed."""
_STAND_IN = Path(__file__).with_name("stand_in_sshd.py")
_DOWNLOADED = Path(__file__).resolve().parents[2] / ".sshd" / "sshd"
"""Made by newer_sshd.sh."""


def find_sshd() -> str | None:
    """OpenSSH's server on this machine."""
    return shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin:/sbin")


def find_banning_sshd() -> str | None:
    """An OpenSSH server that bans clients (9.8 or newer): named by ROLLOUTS_TEST_SSHD, downloaded, or installed."""
    for program in (os.environ.get("ROLLOUTS_TEST_SSHD"), str(_DOWNLOADED), find_sshd()):
        if program is not None and Path(program).exists() and _version_of(program) >= (9, 8):
            return program
    return None


class SSHServer:
    """Starts, stops and disturbs one server; everything it needs lies in its folder."""

    def __init__(self, folder: Path, *, more_config: str = "", stand_in: bool = False, sshd: str | None = None) -> None:
        """The stand-in also where there is no other and the test has no wishes.

        Args:
            more_config: lines for sshd_config, which only OpenSSH's server understands.
            sshd: absolute path of OpenSSH's server; None for the installed one.
        """
        program = None if stand_in else sshd or find_sshd()
        if program is None and more_config:
            pytest.skip("there is no sshd on this machine: install openssh-server")
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.port = _free_port()
        self.host_key_file = folder / "host_key"
        self.client_key_file = folder / "client_key"
        for path in (self.host_key_file, self.client_key_file):
            make_key(path)
        (folder / "authorized_keys").write_bytes(Path(f"{self.client_key_file}.pub").read_bytes())
        if program is None:
            command = [sys.executable, str(_STAND_IN), str(folder), str(self.port)]
        else:
            command = [program, "-D", "-e", "-f", str(folder / "sshd_config")]
        self._command = [*dies_with_us(), *command]
        self._process: subprocess.Popen[bytes] | None = None
        self._write_config(more_config)

    @property
    def access(self) -> SSHAccess:
        """How to log in, with the host's key pinned."""
        return SSHAccess(
            host="127.0.0.1",
            port=self.port,
            user=getpass.getuser(),
            key_file=str(self.client_key_file),
            host_key=fingerprint_of(self.host_key_file),
            known_hosts=(),
        )

    @property
    def is_running(self) -> bool:
        """True between `start` and `stop`."""
        return self._process is not None

    def start(self) -> None:
        """Return when it accepts connections."""
        if os.geteuid() == 0:
            _PRIVILEGE_SEPARATION_DIR.mkdir(mode=0o755, exist_ok=True)
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        deadline = time.monotonic() + 20
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return
            except OSError:
                assert self._process.poll() is None, (self.folder / "log").read_text()
                assert time.monotonic() < deadline, "sshd does not listen"
                time.sleep(0.05)

    def stop(self) -> None:
        """Kill the listener; sessions go on."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def signal_sessions(self, number: signal.Signals) -> int:
        """Send a signal to the processes that hold connections; returns how many there were.

        SIGSTOP is waited for: it is one thread's to take, and those of a busy machine go on until that one runs.
        """
        assert self._process is not None
        sessions = _sessions_of(self._process.pid)
        for pid in sessions:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        if number == signal.SIGSTOP:
            wait_until(lambda: not any(map(_is_running, sessions)), what="the sessions to stand still")
        return len(sessions)

    def _write_config(self, more: str) -> None:
        text = sshd_config("127.0.0.1", self.port, self.host_key_file, self.folder / "authorized_keys")
        # Of several lines with SetEnv sshd takes the first.
        (self.folder / "sshd_config").write_text(f"{text}{more}\n{NO_BASHRC}\n")


def sshd_config(address: str, port: int, host_key: Path, authorized_keys: Path) -> str:
    """The settings of a server that lets only these keys in."""
    return f"""
ListenAddress {address}
Port {port}
HostKey {host_key}
AuthorizedKeysFile {authorized_keys}
PidFile none
StrictModes no
UsePAM no
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
MaxStartups 100
"""


@contextmanager
def running_server(
    folder: Path, *, more_config: str = "", stand_in: bool = False, sshd: str | None = None
) -> Iterator[SSHServer]:
    """A server that listens, and is gone with its connections afterwards. The arguments are those of `SSHServer`."""
    server = SSHServer(folder, more_config=more_config, stand_in=stand_in, sshd=sshd)
    server.start()
    try:
        yield server
    finally:
        try:
            if server.is_running:
                server.signal_sessions(signal.SIGKILL)
        finally:
            server.stop()


def make_key(path: Path, *, passphrase: str = "", key_type: str = "ed25519") -> None:
    """A new key pair."""
    bits = ["-b", "2048"] if key_type == "rsa" else []  # a longer one takes seconds to find
    subprocess.run(["ssh-keygen", "-q", "-t", key_type, *bits, "-N", passphrase, "-f", str(path)], check=True)


def fingerprint_of(path: Path) -> str:
    """What ssh-keygen prints for a key: an independent opinion."""
    return subprocess.run(
        ["ssh-keygen", "-lf", f"{path}.pub"], capture_output=True, text=True, check=True
    ).stdout.split()[1]


def known_hosts_line(server: SSHServer, *, key_file: Path | None = None) -> str:
    """The server as a known_hosts file names it."""
    key = Path(f"{key_file or server.host_key_file}.pub").read_text().split()
    return f"[127.0.0.1]:{server.port} {key[0]} {key[1]}\n"


def unpinned(access: SSHAccess, *known_hosts: Path, first_use_file: Path | None = None) -> SSHAccess:
    """The same login, with the host's key looked up in files instead."""
    files = tuple(str(path) for path in known_hosts)
    return replace(access, host_key="", known_hosts=files, first_use_file=str(first_use_file or ""))


def _version_of(sshd: str) -> tuple[int, int]:
    said = subprocess.run([sshd, "-V"], capture_output=True, text=True, check=False).stderr
    found = re.search(r"OpenSSH_(\d+)\.(\d+)", said)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _is_running(pid: int) -> bool:
    """False of a process that stands still or is gone."""
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] not in "TtZX"
    except OSError:
        return False


def _sessions_of(listener: int) -> list[int]:
    """The processes that hold a server's connections: its children, and theirs where they are sshd as well."""
    table = subprocess.run(["ps", "-A", "-o", "pid=,ppid=,comm="], capture_output=True, text=True, check=True).stdout
    rows = [line.split(None, 2) for line in table.splitlines()]
    children: dict[int, list[tuple[int, str]]] = {}
    for pid, parent, name in rows:
        children.setdefault(int(parent), []).append((int(pid), name))
    found: list[int] = []
    queue = [listener]
    while queue:
        process = queue.pop()
        sessions = [pid for pid, name in children.get(process, []) if process == listener or name.startswith("sshd")]
        found += sessions
        queue += sessions
    return found
