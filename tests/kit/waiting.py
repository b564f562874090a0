"""Waiting for what another process does."""

import time
from collections.abc import Callable


def wait_until(
    condition: Callable[[], object], *, what: str = "it", timeout_s: float = 120.0, every_s: float = 0.05
) -> None:
    """Return when the condition holds; fail the test at the deadline."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s:g} s for {what}"
        time.sleep(every_s)
