"""Count consecutive RL steps without learning signal, warn about these steps, and end the training at a limit.

    the step had an update by rewards                        the counter is reset
    no update; every reward equals the best so far (solved)  the counter is reset
    no update otherwise                                      +1:  10, 20, 40, ... -> a warning;  limit -> end

An update only by other terms of the loss (KL to the initial model, entropy) is not an update by rewards.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollouts_core.errors import NoSignalError

FIRST_TOLD = 10
"""Number of consecutive steps without learning signal at the first warning. The number doubles for each further
warning."""
BY_REWARDS = " by rewards, only by the other terms of the loss"
NO_SIGNAL = "completions of each prompt had equal rewards"
NOT_TRAINED = "no completion with an advantage is trained on"
NONFINITE = "loss or gradient was not finite"
REMEDIES = {
    NO_SIGNAL: "check the completions in samples/; use prompts that the model solves sometimes, more completions per "
    "prompt, or a reward that separates good from bad completions",
    NOT_TRAINED: "check reward_shaping.mask_truncated and the loss masks in samples/",
    NONFINITE: "lower the learning rate, or check the samples named in the log",
}


def is_untaught(metrics: Mapping[str, float]) -> bool:
    """Return True if rewards made no update in a step. Metrics of earlier versions lack `without_signal`."""
    return bool(metrics["skipped"] or metrics.get("without_signal", 0.0))


def why_skipped(metrics: Mapping[str, float]) -> str:
    """The reason why rewards made no update in a step, as a name in `REMEDIES`."""
    if metrics["num_nonfinite"]:
        return NONFINITE
    return NO_SIGNAL if not metrics["signal_share"] else NOT_TRAINED


class SignalWatch:
    """Counts consecutive steps in which rewards made no update.

    A solved task does not lack signal. If the policy has learned from rewards before, a step in which every completion
    gets the best reward so far resets the counter.

    Args:
        limit: number of consecutive steps without an update by rewards at which the training ends; 0 sets no limit.
        state: a result of `state_dict`, to continue the count of an earlier attempt.
    """

    def __init__(self, limit: int, state: Mapping[str, Any] | None = None) -> None:  # Any: JSON
        saved = state or {}
        self.limit = limit
        self.num_in_a_row: int = saved.get("num_in_a_row", 0)
        self._reason: str = saved.get("reason", NO_SIGNAL)
        self._step: int = saved.get("step", 0)
        self._seen: list[float] = list(saved.get("seen", ()))
        """The lowest and the highest mean reward of the counted steps; empty if no counted step had a reward."""
        self._is_uniform: bool = saved.get("is_uniform", True)
        """True if in each counted step all completions of all prompts had the same reward."""
        self._is_updated: bool = saved.get("is_updated", False)
        """True if other terms of the loss made an update in one of the counted steps."""
        self._has_learned: bool = saved.get("has_learned", False)
        self._best: float | None = saved.get("best")

    def state_dict(self) -> dict[str, Any]:  # Any: JSON
        """The counters as JSON values, for a checkpoint."""
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
        """Return True if the count has reached the limit."""
        return 0 < self.limit <= self.num_in_a_row

    def after_step(self, step: int, metrics: Mapping[str, float]) -> str:
        """Count a step by its metrics. Returns a warning if the count reached 10, 20, 40 and so on, otherwise ""."""
        if self._teaches_nothing(metrics):
            self._count(step, metrics)
        else:
            self.num_in_a_row, self._seen, self._is_uniform, self._is_updated = 0, [], True, False
        self._has_learned = self._has_learned or not is_untaught(metrics)
        if "reward" in metrics:
            self._best = max(metrics["reward"], metrics["reward"] if self._best is None else self._best)
        return self.sentence if is_time_to_tell(self.num_in_a_row) else ""

    def check(self) -> None:
        """Raise NoSignalError if the count has reached the limit."""
        if self.is_over:
            raise NoSignalError(
                f"{self.sentence}. The training ended at this step, and its checkpoint is kept. To resume, raise "
                f"training.rl.max_steps_without_signal ({self.limit}; 0 sets no limit)"
            )

    @property
    def sentence(self) -> str:
        """A sentence that says what was observed and what to do."""
        return (
            f"step {self._step}: {self.num_in_a_row} steps in a row made no update{BY_REWARDS * self._is_updated}, "
            f"{self._describe_rewards()} ({self._reason}): {REMEDIES[self._reason]}"
        )

    def _teaches_nothing(self, metrics: Mapping[str, float]) -> bool:
        if not is_untaught(metrics) or metrics["num_nonfinite"]:  # max_skipped_updates limits non-finite updates
            return False
        is_solved = (
            self._has_learned
            and self._best is not None
            and metrics.get("reward_std") == 0
            and metrics["reward"] >= self._best
        )
        return not is_solved

    def _count(self, step: int, metrics: Mapping[str, float]) -> None:
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
    """Return True if the count is `FIRST_TOLD`, twice `FIRST_TOLD`, four times `FIRST_TOLD` and so on."""
    times, rest = divmod(num_in_a_row, FIRST_TOLD)
    return rest == 0 and times > 0 and times & (times - 1) == 0
