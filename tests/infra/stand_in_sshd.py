"""An SSH server for tests on machines without OpenSSH's: commands, tunnels, and a process for each connection.

    python tests/infra/stand_in_sshd.py FOLDER PORT      FOLDER holds `host_key` and `authorized_keys`

Like sshd it starts each command with the user's shell, in their home and with variables of its own, and a connection's
process can be stopped or killed by itself. Not here: everything that sshd_config could say.
"""

from __future__ import annotations

import functools
import getpass
import logging
import os
import pwd
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import paramiko

_LOGIN_TIMEOUT_S = 120.0
"""As long as sshd waits; paramiko's own limits are short for a busy machine."""
_PIECE_BYTES = 256 << 10
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_DROPPED = (paramiko.SSHException, OSError, EOFError)


def main(folder: Path, port: int) -> None:
    """Fork for every connection."""
    logging.basicConfig(level=logging.DEBUG, handlers=[LoginLog()])
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    with socket.create_server(("127.0.0.1", port), backlog=100) as listener:
        while True:
            connection, peer = listener.accept()
            if os.fork() == 0:
                listener.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                try:
                    serve(connection, folder, {"SSH_CONNECTION": f"{peer[0]} {peer[1]} 127.0.0.1 {port}"})
                finally:
                    os._exit(0)
            connection.close()


def serve(connection: socket.socket, folder: Path, variables: Mapping[str, str]) -> None:
    """Return when the connection has ended; its commands, which get these variables, see the end of their input."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    transport = paramiko.Transport(connection)
    transport.add_server_key(paramiko.PKey.from_path(folder / "host_key"))
    transport.banner_timeout = transport.handshake_timeout = _LOGIN_TIMEOUT_S
    account = Account(folder / "authorized_keys", variables)
    with suppress(*_DROPPED):  # somebody who only looks whether the server listens
        transport.start_server(server=account)
        while transport.is_active():
            channel = transport.accept(0.2)
            if channel is not None and (target := account.targets.pop(channel.get_id(), None)):
                carry_tunnel(channel, target)


class LoginLog(logging.Handler):
    """Says in sshd's words that somebody was let in; the account is also asked which keys it would take."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage().startswith("Auth granted"):
            sys.stderr.write("Accepted publickey\n")


class Account(paramiko.ServerInterface):
    """What the one user may do, who is whoever tests."""

    def __init__(self, authorized_keys: Path, variables: Mapping[str, str]) -> None:
        self._authorized = {line.split()[1] for line in authorized_keys.read_text().splitlines()}
        user = pwd.getpwuid(os.getuid())
        self._home, self._shell = user.pw_dir, user.pw_shell
        self._variables = {
            "HOME": user.pw_dir,
            "LOGNAME": user.pw_name,
            "PATH": _PATH,
            "SHELL": user.pw_shell,
            "USER": user.pw_name,
            **variables,
        }
        self.targets: dict[int, socket.socket] = {}
        """Where tunnels lead, by their channels."""

    def get_allowed_auths(self, username: str) -> str:
        return "publickey"

    def check_auth_publickey(self, username: str, key: Any) -> int:  # Any: paramiko has no types
        if username != getpass.getuser() or key.get_base64() not in self._authorized:
            return int(paramiko.AUTH_FAILED)
        return int(paramiko.AUTH_SUCCESSFUL)

    def check_channel_request(self, kind: str, chanid: int) -> int:
        return int(paramiko.OPEN_SUCCEEDED if kind == "session" else paramiko.OPEN_FAILED_UNKNOWN_CHANNEL_TYPE)

    def check_channel_exec_request(self, channel: Any, command: bytes) -> bool:
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            [self._shell, "-c", command],
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            bufsize=0,
            env=self._variables,
            cwd=self._home,
            start_new_session=True,
        )
        in_background(carry_command, channel, process)
        return True

    def check_channel_direct_tcpip_request(
        self, chanid: int, origin: tuple[str, int], destination: tuple[str, int]
    ) -> int:
        try:
            self.targets[chanid] = socket.create_connection(destination, 10)
        except OSError:
            return int(paramiko.OPEN_FAILED_CONNECT_FAILED)
        self.targets[chanid].settimeout(None)
        return int(paramiko.OPEN_SUCCEEDED)


def in_background(work: Callable[..., None], *arguments: object) -> threading.Thread:
    thread = threading.Thread(target=work, args=arguments, daemon=True)
    thread.start()
    return thread


def carry(receive: Callable[[int], bytes], send: Callable[[bytes], object], end: Callable[[], object]) -> None:
    """Pass everything on, and then that it has ended, in whichever direction that was noticed."""
    with suppress(*_DROPPED):
        while piece := receive(_PIECE_BYTES):
            send(piece)
    with suppress(*_DROPPED):
        end()


def carry_command(channel: Any, process: subprocess.Popen[bytes]) -> None:
    """Connect a command with its channel, up to its end and that of its output."""
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    in_background(carry, channel.recv, functools.partial(write_all, process.stdin.fileno()), process.stdin.close)
    outputs = [
        in_background(carry, process.stdout.read, channel.sendall, process.stdout.close),
        in_background(carry, process.stderr.read, channel.sendall_stderr, process.stderr.close),
    ]
    exit_code = process.wait()
    with suppress(*_DROPPED):
        if exit_code >= 0:  # paramiko has no words for the others
            channel.send_exit_status(exit_code)
        for output in outputs:
            output.join()
        channel.close()


def carry_tunnel(channel: Any, target: socket.socket) -> None:
    """Connect a channel with a port, until both have said everything."""
    to_port = in_background(carry, channel.recv, target.sendall, lambda: target.shutdown(socket.SHUT_WR))

    def answer() -> None:
        with target:
            carry(target.recv, channel.sendall, channel.shutdown_write)
            to_port.join()
            channel.close()

    in_background(answer)


def write_all(descriptor: int, piece: bytes) -> None:
    rest = memoryview(piece)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
