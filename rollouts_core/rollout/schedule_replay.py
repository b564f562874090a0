"""Record and replay the order in which finished groups are kept or dropped, for batches in which timing decides it."""

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
    """The order in which the groups of one batch finished, and the groups lost to outages. A replay gives the same
    batch."""

    completed: Sequence[int]
    """Group indices in the order in which the groups were kept or dropped."""
    unavailable: Sequence[int] = ()
    """Indices of groups that were dropped because an environment or a reward was unavailable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedGroup:
    """A group whose generation ended, with the decision to keep or drop it, or with the error that ended it."""

    group: list[Sample]
    decision: FilterDecision
    error: RolloutsError | None = None
    unavailable: str = ""
    """Error message if an environment or a reward was unavailable for the group; otherwise empty."""

    @property
    def index(self) -> int:
        """Number of the group in the run, counted from 0."""
        return self.group[0].group_index


class ScheduleReplay:
    """Returns finished groups in the order of a recorded schedule. Without a schedule, groups are returned in the order
    in which they finished."""

    def __init__(self, schedule: Schedule | None = None) -> None:
        self.unavailable = frozenset(schedule.unavailable if schedule else ())
        """Indices of groups that the schedule dropped as unavailable. A replay drops these groups without generating
        them."""
        self.was_left = False
        """True if the schedule could not be followed, because its next group was not requested."""
        self._expected = deque(schedule.completed if schedule else ())
        self._early: dict[int, FinishedGroup] = {}

    def add(self, finished: FinishedGroup) -> None:
        self._early[finished.index] = finished

    def next_finished(self, under_way: Container[int]) -> FinishedGroup | None:
        """The next group to keep or drop; None if this group has not finished yet.

        Returns the same group until `consume` or `forget` removes it. If the schedule's next group was not
        requested, the rest of the schedule is ignored with a warning.

        Args:
            under_way: indices of groups that were requested and neither kept nor dropped yet.
        """
        if self._expected and self._expected[0] not in under_way:
            logger.warning(
                "group %d, the next group of the recorded schedule, was not requested: from now on groups are "
                "considered in the order in which they finish",
                self._expected[0],
            )
            self._expected.clear()
            self.was_left = True
        if not self._expected:
            return next(iter(self._early.values()), None)
        return self._early.get(self._expected[0])

    def consume(self, index: int) -> None:
        """Remove the group that `next_finished` returned, after it was kept or dropped."""
        del self._early[index]
        if self._expected:
            self._expected.popleft()

    def forget(self, indices: Iterable[int]) -> None:
        """Discard results of groups that were neither kept nor dropped, because the manager generates these groups
        again."""
        for index in indices:
            self._early.pop(index, None)
