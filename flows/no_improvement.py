"""A separate final state for runs whose RL worked but did not improve the model, to distinguish them from failures.

Not here: the comparison (rollouts_core/comparison.py), the flow that ends in this state (pipeline.py).
"""

from rollouts_core.errors import RolloutsError

NO_IMPROVEMENT = "NoImprovement"
"""Name of the state in Prefect's UI and events. The state's type is FAILED."""


class NoImprovementError(RolloutsError):
    """RL ran, but its best checkpoint is not better than the model it started from."""
