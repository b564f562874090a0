"""Control when Ctrl-C (SIGINT) takes effect while something is released or started."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ignore Ctrl-C in the block: a second Ctrl-C must not stop the cleanup that the first one started.

    Only the main thread receives Ctrl-C; in other threads the block changes nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


@contextmanager
def noted_interrupts() -> Iterator[Callable[[], bool]]:
    """Record Ctrl-C in the block instead of raising KeyboardInterrupt; the callable returns whether one came."""
    came: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    previous = signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        yield lambda: bool(came)
    finally:
        signal.signal(signal.SIGINT, previous)


@contextmanager
def interrupted_afterwards() -> Iterator[None]:
    """Delay Ctrl-C until the block was left without an error."""
    with noted_interrupts() as has_come:
        yield
    if has_come():
        signal.raise_signal(signal.SIGINT)


@contextmanager
def interrupted_if(is_wanted: Callable[[], bool]) -> Iterator[None]:
    """If this process ignores SIGINT, raise KeyboardInterrupt in the block on a SIGINT for which `is_wanted()` is true.

    A shell lets background processes of a script ignore SIGINT, so that Ctrl-C for the script does not end them.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        if is_wanted():
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
