"""Give a port of a node an address on this machine, as long as it is needed.

Not here: the channels that lead there (connection.py).

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
"""Why a connection cannot be accepted now, and others can later: too many files are open here, for one."""
_PAUSE_S = 0.5

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def forwarded_port(open_channel: Callable[[], SSHChannel]) -> Iterator[int]:
    """The local port; a connection that cannot be passed on is closed, as by a server that is not there.

    Raises:
        PermanentInfraError: none can be, whoever listens.
    """
    early: list[SSHChannel] = []
    with contextlib.suppress(TransientInfraError):  # nobody listens yet
        early.append(open_channel())  # for the first that comes: some servers take no other

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
            if error.errno not in _PASSING:  # the block was left
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
