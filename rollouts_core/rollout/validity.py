"""Mark invalid samples, which say nothing about the policy, and detect when there are too many.

An invalid sample is neither graded nor trained on. The sample stays in its batch, and metrics count it by its reason.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import replace

from rollouts_core.errors import DataError
from rollouts_core.types import Sample, Status, trajectory_places

UNSEEN_REPLY = "unseen_reply"
"""The chat template hid a reply from the policy."""
FOREIGN_TOKENS = "foreign_tokens"
"""The policy sampled ids that its tokenizer lacks: the engine did not exclude them."""
MAX_INVALID_SHARE = 0.05
INVALID_WINDOW = 200
"""Number of last samples over which the share of invalid samples is computed."""
MIN_WINDOW = 40
"""Smallest divisor of that share, so that a few invalid samples at the start do not end the run."""


def mark_foreign_tokens(sample: Sample, num_tokens: int | None) -> Sample:
    """Mark the sample as invalid if the policy sampled ids from `num_tokens` on; None permits all ids."""
    if num_tokens is None or max(sample.tokens, default=0) < num_tokens:
        return sample
    sampled = zip(sample.tokens, sample.loss_mask, strict=True)
    foreign = [token for token, weight in sampled if weight and token >= num_tokens]
    if not foreign:
        return sample
    problem = (
        f"the policy sampled the token id {foreign[0]}, but its tokenizer has only ids below {num_tokens}: the engine "
        "did not exclude the other ids"
    )
    metadata = {**sample.metadata, "invalid": problem}
    return replace(sample, status=Status.INVALID, finish_reason=FOREIGN_TOKENS, reward=None, metadata=metadata)


def count_invalid(samples: Sequence[Sample]) -> Counter[str]:
    """Number of invalid trajectories by reason."""
    lasts = [samples[places[-1]] for places in trajectory_places(samples)]
    return Counter(sample.finish_reason for sample in lasts if sample.status is Status.INVALID)


class InvalidWatch:
    """Remembers which of the last samples were invalid.

    Args:
        window: number of remembered samples.
    """

    def __init__(self, window: int = INVALID_WINDOW) -> None:
        self._were_invalid: deque[bool] = deque(maxlen=window)

    def note(self, samples: Iterable[Sample]) -> DataError | None:
        """Count finished samples; returns an error if more than `MAX_INVALID_SHARE` are invalid."""
        problem = ""
        for sample in samples:
            is_invalid = sample.status is Status.INVALID
            self._were_invalid.append(is_invalid)
            if is_invalid:
                problem = str(sample.metadata.get("invalid", sample.finish_reason))
        num_invalid, num_known = sum(self._were_invalid), len(self._were_invalid)
        if not problem or num_invalid <= MAX_INVALID_SHARE * max(MIN_WINDOW, num_known):
            return None
        return DataError(
            f"{num_invalid} of the last {num_known} samples are invalid, more than {MAX_INVALID_SHARE:.0%}; they were "
            f"neither graded nor trained on. The last problem: {problem}"
        )
