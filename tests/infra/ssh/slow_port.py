"""A port of loopback that leads to another one over a slow line.

What is on its way waits where it comes from, as it does before a slow modem: in the buffers of whoever sends.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

PIECE_BYTES = 4096


@contextmanager
def slow_port(target_port: int, *, bytes_per_s: float) -> Iterator[int]:
    """The port; each connection carries so much in each direction."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 * PIECE_BYTES)
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        threading.Thread(target=_accept, args=(listener, target_port, bytes_per_s), daemon=True).start()
        try:
            yield int(listener.getsockname()[1])
        finally:
            listener.shutdown(socket.SHUT_RDWR)


def _accept(listener: socket.socket, target_port: int, bytes_per_s: float) -> None:
    with suppress(OSError):
        while True:
            near, _ = listener.accept()
            far = socket.socket()
            far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 * PIECE_BYTES)
            far.connect(("127.0.0.1", target_port))
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=_carry, args=(source, sink, bytes_per_s), daemon=True).start()


def _carry(source: socket.socket, sink: socket.socket, bytes_per_s: float) -> None:
    with suppress(OSError):
        while content := source.recv(PIECE_BYTES):
            time.sleep(len(content) / bytes_per_s)
            sink.sendall(content)
    for each in (source, sink):
        with suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
