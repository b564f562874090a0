"""Notice that a server with running requests has fallen silent, long before the requests' time limit.

    running requests -> now and then a question that the server's scheduler answers between two steps
                          | answered, however late: also by a full server, a paused one, or one without its memory
                          | no answer in time, no request ended meanwhile, and no weights are being loaded; the limit
                          | is another one until the first request has ended, because servers compile then
                          v
                          the requests are interrupted, and the server counts as gone until it answers the question

The question skips the queue: however busy a server is, its answer is delayed by one step at most.
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
"""Steps take a second, with a long prompt some; what is compiled when it is first needed can take a minute."""
MAX_QUESTION_INTERVAL_S = 10.0
QUESTIONS_PER_TIMEOUT = 4
"""With a short timeout the question is put more often than that."""
NUM_LOOKS = 12
"""Interval of checks for an answer. The event loop may be blocked, for instance by a reward function, for longer than
the whole timeout: that counts as one check, and answers that arrived meanwhile are read before the next one."""
UNREACHED_PAUSE_S = 1.0
"""Between two questions where the first did not reach the server."""

ResultT = TypeVar("ResultT")


class SilenceWatch:
    """Watches the requests of one server.

    Args:
        name: the server's name in messages.
        question: returns when the server's scheduler has answered.
        is_excused: True while the server is in a call that may delay its answer, for instance loading weights.
        timeout_s: limit on its silence.
        start_timeout_s: the same limit until a first request has ended, if longer, because servers compile then.
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
        """How long it may be silent now."""
        self.is_silent = False
        """It fell silent, and has not answered since then."""
        self._later_timeout_s = timeout_s
        self._question = question
        self._is_excused = is_excused
        self._calls = RunningCalls()
        """What is watched over."""
        self._watching: asyncio.Task[None] | None = None
        """Puts the question as long as there are any."""
        self._sign_at = time.monotonic()

    @property
    def has_requests(self) -> bool:
        """Whether anything is waited for."""
        return self._calls.num_requests > 0

    async def over(self, ask: Callable[[], Awaitable[ResultT]]) -> ResultT:
        """The result of `ask`, which waits for the server.

        Raises:
            EngineUnavailableError: the server fell silent.
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
                self._watching = None  # it ends in a moment, and the next call must not take it for its own
        raise EngineUnavailableError(
            f"{self.name} was silent for {self.timeout_s:g} s amid requests: no request ended, and what generates "
            "answered no question"
        )

    def note_sign(self) -> None:
        """Record an event that only a generating server causes."""
        self._sign_at = time.monotonic()

    async def check(self) -> None:
        """Return when the server generates. It is asked only after it fell silent.

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
        """Return when it is answered, if only by a refusal."""
        while True:
            try:
                return await self._question()
            except EngineBusyError:
                return None
            except EngineUnavailableError:  # if the server is gone, its requests fail by themselves
                await anyio.sleep(UNREACHED_PAUSE_S)
            except EngineError:
                return None
