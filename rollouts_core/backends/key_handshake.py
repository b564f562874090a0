"""Prove over a connection that both ends know a key, without sending the key. Nothing is encrypted.

client:  nonce a ──>                               32 random bytes
                 <── nonce b, HMAC(key, "asked" a b)
HMAC(key, "asks" a b) ──>
"""

from __future__ import annotations

import hmac
import secrets
import socket
import time

ASKING_S, ASKED_S = 10.0, 4.0
"""Time limits of client and server for the whole exchange, seconds. The server handles one connection at a time, so a
silent stranger must not use up the client's time."""
_NUM_BYTES = 32
_ASKS, _ASKED = b"asks", b"asked"


class ProofError(Exception):
    """The other end does not know the key, or did not prove it in time."""


def prove_as_asking(connection: socket.socket, key: str) -> None:
    """Run the client's side: prove the key and verify the server's proof.

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
    """Run the server's side: prove the key and verify the client's proof.

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
