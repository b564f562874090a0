"""Close connections that do not send a complete request in time, so that they take no connections and memory from
other clients.

Not here: the check of API keys (gate.py), the size limit of bodies (exchange.py).

    opened, or last answer sent ── header ── body ── answer ── idle, until the server's keep-alive timeout
              └── 64 kB at most ──┘        │
              └────── 60 s at most ────────┘
"""

from __future__ import annotations

import resource
from collections.abc import Collection

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEADER_BYTES = 64 * 2**10
"""Limit of the size of a request line with its headers, bytes. uvicorn has no such limit."""
MAX_SLOW_S = 60.0
"""Seconds within which a client must send its complete request."""
MAX_SLOW_SHARE = 0.25
"""Highest number of connections without a complete request, as a share of the process's limit of open files. If there
are more, the oldest of these connections are closed."""
TOO_LONG = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class BoundedProtocol(HttpToolsProtocol):
    """Uvicorn's HTTP protocol that closes a connection if a request's header is too large."""

    is_in_header = False
    """True while the header of a request is being received."""
    num_header_bytes = 0
    """Approximate number of bytes received since the header began."""

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.is_in_header, self.num_header_bytes = True, 0

    def on_headers_complete(self) -> None:
        self.is_in_header = False
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        """Parse received bytes. Close the connection if the header is too large."""
        super().data_received(data)
        self.num_header_bytes += len(data)
        if self.is_in_header and self.num_header_bytes > MAX_HEADER_BYTES and not self.transport.is_closing():
            self.transport.write(TOO_LONG)
            self.transport.close()

    def is_incomplete(self) -> bool:
        """True if the connection waits for the rest of a request. False if it is idle after an answer."""
        if self.cycle is None or self.cycle.response_complete:
            return self.timeout_keep_alive_task is None
        return self.cycle.more_body and not self.pipeline  # a pipelined request only waits for an answer


class SlowClients:
    """Records how long each connection has waited for a complete request, and closes overdue connections."""

    def __init__(self) -> None:
        self._since: dict[BoundedProtocol, float] = {}
        """Start of the wait for a complete request, for each waiting connection, in seconds of a monotonic clock;
        oldest first."""

    def close_overdue(self, connections: Collection[BoundedProtocol], now: float) -> None:
        """Close connections whose request is overdue. If too many requests are incomplete, also close the oldest.

        Args:
            connections: all open connections.
            now: seconds of a monotonic clock.
        """
        slow = {each for each in connections if each.is_incomplete()}
        known = {each: since for each, since in self._since.items() if each in slow}
        self._since = known | dict.fromkeys(slow - known.keys(), now)
        num_beyond = len(slow) - int(MAX_SLOW_SHARE * resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        for number, (each, since) in enumerate(self._since.items()):
            if number < num_beyond or now - since > MAX_SLOW_S:
                each.transport.close()
