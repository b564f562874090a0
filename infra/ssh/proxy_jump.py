"""Reach a machine through jump hosts, with the installed OpenSSH client.

    this machine ── ssh -W machine:22 last ── first ── last ── machine

Our own connection (connection.py) logs in on the machine itself and checks the machine's host key. The jump hosts can
therefore neither read nor change the data of our connection. The OpenSSH client logs in on the jump hosts with the
user's configuration, agent and known_hosts files.
"""

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from rollouts.infra.errors import BannedError, LoginError, NameUnknownError, NodeUnreachableError, PermanentInfraError
from rollouts.infra.foreign_text import shown_line
from rollouts.infra.node import SSHAccess

GREETING = b"SSH-"
_MAX_FIRST_BYTES = 4096


class HeardSocket(socket.socket):
    """A socket that takes over another socket's descriptor, and records its first line and the time of the last
    received bytes."""

    def __init__(self, other: socket.socket) -> None:
        super().__init__(fileno=other.detach())
        self.heard_at = time.monotonic()
        """Time of the last received bytes, in seconds of the monotonic clock."""
        self._first = b""

    @property
    def refusal(self) -> str:
        """The first line from an SSH server that sent a text instead of its greeting, or "" if the server sent a
        greeting."""
        lines = self._first.splitlines()
        is_greeted = any(line.startswith(GREETING) for line in lines)
        return "" if is_greeted or not lines else shown_line(lines[0].decode(errors="replace"))

    def recv(self, num_bytes: int, flags: int = 0, /) -> bytes:
        content = super().recv(num_bytes, flags)
        self.heard_at = time.monotonic()
        if len(self._first) < _MAX_FIRST_BYTES:
            self._first += content
        return content

    # Any: as in socket.socket
    def send(self, content: Any, flags: int = 0, /) -> int:
        try:
            return super().send(content, flags)
        except (BrokenPipeError, ConnectionResetError):
            if self._first:
                raise
            return len(content)  # raise nothing yet: the server's reason for closing may be readable next


PROGRAM = "ssh"
CONNECT_TIMEOUT_S = 15.0
HEARTBEAT_INTERVAL_S = 15.0
NUM_HEARTBEATS = 2
"""Number of unanswered heartbeats after which the client counts its peer as dead."""
_NEXT = "[%h]:%p"
"""Placeholders for the address of the next machine; the OpenSSH client expands them."""
_OPTIONS = {
    "BatchMode": "yes",
    "ClearAllForwardings": "no",  # "yes" would cancel -W
    "ConnectTimeout": str(int(CONNECT_TIMEOUT_S)),
    "ControlMaster": "no",  # a shared master connection would outlive this program
    "ControlPath": "none",
    "LogLevel": "ERROR",
    "PermitLocalCommand": "no",
    "RemoteCommand": "none",
    "ServerAliveCountMax": str(NUM_HEARTBEATS),
    "ServerAliveInterval": str(int(HEARTBEAT_INTERVAL_S)),
}
_END_TIMEOUT_S = 2.0
_NO_NAME = "Could not resolve hostname"
_NO_GREETING = "kex_exchange_identification"
_REFUSALS = ("Permission denied", "Host key verification failed", _NO_NAME, "Bad configuration")
"""Parts of the client's error messages for problems that a retry does not solve."""


class ProxySocket(HeardSocket):
    """A socket to the machine, through the OpenSSH client. Closing the socket ends the client."""

    def __init__(self, process: subprocess.Popen[bytes], said: IO[bytes], ours: socket.socket) -> None:
        super().__init__(ours)
        self._process = process
        self._said = said

    def problem(self) -> str:
        """Return the client's error message about the connection, or "" if the client printed no error message."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_TIMEOUT_S)  # the error message is complete only after the client's end
        lines = os.pread(self._said.fileno(), 64 << 10, 0).decode(errors="replace").strip().splitlines()
        # With several jump hosts, the line with the reason comes first. Later lines only report a missing answer.
        return next((line for line in lines if any(known in line for known in _REFUSALS)), lines[-1] if lines else "")

    def close(self) -> None:
        """End the client and its connections to the jump hosts."""
        super().close()
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def open_proxy(access: SSHAccess) -> ProxySocket:
    """Start the OpenSSH client. If the machine then does not answer, `explain_proxy` returns the reason.

    Raises:
        PermanentInfraError: the client is not installed.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        said = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the socket
        try:
            end = theirs.fileno()
            process = subprocess.Popen(
                proxy_command(access), stdin=end, stdout=end, stderr=said, start_new_session=True
            )
        except OSError as error:
            ours.close()
            raise PermanentInfraError(
                f"node.proxy_jump needs OpenSSH's client `{PROGRAM}` on this machine ({error.strerror}): install it"
            ) from error
    return ProxySocket(process, said, ours)


def explain_proxy(
    access: SSHAccess, proxy: ProxySocket, reason: str
) -> NodeUnreachableError | LoginError | NameUnknownError:
    """Return the error for a machine that did not answer through jump hosts. The error contains the client's error
    message."""
    problem = proxy.problem() or reason
    if any(known in problem for known in _REFUSALS):
        there = f" -F {access.ssh_config}" if access.ssh_config else ""
        way = f"no way through {access.proxy_jump} ({problem}): try `{PROGRAM}{there} -J {access.proxy_jump} ...`"
        refusal = LoginError(access.address, f"{way} in a terminal; it must work without a question")
        return NameUnknownError(str(refusal)) if _NO_NAME in problem else refusal
    if _NO_GREETING in problem:
        # The client prints the server's words only with debug messages, whose other lines could hide the reason.
        return BannedError(access.address, problem, jump=access.proxy_jump)
    return NodeUnreachableError(access.address, f"through {access.proxy_jump}: {problem}")


def proxy_command(access: SSHAccess) -> list[str]:
    """Return the client's command line. The client connects its standard input and output with the machine's SSH
    port."""
    host = f"[{access.host}]" if ":" in access.host else access.host
    return _command_to(access.proxy_jump.split(","), f"{host}:{access.port}", access.ssh_config)


def proxy_option(access: SSHAccess) -> str:
    """Return the command line in the format of OpenSSH's option ProxyCommand."""
    return _as_option(proxy_command(access))


def _command_to(hops: Sequence[str], target: str, config: str) -> list[str]:
    *earlier, last = hops
    options = dict(_OPTIONS)
    if earlier:  # the option -J would neither quote the configuration's path nor pass on these options
        options["ProxyCommand"] = _as_option(_command_to(earlier, _NEXT, config))
    words = [PROGRAM, *(["-F", str(Path(config).expanduser())] if config else [])]
    words += [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
    return [*words, "-W", target, f"ssh://{last}"]


def _as_option(words: Sequence[str]) -> str:
    """Return the command line as a ProxyCommand. Percent signs except in `_NEXT` are doubled, because OpenSSH expands
    percent tokens."""
    return shlex.join(word if word == _NEXT else word.replace("%", "%%") for word in words)
