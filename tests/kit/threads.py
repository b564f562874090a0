"""Wait for threads that the code under test leaves to end by themselves."""

import threading


def join_threads(prefix: str, timeout_s: float = 60.0) -> None:
    """Return when no thread with such a name is left; fail when one does not end."""
    for thread in threading.enumerate():
        if thread.name.startswith(prefix):
            thread.join(timeout_s)
            assert not thread.is_alive(), f"{thread.name} did not end within {timeout_s:.0f} s"
