"""How far the tokens of a sample are behind the weights that they train.

Not here: what becomes of a sample that is too old (manager.py), the correction of its loss (algorithms/mismatch.py).

    published versions    4    7    9    12 (current)
    a token of version    7 is two publications behind, a sample is as stale as its oldest token
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from rollouts_core.types import Sample


class PublishedVersions:
    """The versions that were published last, in order.

    Staleness counts publications: a step may be skipped, or make several updates.

    Args:
        num_kept: how many are remembered; what is older counts as older than all of them.
    """

    def __init__(self, num_kept: int, versions: Sequence[int] = ()) -> None:
        self.num_kept = num_kept
        self.versions = list(versions)[-num_kept:]

    def add(self, version: int) -> None:
        """Take note of a publication; of the current version again, after a restart, it is none."""
        if not self.versions or version != self.versions[-1]:
            self.versions = [*self.versions, version][-self.num_kept :]

    def staleness_of(self, version: int) -> int:
        """The number of publications since the one of `version`; 0 where none is known."""
        return len(self.versions) - bisect_right(self.versions, version)

    def oldest(self, samples: Sequence[Sample]) -> int:
        """The staleness of the oldest token of some samples."""
        versions = [span.version for sample in samples for span in sample.policy_versions]
        return self.staleness_of(min(versions)) if versions else 0

    def describe(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Mean and largest staleness of the sampled tokens, and the share that is not of the current version."""
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
