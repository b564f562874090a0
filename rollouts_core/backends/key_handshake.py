"""Mutual authentication: client and server of a connection prove that they know a key, without sending the key.

client                                server
nonce a ──>                                          32 random bytes
                 <── nonce b, HMAC(key, "asked" a b)
HMAC(key, "asks" a b) ──>

The connection itself is not encrypted.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import time

ASKING_S, ASKED_S = 10.0, 4.0
"""Time limits of client and server for the handshake, seconds. The server's limit is shorter, because a server may
handle one connection at a time: a client that sends nothing must not make the next client time out."""
_NUM_BYTES = 32
_ASKS, _ASKED = b"asks", b"asked"


class ProofError(Exception):
    """The peer does not know the key, or did not prove it in time."""


def prove_as_asking(connection: socket.socket, key: str) -> None:
    """Run the client's side of the handshake: verify the server's proof, then prove knowledge of the key.

    Raises:
        ProofError: the server gave no valid proof.
    """
    deadline = time.monotonic() + ASKING_S
    own = secrets.token_bytes(_NUM_BYTES)
    _send(connection, own)
    answer = _receive(connection, 2 * _NUM_BYTES, deadline)
    other, proof = answer[:_NUM_BYTES], answer[_NUM_BYTES:]
    _check(proof, key, _ASKED + own + other)
    _send(connection, _sign(key, _ASKS + own + other))


def prove_as_asked(connection: socket.socket, key: str) -> None:
    """Run the server's side of the handshake: prove knowledge of the key, then verify the client's proof.

    Raises:
        ProofError: the client gave no valid proof.
    """
    deadline = time.monotonic() + ASKED_S
    own = secrets.token_bytes(_NUM_BYTES)
    other = _receive(connection, _NUM_BYTES, deadline)
    _send(connection, own + _sign(key, _ASKED + other + own))
    _check(_receive(connection, _NUM_BYTES, deadline), key, _ASKS + other + own)


def _sign(key: str, message: bytes) -> bytes:
    return hmac.digest(key.encode(), message, "sha256")


def _check(proof: bytes, key: str, message: bytes) -> None:
    if not hmac.compare_digest(proof, _sign(key, message)):
        raise ProofError("the other end does not know the key of this run")


def _send(connection: socket.socket, content: bytes) -> None:
    connection.settimeout(ASKED_S)
    try:
        connection.sendall(content)
    except OSError as error:
        raise ProofError(f"the connection broke ({error.strerror or error})") from error


def _receive(connection: socket.socket, num_bytes: int, deadline: float) -> bytes:
    content = b""
    while len(content) < num_bytes:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise ProofError("the other end did not prove in time that it knows the key of this run")
        connection.settimeout(left_s)
        try:
            chunk = connection.recv(num_bytes - len(content))
        except TimeoutError:
            continue
        except OSError as error:
            raise ProofError(f"the connection broke ({error.strerror or error})") from error
        if not chunk:
            raise ProofError("the other end closed the connection")
        content += chunk
    return content
