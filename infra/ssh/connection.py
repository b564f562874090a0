"""Open an authenticated SSH connection to a node, detect a dead peer, and open channels.

    connect ── TCP ── key exchange ── host key checked ── login ── SSHConnection ── open_command / open_tunnel

Comments explain each departure from paramiko's defaults. Not here: the protocol on a channel (ssh_session.py), the
check of host keys (host_keys.py), login keys (login_keys.py).
"""

import contextlib
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import paramiko

from rollouts.infra.errors import (
    BannedError,
    KeyAgentError,
    LoginError,
    NameUnknownError,
    NodeUnreachableError,
    PermanentInfraError,
    TransientInfraError,
)
from rollouts.infra.foreign_text import shown_line
from rollouts.infra.node import SSHAccess
from rollouts.infra.ssh.host_keys import HostKey, HostKeyEvidence, HostKeyPolicy
from rollouts.infra.ssh.login_keys import (
    SIGNING_TIMEOUT_S,
    KeyOfAgent,
    LoginKeys,
    SigningRefusedError,
    load_keys,
    public_half,
)
from rollouts.infra.ssh.proxy_jump import (
    CONNECT_TIMEOUT_S,
    HEARTBEAT_INTERVAL_S,
    HeardSocket,
    explain_proxy,
    open_proxy,
)

_CHANNEL_TIMEOUT_S = 30.0
EXIT_CODE_TIMEOUT_S = 10.0
HEARTBEAT_LIMIT_S = 30.0
"""Seconds of silence after a heartbeat until the peer counts as dead. Together with HEARTBEAT_INTERVAL_S, a dead peer
is detected within 45 s. Any received byte ends the silence, because a slow link delays the heartbeat's answer."""

CIPHERS = ("aes128-gcm@openssh.com", "aes256-gcm@openssh.com", "aes128-ctr", "aes256-ctr")
"""Ciphers in the order of preference. AES-GCM is 1.5 times as fast as paramiko's first choice."""
_KEX = "curve25519-sha256"
"""A key exchange that paramiko and every server of the last ten years support."""
_KEY_TYPES = ("ssh-ed25519", "ecdsa-sha2-nistp256", "ecdsa-sha2-nistp384", "ecdsa-sha2-nistp521", "ssh-rsa")
SIGNATURES = {"ssh-rsa": ("rsa-sha2-512", "rsa-sha2-256")}
"""Signature algorithms by key type, for the key types whose name differs from the names of their signature
algorithms."""
_REKEY_BYTES = 1 << 35
"""Amount of data after which the encryption keys are renewed. paramiko's default is 512 MiB, and paramiko often hangs
while it renews keys. With AES, OpenSSH renews keys every 64 GiB."""
_NEAR_S = 0.005
_NEAR_WINDOW_BYTES, _FAR_WINDOW_BYTES = 2 << 20, 16 << 20
"""Receive windows of a near and of a distant connection. The window limits the speed of a distant connection. A large
window costs a near connection two fifths of its speed. The server chooses the window for sent data."""
_PROHIBITED = 1
"""Error code for a channel that the server's configuration forbids. All other error codes report temporary problems."""
_REFUSALS_FOR_NOW = ("Not allowed at this time", "Exceeded MaxStartups")
"""Texts that OpenSSH sends instead of its greeting: to a banned address, and while too many logins are in progress."""
_DROPPED = (paramiko.SSHException, OSError, EOFError)

logger = logging.getLogger(__name__)
# Silence paramiko, which logs every dropped connection as a traceback. Our one-sentence errors reach the caller.
_paramiko_logger = logging.getLogger(f"{__name__}.paramiko")
_paramiko_logger.addHandler(logging.NullHandler())
_paramiko_logger.propagate = False


class _Transport(paramiko.Transport):  # type: ignore[misc]  # paramiko has no types
    """A paramiko transport that stores the server's disconnect message, which paramiko only logs."""

    goodbye = ""
    """The server's disconnect message, or "" while connected, or if the server sent none."""

    def _parse_disconnect(self, message: Any) -> None:  # Any: as above
        message.get_int()  # skip the number for the kind of reason
        self.goodbye = shown_line(message.get_string().decode(errors="replace"))


class Channel(Protocol):
    @property
    def has_ended(self) -> bool: ...

    def send(self, *parts: bytes | memoryview) -> None: ...

    def receive(self, max_bytes: int, *, timeout_s: float | None = None) -> bytes: ...

    def receive_stderr(self) -> bytes: ...

    def exit_code(self) -> int | None: ...

    def end_input(self) -> None: ...

    def close(self) -> None: ...


class SSHChannel:
    """The input and output of one command, or of one forwarded port, of a node. The methods raise InfraError instead of
    paramiko's errors."""

    def __init__(self, channel: Any, address: str) -> None:  # Any: paramiko has no types
        self._channel = channel
        self._address = address

    @property
    def has_ended(self) -> bool:
        """True once this side has noticed the end of the channel or of its connection."""
        return bool(self._channel.closed or self._channel.eof_received)

    def send(self, *parts: bytes | memoryview) -> None:
        """Send all parts. Blocks until the other side has room for the data.

        Raises:
            NodeUnreachableError: the other side no longer receives data.
        """
        try:
            self._channel.settimeout(None)
            self._channel.sendall(b"".join(parts))
        except _DROPPED as error:
            raise NodeUnreachableError(self._address, describe(error)) from error

    def receive(self, max_bytes: int, *, timeout_s: float | None = None) -> bytes:
        """Return received bytes, or b"" if the channel ended or the connection broke, because paramiko reports both
        alike.

        Raises:
            TimeoutError: no byte came in time.
        """
        try:
            self._channel.settimeout(timeout_s)
            return bytes(self._channel.recv(max_bytes))
        except TimeoutError:
            raise
        except _DROPPED:
            return b""

    def receive_stderr(self) -> bytes:
        """Return at most 64 KiB of the stderr output received so far, without waiting."""
        if not self._channel.recv_stderr_ready():
            return b""
        return bytes(self._channel.recv_stderr(64 << 10))

    def exit_code(self) -> int | None:
        """The command's exit code, or None if the server does not report it."""
        self._channel.status_event.wait(EXIT_CODE_TIMEOUT_S)  # the code arrives shortly after the end of the output
        exit_code = int(self._channel.exit_status)
        return None if exit_code == -1 else exit_code

    def end_input(self) -> None:
        with contextlib.suppress(*_DROPPED):
            self._channel.shutdown_write()

    def close(self) -> None:
        with contextlib.suppress(*_DROPPED):
            self._channel.close()


class SSHConnection:
    """An authenticated connection. The connection ends by `close`, or when the peer no longer answers heartbeats."""

    # Any: paramiko has no types.
    def __init__(
        self, transport: Any, address: str, evidence: HostKeyEvidence, *, host_key: HostKey, key_file: str
    ) -> None:
        self._transport = transport
        self.address = address
        self.host_key = host_key
        self.key_file = key_file
        """File of the private key that the server accepted, or "" for a key of the agent."""
        round_trip_s = _measure_round_trip(transport, address)
        self.is_far = round_trip_s >= _NEAR_S
        """Whether the round trip is so long that the window limits the speed."""
        self._closed = threading.Event()
        self.host_key_evidence = evidence
        threading.Thread(target=self._watch_peer, name=f"heartbeat of {address}", daemon=True).start()

    @property
    def is_alive(self) -> bool:
        """False once this side has noticed that the connection broke. A broken connection may be noticed late."""
        return bool(self._transport.is_active())

    def open_command(self, command: str) -> SSHChannel:
        """Open a channel on which the node's shell runs a command.

        Raises:
            NodeUnreachableError: the connection has broken.
            TransientInfraError: the server allows no further channel now. The connection still works.
        """
        channel = self._open("session")
        try:
            channel.exec_command(command)
        except _DROPPED as error:
            channel.close()
            raise NodeUnreachableError(self.address, describe(error)) from error
        return SSHChannel(channel, self.address)

    def open_tunnel(self, port: int, host: str) -> SSHChannel:
        """Open a channel to a port of a host, as seen from the node.

        Raises:
            NodeUnreachableError: the connection has broken.
            TransientInfraError: no program listens on the port.
            PermanentInfraError: the server forbids forwarding, or forbids this address.
        """
        return SSHChannel(self._open("direct-tcpip", (host, port), ("127.0.0.1", 0)), self.address)

    def close(self) -> None:
        self._closed.set()
        self._transport.close()

    def _open(self, kind: str, *addresses: tuple[str, int]) -> Any:  # Any: paramiko has no types
        window = _FAR_WINDOW_BYTES if self.is_far else _NEAR_WINDOW_BYTES
        try:
            return self._transport.open_channel(kind, *addresses, window_size=window, timeout=_CHANNEL_TIMEOUT_S)
        except paramiko.ChannelException as error:
            if addresses and error.code == _PROHIBITED:
                raise PermanentInfraError(
                    f"{self.address} does not forward connections, which engines there need: allow TCP forwarding in "
                    "its sshd_config (AllowTcpForwarding, DisableForwarding, PermitOpen) and in authorized_keys"
                ) from error
            raise TransientInfraError(f"{self.address} opens no further channel now ({error}): try again") from error
        except _DROPPED as error:
            raise NodeUnreachableError(self.address, describe(error)) from error

    def _watch_peer(self) -> None:
        """Send heartbeats, because TCP alone does not detect a server that hangs."""
        with contextlib.suppress(*_DROPPED):
            while not self._closed.wait(HEARTBEAT_INTERVAL_S) and self._transport.is_active():
                _ask_for_sign_of_life(self._transport)


def connect(access: SSHAccess, *, likely_type: str = "") -> SSHConnection:
    """Log in on a node.

    Args:
        likely_type: type of the host key in an earlier connection. The server is asked for this type first.

    Raises:
        BannedError: the node's server refuses connections from this machine for some time.
        NodeUnreachableError: the node does not answer, or the connection breaks, or the name of a node with a known
            host key cannot be resolved now.
        HostKeyError: the host key is wrong. No login key was offered.
        LoginError: the node refuses the login, or the login key is unusable.
        KeyAgentError: the SSH agent does not sign with a candidate key.
        NameUnknownError: the node's name cannot be resolved, and its host key is unknown.
    """
    keys, refusal = load_keys(access), ""
    while True:
        try:
            return _connect(access, keys, likely_type)
        except SigningRefusedError as error:  # the connection is already closed
            refusal = f"{error} with {_fingerprint(error.key)}: unlock it, or confirm its question"
            keys = keys.without(error.key, refusal)
            if not keys.keys:
                raise KeyAgentError(access.address, refusal) from error
        except LoginError as error:
            if refusal:  # the key that the agent did not use may be right
                raise KeyAgentError(access.address, error.problem) from error
            raise


def _connect(access: SSHAccess, keys: LoginKeys, likely_type: str) -> SSHConnection:
    """Connect and log in with these keys. Raises the errors of `connect`, too.

    Raises:
        SigningRefusedError: the agent refuses to sign with one of the keys.
    """
    policy = HostKeyPolicy(
        host=access.host,
        port=access.port,
        alias=access.host_key_alias,
        pinned=access.host_key,
        known_hosts=tuple(Path(path).expanduser() for path in access.known_hosts),
        first_use_file=Path(access.first_use_file) if access.first_use_file else None,
        pinned_file=Path(access.pinned_file) if access.pinned_file else None,
        likely_type=likely_type,
    )
    try:
        transport, host_key, evidence = _open_verified(access, policy)
    except NameUnknownError as error:
        if not (policy.pinned or policy.known_keys()):
            raise
        # A known host key shows that the name could be resolved before. The name server may be unreachable now, for
        # example outside a company's network.
        raise NodeUnreachableError(access.address, str(error)) from error
    try:
        key_file = _log_in(transport, access, keys)
        logger.info("connected to %s, host key by %s", access.address, evidence)
        return SSHConnection(transport, access.address, evidence, host_key=host_key, key_file=key_file)
    except BaseException:
        transport.close()
        raise


def _ask_for_sign_of_life(transport: Any) -> None:  # Any: paramiko has no types
    """Send a heartbeat and wait for the answer. Disconnects a peer that is silent for too long."""
    is_answered = threading.Event()
    threading.Thread(target=_close_if_silent, args=(transport, is_answered), daemon=True).start()
    try:
        transport.global_request("keepalive@openssh.com", wait=True)
    finally:
        is_answered.set()


def _close_if_silent(transport: Any, is_answered: threading.Event) -> None:  # Any: paramiko has no types
    asked_at, silent_s = time.monotonic(), 0.0
    while silent_s < HEARTBEAT_LIMIT_S:
        if is_answered.wait(HEARTBEAT_LIMIT_S - silent_s):
            return
        silent_s = time.monotonic() - max(asked_at, transport.sock.heard_at)
    transport.close()


def _measure_round_trip(transport: Any, address: str) -> float:  # Any: paramiko has no types
    """Measure the round trip to the server in seconds.

    TCP's round trip is not enough, because a nearby proxy may end the TCP connection.

    Raises:
        NodeUnreachableError: the server accepted the login and then hangs, for example on the user's home folder.
    """
    round_trip_s = float("inf")
    for attempt in range(6):  # repeat, because one measurement may include a wait for a CPU
        started = time.monotonic()
        _ask_for_sign_of_life(transport)
        if not transport.is_active():
            raise NodeUnreachableError(address, "it accepts the login and then does not answer")
        round_trip_s = min(round_trip_s, time.monotonic() - started)
        if round_trip_s < _NEAR_S or (attempt > 0 and round_trip_s > 4 * _NEAR_S):
            break
    return round_trip_s


def _open_verified(access: SSHAccess, policy: HostKeyPolicy) -> tuple[Any, HostKey, HostKeyEvidence]:
    """Open a transport to a host, and check that the host's key is right.

    A host has keys of several types and shows the key whose type comes first in the request. A pinned fingerprint does
    not tell the key's type, so the type is looked up among the stored keys. If no key is stored, further connections
    request the types that the host has not shown yet. Each wrong type costs a connection without a login, and OpenSSH
    bans an address after several such connections.
    """
    key: HostKey | None = None
    reasons = []
    left: tuple[str, ...] = _KEY_TYPES
    types = policy.likely_types(left) or left
    while types:
        try:
            transport, key = _open_transport(access, types)
        except paramiko.IncompatiblePeer as error:  # the host has no key of these types, or no algorithm in common
            reasons.append(describe(error).partition("(")[2].rstrip(")"))
            types = left = tuple(each for each in left if each not in types)
            continue
        try:
            if not policy.pinned or policy.pinned == key.fingerprint:
                return transport, key, policy.check(key)
        except BaseException:
            transport.close()
            raise
        transport.close()
        is_asked_for = key.type in types
        types = left = tuple(each for each in left if each != key.type) if is_asked_for else ()
    if key is None:
        reason = min(reasons, key=lambda each: "host key" in each)
        raise PermanentInfraError(
            f"{access.address} has an SSH server without a safe algorithm in common ({reason}): update "
            f"it, or allow the cipher {CIPHERS[0]} and the key exchange {_KEX} in its sshd_config"
        )
    raise AssertionError(policy.check(key))  # `check` raises HostKeyError, because the key is not the pinned one


def _open_transport(access: SSHAccess, key_types: Sequence[str]) -> tuple[Any, HostKey]:
    """Open a transport without a login. Returns the transport and the host's key. The host has proven that it owns the
    key.

    Raises:
        NodeUnreachableError: the host does not answer, or the connection breaks.
        LoginError: a jump host refuses the login.
        NameUnknownError: the name of the host or of a jump host cannot be resolved.
        paramiko.IncompatiblePeer: the host has no key of these types.
    """
    proxy = open_proxy(access) if access.proxy_jump else None
    heard = proxy or HeardSocket(_open_socket(access))
    transport = _Transport(heard)
    transport.set_log_channel(_paramiko_logger.name)
    transport.packetizer.REKEY_BYTES = _REKEY_BYTES
    transport.banner_timeout = transport.auth_timeout = CONNECT_TIMEOUT_S
    options = transport.get_security_options()
    options.ciphers = CIPHERS
    options.key_types = tuple(signature for t in key_types for signature in SIGNATURES.get(t, (t,)))
    try:
        transport.start_client(timeout=CONNECT_TIMEOUT_S)
        remote = transport.get_remote_server_key()  # raises after a timeout, which start_client does not report
    except paramiko.IncompatiblePeer:
        transport.close()
        raise
    except _DROPPED as error:
        failure = explain_proxy(access, proxy, describe(error)) if proxy and not heard.refusal else None
        transport.close()
        raise failure or _no_greeting(access, heard.refusal or describe(error)) from error
    return transport, HostKey(remote.get_name(), remote.asbytes())


def _no_greeting(access: SSHAccess, reason: str) -> NodeUnreachableError:
    """Return the error for a server that disconnected before it showed a key. `reason` is the server's message."""
    if any(reason.startswith(refusal) for refusal in _REFUSALS_FOR_NOW):
        return BannedError(access.address, reason)
    return NodeUnreachableError(access.address, reason)


def _open_socket(access: SSHAccess) -> socket.socket:
    """Open a TCP socket without send delay, with keepalive probes that detect a dead link."""
    try:
        tcp = socket.create_connection((access.host, access.port), CONNECT_TIMEOUT_S)
    except socket.gaierror as error:
        if error.errno == socket.EAI_NONAME:
            raise NameUnknownError(f"there is no host called {access.host}: check node.host") from error
        raise NodeUnreachableError(access.address, error.strerror or str(error)) from error
    except UnicodeError as error:  # the name has two dots in a row, or a label is too long
        raise PermanentInfraError(f"{access.host} is not a valid host name: check node.host") from error
    except OSError as error:
        raise NodeUnreachableError(access.address, error.strerror or str(error)) from error
    tcp.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # paramiko's default is 14 times slower
    tcp.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        for option, value in (
            (socket.TCP_KEEPIDLE, 15),
            (socket.TCP_KEEPINTVL, 5),
            (socket.TCP_KEEPCNT, 4),
            (socket.TCP_USER_TIMEOUT, 40_000),
        ):
            tcp.setsockopt(socket.IPPROTO_TCP, option, value)
    return tcp


# ── login ──


def _log_in(transport: Any, access: SSHAccess, keys: LoginKeys) -> str:  # Any: paramiko has no types
    """Offer the keys one after another. Returns the file of the accepted key.

    Raises:
        LoginError: the node accepts no key, or requires more than a key.
        SigningRefusedError: the agent refuses to sign with a key.
        KeyAgentError: the agent does not answer in time.
        NodeUnreachableError: the connection broke, or the node does not answer in time.
    """
    wanted_besides: list[str] = []
    for num_offered, key in enumerate(keys.keys, start=1):
        is_of_agent = isinstance(key.key, KeyOfAgent)
        transport.auth_timeout = SIGNING_TIMEOUT_S if is_of_agent else CONNECT_TIMEOUT_S
        try:
            wanted_besides = transport.auth_publickey(access.user, key.key) or wanted_besides
        except paramiko.BadAuthenticationType as error:
            ways = ", ".join(error.allowed_types)
            raise LoginError(access.address, f"it requires {ways}: allow public keys there") from error
        except paramiko.AuthenticationException as error:
            if transport.goodbye:
                raise LoginError(
                    access.address,
                    f"it disconnected after {num_offered} of {len(keys.keys)} keys ({transport.goodbye}): name "
                    "the right one as node.key_file",
                ) from error
            if is_of_agent and key.key.is_signing:
                raise KeyAgentError(
                    access.address,
                    f"the SSH agent did not sign with {_fingerprint(key.key)} within {SIGNING_TIMEOUT_S:g} s: confirm "
                    "its question, or name another key as node.key_file",
                ) from error
            # paramiko raises the same error for a wrong key, a broken connection and a server that times out.
            if not transport.is_active() or "timeout" in describe(error):
                raise NodeUnreachableError(access.address, describe(error)) from error
        except SigningRefusedError:
            raise
        except _DROPPED as error:
            raise NodeUnreachableError(access.address, describe(error)) from error
        if transport.is_authenticated():
            return key.file
    if wanted_besides:
        ways = ", ".join(wanted_besides)
        raise LoginError(access.address, f"it accepts our key, but also requires {ways}: allow a key alone there")
    names = ", ".join(sorted({_fingerprint(each.key) for each in keys.keys}))
    remedy = "; not tried: ".join(["put the public key into ~/.ssh/authorized_keys there", *keys.left_out])
    raise LoginError(access.address, f"user {access.user} cannot log in with {names}: {remedy}")


def _fingerprint(key: Any) -> str:  # Any: paramiko has no types
    return HostKey(key.get_name(), public_half(key)).fingerprint


def describe(error: BaseException) -> str:
    """Return the text of an error, or the error's type if the text is empty."""
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno)
    return str(error).strip() or type(error).__name__
