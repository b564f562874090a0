"""Do something again and again in a thread, beside whatever a block of code does."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def repeating(
    act: Callable[[], None], *, interval_s: float, thread_name: str, once_more: bool = False
) -> Iterator[None]:
    """Call `act` after every interval as long as the block runs; it is never called twice at a time.

    Leaving the block waits for the call under way; an exception, an interrupt above all, does not.

    Args:
        act: says itself what goes wrong, because an exception ends the thread.
        once_more: call it after the block as well, and wait for that, unless an exception left the block.
    """
    is_over, is_last_due = threading.Event(), threading.Event()

    def act_until_over() -> None:
        while not is_over.wait(interval_s):
            act()
        if is_last_due.is_set():
            act()

    thread = threading.Thread(target=act_until_over, name=thread_name, daemon=True)
    thread.start()
    try:
        yield
        if once_more:
            is_last_due.set()
    finally:
        is_over.set()
    thread.join()
