"""Close connections whose request does not become complete, so that other clients get connections and memory.

Not here: the check of keys (gate.py), the limit of bodies (app.py).

    opened, or the last answer sent ── header ── body ── answer ── idle, as long as the server keeps connections
                  └── 64 kB at most ──┘        │
                  └────── 60 s at most ────────┘
"""

from __future__ import annotations

import resource
from collections.abc import Collection

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEADER_BYTES = 64 * 2**10
"""Limit of a request line with its headers, bytes. uvicorn has no such limit."""
MAX_SLOW_S = 60.0
"""Seconds until a request must be complete. Clients normally send a request at once."""
MAX_SLOW_SHARE = 0.25
"""Limit of connections without a complete request, as a share of the files that the process may open. Beyond the limit,
the oldest of these connections are closed."""
TOO_LONG = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class BoundedProtocol(HttpToolsProtocol):
    """Uvicorn's protocol with a limit of the header's size. Beyond the limit the connection is closed."""

    is_in_header = False
    """True from the beginning of a header to its end."""
    num_header_bytes = 0
    """Approximate number of bytes read since the header began."""

    def on_message_begin(self) -> None:
        """Record that a header begins."""
        super().on_message_begin()
        self.is_in_header, self.num_header_bytes = True, 0

    def on_headers_complete(self) -> None:
        """Record that the header ended."""
        self.is_in_header = False
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        """Parse what came."""
        super().data_received(data)
        self.num_header_bytes += len(data)
        if self.is_in_header and self.num_header_bytes > MAX_HEADER_BYTES and not self.transport.is_closing():
            self.transport.write(TOO_LONG)
            self.transport.close()

    def is_incomplete(self) -> bool:
        """True while a request is incomplete; False on a connection that is idle after an answer."""
        if self.cycle is None or self.cycle.response_complete:
            return self.timeout_keep_alive_task is None
        return self.cycle.more_body and not self.pipeline  # a pipelined request is read after the answer


class SlowClients:
    """Remembers since when each connection has had no complete request."""

    def __init__(self) -> None:
        self._since: dict[BoundedProtocol, float] = {}
        """The oldest first."""

    def close_overdue(self, connections: Collection[BoundedProtocol], now: float) -> None:
        """Close connections whose request takes too long, and the oldest of too many incomplete ones.

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
