"""The end of a run whose RL worked and did not help: a state of its own, so that it is not taken for a broken run.

Not here: the verdict (rollouts_core/comparison.py), the flow that ends so (pipeline.py). Imports no Prefect.
"""

from rollouts_core.errors import RolloutsError

NO_IMPROVEMENT = "NoImprovement"
"""The name of the failed state, in Prefect's UI and events."""


class NoImprovementError(RolloutsError):
    """RL ran, but its best checkpoint is not better than the model it started from."""
