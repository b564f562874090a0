"""Check that the node can do the work: Python, torch, devices, disk; install what it lacks where that is asked for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from infra.bootstrap import NodeNeeds, check_imports, check_node, probe_node
from infra.environment import ensure_environment, installed_requirements, read_requirements
from infra.errors import PermanentInfraError
from infra.node import EngineNode, LocalNode, Node, NodeSettings, SSHNode
from infra.providers import open_session
from infra.reach import check_both_ways
from infra.session import Session
from rollouts_core.config import Config
from rollouts_core.resource_needs import checkpoint_disk_bytes, least_memory_bytes
from tasks.placement import place_code
from tasks.progress import StageProgress, stage_console


@task(name="bootstrap", cache_policy=NO_CACHE)
def bootstrap(node: Node, config: Config, settings: NodeSettings, *, trains: bool = True) -> Node:
    """The node when it is good enough for the pipeline, with the interpreter that its stages run by.

    So are its engines' nodes, each of which it reaches, and is reached from.

    Args:
        trains: whether something is trained there, which takes memory and disk.
    """
    placement = config.deployment
    own_gpus = {*placement.trainer_gpu_ranks, *(() if node.engine_nodes else placement.engine_gpu_ranks)}
    needs = NodeNeeds(
        disk_gb=max(settings.min_free_gb, checkpoint_disk_bytes(config) / 1e9 if trains else 0.0),
        num_gpus=len(own_gpus),
        trainer_gpu_ranks=placement.trainer_gpu_ranks,
        num_trainers=placement.num_trainer_processes,
        trainer_gb=least_memory_bytes(config) / 1e9 if trains else 0.0,
    )
    with StageProgress("bootstrap", num_steps=0, console=stage_console()) as progress, open_session(node) as session:
        ready = prepare_machine(session, node, settings, needs, config, progress)
        if not isinstance(settings, SSHNode):
            return ready
        engine_nodes = [
            prepare_engine_node(session, node, engine_node, own_settings, config, progress)
            for engine_node, own_settings in zip(node.engine_nodes, settings.engine_nodes, strict=True)
        ]
    return replace(ready, engine_nodes=tuple(engine_nodes))


def prepare_engine_node(
    trainer: Session, node: Node, engine_node: Node, settings: EngineNode, config: Config, progress: StageProgress
) -> Node:
    """A machine for engines when it is good enough, and it and the one that trains reach each other."""
    needs = NodeNeeds(disk_gb=settings.min_free_gb, num_gpus=len(config.deployment.engine_gpu_ranks))
    try:
        with open_session(engine_node) as session:
            ready = prepare_machine(session, engine_node, settings, needs, config, progress)
            check_both_ways(trainer, node, session, engine_node)
    except PermanentInfraError as error:
        raise PermanentInfraError(f"node.engine_nodes, {engine_node.name}: {error}") from error
    return ready


def prepare_machine(
    session: Session,
    node: Node,
    settings: NodeSettings | EngineNode,
    needs: NodeNeeds,
    config: Config,
    progress: StageProgress,
) -> Node:
    """One machine of the unit, with what it needs."""
    ready = install_packages(session, node, settings, progress)
    report = probe_node(session, ready)
    check_node(report, needs)
    if ready.is_remote:
        check_imports(session, ready, place_code(session, ready, config.rollout))
    progress.say(
        f"Python {report.python_version}, torch {report.torch_version}, {report.device_summary}, "
        f"{report.free_disk_gb:.0f} GB free"
    )
    return ready


def install_packages(
    session: Session, node: Node, settings: NodeSettings | EngineNode, progress: StageProgress
) -> Node:
    """The node with the interpreter of an environment that has the packages, where the settings ask for one."""
    if isinstance(settings, LocalNode) or settings.install == "nothing":
        return node
    wanted = read_requirements(Path(settings.requirements)) if settings.requirements else installed_requirements()
    progress.say(f"{len(wanted)} packages by {settings.install}, unless they are there already")
    python = ensure_environment(session, node, wanted, installer=settings.install, index=settings.package_index)
    return replace(node, python=python)
