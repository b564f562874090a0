"""Measure how many publications the tokens of a sample are behind the current weights.

published versions    4    7    9    12 (current)
a token of version    7 is two publications behind, a sample is as stale as its oldest token
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from rollouts_core.types import Sample


class PublishedVersions:
    """The last published versions, in order.

    Staleness counts publications, not steps: a step may be skipped, or make several updates.

    Args:
        num_kept: number of remembered versions. Every older version has the staleness `num_kept`.
    """

    def __init__(self, num_kept: int, versions: Sequence[int] = ()) -> None:
        self.num_kept = num_kept
        self.versions = list(versions)[-num_kept:]

    def add(self, version: int) -> None:
        """Add a publication. Adding the current version again, as after a restart, changes nothing."""
        if not self.versions or version != self.versions[-1]:
            self.versions = [*self.versions, version][-self.num_kept :]

    def staleness_of(self, version: int) -> int:
        """Number of publications after `version`; 0 if no publication is known."""
        return len(self.versions) - bisect_right(self.versions, version)

    def oldest(self, samples: Sequence[Sample]) -> int:
        """Staleness of the oldest token in some samples."""
        versions = [span.version for sample in samples for span in sample.policy_versions]
        return self.staleness_of(min(versions)) if versions else 0

    def describe(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Mean and maximum staleness of the sampled tokens, and the share of outdated tokens."""
        spans = [span for sample in samples for span in sample.policy_versions]
        num_tokens = sum(span.end - span.start for span in spans)
        if not num_tokens:
            return {}
        ages = [(self.staleness_of(span.version), span.end - span.start) for span in spans]
        return {
            "staleness_mean": sum(age * count for age, count in ages) / num_tokens,
            "staleness_max": float(max(age for age, _ in ages)),
            "stale_token_share": sum(count for age, count in ages if age) / num_tokens,
        }
