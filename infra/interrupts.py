"""Ctrl-C while something is given back."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C does nothing inside: a second one must not stop what the first one started to end.

    Only the main thread is ever interrupted; elsewhere there is nothing to do.
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
    """Ctrl-C inside is only noted; the callable says if one came."""
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
    """Ctrl-C inside takes effect when the block has been left without an error."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    previous = signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
    if came:
        signal.raise_signal(signal.SIGINT)


@contextmanager
def interrupted_if(is_wanted: Callable[[], bool]) -> Iterator[None]:
    """Where this process is deaf to SIGINT, it takes effect inside as soon as it is wanted; elsewhere it always does.

    Shells make deaf what a script starts with `&`, so that a Ctrl-C for the script is none for that.
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
