"""The state of a run whose RL worked but did not improve the model, so that the run does not look like a broken one.

Not here: the verdict (rollouts_core/comparison.py), the flow that ends so (pipeline.py). Imports no Prefect.
"""

from rollouts_core.errors import RolloutsError

NO_IMPROVEMENT = "NoImprovement"
"""The name of the failed state, in Prefect's UI and events."""


class NoImprovementError(RolloutsError):
    """RL ran, but its best checkpoint is not better than the model it started from."""
