"""Check that the node can do the work: Python, torch, devices, disk."""

from __future__ import annotations

from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from infra.bootstrap import check_imports, check_node, probe_node
from infra.node import Node
from infra.providers import open_session
from rollouts_core.checkpoint import estimate_checkpoint_bytes
from rollouts_core.config import Config
from tasks.placement import place_code
from tasks.progress import StageProgress, stage_console


@task(name="bootstrap", cache_policy=NO_CACHE)
def bootstrap(node: Node, config: Config, min_free_gb: float) -> None:
    """Return when the node is good enough for the pipeline."""
    num_gpus = len({*config.deployment.trainer_gpu_ranks, *config.deployment.engine_gpu_ranks})
    needed_gb = max(min_free_gb, estimate_disk_bytes(config) / 1e9)
    with StageProgress("bootstrap", num_steps=0, console=stage_console()) as progress, open_session(node) as session:
        report = probe_node(session, node)
        check_node(report, min_free_gb=needed_gb, required_gpus=num_gpus)
        if node.is_remote:
            check_imports(session, place_code(session, node, config.rollout))
        progress.say(
            f"Python {report.python_version}, torch {report.torch_version}, {report.device_summary}, "
            f"{report.free_disk_gb:.0f} GB free"
        )


def estimate_disk_bytes(config: Config) -> int:
    """What the checkpoints of a run come to, in bytes; 0 for a hub model, whose size is not known before."""
    sft, rl = config.training.sft, config.training.rl
    num_sft = (
        min(sft.keep_checkpoints + sft.keep_best, -(-sft.num_steps // sft.checkpoint_every))
        if config.mode != "rl"
        else 0
    )
    num_rl = (
        min(rl.keep_checkpoints + rl.keep_best, -(-rl.num_steps // rl.checkpoint_every)) if config.mode != "sft" else 0
    )
    return (num_sft + num_rl) * estimate_checkpoint_bytes(Path(config.model.path))
