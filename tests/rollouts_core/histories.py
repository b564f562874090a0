"""Metrics of two runs that must agree.

Not here: what a run writes and how it is read (rollouts_core/metrics.py).
"""

from collections.abc import Iterable

from rollouts_core.algorithms.loss import Metrics


def without_times(history: Iterable[Metrics]) -> list[Metrics]:
    """The lines without what differs between equal runs: moments, seconds (`..._s`) and the number of the attempt."""
    return [
        {name: value for name, value in metrics.items() if name not in ("time", "attempt") and not name.endswith("_s")}
        for metrics in history
    ]
