"""The `finish` flow: end a run's training early from Prefect's UI. The run continues with its best checkpoint.

Not here: ending the training, and the command `rollouts finish` (commands/finish.py).
"""

# No `from __future__ import annotations`: Prefect pickles the flow by value, without the names to resolve annotations.

from pathlib import Path
from typing import Any

from prefect import get_run_logger
from prefect.client.schemas.objects import State
from prefect.states import Completed

from rollouts.flows.checked_flow import checked_flow
from rollouts.flows.commands.finish import finish_training
from rollouts.flows.run_ends import known_tool, with_noted_end
from rollouts.flows.tools import FINISH_FLOW, FinishConfig


@checked_flow(name=FINISH_FLOW, flow_run_name="finish {finish.run}")
@with_noted_end
def finish_run(finish: FinishConfig) -> State[Any]:
    """End the training of a run after the current step. The run continues with its best checkpoint so far.

    Raises:
        InputError, PermanentInfraError: the store or the run does not exist, or the run is not training.
    """
    with known_tool(Path(finish.store).resolve()):
        said = finish_training(Path(finish.store), finish.run)
        get_run_logger().info(said)
    return Completed(message=said)
