"""Staleness of a sample: how many weight versions were published to the engines after the version that sampled it.

published versions    4    7    9    12 (current)
a token of version    7 has staleness 2; a sample has the staleness of its oldest token
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from rollouts_core.types import Sample


class PublishedVersions:
    """The most recently published weight versions, oldest first.

    Staleness counts publications, not training steps, because not every step publishes weights.

    Args:
        num_kept: number of versions to remember. All older versions count as `num_kept` publications old.
    """

    def __init__(self, num_kept: int, versions: Sequence[int] = ()) -> None:
        self.num_kept = num_kept
        self.versions = list(versions)[-num_kept:]

    def add(self, version: int) -> None:
        """Append a published version. Publishing the current version again, as after a restart, changes nothing."""
        if not self.versions or version != self.versions[-1]:
            self.versions = [*self.versions, version][-self.num_kept :]

    def staleness_of(self, version: int) -> int:
        """Number of publications after `version`; 0 if no version was published yet."""
        return len(self.versions) - bisect_right(self.versions, version)

    def oldest(self, samples: Sequence[Sample]) -> int:
        """Staleness of the oldest token in the samples; 0 if no token has a version."""
        versions = [span.version for sample in samples for span in sample.policy_versions]
        return self.staleness_of(min(versions)) if versions else 0

    def describe(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Mean and maximum staleness of the sampled tokens, and the share of tokens older than the current version.

        Returns an empty dict if no token has a version.
        """
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
