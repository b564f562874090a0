"""Enforce time limits for calls of a user's functions, even for functions that never await.

A function that never awaits blocks the event loop, so the loop's timers cannot end the function. In the main thread,
where jobs run the event loop, a signal interrupts the function, or the part of a coroutine between two awaits. The
signal costs a few microseconds per call, and functions stay in the main thread, as libraries with signal handlers
require. If the event loop runs in another thread, a plain function runs in a new thread. This new thread is abandoned
at the deadline.

    call of grade ── waits for its turn ── runs a program ── returns
    time that counts |    paused (take_turn)   |-------------|
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
"""Seconds until the interrupt is repeated, in case the interrupted code caught the exception and continued."""

CLEAN_UP_S = 5.0
"""After a coroutine was cancelled at its deadline, its cleanup code may run this many seconds between two awaits."""


class OutOfTimeError(TimeoutError):
    """A call was ended because it exceeded its time limit. A TimeoutError that the called function raises has another
    class."""


class BlockedError(OutOfTimeError):
    """A function did not return or await within its time limit, and was interrupted. The message names the interrupted
    line."""


class _Interrupt(BaseException):
    """Raised by the signal handler. The class does not inherit from Exception, because a user's `except Exception`
    would catch it."""


class _Clock:
    """The remaining time of a call. The clock is paused while the call waits for its turn (`uncounted`).

    Args:
        outer: the clock of the enclosing call with a time limit, if any.
    """

    def __init__(self, timeout_s: float, outer: _Clock | None) -> None:
        self.outer = outer
        self.scope = anyio.CancelScope(deadline=anyio.current_time() + timeout_s)
        """Cancels the call at its next await when the time is over."""
        self._deadline = monotonic() + timeout_s
        self._left_s = timeout_s
        """Remaining seconds, valid while the clock is paused."""
        self._num_waits = 0

    @property
    def left_s(self) -> float:
        return self._left_s if self._num_waits else self._deadline - monotonic()

    def stop(self) -> None:
        """Pause the clock until `go_on` has been called as often as `stop`."""
        self._left_s = self.left_s
        self.scope.deadline = math.inf
        self._num_waits += 1

    def go_on(self) -> None:
        """End one pause. The clock runs again when all pauses have ended."""
        self._num_waits -= 1
        if not self._num_waits:
            self._deadline = monotonic() + self._left_s
            self.scope.deadline = anyio.current_time() + self._left_s


_current_clock: ContextVar[_Clock | None] = ContextVar("current_clock", default=None)
"""The clock of the innermost call with a time limit in the current task."""


async def call_within(
    timeout_s: float | None, function: Callable[..., Any], *arguments: Any
) -> Any:  # Any: a user's function made it
    """Call a plain or coroutine function with a time limit. Returns its result.

    Time inside `uncounted` does not count. Some code cannot be ended at the limit: C code that does not check signals,
    tasks that a coroutine started and, outside of the main thread, the part of a coroutine between two awaits.

    Args:
        timeout_s: the time limit; None sets no limit.

    Raises:
        OutOfTimeError: the call did not return in time.
        BlockedError: the call did not return in time and did not await, so that it blocked the event loop.
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
    """Exclude the time of the `with` block from the time limits of all enclosing calls.

    Use this for a wait that has its own limit and that the call does not cause, for example the wait for a free slot.
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
    """Hold a slot of the limiter during the `async with` block. Waiting for the slot does not count (`uncounted`)."""
    with uncounted():
        await limiter.acquire()
    try:
        yield
    finally:
        limiter.release()


def can_interrupt() -> bool:
    """Whether `interrupt_after` has an effect: only in the main thread, on systems with the signal SIGALRM."""
    return threading.current_thread() is threading.main_thread() and hasattr(signal, "SIGALRM")


@contextmanager
def interrupt_after(
    timeout_s: float, *, left_s: float | None = None, is_over: Callable[[], bool] = lambda: True
) -> Iterator[None]:
    """Raise BlockedError inside the `with` block if it takes longer than `timeout_s`, even if it never awaits.

    The limit uses the signal SIGALRM, so it works only in the main thread and on systems with this signal.

    Args:
        left_s: the remaining part of `timeout_s`, if a part is already used up.
        is_over: called at the deadline and every second afterwards. The block is interrupted when `is_over` returns
            True.
    """
    if not can_interrupt():
        yield
        return
    is_inside, place = True, ""
    hook = sys.unraisablehook

    def insist(unraisable: sys.UnraisableHookArgs) -> None:
        """Repeat an interrupt at once if it was raised in a finalizer or a callback of the garbage collector.

        Python drops exceptions that finalizers and such callbacks raise.
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
        # A timer that was set before the `with` block continues with its remaining time.
        remaining_s = max(others_s - (monotonic() - began), MIN_TIMER_S) if others_s else 0.0
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
        sys.unraisablehook = hook
        signal.setitimer(signal.ITIMER_REAL, remaining_s, others_interval_s)


@contextmanager
def interrupt_after_computing(limit_s: float) -> Iterator[None]:
    """Raise BlockedError inside the `with` block after its thread has used `limit_s` seconds of CPU time.

    Unlike with `interrupt_after`, waiting and the load of the machine do not count.
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
    """Wraps an awaitable, so that a part between two awaits is interrupted when the time limit is over."""

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
            except BaseException as error:  # noqa: BLE001 - cancellations are also passed on to the coroutine
                thrown = error


async def _wait_for(awaitable: Awaitable[ResultT]) -> ResultT:
    return await awaitable


async def _call_in_thread(
    timeout_s: float, function: Callable[..., Any], *arguments: Any
) -> Any:  # Any: a user's function made it
    """Run a function in a new thread, and await its result.

    A thread cannot be ended, so the thread is abandoned after the timeout. The thread is a daemon, so that the process
    can exit.
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
