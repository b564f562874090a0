"""End a call of a user's function at its deadline, also one that never waits for anything.

Not here: what is called (rewards.py, conversation.py), limits of other processes (environments/sandbox.py).

A function that never waits holds the event loop up, so no timer of the loop can end it. Where the loop has the main
thread, as in every job, a signal does: in the function itself, and in each stretch of a coroutine between two waits. It
costs a few microseconds a call, and keeps functions in the thread that libraries with signals of their own need. In
another thread a plain function gets a thread of its own, which is left behind when its time is over.

    call of grade ── waits for its turn ── runs a program ── returns
    its time      |      stands (take_turn)  |---------------|
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
"""An interrupt that the interrupted code swallowed comes again after this long."""

CLEAN_UP_S = 5.0
"""How long a stretch of a coroutine may take that was told that its time is over."""


class OutOfTimeError(TimeoutError):
    """A call was given up at its deadline; what it raises itself, a TimeoutError too, is no such error."""


class BlockedError(OutOfTimeError):
    """A function took too long without waiting for anything, and was interrupted where the message says."""


class _Interrupt(BaseException):
    """No Exception: a function that goes on after every error would go on after this one, too."""


class _Clock:
    """What is left of the time of a call that waits for something; it stands as long as that is only its turn.

    Args:
        outer: that of the call within which this one was made.
    """

    def __init__(self, timeout_s: float, outer: _Clock | None) -> None:
        self.outer = outer
        self.scope = anyio.CancelScope(deadline=anyio.current_time() + timeout_s)
        """Ends the call's waits."""
        self._deadline = monotonic() + timeout_s
        self._left_s = timeout_s
        """While it stands."""
        self._num_waits = 0

    @property
    def left_s(self) -> float:
        """How long the call may still take."""
        return self._left_s if self._num_waits else self._deadline - monotonic()

    def stop(self) -> None:
        """Let no time pass until as many calls of `go_on` as of this."""
        self._left_s = self.left_s
        self.scope.deadline = math.inf
        self._num_waits += 1

    def go_on(self) -> None:
        """Let time pass again."""
        self._num_waits -= 1
        if not self._num_waits:
            self._deadline = monotonic() + self._left_s
            self.scope.deadline = anyio.current_time() + self._left_s


_current_clock: ContextVar[_Clock | None] = ContextVar("current_clock", default=None)
"""That of the innermost call under way, in each task."""


async def call_within(
    timeout_s: float | None, function: Callable[..., Any], *arguments: Any
) -> Any:  # Any: a user's function made it
    """What a plain or coroutine function returns. Its time passes from here on, but not where it says `uncounted`.

    Code that waits inside C without looking at signals, or a task that a coroutine starts for itself, has no limit
    here; nor has a stretch of a coroutine that never waits, where the event loop is not in the main thread.

    Raises:
        OutOfTimeError: it did not return in time.
        BlockedError: nor did it wait for anything, so everything else waited for it.
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
    """Nothing of the block's time counts towards the limits of the calls that it is in.

    For waits that have an end by themselves, and of whose length the call knows nothing: for its turn, or for an answer
    that has a limit of its own.
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
    """One of the limiter's places for the block; the wait for it is `uncounted`."""
    with uncounted():
        await limiter.acquire()
    try:
        yield
    finally:
        limiter.release()


def can_interrupt() -> bool:
    """Whether `interrupt_after` has an effect: in the main thread, of systems with the signal for it."""
    return threading.current_thread() is threading.main_thread() and hasattr(signal, "SIGALRM")


@contextmanager
def interrupt_after(
    timeout_s: float, *, left_s: float | None = None, is_over: Callable[[], bool] = lambda: True
) -> Iterator[None]:
    """Raise BlockedError in the block when it takes longer, whatever it computes.

    By a signal, so in the main thread only; elsewhere, and on systems without that signal, there is no limit.

    Args:
        left_s: what is left of `timeout_s`, where something else took a part of it.
        is_over: asked at the end of the time, and every second from then on; the block goes on until it is true.
    """
    if not can_interrupt():
        yield
        return
    is_inside, place = True, ""
    hook = sys.unraisablehook

    def insist(unraisable: sys.UnraisableHookArgs) -> None:
        """Interrupt again at once if the interrupt came amid a finalizer or a callback of the garbage collector.

        Python drops their errors.
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
        # Whoever had set the timer before gets what is left of it.
        remaining_s = max(others_s - (monotonic() - began), MIN_TIMER_S) if others_s else 0.0
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
        sys.unraisablehook = hook
        signal.setitimer(signal.ITIMER_REAL, remaining_s, others_interval_s)


@contextmanager
def interrupt_after_computing(limit_s: float) -> Iterator[None]:
    """Raise BlockedError in the block when its thread has computed for longer, whatever others did meanwhile.

    What ends does not depend on how busy the machine is. Otherwise as `interrupt_after`.
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
    """An awaitable whose every stretch between two waits is interrupted at the deadline."""

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
            except BaseException as error:  # noqa: BLE001 - a cancellation too belongs to the coroutine
                thrown = error


async def _wait_for(awaitable: Awaitable[ResultT]) -> ResultT:
    return await awaitable


async def _call_in_thread(
    timeout_s: float, function: Callable[..., Any], *arguments: Any
) -> Any:  # Any: a user's function made it
    """What the function returns in a thread of its own; nothing can end that thread, so at the deadline it is left.

    A daemon, which does not keep the process from ending.
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
        except BaseException as raised:  # noqa: BLE001 - the future carries it to who waits
            error = raised
        if not loop.is_closed():
            loop.call_soon_threadsafe(report, error, outcome)

    threading.Thread(target=call, name="user function", daemon=True).start()
    with anyio.move_on_after(timeout_s):
        return await result
    raise BlockedError(f"{_say_late(timeout_s)}, and goes on in a thread that nothing can end")
