"""Control when Ctrl-C (SIGINT) takes effect while a resource is being released or started."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ignore Ctrl-C in the block, so that a second Ctrl-C does not stop the cleanup after the first.

    Only the main thread receives Ctrl-C. In other threads, this function has no effect.
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
    """Record Ctrl-C in the block instead of raising KeyboardInterrupt. The yielded function returns whether Ctrl-C was
    pressed."""
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
    """Delay Ctrl-C until the block has ended without an error."""
    with noted_interrupts() as has_come:
        yield
    if has_come():
        signal.raise_signal(signal.SIGINT)


@contextmanager
def interrupted_if(is_wanted: Callable[[], bool]) -> Iterator[None]:
    """If this process ignores SIGINT, let a SIGINT in the block raise KeyboardInterrupt if `is_wanted()` is true.

    A shell script starts its background processes with SIGINT ignored, so that Ctrl-C ends only the script.
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
