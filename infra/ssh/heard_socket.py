"""A socket that knows when something has come over it last.

Not here: who asks that (connection.py), how a socket is made (connection.py, proxy_jump.py).
"""

import socket
import time


class HeardSocket(socket.socket):
    """Takes the place of another socket, which is detached."""

    def __init__(self, other: socket.socket) -> None:
        super().__init__(fileno=other.detach())
        self.heard_at = time.monotonic()
        """By the monotonic clock, seconds."""

    def recv(self, num_bytes: int, flags: int = 0, /) -> bytes:
        content = super().recv(num_bytes, flags)
        self.heard_at = time.monotonic()
        return content
