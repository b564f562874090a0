"""Repeat an action in a thread while a block of code runs."""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)


@contextmanager
def repeating(
    act: Callable[[], None], *, interval_s: float, thread_name: str, once_more: bool = False
) -> Iterator[None]:
    """Call `act` after every interval while the block runs. Calls never overlap.

    At the end of the block, this function waits for a running call. After an exception or an interrupt, this function
    does not wait.

    Args:
        act: the action. An exception of the action is logged and does not stop the calls, because the action may end a
            machine that costs money.
        once_more: whether to call `act` once more after a block that ended without an exception, and to wait for this
            call.
    """
    is_over, is_last_due = threading.Event(), threading.Event()

    def try_to_act() -> None:
        try:
            act()
        except Exception:
            logger.exception("%s: this failed and will be tried again", thread_name)

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
