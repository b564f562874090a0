"""Detect a silent server with running requests long before the requests' time limit.

While requests are running, the watch sends liveness probes, which the server's scheduler answers between two steps:

    answer, even a late one    the server is alive. Full and paused servers, and servers without memory, answer too
    no answer in time          if no request has ended and no weights are being loaded meanwhile, the requests are
                               interrupted, and the server counts as gone until it answers a probe

A probe skips the server's queue, so a busy server answers a probe after at most one step. The time limit is longer
until the first request has ended, because servers compile then.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import anyio

from rollouts_core.engines.running_calls import RunningCalls
from rollouts_core.errors import EngineBusyError, EngineError, EngineUnavailableError

SILENCE_TIMEOUT_S = 120.0
"""Default limit of silence, seconds. A step takes a second, a long prompt a few seconds, and compiling at the first use
up to a minute."""
MAX_QUESTION_INTERVAL_S = 10.0
QUESTIONS_PER_TIMEOUT = 4
"""Least number of probes within the timeout. `QUESTIONS_PER_TIMEOUT` matters only for timeouts below 40 s."""
NUM_LOOKS = 12
"""Number of checks for an answer within the timeout. A reward function may block the event loop for longer than the
timeout. A blocked event loop counts as one check, and reads answers that arrived before the next check."""
UNREACHED_PAUSE_S = 1.0
"""Seconds between two probes if the first probe did not reach the server."""

ResultT = TypeVar("ResultT")


class SilenceWatch:
    """Watches the requests of one server.

    Args:
        name: the server's name in logs and errors.
        question: sends a probe, and returns when the server's scheduler has answered.
        is_excused: True while the server runs a call that may delay its answer, for example loading weights.
        timeout_s: longest permitted silence.
        start_timeout_s: used in place of a shorter `timeout_s` until the first request has ended, because servers
            compile kernels then.
    """

    def __init__(
        self,
        name: str,
        question: Callable[[], Awaitable[None]],
        is_excused: Callable[[], bool],
        *,
        timeout_s: float = SILENCE_TIMEOUT_S,
        start_timeout_s: float = 0.0,
    ) -> None:
        self.name = name
        self.timeout_s = max(timeout_s, start_timeout_s)
        """Longest permitted silence at the moment, seconds."""
        self.is_silent = False
        """True if the server became silent and has not answered since then."""
        self._later_timeout_s = timeout_s
        self._question = question
        self._is_excused = is_excused
        self._calls = RunningCalls()
        """The watched requests."""
        self._watching: asyncio.Task[None] | None = None
        """Sends probes as long as requests are running."""
        self._sign_at = time.monotonic()

    @property
    def has_requests(self) -> bool:
        """Whether requests are running."""
        return self._calls.num_requests > 0

    async def over(self, ask: Callable[[], Awaitable[ResultT]]) -> ResultT:
        """Run `ask`, which waits for the server, and interrupt it if the server becomes silent, and return the result
        of `ask`.

        Raises:
            EngineUnavailableError: the server became silent.
        """
        if self._watching is None or self._watching.done():
            self._watching = asyncio.create_task(self._watch())
        try:
            with self._calls.one():
                answer = await ask()
                self.timeout_s = self._later_timeout_s
                return answer
        finally:
            if not self._calls.num_requests:
                self._watching.cancel()
                self._watching = None  # this task ends soon, so the next call starts another task
        raise EngineUnavailableError(
            f"{self.name} was silent for {self.timeout_s:g} s with running requests: no request ended, and its "
            "scheduler answered no liveness probe"
        )

    def note_sign(self) -> None:
        """Record an event that shows that the server is generating."""
        self._sign_at = time.monotonic()

    async def check(self) -> None:
        """Return at once if the server counts as alive. If it was silent, wait for its answer to a probe.

        Raises:
            EngineUnavailableError: the server cannot be reached.
        """
        if self.is_silent:
            await self._question()
            self.is_silent = False

    async def _watch(self) -> None:
        gives_sign = True
        while gives_sign:
            await anyio.sleep(min(MAX_QUESTION_INTERVAL_S, self.timeout_s / QUESTIONS_PER_TIMEOUT))
            gives_sign = await self._gives_sign()
        self.is_silent = True
        self._calls.break_off()

    async def _gives_sign(self) -> bool:
        began = time.monotonic()
        was_excused = self._is_excused()
        question = asyncio.create_task(self._put_question())
        try:
            for _ in range(NUM_LOOKS):
                await asyncio.wait([question], timeout=self.timeout_s / NUM_LOOKS)
                if question.done():
                    question.result()
                    return True
        finally:
            question.cancel()
        return was_excused or self._is_excused() or self._sign_at > began

    async def _put_question(self) -> None:
        """Send probes until the server answers, even with a refusal."""
        while True:
            try:
                return await self._question()
            except EngineBusyError:
                return None
            except EngineUnavailableError:  # if the server is gone, its requests fail by themselves
                await anyio.sleep(UNREACHED_PAUSE_S)
            except EngineError:
                return None
