"""Keep the running calls to an engine, so that this process can interrupt them.

Not here: ending requests at the server (in_flight.py), when to interrupt a call (in_flight.py, pool.py, silence.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import anyio


class RunningCalls:
    """The running calls to an engine. A task waits for each call."""

    def __init__(self) -> None:
        self.num_requests = 0
        """Number of requests in all running calls."""
        self._scopes: set[anyio.CancelScope] = set()

    @contextmanager
    def one(self, num_requests: int = 1) -> Iterator[None]:
        """Register a call that lasts as long as the block. If `break_off` interrupts it, the code after the block
        continues."""
        scope = anyio.CancelScope()
        self._scopes.add(scope)
        self.num_requests += num_requests
        try:
            with scope:
                yield
        finally:
            self._scopes.discard(scope)
            self.num_requests -= num_requests

    def break_off(self) -> None:
        """Interrupt all running calls. A task notices the interruption when the event loop runs the task next."""
        for scope in self._scopes:
            scope.cancel()
