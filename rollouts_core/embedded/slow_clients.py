"""Connections on which no whole request comes: they are closed, so that others find a place and memory.

Not here: the check of keys (gate.py), how much of a body it reads (app.py).

    opened, or the last answer sent ── header ── body ── answer ── idle, as long as the server keeps connections
                  └── 64 kB at most ──┘        │
                  └────── 60 s at most ────────┘
"""

from __future__ import annotations

import resource
from collections.abc import Collection

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEADER_BYTES = 64 * 2**10
"""Limit of a request line with its headers; uvicorn bounds neither."""
MAX_SLOW_S = 60.0
"""Until a request is whole; clients send theirs at once."""
MAX_SLOW_SHARE = 0.25
"""Limit of connections without a whole request, as a share of the files that the process may open. Beyond it the oldest
are closed."""
TOO_LONG = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class BoundedProtocol(HttpToolsProtocol):
    """Uvicorn's protocol, which ends a connection whose header does not end."""

    is_in_header = False
    """Whether a header has begun and not ended."""
    num_header_bytes = 0
    """Read since it began, roughly."""

    def on_message_begin(self) -> None:
        """Note that a header begins."""
        super().on_message_begin()
        self.is_in_header, self.num_header_bytes = True, 0

    def on_headers_complete(self) -> None:
        """Note that it ended."""
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
        """Whether a request is yet to come as a whole; not while the server waits for the next one for a time."""
        if self.cycle is None or self.cycle.response_complete:
            return self.timeout_keep_alive_task is None
        return self.cycle.more_body and not self.pipeline  # what is pipelined is read after an answer


class SlowClients:
    """Knows since when each connection has had no whole request."""

    def __init__(self) -> None:
        self._since: dict[BoundedProtocol, float] = {}
        """The oldest first."""

    def close_overdue(self, connections: Collection[BoundedProtocol], now: float) -> None:
        """Close connections on which a request takes too long to come, and the oldest of too many.

        Args:
            connections: all that are open.
            now: seconds of a clock that does not go back.
        """
        slow = {each for each in connections if each.is_incomplete()}
        known = {each: since for each, since in self._since.items() if each in slow}
        self._since = known | dict.fromkeys(slow - known.keys(), now)
        num_beyond = len(slow) - int(MAX_SLOW_SHARE * resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        for number, (each, since) in enumerate(self._since.items()):
            if number < num_beyond or now - since > MAX_SLOW_S:
                each.transport.close()
