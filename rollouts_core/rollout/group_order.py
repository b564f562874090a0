"""Record and replay in which order a batch considers its groups, if timing decides the order."""

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
    """The decisions of timing and outages about one batch."""

    completed: Sequence[int]
    """Groups in the order in which they were considered."""
    unavailable: Sequence[int] = ()
    """Groups dropped because an environment or a reward was unavailable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedGroup:
    """A finished group and its fate, or its error."""

    group: list[Sample]
    decision: FilterDecision
    error: RolloutsError | None = None
    unavailable: str = ""
    """The failure, if the group was dropped because an environment or a reward was unavailable."""

    @property
    def index(self) -> int:
        """The group's number."""
        return self.group[0].group_index


class LoggedOrder:
    """Holds finished groups back until a schedule reaches them. Without a schedule nothing is held back."""

    def __init__(self, schedule: Schedule | None = None) -> None:
        self.unavailable = frozenset(schedule.unavailable if schedule else ())
        """Groups to drop without generating them."""
        self.was_left = False
        """True if the schedule could not be followed."""
        self._expected = deque(schedule.completed if schedule else ())
        self._early: dict[int, FinishedGroup] = {}

    def add(self, finished: FinishedGroup) -> None:
        """Add a finished group."""
        self._early[finished.index] = finished

    def next_finished(self, under_way: Container[int]) -> FinishedGroup | None:
        """The next group to keep or drop; None until it has finished. The same group until `go_on_behind` or `forget`.

        Args:
            under_way: groups that were requested and neither kept nor dropped yet.
        """
        if self._expected and self._expected[0] not in under_way:
            logger.warning(
                "the logged schedule has group %d next, which was not requested: from now on timing decides the order",
                self._expected[0],
            )
            self._expected.clear()
            self.was_left = True
        if not self._expected:
            return next(iter(self._early.values()), None)
        return self._early.get(self._expected[0])

    def go_on_behind(self, index: int) -> None:
        """Remove the group that `next_finished` returned: its fate is decided."""
        del self._early[index]
        if self._expected:
            self._expected.popleft()

    def forget(self, indices: Iterable[int]) -> None:
        """Discard results of groups whose fate is not decided, to wait for them again."""
        for index in indices:
            self._early.pop(index, None)
