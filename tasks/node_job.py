"""Convert a stage to a job for a node's supervisor: command, environment variables and GPUs.

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
"""A cancelled job is killed after this many seconds, unless the job says that it needs longer to save."""
GRACE_SHARE = 0.5
"""A cancelled job may save for at most this share of a rented machine's remaining time."""
USER_ERROR_CODE = 2
"""Exit code of a job that rejects its settings or its inputs."""
COUNTED_BY_BUS = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
"""This variable makes CUDA number GPUs as nvidia-smi does. The names of GPU locks contain the numbers of nvidia-smi. By
default, CUDA numbers the fastest GPU first, so that a job would use a GPU that another job has locked."""


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
    """Describe a stage as a job for a node's supervisor.

    Args:
        gpus: the job starts when it has locked these GPUs. An RL job and its engines can lock the same GPUs, because
            they have the same fingerprint.
        code_dir: the folder on the node from which the job imports; empty on this machine.
        known_keys: API keys by environment variable. The variables of these keys need not be set in this process.
        max_restarts: how often the supervisor restarts the job after a crash.
        lease_s: the job ends after this many seconds without a renewal of its lease; 0 for a job without a lease.
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
        # The jobs of several machines must restart together. One machine's supervisor cannot do this, so stage.py does.
        restart_code=FULL_GPU_CODE if stage.trains and not stage.job.get("further_trainers") else 0,
        lease_s=lease_s,
        gpus=gpus,
        gpu_group=stage.fingerprint,
        run_name=scope.output_dir.name,
    )


def longest_grace_s(node: Node, scope: RunScope) -> float:
    """The most seconds that a cancelled training may take to save.

    On a rented machine, the limit is shorter, so that the result can be downloaded before the rental ends.
    """
    if not node.is_rented:
        return scope.stop_timeout_s
    with Ledger(scope.ledger_path) as ledger:
        left_s = [rental.expires_at - time.time() for rental in rentals_of_unit(ledger, node)]
    return min(scope.stop_timeout_s, *(max(0.0, each) * GRACE_SHARE for each in left_s))


def variables_of_place(code_dir: str) -> dict[str, str]:
    """Environment variables that point a job to its code and to its hub cache. Empty for a job on this machine.

    Args:
        code_dir: <root>/code/<digest> on a remote node; empty on this machine.
    """
    if not code_dir:
        return {}
    root = PurePosixPath(code_dir).parents[1]
    return {"PYTHONPATH": code_dir, FALLBACK: str(root / "cache" / "huggingface")}


def gpus_of(stage: Stage, node: Node) -> tuple[str, ...]:
    """The GPUs of the node that a stage's job locks while it runs. An RL job also locks its engines' GPUs on this node.

    Each job of an RL stage locks all GPUs of the stage at once. If two RL stages could each lock a part of the GPUs,
    the stages would deadlock.
    """
    if starts_engines(stage):
        return gpus_of_engines(stage)
    deployment = stage.job["deployment"]
    trainer = deployment["trainer_gpu_ranks"]
    shares_cpu = deployment["trainer_processes"] > 1 and not trainer
    gpus = [] if shares_cpu else [str(rank) for rank in trainer] or [FIRST_GPU]
    # Training on recorded rollouts needs no engine. Engines run on the leading machine or on engine nodes only.
    is_beside_engines = not node.engine_nodes and not stage.job.get("node_rank")
    if stage.samples and is_beside_engines:
        gpus += gpus_of_engines(stage)
    return tuple(dict.fromkeys(gpus))


def gpus_of_engines(stage: Stage) -> tuple[str, ...]:
    """The GPUs that a stage's engines use on each engine node. Empty for the embedded engine, which uses the CPU."""
    if ENGINES[stage.job["rollout"]["engine"]["kind"]].is_own:
        return ()
    return tuple(str(rank) for rank in stage.job["deployment"]["engine_gpu_ranks"]) or (FIRST_GPU,)


def starts_engines(stage: Stage) -> bool:
    """True if the stage's job itself starts engines: an evaluation that does not use the embedded engine."""
    return stage.kind == "eval" and not ENGINES[stage.job["rollout"]["engine"]["kind"]].is_own


def job_environment(stage: Stage, known_keys: Mapping[str, str] = MappingProxyType({})) -> dict[str, str]:
    """The environment variables of a stage's process: its GPUs, API keys, and options of torch's memory allocator.

    Args:
        known_keys: API keys by environment variable. These variables need not be set in this process.

    Raises:
        ConfigError: an environment variable that must contain an API key is not set in this process.
    """
    uses_engine_gpus = stage.kind == "serve" or starts_engines(stage)
    ranks = stage.job["deployment"]["engine_gpu_ranks" if uses_engine_gpus else "trainer_gpu_ranks"]
    gpus = COUNTED_BY_BUS | ({"CUDA_VISIBLE_DEVICES": ",".join(str(rank) for rank in ranks)} if ranks else {})
    keys = read_named_keys(stage.job, known_keys) | read_hub_token(stage.job)
    is_own_engine = stage.kind == "serve" and ENGINES[stage.job["engine"]["kind"]].is_own
    return gpus | keys | (KEPT_MEMORY if stage.trains or is_own_engine else {})


def running_job(session: Session, run_dir: str) -> dict[str, Any] | None:  # Any: JSON
    """The content of job.json if the job in this directory is running, else None."""
    if job_status(session, run_dir).state is not JobState.RUNNING:
        return None
    job: dict[str, Any] = json.loads(session.read_file(f"{run_dir}/job.json"))  # Any: JSON
    return job
