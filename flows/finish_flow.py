"""The `finish` flow: have a run that trains go on with what it has, from Prefect's UI.

Not here: what that means, and the command that does the same (commands/finish.py).
"""

# No postponed annotations here: the process of a served run gets the flow by value, without the names of this module.

from pathlib import Path
from typing import Any

from prefect import flow, get_run_logger
from prefect.client.schemas.objects import State
from prefect.states import Completed

from rollouts.flows.commands.finish import finish_training
from rollouts.flows.run_ends import known_tool, with_noted_end
from rollouts.flows.tools import FINISH_FLOW, FinishConfig


@flow(name=FINISH_FLOW, flow_run_name="finish {finish.run}", persist_result=False)
@with_noted_end
def finish_run(finish: FinishConfig) -> State[Any]:
    """End the training of a run after the step under way; the run goes on with the best checkpoint so far.

    Raises:
        InputError, PermanentInfraError: one sentence; the run does not exist, or trains nothing.
    """
    with known_tool(Path(finish.store).resolve()):
        said = finish_training(Path(finish.store), finish.run)
        get_run_logger().info(said)
    return Completed(message=said)
