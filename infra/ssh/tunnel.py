"""Forward a local port to a port of a node.

client here ──> 127.0.0.1:<free port> ──> one channel per connection ──> the node's 127.0.0.1:<port>
"""

import contextlib
import errno
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator

from rollouts.infra.errors import InfraError, NodeUnreachableError, TransientInfraError
from rollouts.infra.session import LOOPBACK
from rollouts.infra.ssh.connection import SSHChannel

_PIECE_BYTES = 64 << 10
_PASSING = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.ECONNABORTED)
"""Temporary reasons why `accept` fails, for example too many open files."""
_PAUSE_S = 0.5

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def forwarded_port(open_channel: Callable[[], SSHChannel]) -> Iterator[int]:
    """Yield the local port. If a connection cannot be forwarded, it is closed, as by a missing server.

    Raises:
        PermanentInfraError: the node never forwards connections to this port.
    """
    early: list[SSHChannel] = []
    with contextlib.suppress(TransientInfraError):  # no program listens yet
        early.append(open_channel())  # used by the first connection, because some servers accept only one

    def next_channel() -> SSHChannel:
        with contextlib.suppress(IndexError):
            if not (channel := early.pop()).has_ended:
                return channel
            channel.close()
        return open_channel()

    with socket.create_server((LOOPBACK, 0)) as server:
        threading.Thread(target=_accept, args=(server, next_channel), daemon=True).start()
        try:
            yield server.getsockname()[1]
        finally:
            with contextlib.suppress(OSError):
                server.shutdown(socket.SHUT_RDWR)  # close() alone does not wake up the thread that accepts
            for unused in early:
                unused.close()


def _accept(server: socket.socket, open_channel: Callable[[], SSHChannel]) -> None:
    while True:
        try:
            client, _ = server.accept()
        except OSError as error:
            if error.errno not in _PASSING:  # the block ended
                return
            logger.warning("a connection to a port of a node waits: %s", error.strerror)
            time.sleep(_PAUSE_S)
            continue
        threading.Thread(target=_pass_on, args=(client, open_channel), daemon=True).start()


def _pass_on(client: socket.socket, open_channel: Callable[[], SSHChannel]) -> None:
    with client:
        try:
            channel = open_channel()
        except InfraError as error:
            logger.debug("a connection was not passed on: %s", error)
            return
        threading.Thread(target=_send, args=(client, channel), daemon=True).start()
        try:
            with contextlib.suppress(OSError):
                while piece := channel.receive(_PIECE_BYTES):
                    client.sendall(piece)
                client.shutdown(socket.SHUT_RDWR)
        finally:
            channel.close()


def _send(client: socket.socket, channel: SSHChannel) -> None:
    with contextlib.suppress(OSError, NodeUnreachableError):
        while piece := client.recv(_PIECE_BYTES):
            channel.send(piece)
    channel.end_input()
