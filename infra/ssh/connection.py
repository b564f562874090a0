"""Open one authenticated SSH connection to a node, notice when its peer is dead, and open channels on it.

Not here: what is said on a channel (ssh_session.py), which host key is right (host_keys.py), which keys of ours there
are (login_keys.py). paramiko's defaults are not for us; each departure is explained where it is made.

    connect ── TCP ── key exchange ── host key checked ── login ── SSHConnection ── open_command / open_tunnel
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

from infra.errors import (
    BannedError,
    KeyAgentError,
    LoginError,
    NameUnknownError,
    NodeUnreachableError,
    PermanentInfraError,
    TransientInfraError,
)
from infra.foreign_text import shown_line
from infra.node import SSHAccess
from infra.ssh.heard_socket import HeardSocket
from infra.ssh.host_keys import HostKey, HostKeyEvidence, HostKeyPolicy
from infra.ssh.key_agent import SIGNING_TIMEOUT_S, KeyOfAgent, SigningRefusedError, public_half
from infra.ssh.login_keys import LoginKeys, load_keys
from infra.ssh.proxy_jump import explain_proxy, open_proxy

CONNECT_TIMEOUT_S = 15.0
CHANNEL_TIMEOUT_S = 30.0
EXIT_CODE_TIMEOUT_S = 10.0
HEARTBEAT_INTERVAL_S = 15.0
HEARTBEAT_LIMIT_S = 30.0
"""A peer from which nothing at all has come for this long after a heartbeat is dead; with the interval, found within
45 s. The answer itself may take longer: over a slow link it comes after what is on its way."""

CIPHERS = ("aes128-gcm@openssh.com", "aes256-gcm@openssh.com", "aes128-ctr", "aes256-ctr")
"""GCM first: half as fast again as paramiko's first choice."""
KEX = "curve25519-sha256"
"""One that paramiko and every server of the last ten years know."""
_KEY_TYPES = ("ssh-ed25519", "ecdsa-sha2-nistp256", "ecdsa-sha2-nistp384", "ecdsa-sha2-nistp521", "ssh-rsa")
SIGNATURES = {"ssh-rsa": ("rsa-sha2-512", "rsa-sha2-256")}
"""How a host proves to have a key, where that is not called like the key."""
_REKEY_BYTES = 1 << 35
"""paramiko asks for new keys every 512 MiB, and then often waits for ever; OpenSSH does it every 64 GiB with AES."""
_NEAR_S = 0.005
_NEAR_WINDOW_BYTES, _FAR_WINDOW_BYTES = 2 << 20, 16 << 20
"""Over a long way the window limits the speed; over a short one a large window costs two fifths of it. This is the
window of what we receive; the server decides on the other."""
_PROHIBITED = 1
"""Why a channel is not opened: the server's configuration. Others say that it cannot be now."""
REFUSALS_FOR_NOW = ("Not allowed at this time", "Exceeded MaxStartups")
"""OpenSSH's words, in place of its greeting, for an address that it has banned and for too many logins at a time."""
_DROPPED = (paramiko.SSHException, OSError, EOFError)

logger = logging.getLogger(__name__)
# It reports every dropped connection as an error with a traceback; ours are one sentence and reach the caller.
_paramiko_logger = logging.getLogger(f"{__name__}.paramiko")
_paramiko_logger.addHandler(logging.NullHandler())
_paramiko_logger.propagate = False


class _Transport(paramiko.Transport):  # type: ignore[misc]  # paramiko has no types
    """One that keeps what the server said when it hung up, which paramiko only logs."""

    goodbye = ""
    """Empty where it said nothing, or is still there."""

    def _parse_disconnect(self, message: Any) -> None:  # Any: as above
        message.get_int()  # a number for the kind of reason
        self.goodbye = shown_line(message.get_string().decode(errors="replace"))


class Channel(Protocol):
    """Bytes to and from one command of a node."""

    @property
    def has_ended(self) -> bool: ...

    def send(self, *parts: bytes | memoryview) -> None: ...

    def receive(self, max_bytes: int, *, timeout_s: float | None = None) -> bytes: ...

    def receive_stderr(self) -> bytes: ...

    def exit_code(self) -> int | None: ...

    def end_input(self) -> None: ...

    def close(self) -> None: ...


class SSHChannel:
    """Bytes to and from one command, or one port, of a node; its errors are ours, not paramiko's."""

    def __init__(self, channel: Any, address: str) -> None:  # Any: paramiko has no types
        self._channel = channel
        self._address = address

    @property
    def has_ended(self) -> bool:
        """True when its end, or that of its connection, was noticed."""
        return bool(self._channel.closed or self._channel.eof_received)

    def send(self, *parts: bytes | memoryview) -> None:
        """Send everything, waiting until the other side has room.

        Raises:
            NodeUnreachableError: nobody takes it any more.
        """
        try:
            self._channel.settimeout(None)
            self._channel.sendall(b"".join(parts))
        except _DROPPED as error:
            raise NodeUnreachableError(self._address, describe(error)) from error

    def receive(self, max_bytes: int, *, timeout_s: float | None = None) -> bytes:
        """What has arrived; empty when the channel has ended, or the connection broke, which look alike.

        Raises:
            TimeoutError: nothing came in time.
        """
        try:
            self._channel.settimeout(timeout_s)
            return bytes(self._channel.recv(max_bytes))
        except TimeoutError:
            raise
        except _DROPPED:
            return b""

    def receive_stderr(self) -> bytes:
        """What has arrived on the other channel, up to 64 KiB; waits for nothing."""
        if not self._channel.recv_stderr_ready():
            return b""
        return bytes(self._channel.recv_stderr(64 << 10))

    def exit_code(self) -> int | None:
        """How the command ended; None when the server does not say."""
        self._channel.status_event.wait(EXIT_CODE_TIMEOUT_S)  # it comes a moment after the end of the output
        exit_code = int(self._channel.exit_status)
        return None if exit_code == -1 else exit_code

    def end_input(self) -> None:
        """Say that nothing more will be sent."""
        with contextlib.suppress(*_DROPPED):
            self._channel.shutdown_write()

    def close(self) -> None:
        """Give the channel up."""
        with contextlib.suppress(*_DROPPED):
            self._channel.close()


class SSHConnection:
    """An authenticated connection; ends by `close`, or by itself when the peer does not answer any more."""

    # Any: paramiko has no types.
    def __init__(
        self, transport: Any, address: str, evidence: HostKeyEvidence, *, host_key: HostKey, key_file: str
    ) -> None:
        self._transport = transport
        self.address = address
        self.host_key = host_key
        self.key_file = key_file
        """The private key that let us in; empty where the agent has it."""
        round_trip_s = _measure_round_trip(transport, address)
        self.is_far = round_trip_s >= _NEAR_S
        """Whether a connection's windows limit its speed."""
        self._closed = threading.Event()
        self.host_key_evidence = evidence
        threading.Thread(target=self._watch_peer, name=f"heartbeat of {address}", daemon=True).start()

    @property
    def is_alive(self) -> bool:
        """False once it has broken, which may be noticed late."""
        return bool(self._transport.is_active())

    def open_command(self, command: str) -> SSHChannel:
        """A channel on which the node's shell runs a command.

        Raises:
            NodeUnreachableError: the connection has broken.
            TransientInfraError: the server allows no more channels now; the connection lives.
        """
        channel = self._open("session")
        try:
            channel.exec_command(command)
        except _DROPPED as error:
            channel.close()
            raise NodeUnreachableError(self.address, describe(error)) from error
        return SSHChannel(channel, self.address)

    def open_tunnel(self, port: int, host: str) -> SSHChannel:
        """A channel to where the node finds host and port.

        Raises:
            NodeUnreachableError: the connection has broken.
            TransientInfraError: nobody listens there.
            PermanentInfraError: the server forwards no connections, or none to there.
        """
        return SSHChannel(self._open("direct-tcpip", (host, port), ("127.0.0.1", 0)), self.address)

    def close(self) -> None:
        """Drop the connection with everything on it."""
        self._closed.set()
        self._transport.close()

    def _open(self, kind: str, *addresses: tuple[str, int]) -> Any:  # Any: paramiko has no types
        window = _FAR_WINDOW_BYTES if self.is_far else _NEAR_WINDOW_BYTES
        try:
            return self._transport.open_channel(kind, *addresses, window_size=window, timeout=CHANNEL_TIMEOUT_S)
        except paramiko.ChannelException as error:
            if addresses and error.code == _PROHIBITED:
                raise PermanentInfraError(
                    f"{self.address} forwards no connections, by which engines there are reached: let its sshd_config "
                    "allow TCP forwarding (AllowTcpForwarding, DisableForwarding, PermitOpen), and authorized_keys, too"
                ) from error
            raise TransientInfraError(f"{self.address} opens no more channels now ({error}): try again") from error
        except _DROPPED as error:
            raise NodeUnreachableError(self.address, describe(error)) from error

    def _watch_peer(self) -> None:
        """Ask for a sign of life now and then; TCP alone does not notice a server that hangs."""
        with contextlib.suppress(*_DROPPED):
            while not self._closed.wait(HEARTBEAT_INTERVAL_S) and self._transport.is_active():
                _ask_for_sign_of_life(self._transport)


def connect(access: SSHAccess, *, likely_type: str = "") -> SSHConnection:
    """Log in on a node.

    Args:
        likely_type: the type of the host key that an earlier connection was shown; asked for first.

    Raises:
        BannedError: its server takes no connections from here for a while.
        NodeUnreachableError: nobody answers there, or the connection breaks; or nobody knows the name of a node whose
            key is known.
        HostKeyError: somebody answers with the wrong key; no key of ours was used.
        LoginError: the node does not let us in, or our key cannot be used.
        KeyAgentError: the SSH agent does not sign with a key that it might let in.
        NameUnknownError: nobody knows the name of one whose key is not.
    """
    keys, refusal = load_keys(access), ""
    while True:
        try:
            return _connect(access, keys, likely_type)
        except SigningRefusedError as error:  # the connection does not outlive that
            refusal = f"{error} with {_fingerprint(error.key)}: unlock it, or allow what it asks"
            keys = keys.without(error.key, refusal)
            if not keys.keys:
                raise KeyAgentError(access.address, refusal) from error
        except LoginError as error:
            if refusal:  # it may have been the key
                raise KeyAgentError(access.address, error.problem) from error
            raise


def _connect(access: SSHAccess, keys: LoginKeys, likely_type: str) -> SSHConnection:
    """As `connect`, with these keys.

    Raises:
        SigningRefusedError: the agent does not sign with one of them.
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
        # It has answered to its name before: what knows that is away, a company's network or any at all.
        raise NodeUnreachableError(access.address, str(error)) from error
    try:
        key_file = _log_in(transport, access, keys)
        logger.info("connected to %s, host key by %s", access.address, evidence)
        return SSHConnection(transport, access.address, evidence, host_key=host_key, key_file=key_file)
    except BaseException:
        transport.close()
        raise


def _ask_for_sign_of_life(transport: Any) -> None:  # Any: paramiko has no types
    """Return when the peer has answered, or nothing has come from it for too long: then the connection is closed."""
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
    """Seconds to the server and back; not those of the TCP connection, which a proxy may end nearby.

    Raises:
        NodeUnreachableError: it let us in and says nothing more, as where the home that it opens for us hangs.
    """
    round_trip_s = float("inf")
    for attempt in range(6):  # those on a short way may have waited for a processor
        started = time.monotonic()
        _ask_for_sign_of_life(transport)
        if not transport.is_active():
            raise NodeUnreachableError(address, "it lets us in and does not answer then")
        round_trip_s = min(round_trip_s, time.monotonic() - started)
        if round_trip_s < _NEAR_S or (attempt > 0 and round_trip_s > 4 * _NEAR_S):
            break
    return round_trip_s


def _open_verified(access: SSHAccess, policy: HostKeyPolicy) -> tuple[Any, HostKey, HostKeyEvidence]:
    """A transport whose host key is right.

    A host has keys of several types and shows the first that we ask for. A fingerprint does not tell its type, so the
    type is looked up among the noted keys; an unknown one is found by asking for all types but those that were shown.
    Each miss is a connection without a login, for which OpenSSH bans an address after a while.
    """
    key: HostKey | None = None
    reasons = []
    left: tuple[str, ...] = _KEY_TYPES
    types = policy.likely_types(left) or left
    while types:
        try:
            transport, key = _open_transport(access, types)
        except paramiko.IncompatiblePeer as error:  # it has none of these types, or another cipher
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
            f"{access.address} has an SSH server with which we have nothing in common that is safe ({reason}): update "
            f"it, or let its sshd_config allow the cipher {CIPHERS[0]} and the exchange of keys {KEX}"
        )
    raise AssertionError(policy.check(key))  # it is not the pinned one: raises


def _open_transport(access: SSHAccess, key_types: Sequence[str]) -> tuple[Any, HostKey]:
    """A connection with nothing sent over it yet, and the key that the host has proved to have.

    Raises:
        NodeUnreachableError: nobody answers, or the answer breaks off.
        LoginError: a machine on the way there does not let us in.
        NameUnknownError: nobody knows its name, or that of a machine on the way.
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
        remote = transport.get_remote_server_key()  # fails after a timeout, which the line above keeps to itself
    except paramiko.IncompatiblePeer:
        transport.close()
        raise
    except _DROPPED as error:
        failure = explain_proxy(access, proxy, describe(error)) if proxy and not heard.refusal else None
        transport.close()
        raise failure or _no_greeting(access, heard.refusal or describe(error)) from error
    return transport, HostKey(remote.get_name(), remote.asbytes())


def _no_greeting(access: SSHAccess, reason: str) -> NodeUnreachableError:
    """The error for a server that ended the connection before it showed a key, by what it said."""
    if any(reason.startswith(refusal) for refusal in REFUSALS_FOR_NOW):
        return BannedError(access.address, reason)
    return NodeUnreachableError(access.address, reason)


def _open_socket(access: SSHAccess) -> socket.socket:
    """A socket that sends at once and notices a dead link."""
    try:
        tcp = socket.create_connection((access.host, access.port), CONNECT_TIMEOUT_S)
    except socket.gaierror as error:
        if error.errno == socket.EAI_NONAME:
            raise NameUnknownError(f"there is no host called {access.host}: check node.host") from error
        raise NodeUnreachableError(access.address, error.strerror or str(error)) from error
    except UnicodeError as error:  # two dots in a row, or more letters between two than names can have
        raise PermanentInfraError(f"{access.host} is no name that a host can have: check node.host") from error
    except OSError as error:
        raise NodeUnreachableError(access.address, error.strerror or str(error)) from error
    tcp.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # paramiko leaves it off: 14 times slower
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
    """Offer the keys in turn; returns the file of the one that is taken.

    Raises:
        LoginError: the node takes none of them, or none alone.
        SigningRefusedError: the agent does not sign with one of them.
        KeyAgentError: it says neither yes nor no.
        NodeUnreachableError: the connection broke, or the node says neither yes nor no.
    """
    wanted_besides: list[str] = []
    for num_offered, key in enumerate(keys.keys, start=1):
        is_of_agent = isinstance(key.key, KeyOfAgent)
        transport.auth_timeout = SIGNING_TIMEOUT_S if is_of_agent else CONNECT_TIMEOUT_S
        try:
            wanted_besides = transport.auth_publickey(access.user, key.key) or wanted_besides
        except paramiko.BadAuthenticationType as error:
            ways = ", ".join(error.allowed_types)
            raise LoginError(access.address, f"it wants {ways}, and we have keys: allow public keys there") from error
        except paramiko.AuthenticationException as error:
            if transport.goodbye:
                raise LoginError(
                    access.address,
                    f"it hung up when {num_offered} of {len(keys.keys)} keys were offered ({transport.goodbye}): name "
                    "the right one as node.key_file",
                ) from error
            if is_of_agent and key.key.is_signing:
                raise KeyAgentError(
                    access.address,
                    f"the SSH agent has not signed with {_fingerprint(key.key)} for {SIGNING_TIMEOUT_S:g} s: allow "
                    "what it asks, or name another key as node.key_file",
                ) from error
            # So it also calls a connection that breaks just now, and a server that says neither yes nor no in time.
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
        raise LoginError(access.address, f"it takes a key of ours, and wants {ways} besides: let the key do there")
    names = ", ".join(sorted({_fingerprint(each.key) for each in keys.keys}))
    remedy = "; not tried: ".join(["put the public key into ~/.ssh/authorized_keys there", *keys.left_out])
    raise LoginError(access.address, f"user {access.user} is not let in with {names}: {remedy}")


def _fingerprint(key: Any) -> str:  # Any: paramiko has no types
    return HostKey(key.get_name(), public_half(key)).fingerprint


def describe(error: BaseException) -> str:
    """The reason in words, for errors that sometimes have none."""
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno)
    return str(error).strip() or type(error).__name__
