"""Do something again and again in a thread, beside whatever a block of code does."""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)


@contextmanager
def repeating(
    act: Callable[[], None], *, interval_s: float, thread_name: str, once_more: bool = False
) -> Iterator[None]:
    """Call `act` after every interval as long as the block runs; it is never called twice at a time.

    Leaving the block waits for the call under way; an exception, an interrupt above all, does not.

    Args:
        act: is called again after an exception, which is logged: who leans on it may have a machine that costs money.
        once_more: call it after the block as well, and wait for that, unless an exception left the block.
    """
    is_over, is_last_due = threading.Event(), threading.Event()

    def try_to_act() -> None:
        try:
            act()
        except Exception:
            logger.exception("%s: this failed, and is tried again", thread_name)

    def act_until_over() -> None:
        while not is_over.wait(interval_s):
            try_to_act()
        if is_last_due.is_set():
            try_to_act()

    thread = threading.Thread(target=act_until_over, name=thread_name, daemon=True)
    thread.start()
    try:
        yield
        if once_more:
            is_last_due.set()
    finally:
        is_over.set()
    thread.join()
