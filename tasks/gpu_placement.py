"""Plan which GPUs of a machine train and which serve inference engines, if the settings name no GPUs.

    no GPU, CUDA_VISIBLE_DEVICES, further machines, or GPU ranks in the settings ── no plan
    GPUs without other programs (or all GPUs if none is free) ── plan_placement ── stored for later attempts

The plan enters job.json, but not the fingerprint. Not here: the estimate of the memory
(rollouts_core/checks/placement_plan.py), storing the plan (engine_choice.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from rollouts.infra.gpu_state import GpuState, read_gpus
from rollouts.infra.node import NodeSettings, settings_of_engines, settings_of_trainers
from rollouts.infra.session import Session
from rollouts_core.checks.placement_plan import PlacementPlan, is_placement_open, plan_placement
from rollouts_core.config import Config
from rollouts_core.model.model_size import ModelSize

ASK_TIMEOUT_S = 60.0


def has_open_placement(config: Config, settings: NodeSettings) -> bool:
    """True if the run must plan which GPUs train and which serve engines.

    A run on several machines has no plan: its settings must name the GPUs of each machine.
    """
    has_others = len(settings_of_trainers(settings)) + len(settings_of_engines(settings)) > 0
    return not has_others and is_placement_open(config)


def read_usable_gpus(session: Session) -> list[GpuState]:
    """The GPUs of a node that a plan may use.

    Empty if CUDA_VISIBLE_DEVICES is set, because a user or a scheduler has then chosen the GPUs. The list is also empty
    if the driver does not report the memory of a GPU, for example of a MIG partition.
    """
    gpus = read_gpus(session)
    if not all(gpu.total_gb for gpu in gpus):
        return []
    return [] if gpus and _is_set(session, "CUDA_VISIBLE_DEVICES") else gpus


def _is_set(session: Session, variable: str) -> bool:
    asked = session.run(["printenv", variable], timeout_s=ASK_TIMEOUT_S, check=False, may_repeat=True)
    return asked.exit_code == 0


def plan_on_gpus(gpus: Sequence[GpuState], config: Config, size: ModelSize) -> PlacementPlan | None:
    """Plan a placement on the GPUs that no other program uses. If other programs use every GPU, plan on all GPUs.

    Returns None without GPUs, or if the size of the model is unknown.

    Raises:
        ConfigError: the GPUs differ, or no placement fits.
    """
    if not gpus or not size.tensors:
        return None
    idle = [rank for rank, gpu in enumerate(gpus) if not gpu.programs] or range(len(gpus))
    return plan_placement(config, size, {rank: int(gpus[rank].total_gb * 1e9) for rank in idle})
