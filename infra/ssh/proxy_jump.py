"""Reach a machine through others: bytes to it and back by the OpenSSH client that is installed here.

    this machine ── ssh -W machine:22 last ── first ── last ── machine

The login on the machine itself stays ours (connection.py), with its host key checked from here: who sits between sees,
and can change, nothing of it. The logins on the way are the client's, with the user's configuration, agent and
known_hosts.
"""

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from rollouts.infra.errors import LoginError, NameUnknownError, NodeUnreachableError, PermanentInfraError
from rollouts.infra.node import SSHAccess
from rollouts.infra.ssh.heard_socket import HeardSocket

PROGRAM = "ssh"
CONNECT_TIMEOUT_S = 15
HEARTBEAT_INTERVAL_S = 15
NUM_HEARTBEATS = 2
_NEXT = "[%h]:%p"
"""The machine after this one on the way, as its client finds it in the configuration."""
_OPTIONS = {
    "BatchMode": "yes",
    "ClearAllForwardings": "no",  # it would take -W away
    "ConnectTimeout": str(CONNECT_TIMEOUT_S),
    "ControlMaster": "no",  # one that stayed would outlive us
    "ControlPath": "none",
    "LogLevel": "ERROR",
    "PermitLocalCommand": "no",
    "RemoteCommand": "none",
    "ServerAliveCountMax": str(NUM_HEARTBEATS),
    "ServerAliveInterval": str(HEARTBEAT_INTERVAL_S),
}
_END_TIMEOUT_S = 2.0
_NO_NAME = "Could not resolve hostname"
_NO_GREETING = "kex_exchange_identification"
_REFUSALS = ("Permission denied", "Host key verification failed", _NO_NAME, "Bad configuration")
"""What the client says where trying again does not help."""


class ProxySocket(HeardSocket):
    """A socket to the machine; the client on its other end is ended with it."""

    def __init__(self, process: subprocess.Popen[bytes], said: IO[bytes], ours: socket.socket) -> None:
        super().__init__(ours)
        self._process = process
        self._said = said

    def problem(self) -> str:
        """The last line of what the client says went wrong on the way; empty where it says nothing."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_TIMEOUT_S)  # its last words come with its end
        lines = os.pread(self._said.fileno(), 64 << 10, 0).decode(errors="replace").strip().splitlines()
        # Of several machines on the way, the first that fails says why; those after it only that nobody answers.
        return next((line for line in lines if any(known in line for known in _REFUSALS)), lines[-1] if lines else "")

    def close(self) -> None:
        """End the client with the machines on the way."""
        super().close()
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def open_proxy(access: SSHAccess) -> ProxySocket:
    """Start the client; whether it gets through shows when the machine answers. `explain_proxy` says why it did not.

    Raises:
        PermanentInfraError: there is no such client here.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        said = tempfile.TemporaryFile()  # noqa: SIM115 - gone with the socket
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
    """The error for a machine that did not answer through others, in the words of the client."""
    problem = proxy.problem() or reason
    if any(known in problem for known in _REFUSALS):
        there = f" -F {access.ssh_config}" if access.ssh_config else ""
        way = f"no way through {access.proxy_jump} ({problem}): try `{PROGRAM}{there} -J {access.proxy_jump} ...`"
        refusal = LoginError(access.address, f"{way} in a terminal, without being asked anything")
        return NameUnknownError(str(refusal)) if _NO_NAME in problem else refusal
    if _NO_GREETING in problem:
        problem += ", as a server ends the connections of an address that it has banned (PerSourcePenalties)"
    return NodeUnreachableError(access.address, f"through {access.proxy_jump}: {problem}")


def proxy_command(access: SSHAccess) -> list[str]:
    """The client's command line, whose input and output are those of the machine's SSH port."""
    host = f"[{access.host}]" if ":" in access.host else access.host
    return _command_to(access.proxy_jump.split(","), f"{host}:{access.port}", access.ssh_config)


def proxy_option(access: SSHAccess) -> str:
    """The same as OpenSSH's option ProxyCommand wants it."""
    return _as_option(proxy_command(access))


def _command_to(hops: Sequence[str], target: str, config: str) -> list[str]:
    *earlier, last = hops
    options = dict(_OPTIONS)
    if earlier:  # not by -J, which neither quotes the configuration's path nor hands these options on
        options["ProxyCommand"] = _as_option(_command_to(earlier, _NEXT, config))
    words = [PROGRAM, *(["-F", str(Path(config).expanduser())] if config else [])]
    words += [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
    return [*words, "-W", target, f"ssh://{last}"]


def _as_option(words: Sequence[str]) -> str:
    """A command line for a shell, which runs it after percent signs are read."""
    return shlex.join(word if word == _NEXT else word.replace("%", "%%") for word in words)
