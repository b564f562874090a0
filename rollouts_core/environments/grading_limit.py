"""End the grading of a completion that a policy made hard to check: it gets no reward, and is counted.

Not here: limits of a user's own functions, which end a run (system/time_limits.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from rollouts_core.system.time_limits import OutOfTimeError, interrupt_after_computing
from rollouts_core.types import Sample

logger = logging.getLogger(__name__)


class GradingLimit:
    """How long a grader may compute for one completion, and how many took longer.

    Args:
        seconds: far more than a completion needs that is meant to be checked.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._num_over = 0

    def call(self, sample: Sample, function: Callable[..., float], *arguments: Any) -> float:  # Any: the function's
        """The reward that the function returns, or 0 if it computes for too long."""
        try:
            with interrupt_after_computing(self.seconds):
                return function(*arguments)
        except OutOfTimeError:
            return self.note(sample)

    def note(self, sample: Sample) -> float:
        """Count a completion that took too long to grade; returns its reward, 0."""
        self._num_over += 1
        prompt = sample.metadata.get("prompt_id", "?")
        logger.warning("a completion of prompt %r took more than %g s to grade: reward 0", prompt, self.seconds)
        return 0.0

    def take_count(self) -> int:
        """How many completions took too long since the last call."""
        count, self._num_over = self._num_over, 0
        return count
