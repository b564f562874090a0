"""Calls that never end: a busy loop, a sleep, a regular expression, a wait; plain, in a coroutine, in a thread.

Without these limits one function of a user's, on one unlucky completion, would hold up a run for ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import re
import sys
import threading
import time
import weakref
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest

from rollouts_core.system.concurrency import gather
from rollouts_core.system.time_limits import (
    INSIST_S,
    BlockedError,
    OutOfTimeError,
    call_within,
    interrupt_after,
    take_turn,
)

LIMIT_S = 0.1


def loop_for_ever() -> float:
    while True:
        pass


def sleep_for_ever() -> float:
    time.sleep(3600)
    return 1.0


def backtrack_for_ever() -> float:
    return float(bool(re.fullmatch(r"(a+)+b", "a" * 60)))


def swallow_every_error() -> float:
    while True:
        with contextlib.suppress(Exception):
            loop_for_ever()


def wait_for_a_lock() -> float:
    lock = threading.Lock()
    return float(lock.acquire() and lock.acquire())


FUNCTIONS = [loop_for_ever, sleep_for_ever, backtrack_for_ever, swallow_every_error, wait_for_a_lock]
BLOCKING = pytest.mark.parametrize("function", FUNCTIONS)


def after_a_wait(function: Callable[[], float]) -> Callable[[], Awaitable[float]]:
    """A coroutine function that waits once, and then for nothing."""

    async def call() -> float:
        await asyncio.sleep(0)
        return function()

    return call


def call(function: Callable[[], Any], timeout_s: float = LIMIT_S) -> Any:
    return asyncio.run(call_within(timeout_s, function))


@BLOCKING
def test_a_plain_function_that_never_waits_is_interrupted_where_it_is(function: Callable[[], float]) -> None:
    began = time.monotonic()
    with pytest.raises(BlockedError, match=r"did not return within 0\.1 s; it was in \w+, \w+\.py line \d+"):
        call(function)
    assert time.monotonic() - began < 2.0


@BLOCKING
def test_a_coroutine_that_stops_waiting_is_interrupted_where_it_is(function: Callable[[], float]) -> None:
    with pytest.raises(BlockedError, match=r"did not return within 0\.1 s; it was in \w+, \w+\.py line \d+"):
        call(after_a_wait(function))


@pytest.mark.parametrize("function", [sleep_for_ever, wait_for_a_lock])
def test_outside_the_main_thread_a_plain_function_is_left_behind(function: Callable[[], float]) -> None:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            call(function)
        except BlockedError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(5.0)
    assert "continues in a thread that cannot be ended" in str(errors[0])


def test_a_coroutine_that_waits_for_ever_is_told_and_cleans_up() -> None:
    cleaned: list[str] = []

    async def wait() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            time.sleep(0.01)
            cleaned.append("yes")

    with pytest.raises(OutOfTimeError, match="did not return within") as caught:
        call(wait)
    assert not isinstance(caught.value, BlockedError)
    assert cleaned == ["yes"]


@pytest.mark.slow
def test_waits_count_towards_the_limit_of_what_computes_after_them() -> None:
    computed_s: list[float] = []

    async def wait_then_compute() -> float:
        await asyncio.sleep(0.8)
        began_s = time.thread_time()
        try:
            return loop_for_ever()
        finally:
            computed_s.append(time.thread_time() - began_s)

    with pytest.raises(BlockedError):
        call(wait_then_compute, 1.0)
    assert computed_s[0] < 0.6  # of its own time, which a busy machine takes nothing from; the whole limit is 1 s


@pytest.mark.slow
def test_the_wait_for_a_turn_counts_towards_no_limit_but_what_comes_before_and_after_does() -> None:
    async def run(num_calls: int, computes_for_ever: bool) -> list[float]:
        one_at_a_time = anyio.CapacityLimiter(1)

        async def work() -> float:
            await asyncio.sleep(0.05)
            async with take_turn(one_at_a_time):
                await asyncio.sleep(0.15)
            return loop_for_ever() if computes_for_ever else 1.0

        async def within_another() -> Any:
            return await call_within(0.4, work)

        return await gather([lambda: call_within(0.4, within_another)] * num_calls)

    assert asyncio.run(run(6, computes_for_ever=False)) == [1.0] * 6  # the last waits for 0.75 s
    with pytest.raises(BlockedError, match=r"0\.4 s"):
        asyncio.run(run(2, computes_for_ever=True))


def test_a_call_that_is_late_behind_its_turn_is_ended() -> None:
    async def take_a_turn_for_ever() -> None:
        one_at_a_time = anyio.CapacityLimiter(1)
        async with take_turn(one_at_a_time):
            await asyncio.sleep(3600)

    with pytest.raises(OutOfTimeError, match=r"0\.1 s"):
        call(take_a_turn_for_ever)


@pytest.mark.slow
def test_an_interrupt_that_a_bare_except_swallows_comes_again() -> None:
    swallowed: list[int] = []

    def swallow_once() -> float:
        try:
            return loop_for_ever()
        except:  # noqa: E722 - as users write it
            swallowed.append(1)
        return loop_for_ever()

    with pytest.raises(BlockedError):
        call(swallow_once)
    assert swallowed == [1]


class _Slow:
    """An object whose end takes longer than the limit."""

    def __del__(self) -> None:
        linger()


def linger(*_: object) -> None:
    """Take longer than the limit, until the first interrupt."""
    ends_at = time.monotonic() + 3 * LIMIT_S
    while time.monotonic() < ends_at:
        pass


def collect_slowly() -> None:
    gc.callbacks.append(linger)  # as JAX has one
    try:
        gc.collect(0)
    finally:
        gc.callbacks.remove(linger)


def call_back_slowly() -> None:
    target = type("Target", (), {})()
    reference = weakref.ref(target, linger)
    del target
    assert reference() is None


@pytest.mark.parametrize("drop", [_Slow, collect_slowly, call_back_slowly])
def test_an_interrupt_amid_a_callback_that_drops_errors_comes_again_at_once_and_is_not_told(
    drop: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", told.append)

    def function() -> None:
        drop()
        loop_for_ever()

    began = time.monotonic()
    with pytest.raises(BlockedError, match="it was in loop_for_ever"), interrupt_after(LIMIT_S):
        function()
    assert time.monotonic() - began < INSIST_S
    assert not told
    assert sys.unraisablehook == told.append


def test_errors_of_others_amid_an_interrupted_call_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: told.append(unraisable.exc_type))

    class Raises:
        def __del__(self) -> None:
            raise KeyError

    def function() -> None:
        try:
            loop_for_ever()
        finally:
            Raises()

    with pytest.raises(BlockedError), interrupt_after(LIMIT_S):
        function()
    assert told == [KeyError]


def test_a_timeout_of_the_functions_own_is_told_from_ours() -> None:
    async def time_out() -> None:
        raise TimeoutError("the database is slow")

    with pytest.raises(TimeoutError, match="database") as caught:
        call(time_out)
    assert not isinstance(caught.value, OutOfTimeError)


@pytest.mark.parametrize("in_thread", [False, True])
def test_results_and_errors_come_through(in_thread: bool) -> None:
    async def later(value: float) -> float:
        await anyio.sleep(0.001)
        return value

    async def ask() -> list[Any]:
        assert await call_within(1.0, float, "2") == 2.0
        assert await call_within(None, float, "2") == 2.0
        assert await call_within(1.0, later, 3.0) == 3.0
        with pytest.raises(ZeroDivisionError):
            await call_within(1.0, lambda: 1 / 0)
        return await gather([lambda: call_within(1.0, later, 1.0), lambda: call_within(1.0, lambda: later(2.0))])

    results: list[Any] = []
    if in_thread:
        thread = threading.Thread(target=lambda: results.extend(asyncio.run(ask())))
        thread.start()
        thread.join()
    else:
        results = asyncio.run(ask())
    assert results == [1.0, 2.0]


def test_a_limit_within_a_limit_leaves_the_outer_one_its_time() -> None:
    began = time.monotonic()
    with pytest.raises(BlockedError, match=r"0\.3 s"), interrupt_after(0.3):
        with pytest.raises(BlockedError, match=r"0\.1 s"), interrupt_after(0.1):
            loop_for_ever()
        loop_for_ever()
    assert 0.25 < time.monotonic() - began < 1.0


def test_a_limit_costs_microseconds() -> None:
    def grade() -> None:
        with interrupt_after(10.0):
            pass

    costs = []
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(1000):
            grade()
        costs.append((time.perf_counter() - began) / 1000)
    assert min(costs) < 100e-6
