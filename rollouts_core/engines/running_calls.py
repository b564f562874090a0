"""The calls to an engine that are under way, which can be broken off from this side.

Not here: ending requests at the server (in_flight.py), when a call is broken off (in_flight.py, pool.py, silence.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import anyio


class RunningCalls:
    """Calls whose tasks are waiting for them."""

    def __init__(self) -> None:
        self.num_requests = 0
        """What all of them bring."""
        self._scopes: set[anyio.CancelScope] = set()

    @contextmanager
    def one(self, num_requests: int = 1) -> Iterator[None]:
        """A call that lasts as long as the block; after an interruption the code after the block continues."""
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
        """End all of them; their tasks learn of it at their next look at the event loop."""
        for scope in self._scopes:
            scope.cancel()
