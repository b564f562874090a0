"""End a call of a user's function at its deadline, even if the function never awaits.

A function that never awaits blocks the event loop, so the loop's timers cannot end it. If the loop runs in the main
thread, as in every job, a signal interrupts the function, or the part of a coroutine between two awaits. This costs a
few microseconds per call, and keeps functions in the main thread, which libraries with their own signals need. In
another thread a plain function runs in a new thread, which is abandoned at the deadline.

    call of grade ── waits for its turn ── runs a program ── returns
    its time      |    paused (take_turn)    |---------------|
"""

from __future__ import annotations

import asyncio
import inspect
import math
import signal
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from pathlib import Path
from time import monotonic, thread_time
from types import FrameType
from typing import Any, TypeVar

import anyio

ResultT = TypeVar("ResultT")
MIN_TIMER_S = 0.001
INSIST_S = 1.0
"""Pause before the interrupt is repeated, in case the interrupted code swallowed it."""

CLEAN_UP_S = 5.0
"""Time for a part of a coroutine between two awaits after the coroutine was cancelled at its deadline."""


class OutOfTimeError(TimeoutError):
    """A call was given up at its deadline. A TimeoutError that the call itself raises is not of this class."""


class BlockedError(OutOfTimeError):
    """A function took too long without awaiting, and was interrupted; the message says in which line."""


class _Interrupt(BaseException):
    """Not an Exception, because a function that continues after every exception would continue after this one too."""


class _Clock:
    """The remaining time of a call that awaits; paused while the call waits for its turn.

    Args:
        outer: the clock of the enclosing call.
    """

    def __init__(self, timeout_s: float, outer: _Clock | None) -> None:
        self.outer = outer
        self.scope = anyio.CancelScope(deadline=anyio.current_time() + timeout_s)
        """Cancels the call's awaits."""
        self._deadline = monotonic() + timeout_s
        self._left_s = timeout_s
        """The remaining time while the clock is paused."""
        self._num_waits = 0

    @property
    def left_s(self) -> float:
        """The call's remaining time."""
        return self._left_s if self._num_waits else self._deadline - monotonic()

    def stop(self) -> None:
        """Pause the clock until `go_on` was called as often as `stop`."""
        self._left_s = self.left_s
        self.scope.deadline = math.inf
        self._num_waits += 1

    def go_on(self) -> None:
        """Let the clock run again."""
        self._num_waits -= 1
        if not self._num_waits:
            self._deadline = monotonic() + self._left_s
            self.scope.deadline = anyio.current_time() + self._left_s


_current_clock: ContextVar[_Clock | None] = ContextVar("current_clock", default=None)
"""The clock of the innermost call of each task."""


async def call_within(
    timeout_s: float | None, function: Callable[..., Any], *arguments: Any
) -> Any:  # Any: a user's function made it
    """The result of a plain or coroutine function. The time limit runs from now, except inside `uncounted`.

    Not limited: code that waits inside C without checking signals, tasks that a coroutine starts, and, if the event
    loop is not in the main thread, a part of a coroutine that never awaits.

    Raises:
        OutOfTimeError: the call did not return in time.
        BlockedError: the call did not return in time and did not await, so it blocked everything else.
    """
    if timeout_s is None:
        outcome = function(*arguments)
        return await outcome if inspect.isawaitable(outcome) else outcome
    clock = _Clock(timeout_s, _current_clock.get())
    outer = _current_clock.set(clock)
    try:
        if can_interrupt():
            with interrupt_after(timeout_s):
                outcome = function(*arguments)
        elif inspect.iscoroutinefunction(function):
            outcome = function(*arguments)
        else:
            outcome = await _call_in_thread(timeout_s, function, *arguments)
        if not inspect.isawaitable(outcome):
            return outcome
        with clock.scope:
            return await _InterruptedSteps(outcome, timeout_s, clock)
    finally:
        _current_clock.reset(outer)
    raise OutOfTimeError(_say_late(timeout_s))


@contextmanager
def uncounted() -> Iterator[None]:
    """Exclude the block's time from the limits of the enclosing calls.

    Use this for a wait whose length does not depend on the call and that has its own limit: for a turn, or an answer.
    """
    clock, clocks = _current_clock.get(), list[_Clock]()
    while clock is not None:
        clocks.append(clock)
        clock = clock.outer
    for each in clocks:
        each.stop()
    try:
        yield
    finally:
        for each in clocks:
            each.go_on()


@asynccontextmanager
async def take_turn(limiter: anyio.CapacityLimiter) -> AsyncIterator[None]:
    """Hold one of the limiter's places during the block. The wait for the place is `uncounted`."""
    with uncounted():
        await limiter.acquire()
    try:
        yield
    finally:
        limiter.release()


def can_interrupt() -> bool:
    """Whether `interrupt_after` has an effect: only in the main thread of systems with the signal."""
    return threading.current_thread() is threading.main_thread() and hasattr(signal, "SIGALRM")


@contextmanager
def interrupt_after(
    timeout_s: float, *, left_s: float | None = None, is_over: Callable[[], bool] = lambda: True
) -> Iterator[None]:
    """Raise BlockedError in the block if the block takes longer than `timeout_s`, even if it never awaits.

    Uses a signal, so there is a limit only in the main thread, and only on systems with that signal.

    Args:
        left_s: the rest of `timeout_s`, if a part is already spent.
        is_over: called at the deadline and every second afterwards; the block continues until it returns true.
    """
    if not can_interrupt():
        yield
        return
    is_inside, place = True, ""
    hook = sys.unraisablehook

    def insist(unraisable: sys.UnraisableHookArgs) -> None:
        """Repeat an interrupt at once if it hit a finalizer or a callback of the garbage collector.

        Python drops exceptions there.
        """
        nonlocal place
        if not issubclass(unraisable.exc_type, _Interrupt):
            hook(unraisable)
        elif is_inside:
            place = ""
            signal.setitimer(signal.ITIMER_REAL, MIN_TIMER_S, INSIST_S)

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal place
        if is_inside and is_over():
            place = place or _describe(frame)
            sys.unraisablehook = insist
            raise _Interrupt

    first_s = max(timeout_s if left_s is None else left_s, MIN_TIMER_S)
    previous = signal.signal(signal.SIGALRM, interrupt)
    began = monotonic()
    others_s, others_interval_s = signal.setitimer(signal.ITIMER_REAL, first_s, INSIST_S)
    try:
        yield
    except _Interrupt:
        raise BlockedError(_say_late(timeout_s) + place) from None
    finally:
        is_inside = False
        # A timer that was set before gets its remaining time back.
        remaining_s = max(others_s - (monotonic() - began), MIN_TIMER_S) if others_s else 0.0
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
        sys.unraisablehook = hook
        signal.setitimer(signal.ITIMER_REAL, remaining_s, others_interval_s)


@contextmanager
def interrupt_after_computing(limit_s: float) -> Iterator[None]:
    """Raise BlockedError in the block after `limit_s` of its thread's CPU time.

    The load of the machine does not matter. In all other respects this equals `interrupt_after`.
    """
    began = thread_time()
    with interrupt_after(limit_s, is_over=lambda: thread_time() - began >= limit_s):
        yield


def _say_late(timeout_s: float) -> str:
    return f"it did not return within {timeout_s:g} s"


def _describe(frame: FrameType | None) -> str:
    if frame is None:
        return ""
    code = frame.f_code
    return f"; it was in {code.co_qualname}, {Path(code.co_filename).name} line {frame.f_lineno}"


class _InterruptedSteps:
    """An awaitable that is interrupted at the deadline in each part between two awaits."""

    def __init__(self, awaitable: Awaitable[Any], timeout_s: float, clock: _Clock) -> None:  # Any: a user's
        self._awaitable = awaitable
        self._timeout_s = timeout_s
        self._clock = clock

    def __await__(self) -> Generator[Any, None, Any]:  # Any: what event loops and coroutines tell each other
        steps = _wait_for(self._awaitable)
        thrown: BaseException | None = None
        while True:
            left_s = self._clock.left_s
            with interrupt_after(self._timeout_s, left_s=left_s if left_s > 0 else CLEAN_UP_S):
                try:
                    waited_for = steps.send(None) if thrown is None else steps.throw(thrown)
                except StopIteration as end:
                    return end.value
            thrown = None
            try:
                yield waited_for
            except BaseException as error:  # noqa: BLE001 - the coroutine must also see a cancellation
                thrown = error


async def _wait_for(awaitable: Awaitable[ResultT]) -> ResultT:
    return await awaitable


async def _call_in_thread(
    timeout_s: float, function: Callable[..., Any], *arguments: Any
) -> Any:  # Any: a user's function made it
    """The result of the function in a new thread. A thread cannot be ended, so at the deadline it is abandoned.

    It is a daemon thread, so the process can exit.
    """
    loop = asyncio.get_running_loop()
    result: asyncio.Future[Any] = loop.create_future()  # Any: a user's function made it

    def report(error: BaseException | None, outcome: Any) -> None:  # Any: a user's function made it
        if not result.done():
            result.set_result(outcome) if error is None else result.set_exception(error)

    def call() -> None:
        error, outcome = None, None
        try:
            outcome = function(*arguments)
        except BaseException as raised:  # noqa: BLE001 - the future passes it to the caller
            error = raised
        if not loop.is_closed():
            loop.call_soon_threadsafe(report, error, outcome)

    threading.Thread(target=call, name="user function", daemon=True).start()
    with anyio.move_on_after(timeout_s):
        return await result
    raise BlockedError(f"{_say_late(timeout_s)}, and continues in a thread that cannot be ended")
