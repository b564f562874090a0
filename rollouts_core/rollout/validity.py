"""Mark samples as invalid if a technical fault spoiled them, and end the run if too many are invalid.

An invalid sample is neither graded nor trained on, because its reward would not judge the policy. An invalid sample
stays in its batch, and metrics count it by its finish reason.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import replace

from rollouts_core.errors import DataError
from rollouts_core.types import Sample, Status, trajectory_places

UNSEEN_REPLY = "unseen_reply"
"""Finish reason: the chat template omitted an environment's reply, so the policy did not see it."""
FOREIGN_TOKENS = "foreign_tokens"
"""Finish reason: the policy sampled token ids that its tokenizer lacks, because the engine did not exclude them."""
MAX_INVALID_SHARE = 0.05
INVALID_WINDOW = 200
"""Number of most recent samples over which the share of invalid samples is computed."""
MIN_WINDOW = 40
"""Smallest denominator of the share of invalid samples, so that a few invalid samples at the start do not end the
run."""


def mark_foreign_tokens(sample: Sample, num_tokens: int | None) -> Sample:
    """Mark the sample as invalid if the policy sampled a token id of at least `num_tokens`. None accepts all ids."""
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
    """Number of invalid trajectories by finish reason. A trajectory is invalid if its last sample is."""
    lasts = [samples[places[-1]] for places in trajectory_places(samples)]
    return Counter(sample.finish_reason for sample in lasts if sample.status is Status.INVALID)


class InvalidWatch:
    """Computes the share of invalid samples among the most recent samples.

    Args:
        window: number of samples to remember.
    """

    def __init__(self, window: int = INVALID_WINDOW) -> None:
        self._were_invalid: deque[bool] = deque(maxlen=window)

    def note(self, samples: Iterable[Sample]) -> DataError | None:
        """Count finished samples. Returns an error if the share of invalid recent samples exceeds
        `MAX_INVALID_SHARE`."""
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
