"""Find out which machines of a run need an installed inference engine or router.

Not here: installing engines (engine_installs.py), starting them (engine.py, rollouts_core/engines/child.py).
"""

from __future__ import annotations

from rollouts.infra.engines import check_router_installed
from rollouts.infra.node import Node
from rollouts.infra.session import Session
from rollouts_core.config import Config
from rollouts_core.stages import stages_of


def samples_for_rl(config: Config, *, trains: bool) -> bool:
    """True if an RL stage of the run requests completions from inference engines."""
    return trains and config.samples_for_training


def leads_engines(config: Config, node: Node, *, trains: bool) -> bool:
    """True if `node`, the leading machine, must serve engines of `rollout.engine`, for RL or for evaluations."""
    scores = config.evaluation.metric == "accuracy" and config.evaluation.engine == "rollout"
    return scores or (samples_for_rl(config, trains=trains) and not node.engine_nodes)


def stage_beside_installation(config: Config, *, trains: bool) -> str:
    """The name of the stage that runs while engines are installed: SFT, if the run begins with SFT. Otherwise empty."""
    first = stages_of(config.mode)[0]
    return first.name if trains and not first.kind.is_graded else ""


def check_router(session: Session, config: Config, *, trains: bool) -> None:
    """Raise PermanentInfraError if RL needs a router that is not installed on the training machine."""
    if config.rollout.engine.router_python and samples_for_rl(config, trains=trains):
        check_router_installed(session, config.rollout.engine.router_python)
