"""Forward connections from other machines to torch's store on the leader's machine, after both sides proved the run's
key.

torch's store has no authentication, so it listens only on the loopback address. The connections are not encrypted.

    leader's machine                                   further machine
    store at 127.0.0.1 <── gate <── key_handshake ── tunnel, listens at 127.0.0.1 <── ranks and torchrun's agent
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from rollouts_core.backends.key_handshake import ProofError, prove_as_asked, prove_as_asking

LOOPBACK = "127.0.0.1"
MAX_UNPROVEN = 32
"""Highest number of connections whose client has not proved knowledge of the key yet. Further connections are
closed."""
CONNECT_TIMEOUT_S = 10.0
_CHUNK_BYTES = 1 << 16

logger = logging.getLogger(__name__)


@contextmanager
def opened_gate(listener: socket.socket, store_port: int, key: str) -> Iterator[None]:
    """Forward connections at `listener` to the store at this machine's loopback address if the client proves the key.

    Args:
        listener: socket that listens at an address that the other machines can reach. This function closes it.
    """
    unproven = threading.BoundedSemaphore(MAX_UNPROVEN)

    def admit(connection: socket.socket) -> None:
        try:
            prove_as_asked(connection, key)
        except ProofError as error:
            logger.warning("refused a connection to the ranks' store: %s", error)
            return
        finally:
            unproven.release()
        _relay(connection, (LOOPBACK, store_port))

    def accept(connection: socket.socket) -> None:
        if unproven.acquire(blocking=False):
            _start(admit, connection)
        else:
            connection.close()

    with _accepting(listener, accept):
        yield


@contextmanager
def opened_tunnel(host: str, port: int, key: str) -> Iterator[int]:
    """Listen at the loopback address, forward connections to the gate at `host`, and yield the listener's port."""

    def accept(connection: socket.socket) -> None:
        _start(lambda each: _relay(each, (host, port), key), connection)

    listener = socket.create_server((LOOPBACK, 0))
    with _accepting(listener, accept):
        yield listener.getsockname()[1]


@contextmanager
def _accepting(listener: socket.socket, accept: Callable[[socket.socket], None]) -> Iterator[None]:
    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return  # the listener was closed
            accept(connection)

    thread = threading.Thread(target=serve, name="store tunnel", daemon=True)
    thread.start()
    try:
        yield
    finally:
        with suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        listener.close()
        thread.join()


def _start(serve: Callable[[socket.socket], None], connection: socket.socket) -> None:
    """Run `serve` for a connection in a new thread, and then close the connection."""

    def run() -> None:
        with connection:
            serve(connection)

    threading.Thread(target=run, name="store tunnel", daemon=True).start()


def _relay(connection: socket.socket, target: tuple[str, int], key: str = "") -> None:
    """Connect to `target`, and copy bytes in both directions until one of the two connections ends.

    Args:
        key: key whose knowledge is first proved to the target. If empty, the target needs no proof.
    """
    try:
        further = socket.create_connection(target, CONNECT_TIMEOUT_S)
    except OSError as error:
        logger.warning("the ranks' store at %s:%d is unreachable: %s", *target, error)
        return
    with further:
        if key:
            try:
                prove_as_asking(further, key)
            except ProofError as error:
                logger.warning("the connection to the ranks' store at %s:%d failed: %s", *target, error)
                return
        for end in (connection, further):
            end.settimeout(None)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # the store's messages are small
        answers = threading.Thread(target=_copy, args=(further, connection), name="store tunnel", daemon=True)
        answers.start()
        _copy(connection, further)
        answers.join()


def _copy(source: socket.socket, sink: socket.socket) -> None:
    """Copy bytes until the source ends, then close both connections. torch's store uses no half-open connections."""
    with suppress(OSError):
        while chunk := source.recv(_CHUNK_BYTES):
            sink.sendall(chunk)
    for end in (source, sink):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
