"""In which order a batch looks at its groups where timing decides it, written down so that it can be repeated.

Not here: generating groups (manager.py), the log that keeps the schedules of a run (rl.py).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rollouts_core.errors import RolloutsError
from rollouts_core.filters import FilterDecision
from rollouts_core.types import Sample

logger = logging.getLogger(__name__)


class Schedule(NamedTuple):
    """What timing and outages decided about one batch."""

    completed: Sequence[int]
    """The groups in the order in which they were looked at."""
    unavailable: Sequence[int] = ()
    """Those that were dropped because an environment or a reward was not available."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedGroup:
    """A finished group and its fate, or what went wrong."""

    group: list[Sample]
    decision: FilterDecision
    error: RolloutsError | None = None
    unavailable: str = ""
    """What failed, where the group was dropped because an environment or a reward was not available."""

    @property
    def index(self) -> int:
        """The number of the group."""
        return self.group[0].group_index


class LoggedOrder:
    """Holds finished groups back until a schedule has them next; without one, or behind its end, none is held back."""

    def __init__(self, schedule: Schedule | None = None) -> None:
        self.unavailable = frozenset(schedule.unavailable if schedule else ())
        """Groups that are not generated, because they were dropped unseen."""
        self.was_left = False
        """The schedule could not be followed."""
        self._expected = deque(schedule.completed if schedule else ())
        self._early: dict[int, FinishedGroup] = {}

    def add(self, finished: FinishedGroup) -> None:
        """Take note of a group that has finished."""
        self._early[finished.index] = finished

    def next_finished(self, under_way: Container[int]) -> FinishedGroup | None:
        """The next group to look at, None while it has not finished; the same one until `go_on_behind` or `forget`.

        Args:
            under_way: the groups that were asked for and not looked at yet.
        """
        if self._expected and self._expected[0] not in under_way:
            logger.warning(
                "the logged schedule has group %d next, which was not asked for: from here on timing decides again",
                self._expected[0],
            )
            self._expected.clear()
            self.was_left = True
        if not self._expected:
            return next(iter(self._early.values()), None)
        return self._early.get(self._expected[0])

    def go_on_behind(self, index: int) -> None:
        """Take note of the fate of the group that `next_finished` gave."""
        del self._early[index]
        if self._expected:
            self._expected.popleft()

    def forget(self, indices: Iterable[int]) -> None:
        """Wait for some groups again, where they have finished: their fate is not decided."""
        for index in indices:
            self._early.pop(index, None)
