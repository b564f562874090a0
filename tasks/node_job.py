"""Describe a stage as a job of a node: its command, its environment variables and its GPUs.

Not here: planning the stage (plan.py), uploading its inputs (upload_inputs.py), running the job to its end (stage.py).
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import Any

from rollouts.infra.jobs import FIRST_GPU, JobSpec, JobState, job_status
from rollouts.infra.ledger import Ledger
from rollouts.infra.node import Node
from rollouts.infra.providers.rented import rentals_of_unit
from rollouts.infra.session import Session
from rollouts.tasks.records import RunScope, Stage
from rollouts_core.backends.allocator import KEPT_MEMORY
from rollouts_core.engine_kinds import ENGINES
from rollouts_core.hub_cache import FALLBACK
from rollouts_core.keys import read_hub_token, read_named_keys
from rollouts_core.less_memory import FULL_GPU_CODE

GRACE_S = 10.0
"""Time between asking a job to end and killing it, unless the job states how long it needs to save."""
GRACE_SHARE = 0.5
"""The largest share of a rented machine's remaining time for the grace period."""
USER_ERROR_CODE = 2
"""Exit code of a job that refuses its settings or its inputs."""
COUNTED_BY_BUS = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
"""Numbers GPUs as nvidia-smi does, because GPU locks are named by these numbers. By default, CUDA numbers the fastest
GPU first, so a job would use a GPU that another job has locked."""


def job_spec(
    stage: Stage,
    session: Session,
    scope: RunScope,
    *,
    gpus: tuple[str, ...],
    code_dir: str = "",
    known_keys: Mapping[str, str] = MappingProxyType({}),
    max_restarts: int = 0,
    lease_s: float = 0.0,
) -> JobSpec:
    """The stage as a job for a node's supervisor.

    Args:
        gpus: GPUs for which the job waits. An RL job and its engines have the same fingerprint and share their GPUs.
        code_dir: the folder from which the job imports; empty on this machine.
        known_keys: keys by variable name. These variables need not be set in this process.
    """
    return JobSpec(
        run_dir=stage.run_dir,
        argv=(session.python, "-P", "-m", "rollouts_core", stage.kind, f"{stage.run_dir}/job.json"),
        job=stage.job,
        env=job_environment(stage, known_keys) | variables_of_place(code_dir),
        timeout_s=stage.timeout_s,
        grace_s=GRACE_S,
        max_grace_s=scope.stop_timeout_s,
        max_restarts=max_restarts,
        # Several machines can only restart together (stage.py).
        restart_code=FULL_GPU_CODE if stage.trains and not stage.job.get("further_trainers") else 0,
        lease_s=lease_s,
        gpus=gpus,
        gpu_group=stage.fingerprint,
        run_name=scope.output_dir.name,
    )


def longest_grace_s(node: Node, scope: RunScope) -> float:
    """The most seconds that a stopped training gets to save. On a rented machine, time for fetching is left."""
    if not node.is_rented:
        return scope.stop_timeout_s
    with Ledger(scope.ledger_path) as ledger:
        left_s = [rental.expires_at - time.time() for rental in rentals_of_unit(ledger, node)]
    return min(scope.stop_timeout_s, *(max(0.0, each) * GRACE_SHARE for each in left_s))


def variables_of_place(code_dir: str) -> dict[str, str]:
    """Environment variables for a job's imports and its cache of hub models. Empty for a job on this machine.

    Args:
        code_dir: <root>/code/<digest> on a remote node; empty on this machine.
    """
    if not code_dir:
        return {}
    root = PurePosixPath(code_dir).parents[1]
    return {"PYTHONPATH": code_dir, FALLBACK: str(root / "cache" / "huggingface")}


def gpus_of(stage: Stage, node: Node) -> tuple[str, ...]:
    """The node's GPUs that the stage's job locks while it runs. An RL job also locks its engines' GPUs on this node.

    Each job of an RL stage locks all GPUs of the stage: two RL stages that each hold a part would deadlock.
    """
    if starts_engines(stage):
        return gpus_of_engines(stage)
    deployment = stage.job["deployment"]
    trainer = deployment["trainer_gpu_ranks"]
    shares_cpu = deployment["trainer_processes"] > 1 and not trainer
    gpus = [] if shares_cpu else [str(rank) for rank in trainer] or [FIRST_GPU]
    # Recorded rollouts need no engine. Engines run on the leading machine or on engine nodes, not on other trainers.
    is_beside_engines = not node.engine_nodes and not stage.job.get("node_rank")
    if stage.samples and is_beside_engines:
        gpus += gpus_of_engines(stage)
    return tuple(dict.fromkeys(gpus))


def gpus_of_engines(stage: Stage) -> tuple[str, ...]:
    """The GPUs that a stage's engines use on each of their nodes. Empty for the embedded engine, which uses the CPU."""
    if ENGINES[stage.job["rollout"]["engine"]["kind"]].is_own:
        return ()
    return tuple(str(rank) for rank in stage.job["deployment"]["engine_gpu_ranks"]) or (FIRST_GPU,)


def starts_engines(stage: Stage) -> bool:
    """True if the stage's job itself starts engines: an evaluation with another engine than the embedded one."""
    return stage.kind == "eval" and not ENGINES[stage.job["rollout"]["engine"]["kind"]].is_own


def job_environment(stage: Stage, known_keys: Mapping[str, str] = MappingProxyType({})) -> dict[str, str]:
    """The environment variables of the stage's process: its GPUs, keys that the settings name, and allocator options.

    Args:
        known_keys: keys by variable name. These variables need not be set in this process.

    Raises:
        ConfigError: a variable that must hold a key is not set in this process.
    """
    uses_engine_gpus = stage.kind == "serve" or starts_engines(stage)
    ranks = stage.job["deployment"]["engine_gpu_ranks" if uses_engine_gpus else "trainer_gpu_ranks"]
    gpus = COUNTED_BY_BUS | ({"CUDA_VISIBLE_DEVICES": ",".join(str(rank) for rank in ranks)} if ranks else {})
    keys = read_named_keys(stage.job, known_keys) | read_hub_token(stage.job)
    is_own_engine = stage.kind == "serve" and ENGINES[stage.job["engine"]["kind"]].is_own
    return gpus | keys | (KEPT_MEMORY if stage.trains or is_own_engine else {})


def running_job(session: Session, run_dir: str) -> dict[str, Any] | None:  # Any: JSON
    """The job.json of a running job, or None if the job does not run."""
    if job_status(session, run_dir).state is not JobState.RUNNING:
        return None
    job: dict[str, Any] = json.loads(session.read_file(f"{run_dir}/job.json"))  # Any: JSON
    return job
