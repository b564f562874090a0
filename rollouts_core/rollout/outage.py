"""Handle unavailable environments and rewards: drop the affected group, pause generation, or end the run.

    an environment or a reward was unavailable for a group
      ├─ for few of the last groups                 drop the group and count it
      ├─ for more of them than the settings allow   pause for 15 s, 30 s, ... 5 min, then retry
      └─ after the permitted pauses                 raise EnvironmentOutageError

An evaluation needs a result for every group, so it pauses for each unavailable group instead of dropping it
(`OutagePauses`).
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
"""Number of most recent groups over which the share of unavailable groups is computed."""
FIRST_PAUSE_S, MAX_PAUSE_S = 15.0, 300.0
"""Length of the first and of the longest pause, seconds. Each pause is twice as long as the previous pause."""


class OutageWatch:
    """Decides when training pauses or ends because environments or rewards are unavailable."""

    def __init__(self, config: RolloutConfig) -> None:
        self.config = config
        self._failures: deque[bool] = deque(maxlen=FAILURE_WINDOW)
        self._next_pause_s = FIRST_PAUSE_S
        """Length of the next pause, seconds. Doubles with each pause; reset when a group succeeds."""
        self._paused_s = 0.0
        """Total length of the pauses in the current outage, seconds. Reset to 0 when the share of unavailable groups
        among the last `FAILURE_WINDOW` groups is permitted again."""

    @property
    def _num_allowed(self) -> float:
        return self.config.max_environment_failure_share * FAILURE_WINDOW

    def begin_pause(self, problem: str) -> float:
        """Seconds to pause before requesting an unavailable group again; 0 if the group should be dropped instead.

        The group should be dropped if too few recent groups were unavailable for an outage, or if no pause is permitted
        any more.

        Args:
            problem: the error about the unavailable environment or reward.
        """
        is_outage = 1 + sum(self._failures) > self._num_allowed or self._paused_s > 0
        left_s = self.config.max_outage_minutes * 60 - self._paused_s
        pause_s = min(self._next_pause_s, left_s)
        if not is_outage or pause_s <= 0:
            return 0.0
        self._next_pause_s = min(MAX_PAUSE_S, 2 * self._next_pause_s)
        logger.warning(
            "pausing generation for %.0f s: more groups were unavailable than rollout.max_environment_failure_share "
            "allows (last problem: %s); the run ends after %.0f minutes of pauses",
            pause_s,
            problem,
            self.config.max_outage_minutes,
        )
        return pause_s

    def end_pause(self, pause_s: float) -> None:
        """Add a pause that has ended to the total length of the pauses."""
        self._paused_s += pause_s

    def note_group(self, problem: str) -> EnvironmentOutageError | None:
        """Count a group that was kept or dropped. Returns an error if too many recent groups were unavailable.

        Args:
            problem: the error about the group's unavailable environment or reward; "" if both were available.
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
            f"was unavailable, more than rollout.max_environment_failure_share {share:g} of {FAILURE_WINDOW} allows"
            f"{pauses}; they were not graded. Repair the cause, then start the run again. The last problem: {problem}"
        )


class OutagePauses:
    """Retries calls whose environment or reward was unavailable. The pauses between retries are shared by all calls.

    Calls that do not fail continue during a pause: a single failure is not an outage.
    """

    def __init__(self, config: RolloutConfig) -> None:
        self.config = config
        self._next_pause_s = FIRST_PAUSE_S
        """Length of the next pause, seconds. Doubles with each pause; reset when a call succeeds."""
        self._pause_ends_at = 0.0
        """Time at which the current pause ends, by the event loop's clock."""

    async def wait_out(self, call: Callable[[], Awaitable[ResultT]]) -> ResultT:
        """Await `call`, and retry it while an environment or reward is unavailable, up to `max_outage_minutes` of
        pauses.

        Raises:
            EnvironmentOutageError: the environment or reward was still unavailable after the permitted pauses.
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
        """Seconds until the current pause ends. Starts a new pause if there is no current pause."""
        now = anyio.current_time()
        if now < self._pause_ends_at:
            return self._pause_ends_at - now
        pause_s = self._next_pause_s
        self._pause_ends_at = now + pause_s
        self._next_pause_s = min(MAX_PAUSE_S, 2 * pause_s)
        logger.warning(
            "an environment or a reward was unavailable (%s); retrying in %.0f s; the evaluation ends after %.0f "
            "minutes of pauses for one prompt",
            problem,
            pause_s,
            self.config.max_outage_minutes,
        )
        return pause_s

    def _lasting(self, error: EnvironmentUnavailableError) -> EnvironmentOutageError:
        minutes = self.config.max_outage_minutes
        pauses = f", also after pauses of {minutes:.1f} minutes" if minutes else ""
        return EnvironmentOutageError(
            f"an environment or a reward was unavailable{pauses} (rollout.max_outage_minutes "
            f"{self.config.max_outage_minutes:g}), and an evaluation needs a result for every prompt. Repair the "
            f"cause, then start the run again. The last problem: {error}"
        )
