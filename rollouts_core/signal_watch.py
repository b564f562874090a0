"""Count the steps of RL in a row that taught nothing; tell of them while they go on, and say when there are too many.

Not here: the loop (rl.py), updates that are skipped for numbers that are not finite (update.py).

    rewards made an update                                     the count begins anew
    none, all rewards as high as they ever were, after some    the count begins anew: what is solved teaches nothing
    none otherwise                                             +1:  10, 20, 40, ... -> event few_updates,  limit -> over

An update by the other terms of the loss alone (KL to the start model, entropy) is none by rewards.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from rollouts_core.algorithms.loss import Metrics
from rollouts_core.errors import NoSignalError
from rollouts_core.metrics import EventLog

logger = logging.getLogger(__name__)

FIRST_TOLD = 10
"""After so many steps in a row it is told, and after twice as many again."""
BY_REWARDS = " by rewards, only by the other terms of the loss"
NO_SIGNAL = "completions of each prompt had equal rewards"
NOT_TRAINED = "no completion with an advantage is trained on"
NONFINITE = "loss or gradient was no finite number"
REMEDIES = {
    NO_SIGNAL: "look at what was said in samples/, and give prompts that the model solves now and then, more "
    "completions of each, or a reward that tells them apart",
    NOT_TRAINED: "look at reward_shaping.mask_truncated and at the loss masks in samples/",
    NONFINITE: "lower the learning rate, or look at the samples that the log names",
}


def is_untaught(metrics: Mapping[str, float]) -> bool:
    """Whether rewards made no update in a step; lines of earlier versions say only whether anything did."""
    return bool(metrics["skipped"] or metrics.get("without_signal", 0.0))


def why_skipped(metrics: Mapping[str, float]) -> str:
    """Why rewards made no update in a step, a key of `REMEDIES`."""
    if metrics["num_nonfinite"]:
        return NONFINITE
    return NO_SIGNAL if not metrics["signal_share"] else NOT_TRAINED


class SignalWatch:
    """Counts the steps one after the other in which rewards made no update.

    A policy that has learned to get the highest reward everywhere makes none either, and nothing is wrong.

    Args:
        limit: how many may follow each other before the training is over; 0 sets no limit.
        state: what `state_dict` gave, where a run goes on: it counts on.
    """

    def __init__(self, limit: int, state: Mapping[str, Any] | None = None) -> None:  # Any: JSON
        saved = state or {}
        self.limit = limit
        self.num_in_a_row: int = saved.get("num_in_a_row", 0)
        self._reason: str = saved.get("reason", NO_SIGNAL)
        self._step: int = saved.get("step", 0)
        self._seen: list[float] = list(saved.get("seen", ()))
        """Least and greatest mean reward of the steps in a row; empty where none had a reward."""
        self._is_uniform: bool = saved.get("is_uniform", True)
        """Whether all completions of each of these steps had the same reward, whatever the prompt."""
        self._is_updated: bool = saved.get("is_updated", False)
        """Whether one of these steps made an update all the same, by the other terms of the loss."""
        self._has_learned: bool = saved.get("has_learned", False)
        self._best: float | None = saved.get("best")

    def state_dict(self) -> dict[str, Any]:  # Any: JSON
        """What a run that goes on needs to count on, as JSON values."""
        return {
            "num_in_a_row": self.num_in_a_row,
            "reason": self._reason,
            "step": self._step,
            "seen": self._seen,
            "is_uniform": self._is_uniform,
            "is_updated": self._is_updated,
            "has_learned": self._has_learned,
            "best": self._best,
        }

    @property
    def is_over(self) -> bool:
        """Whether in as many steps in a row as the limit allows rewards made no update."""
        return 0 < self.limit <= self.num_in_a_row

    def after_step(self, step: int, metrics: Metrics, events: EventLog | None = None) -> None:
        """Count a step by its metrics; where many in a row taught nothing, the log and the events are told."""
        if self._teaches_nothing(metrics):
            self._count(step, metrics)
        else:
            self.num_in_a_row, self._seen, self._is_uniform, self._is_updated = 0, [], True, False
        self._has_learned = self._has_learned or not is_untaught(metrics)
        if "reward" in metrics:
            self._best = max(metrics["reward"], metrics["reward"] if self._best is None else self._best)
        if is_time_to_tell(self.num_in_a_row):
            logger.warning("%s", self.sentence)
            if events:
                events.write("few_updates", step=step, message=self.sentence)

    def check(self) -> None:
        """Raise NoSignalError where the training is over."""
        if self.is_over:
            raise NoSignalError(
                f"{self.sentence}. The training has ended there, and what it has is kept: to go on from there, raise "
                f"training.rl.max_steps_without_signal ({self.limit}; 0 sets no limit)"
            )

    @property
    def sentence(self) -> str:
        """What was seen, and what to do."""
        return (
            f"step {self._step}: {self.num_in_a_row} steps in a row made no update{BY_REWARDS * self._is_updated}, "
            f"{self._describe_rewards()} ({self._reason}): {REMEDIES[self._reason]}"
        )

    def _teaches_nothing(self, metrics: Metrics) -> bool:
        if not is_untaught(metrics) or metrics["num_nonfinite"]:  # these have a limit of their own
            return False
        is_solved = (
            self._has_learned
            and self._best is not None
            and metrics.get("reward_std") == 0
            and metrics["reward"] >= self._best
        )
        return not is_solved

    def _count(self, step: int, metrics: Metrics) -> None:
        self.num_in_a_row += 1
        self._step, self._reason = step, why_skipped(metrics)
        self._is_updated = self._is_updated or not metrics["skipped"]
        if "reward" in metrics:
            seen = [*self._seen, metrics["reward"]]
            self._seen = [min(seen), max(seen)]
            self._is_uniform = self._is_uniform and metrics["reward_std"] == 0

    def _describe_rewards(self) -> str:
        if not self._seen:
            return "no completion had a reward"
        least, most = self._seen
        if self._is_uniform and least == most:
            return f"all rewards were {least:g}"
        return f"mean rewards were {least:.3g}" + (f" to {most:.3g}" if most > least else "")


def is_time_to_tell(num_in_a_row: int) -> bool:
    """True at `FIRST_TOLD`, at twice as many, and so on."""
    times, rest = divmod(num_in_a_row, FIRST_TOLD)
    return rest == 0 and times > 0 and times & (times - 1) == 0
