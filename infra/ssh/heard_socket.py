"""A socket that knows when something has come over it last, and what came first.

Not here: who asks that (connection.py), how a socket is made (connection.py, proxy_jump.py).
"""

import socket
import time
from typing import Any

from rollouts.infra.foreign_text import shown_line

GREETING = b"SSH-"
MAX_FIRST_BYTES = 4096


class HeardSocket(socket.socket):
    """Takes the place of another socket, which is detached."""

    def __init__(self, other: socket.socket) -> None:
        super().__init__(fileno=other.detach())
        self.heard_at = time.monotonic()
        """By the monotonic clock, seconds."""
        self._first = b""

    @property
    def refusal(self) -> str:
        """The line that an SSH server said in place of its greeting; empty if it greeted, or said nothing."""
        lines = self._first.splitlines()
        is_greeted = any(line.startswith(GREETING) for line in lines)
        return "" if is_greeted or not lines else shown_line(lines[0].decode(errors="replace"))

    def recv(self, num_bytes: int, flags: int = 0, /) -> bytes:
        content = super().recv(num_bytes, flags)
        self.heard_at = time.monotonic()
        if len(self._first) < MAX_FIRST_BYTES:
            self._first += content
        return content

    # Any: as in the class above
    def send(self, content: Any, flags: int = 0, /) -> int:
        try:
            return super().send(content, flags)
        except (BrokenPipeError, ConnectionResetError):
            if self._first:
                raise
            return len(content)  # a server that hangs up may have said why, and that is read next
