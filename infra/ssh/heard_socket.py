"""A socket that records when it last received bytes, and the first bytes that it received."""

import socket
import time
from typing import Any

from rollouts.infra.foreign_text import shown_line

GREETING = b"SSH-"
MAX_FIRST_BYTES = 4096


class HeardSocket(socket.socket):
    """Replaces another socket, which is detached."""

    def __init__(self, other: socket.socket) -> None:
        super().__init__(fileno=other.detach())
        self.heard_at = time.monotonic()
        """Time of the last received bytes, by the monotonic clock in seconds."""
        self._first = b""

    @property
    def refusal(self) -> str:
        """The line that an SSH server sent instead of its greeting; empty if it sent a greeting or nothing."""
        lines = self._first.splitlines()
        is_greeted = any(line.startswith(GREETING) for line in lines)
        return "" if is_greeted or not lines else shown_line(lines[0].decode(errors="replace"))

    def recv(self, num_bytes: int, flags: int = 0, /) -> bytes:
        content = super().recv(num_bytes, flags)
        self.heard_at = time.monotonic()
        if len(self._first) < MAX_FIRST_BYTES:
            self._first += content
        return content

    # Any: as in socket.socket
    def send(self, content: Any, flags: int = 0, /) -> int:
        try:
            return super().send(content, flags)
        except (BrokenPipeError, ConnectionResetError):
            if self._first:
                raise
            return len(content)  # the server's reason for closing may be readable next
