"""Run commands on a node with the installed OpenSSH client, to copy large amounts of data.

The client is two to three times as fast as paramiko, because paramiko's encryption holds Python's global lock. On a
distant connection, the client receives more slowly than paramiko, because the client's window has only 2 MiB.

The client accepts only the host key that our own connection accepted (host_keys.py), and logs in with the same key
file. The client does not use the user's configuration file, SSH agent and known_hosts file.

Not here: the choice between the client and paramiko (agents.py).
"""

import base64
import contextlib
import functools
import math
import os
import re
import select
import shlex
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from io import FileIO
from pathlib import Path
from typing import IO

from rollouts.infra.errors import NodeUnreachableError, PermanentInfraError
from rollouts.infra.node import SSHAccess
from rollouts.infra.node_agent import widen_pipe
from rollouts.infra.offers import Instance
from rollouts.infra.ssh.connection import (
    CIPHERS,
    EXIT_CODE_TIMEOUT_S,
    SIGNATURES,
    SSHConnection,
)
from rollouts.infra.ssh.proxy_jump import (
    CONNECT_TIMEOUT_S,
    HEARTBEAT_INTERVAL_S,
    NUM_HEARTBEATS,
    PROGRAM,
    proxy_option,
)

_QUESTION_TIMEOUT_S = 5.0
_SLOW_KEY_EXCHANGE = "sntrup761x25519-sha512@openssh.com"
"""The key exchange that OpenSSH 9.0 to 9.8 choose first. This key exchange costs the client up to 0.3 s of processor
time per login."""
_FAST_KEY_EXCHANGES = ("mlkem768x25519-sha256", "curve25519-sha256")
"""Key exchanges to prefer to the slow key exchange. curve25519-sha256 is not safe against quantum computers. The
paramiko connection, which carries the secrets, has the same weakness."""
NOBODY_ANSWERS = 255
"""The client's exit code after a failed or broken connection."""
_PLAIN_PATH = re.compile(r"[A-Za-z0-9/._+-]+")
_ALIAS = "the-node"
"""The node's name in the client's known_hosts file. This name needs no quoting, and the client does not resolve it."""
_NEVER = (
    "AddKeysToAgent CanonicalizeHostname CheckHostIP Compression ControlMaster ForwardAgent ForwardX11 "
    "GSSAPIAuthentication HostbasedAuthentication KbdInteractiveAuthentication PasswordAuthentication "
    "PermitLocalCommand RequestTTY Tunnel UpdateHostKeys VerifyHostKeyDNS"
)


_Stream = int | IO[bytes] | FileIO


class OpenSSH:
    """Starts commands on one node, each over a new connection. `close` ends the commands and removes the temporary
    files."""

    def __init__(self, access: SSHAccess, believed: SSHConnection) -> None:
        self._access = access
        self._processes: list[subprocess.Popen[bytes]] = []
        self._lock = threading.Lock()
        self._folder = tempfile.TemporaryDirectory(prefix="rollouts-ssh-")
        key = believed.host_key
        folder = Path(self._folder.name)
        (folder / "known_hosts").write_text(f"{_ALIAS} {key.type} {base64.b64encode(key.blob).decode()}\n")
        # Use links with safe names, because OpenSSH expands % and ~ in the names of key files.
        for suffix in ("", "-cert.pub"):
            (folder / f"key{suffix}").symlink_to(Path(believed.key_file + suffix).absolute())
        options = {
            "BatchMode": "yes",
            "Ciphers": ",".join(CIPHERS),
            "ClearAllForwardings": "yes",
            "ConnectTimeout": str(int(CONNECT_TIMEOUT_S)),
            "ControlPath": "none",
            "EscapeChar": "none",
            "GlobalKnownHostsFile": os.devnull,
            "HostKeyAlgorithms": ",".join(SIGNATURES.get(key.type, (key.type,))),
            "HostKeyAlias": _ALIAS,
            "IdentitiesOnly": "yes",
            "IdentityAgent": "none",
            "IdentityFile": str(folder / "key"),
            "LogLevel": "ERROR",
            "Port": str(access.port),
            "PreferredAuthentications": "publickey",
            "ServerAliveCountMax": str(NUM_HEARTBEATS),
            "ServerAliveInterval": str(int(HEARTBEAT_INTERVAL_S)),
            "StrictHostKeyChecking": "yes",
            "User": access.user,
            "UserKnownHostsFile": str(folder / "known_hosts"),
            **dict.fromkeys(_NEVER.split(), "no"),
        }
        if exchanges := _fast_key_exchanges(shutil.which(PROGRAM) or PROGRAM):
            options["KexAlgorithms"] = "^" + ",".join(exchanges)
        if access.proxy_jump:
            options["ProxyCommand"] = proxy_option(access)
        self._command = [PROGRAM, "-F", "none"]
        self._command += [word for name, value in options.items() for word in ("-o", f"{name}={value}")]

    def open_command(self, command: str) -> "OpenSSHChannel":
        """Start a command line in the node's shell. If the command cannot start, the channel reports an end
        of output instead of an error."""
        stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the channel
        try:
            process = self._start(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr)
        except BaseException:
            stderr.close()
            raise
        return OpenSSHChannel(process, stderr, self._access.address)

    @contextlib.contextmanager
    def running(
        self, command: str, *, stdin: _Stream = subprocess.PIPE, stdout: _Stream = subprocess.PIPE, stderr: _Stream
    ) -> Iterator[subprocess.Popen[bytes]]:
        """Yield a client process that runs a command line on the node. The process is killed at the end of the
        block."""
        with self._start(command, stdin=stdin, stdout=stdout, stderr=stderr) as process:
            try:
                yield process
            finally:
                process.kill()

    def _start(self, command: str, *, stdin: _Stream, stdout: _Stream, stderr: _Stream) -> subprocess.Popen[bytes]:
        argv = [*self._command, "--", self._access.host, command]
        try:
            process = subprocess.Popen(
                argv, stdin=stdin, stdout=stdout, stderr=stderr, bufsize=0, start_new_session=True
            )
        except OSError as error:
            raise PermanentInfraError(f"{argv[0]} cannot be run on this machine: {error.strerror}") from error
        with self._lock:
            self._processes = [other for other in self._processes if other.poll() is None] + [process]
        return process

    def close(self) -> None:
        with self._lock:
            for process in self._processes:
                process.kill()
        self._folder.cleanup()


def login_command(
    instance: Instance, known_hosts: Path, *, key_file: str = "", command: Sequence[str] = ()
) -> list[str]:
    """Return the command line of the user's own SSH client for a machine whose host key an earlier login stored.

    The client accepts only this host key. All other settings come from the user's configuration and agent.

    Args:
        known_hosts: the file with the machine's stored host key.
        command: a command to run instead of a shell.

    Raises:
        PermanentInfraError: no login has stored a host key yet.
    """
    if not (lines := known_hosts.read_text(encoding="utf-8").splitlines() if known_hosts.exists() else []):
        raise PermanentInfraError(
            f"no run has logged in on {instance.name} yet, so its host key is unknown ({known_hosts} has no key)"
        )
    quoted = str(known_hosts.absolute()).replace("%", "%%")
    options = {
        "HostKeyAlias": lines[-1].split()[0],  # the machine's address may have changed since the key was stored
        "UserKnownHostsFile": f'"{quoted}"',
        "GlobalKnownHostsFile": os.devnull,
        "StrictHostKeyChecking": "yes",
        "CheckHostIP": "no",
        "UpdateHostKeys": "no",
    }
    if instance.proxy_jump:
        options["ProxyCommand"] = proxy_option(
            SSHAccess(
                host=instance.host,
                port=instance.port,
                user=instance.user,
                proxy_jump=instance.proxy_jump,
                ssh_config=instance.ssh_config,
            )
        )
    words = [PROGRAM, "-p", str(instance.port)]
    words += [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
    words += ["-i", str(Path(key_file).expanduser())] if key_file else []
    return [*words, "--", f"{instance.user}@{instance.host}", *([shlex.join(command)] if command else [])]


def is_installed() -> bool:
    """Whether the client is installed, and the temporary folder's name needs no quoting in the client's options."""
    return shutil.which(PROGRAM) is not None and bool(_PLAIN_PATH.fullmatch(tempfile.gettempdir()))


@functools.cache
def _fast_key_exchanges(program: str) -> tuple[str, ...]:
    """Return the members of _FAST_KEY_EXCHANGES that the client knows, or an empty tuple if the client does not know
    the slow key exchange.

    The client refuses an option that contains a name it does not know.
    """
    try:
        asked = subprocess.run(
            [program, "-Q", "kex"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_QUESTION_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ()
    known = asked.stdout.decode(errors="replace").split()
    return tuple(name for name in _FAST_KEY_EXCHANGES if name in known) if _SLOW_KEY_EXCHANGE in known else ()


class OpenSSHChannel:
    """The input and output of one command on a node, through the pipes of the OpenSSH client."""

    def __init__(self, process: subprocess.Popen[bytes], stderr: IO[bytes], address: str) -> None:
        self._address = address
        self._stderr = stderr
        self._process = process
        assert self._process.stdin is not None and self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout
        for stream in (self._input, self._output):
            widen_pipe(stream.fileno())

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def send(self, *parts: bytes | memoryview) -> None:
        """Send all parts. Blocks until the other side has room for the data.

        Raises:
            NodeUnreachableError: the other side no longer receives data.
        """
        rest = [memoryview(part) for part in parts if part]
        try:
            while rest:
                num_sent = os.writev(self._input.fileno(), rest)
                while rest and num_sent >= len(rest[0]):
                    num_sent -= len(rest.pop(0))
                if rest:
                    rest[0] = rest[0][num_sent:]
        except (OSError, ValueError) as error:  # ValueError: the stream is closed
            raise NodeUnreachableError(self._address, "the connection broke") from error

    def receive(self, max_bytes: int, *, timeout_s: float | None = None) -> bytes:
        """Return received bytes, or b"" if the command ended or the connection broke.

        Raises:
            TimeoutError: no byte came in time.
        """
        try:
            if timeout_s is not None and not self._has_output_within(timeout_s):
                raise TimeoutError
            return self._output.read(max_bytes) or b""
        except TimeoutError:
            raise
        except (OSError, ValueError):  # ValueError: the stream is closed
            return b""

    def _has_output_within(self, timeout_s: float) -> bool:
        watch = select.poll()  # select() fails for descriptors above 1023
        watch.register(self._output, select.POLLIN)
        return bool(watch.poll(math.ceil(1000 * timeout_s)))

    def receive_stderr(self) -> bytes:
        """Return at most 64 KiB of the stderr output received so far."""
        return os.pread(self._stderr.fileno(), 64 << 10, 0)

    def exit_code(self) -> int | None:
        try:
            exit_code = self._process.wait(EXIT_CODE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return None
        return None if exit_code in (NOBODY_ANSWERS, *range(-64, 0)) else exit_code

    def end_input(self) -> None:
        with contextlib.suppress(OSError):
            self._input.close()

    def close(self) -> None:
        self.end_input()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(0.05)  # an idle client gets time to close its connection properly
        self.kill()
        self._process.wait()
        self._output.close()
        self._stderr.close()

    def kill(self) -> None:
        """Kill the client. A thread that reads the client's output then gets the end of the output."""
        self._process.kill()
