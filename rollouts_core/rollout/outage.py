"""Tell an outage from a group that just had bad luck: when to wait for its end, and when to give the run up.

Not here: the groups, and the pause itself (manager.py), trying again within a group (generate.py, reward_services.py).

    something was not available for a group
      ├─ for few of the last groups                 it is dropped and counted
      ├─ for more of them than the settings allow   nothing is asked for, for 15 s, 30 s, ... 5 min; then it is again
      └─ also after the pauses that they allow      EnvironmentOutageError

An evaluation can do without no group, so it waits for each (`OutagePauses`).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Awaitable, Callable
from typing import TypeVar

import anyio

from rollouts_core.config import RolloutConfig
from rollouts_core.errors import EnvironmentOutageError, EnvironmentUnavailableError

ResultT = TypeVar("ResultT")

logger = logging.getLogger(__name__)

FAILURE_WINDOW = 50
"""Over so many groups the share is taken that was dropped because something was not available."""
FIRST_PAUSE_S, MAX_PAUSE_S = 15.0, 300.0
"""The second pause is twice as long as the first, and so on."""


class OutageWatch:
    """Remembers for which of the last groups something was not available, and how long has been waited for it."""

    def __init__(self, config: RolloutConfig) -> None:
        self.config = config
        self._failures: deque[bool] = deque(maxlen=FAILURE_WINDOW)
        self._next_pause_s = FIRST_PAUSE_S
        """Twice as long after each pause, until something is available."""
        self._paused_s = 0.0
        """Of the outage that is not over: fewer failures than are allowed among the last groups end it."""

    @property
    def _num_allowed(self) -> float:
        return self.config.max_environment_failure_share * FAILURE_WINDOW

    def begin_pause(self, problem: str) -> float:
        """For how long nothing should be asked for before this group is asked for again, seconds.

        0 where it is dropped: this is no outage, or no time for pauses is left.
        """
        is_outage = 1 + sum(self._failures) > self._num_allowed or self._paused_s > 0
        left_s = self.config.max_outage_minutes * 60 - self._paused_s
        pause_s = min(self._next_pause_s, left_s)
        if not is_outage or pause_s <= 0:
            return 0.0
        self._next_pause_s = min(MAX_PAUSE_S, 2 * self._next_pause_s)
        logger.warning(
            "nothing is generated for %.0f s, because something was not available for more groups than "
            "rollout.max_environment_failure_share allows (%s); the run ends after %.0f minutes of pauses",
            pause_s,
            problem,
            self.config.max_outage_minutes,
        )
        return pause_s

    def end_pause(self, pause_s: float) -> None:
        """Take note of a pause that is over."""
        self._paused_s += pause_s

    def note_group(self, problem: str) -> EnvironmentOutageError | None:
        """Take note of a group that is kept or dropped; an error where too many were dropped for such a problem.

        Args:
            problem: what was not available for it; empty where everything was.
        """
        self._failures.append(bool(problem))
        if not problem:
            self._next_pause_s = FIRST_PAUSE_S
        num_failed = sum(self._failures)
        if num_failed <= self._num_allowed and len(self._failures) == FAILURE_WINDOW:
            self._paused_s = 0.0
        if not problem or num_failed <= self._num_allowed:
            return None
        pauses = f", also after pauses of {self._paused_s / 60:.1f} minutes" if self._paused_s else ""
        share = self.config.max_environment_failure_share
        return EnvironmentOutageError(
            f"{num_failed} of the last {len(self._failures)} groups were dropped because an environment or a reward "
            f"was not available, more than rollout.max_environment_failure_share {share:g} of {FAILURE_WINDOW} allows"
            f"{pauses}; nothing of them was graded. Mend it, then start the run again. The last one: {problem}"
        )


class OutagePauses:
    """Has calls made again that failed because something was not available, after pauses that they share.

    Others go on meanwhile: that one failed does not say that there is an outage.
    """

    def __init__(self, config: RolloutConfig) -> None:
        self.config = config
        self._next_pause_s = FIRST_PAUSE_S
        """Twice as long after each pause, until a call succeeds."""
        self._pause_ends_at = 0.0
        """By the clock of the event loop."""

    async def wait_out(self, call: Callable[[], Awaitable[ResultT]]) -> ResultT:
        """What the call returns, made again as long as the settings allow.

        Raises:
            EnvironmentOutageError: the pauses that they allow were not enough for this call.
        """
        left_s = self.config.max_outage_minutes * 60
        while True:
            try:
                outcome = await call()
            except EnvironmentUnavailableError as error:
                if left_s <= 0:
                    raise self._lasting(error) from error
                pause_s = min(self._begin_pause(str(error)), left_s)
                await anyio.sleep(pause_s)
                left_s -= pause_s
            else:
                self._next_pause_s = FIRST_PAUSE_S
                return outcome

    def _begin_pause(self, problem: str) -> float:
        """How long to wait, seconds: until the end of the pause under way, or that of a new one."""
        now = anyio.current_time()
        if now < self._pause_ends_at:
            return self._pause_ends_at - now
        pause_s = self._next_pause_s
        self._pause_ends_at = now + pause_s
        self._next_pause_s = min(MAX_PAUSE_S, 2 * pause_s)
        logger.warning(
            "something was not available (%s), and is asked for again in %.0f s; the evaluation ends after %.0f "
            "minutes of such pauses for one prompt",
            problem,
            pause_s,
            self.config.max_outage_minutes,
        )
        return pause_s

    def _lasting(self, error: EnvironmentUnavailableError) -> EnvironmentOutageError:
        minutes = self.config.max_outage_minutes
        pauses = f", also after pauses of {minutes:.1f} minutes" if minutes else ""
        return EnvironmentOutageError(
            f"an environment or a reward was not available{pauses} (rollout.max_outage_minutes "
            f"{self.config.max_outage_minutes:g}), and an evaluation needs every prompt. Mend it, then start the run "
            f"again. The last problem: {error}"
        )
