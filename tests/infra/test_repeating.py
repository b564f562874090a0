"""Pins when what is done beside a block is done, and for what leaving the block waits.

Without it a run's last checkpoint is missing where it is expected, or Ctrl-C hangs until a transfer is over.
"""

import sqlite3
import threading
import time

import pytest

from rollouts.infra.repeating import repeating
from tests.kit.threads import join_threads


def test_it_is_done_again_and_again_and_no_more_after_the_block() -> None:
    third = threading.Event()
    calls: list[None] = []

    def act() -> None:
        calls.append(None)
        if len(calls) == 3:
            third.set()

    with repeating(act, interval_s=0.001, thread_name="again"):
        assert third.wait(30)
    num_calls = len(calls)
    time.sleep(0.05)
    assert len(calls) == num_calls


def test_what_fails_is_logged_and_done_again(caplog: pytest.LogCaptureFixture) -> None:
    second = threading.Event()
    calls: list[None] = []

    def act() -> None:
        calls.append(None)
        if len(calls) >= 2:
            second.set()
        raise sqlite3.OperationalError("disk I/O error")

    with repeating(act, interval_s=0.001, thread_name="budget", once_more=True):
        assert second.wait(30)
    assert "budget: this failed" in caplog.text and "disk I/O error" in caplog.text


def test_leaving_the_block_waits_for_the_call_under_way() -> None:
    begun, calls = threading.Event(), list[str]()

    def act() -> None:
        begun.set()
        time.sleep(0.1)
        calls.append("ended")

    with repeating(act, interval_s=0.001, thread_name="under way"):
        assert begun.wait(30)
    assert calls


@pytest.mark.parametrize(("once_more", "num_calls"), [(True, 1), (False, 0)])
def test_once_more_is_after_the_block(once_more: bool, num_calls: int) -> None:
    calls: list[str] = []
    with repeating(lambda: calls.append("called"), interval_s=60, thread_name="at its end", once_more=once_more):
        assert calls == []
    assert len(calls) == num_calls


def test_an_exception_waits_for_nothing_and_nothing_is_done_after_it() -> None:
    begun, may_end, calls = threading.Event(), threading.Event(), list[str]()

    def act() -> None:
        begun.set()
        assert may_end.wait(60)
        calls.append("ended")

    with (
        pytest.raises(KeyboardInterrupt),
        repeating(act, interval_s=0.001, thread_name="interrupted", once_more=True),
    ):
        assert begun.wait(30)
        raise KeyboardInterrupt
    assert calls == []
    may_end.set()
    join_threads("interrupted")
    assert calls == ["ended"]
