"""Convert graded samples to a `RolloutBatch`: one column per field, and counts of samples by status."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rollouts_core.types import RolloutBatch, Sample, Status, compute_response_lengths, extract_sample_fields


def apply_sample_transforms(
    samples: Sequence[Sample], transforms: Sequence[Callable[[Sample], Sample]]
) -> list[Sample]:
    """Apply all transforms to each sample, in order."""
    transformed = list(samples)
    for transform in transforms:
        transformed = [transform(sample) for sample in transformed]
    return transformed


def convert_to_batch(samples: Sequence[Sample], *, metadata: Mapping[str, Any] | None = None) -> RolloutBatch:
    """Build a batch from graded samples. A sample without a reward gets the reward NaN.

    Args:
        metadata: JSON values to add to the batch's metadata. The metadata always has the number of samples of each
            status.
    """
    columns = extract_sample_fields(samples)
    return RolloutBatch(
        tokens=columns["tokens"],
        loss_masks=columns["loss_mask"],
        rewards=[math.nan if reward is None else reward for reward in columns["reward"]],
        response_lengths=compute_response_lengths(samples),
        metadata={**build_batch_metadata(samples), **(metadata or {})},
        samples=tuple(samples),
    )


def build_batch_metadata(samples: Sequence[Sample]) -> dict[str, int]:
    """Number of samples of each status, keyed `num_<status>`. A status without samples has no key."""
    counts = Counter(sample.status for sample in samples)
    return {f"num_{status.value}": counts[status] for status in Status if counts[status]}
