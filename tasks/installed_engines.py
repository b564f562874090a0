"""Find out where an engine has to be installed, and whether it is; the embedded engine comes with this project.

Not here: starting engines (engine.py), or having a job start them (rollouts_core/engines/child.py).
"""

from __future__ import annotations

from rollouts.infra.engines import check_engine_installed, check_router_installed
from rollouts.infra.node import Node
from rollouts.infra.session import Session
from rollouts_core.config import Config, EngineConfig


def samples_for_rl(config: Config, *, trains: bool) -> bool:
    """Whether RL asks engines for completions."""
    return trains and config.samples_for_training


def leads_engines(config: Config, node: Node, *, trains: bool) -> bool:
    """Whether engines of `rollout.engine` run on the leading machine, for RL or for scores."""
    scores = config.evaluation.metric == "accuracy" and config.evaluation.engine == "rollout"
    return scores or (samples_for_rl(config, trains=trains) and not node.engine_nodes)


def check_installed(session: Session, node: Node, engine: EngineConfig) -> None:
    """Raise PermanentInfraError when the engine is not installed where the stages of a node expect it."""
    if package := engine.spec.package:
        check_engine_installed(session, package, python=engine.python or node.python)


def check_router(session: Session, config: Config, *, trains: bool) -> None:
    """Raise PermanentInfraError when RL is to start a router that is not installed on the machine that trains."""
    if config.rollout.engine.router_python and samples_for_rl(config, trains=trains):
        check_router_installed(session, config.rollout.engine.router_python)
