"""Check that the node can do the work: Python, torch, devices, disk; install what it lacks where that is asked for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from infra.bootstrap import NodeNeeds, check_imports, check_node, probe_node
from infra.environment import ensure_environment, installed_requirements, read_requirements
from infra.node import LocalNode, Node, NodeSettings
from infra.providers import open_session
from infra.session import Session
from rollouts_core.config import Config
from rollouts_core.resource_needs import checkpoint_disk_bytes, least_memory_bytes
from tasks.placement import place_code
from tasks.progress import StageProgress, stage_console


@task(name="bootstrap", cache_policy=NO_CACHE)
def bootstrap(node: Node, config: Config, settings: NodeSettings, *, trains: bool = True) -> Node:
    """The node when it is good enough for the pipeline, with the interpreter that its stages run by.

    Args:
        trains: whether something is trained there, which takes memory and disk.
    """
    placement = config.deployment
    needs = NodeNeeds(
        disk_gb=max(settings.min_free_gb, checkpoint_disk_bytes(config) / 1e9 if trains else 0.0),
        num_gpus=len({*placement.trainer_gpu_ranks, *placement.engine_gpu_ranks}),
        trainer_gpu_ranks=placement.trainer_gpu_ranks,
        num_trainers=placement.num_trainer_processes,
        trainer_gb=least_memory_bytes(config) / 1e9 if trains else 0.0,
    )
    with StageProgress("bootstrap", num_steps=0, console=stage_console()) as progress:
        with open_session(node) as session:
            node = install_packages(session, node, settings, progress)
            report = probe_node(session, node)
            check_node(report, needs)
            if node.is_remote:
                check_imports(session, node, place_code(session, node, config.rollout))
        progress.say(
            f"Python {report.python_version}, torch {report.torch_version}, {report.device_summary}, "
            f"{report.free_disk_gb:.0f} GB free"
        )
    return node


def install_packages(session: Session, node: Node, settings: NodeSettings, progress: StageProgress) -> Node:
    """The node with the interpreter of an environment that has the packages, where the settings ask for one."""
    if isinstance(settings, LocalNode) or settings.install == "nothing":
        return node
    wanted = read_requirements(Path(settings.requirements)) if settings.requirements else installed_requirements()
    progress.say(f"{len(wanted)} packages by {settings.install}, unless they are there already")
    python = ensure_environment(session, node, wanted, installer=settings.install, index=settings.package_index)
    return replace(node, python=python)
