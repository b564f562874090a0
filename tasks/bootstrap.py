"""Check that the node can do the work: Python, torch, devices, disk."""

from __future__ import annotations

from prefect import task
from prefect.cache_policies import NO_CACHE

from infra.bootstrap import check_node, probe_node
from infra.node import Node
from infra.providers import open_session
from rollouts_core.config import DeploymentConfig
from tasks.progress import StageProgress, stage_console


@task(name="bootstrap", cache_policy=NO_CACHE)
def bootstrap(node: Node, deployment: DeploymentConfig, min_free_gb: float) -> None:
    """Return when the node is good enough for the pipeline."""
    num_gpus = len({*deployment.trainer_gpu_ranks, *deployment.engine_gpu_ranks})
    with StageProgress("bootstrap", num_steps=0, console=stage_console()) as progress, open_session(node) as session:
        report = probe_node(session, node)
        check_node(report, min_free_gb=min_free_gb, required_gpus=num_gpus)
        progress.say(
            f"Python {report.python_version}, torch {report.torch_version}, {report.device_summary}, "
            f"{report.free_disk_gb:.0f} GB free"
        )
