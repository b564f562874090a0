"""A port that leads to another one, and counts how often a client there had to wait for an answer."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress

READ_BYTES = 256 << 10


class CountingPort:
    """Counts round trips and bytes of all connections together; answers take a while, so that one trip stays one."""

    def __init__(self, target_port: int, *, answer_after_s: float = 0.1) -> None:
        self._target = ("127.0.0.1", target_port)
        self._answer_after_s = answer_after_s
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = []
        self._lock = threading.Lock()
        self._has_answered = True
        self._num_trips = self._num_bytes = 0
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    def take_counts(self) -> tuple[int, int]:
        """How often the client said something that it did not say before the latest answer, and how many bytes.

        Both since the last time that this was asked; the client must have nothing under way.
        """
        with self._lock:
            counts = self._num_trips, self._num_bytes
            self._num_trips = self._num_bytes = 0
            self._has_answered = True
            return counts

    def close(self) -> None:
        """Listen no more, and drop everybody."""
        for each in (self._listener, *self._sockets):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._target)
                self._sockets += [near, far]
                for each in (near, far):
                    each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                threading.Thread(target=self._carry_there, args=(near, far), daemon=True).start()
                threading.Thread(target=self._carry_back, args=(far, near), daemon=True).start()

    def _carry_there(self, near: socket.socket, far: socket.socket) -> None:
        with suppress(OSError):
            while content := near.recv(READ_BYTES):
                with self._lock:
                    self._num_trips += self._has_answered
                    self._num_bytes += len(content)
                    self._has_answered = False
                far.sendall(content)
            far.shutdown(socket.SHUT_WR)

    def _carry_back(self, far: socket.socket, near: socket.socket) -> None:
        with suppress(OSError):
            while content := far.recv(READ_BYTES):
                time.sleep(self._answer_after_s)
                with self._lock:
                    self._has_answered = True
                near.sendall(content)
            near.shutdown(socket.SHUT_WR)
