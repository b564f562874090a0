"""Limit the time for grading a completion. A completion that takes too long gets reward 0 and is counted.

Not here: time limits of users' functions, which end a run (system/time_limits.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from rollouts_core.system.time_limits import OutOfTimeError, interrupt_after_computing
from rollouts_core.types import Sample

logger = logging.getLogger(__name__)


class GradingLimit:
    """A time limit for grading one completion, with a counter of completions that exceeded it.

    Args:
        seconds: time limit, which should be far longer than normal completions need.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._num_over = 0

    def call(self, sample: Sample, function: Callable[..., float], *arguments: Any) -> float:  # Any: the function's
        """Call `function` and return its reward; 0 if it exceeds the time limit."""
        try:
            with interrupt_after_computing(self.seconds):
                return function(*arguments)
        except OutOfTimeError:
            return self.note(sample)

    def note(self, sample: Sample) -> float:
        """Count a completion that took too long; returns its reward, 0."""
        self._num_over += 1
        prompt = sample.metadata.get("prompt_id", "?")
        logger.warning("a completion of prompt %r took more than %g s to grade: reward 0", prompt, self.seconds)
        return 0.0

    def take_count(self) -> int:
        """Return the number of completions that took too long, and reset the counter."""
        count, self._num_over = self._num_over, 0
        return count
