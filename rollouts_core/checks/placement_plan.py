"""Divide the GPUs of a node among the trainer and the engines of a run, by the estimate of the memory that each takes.

    GPUs, model, lengths, optimizer ──> ranks of the trainer, ranks and number of engines, apart or in turns

A run follows the plan if its settings leave the placement open (`is_placement_open`). resource_needs.py estimates the
memory. This module does not import torch. Not here: the GPUs of a node, and keeping the plan (tasks/gpu_placement.py).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollouts_core.checks.needed_part import GIB
from rollouts_core.checks.resource_needs import (
    BFLOAT16_BYTES,
    ENGINE_SHARE,
    PARALLEL_ARGUMENTS,
    engine_weight_bytes,
    training_needs,
)
from rollouts_core.config import Config, DeploymentConfig
from rollouts_core.errors import ConfigError
from rollouts_core.model.model_shape import read_shape
from rollouts_core.model.model_size import ModelSize
from rollouts_core.stages import kind_of

USABLE = 0.95
"""Share of a GPU's memory that plans use; CUDA itself needs the rest."""
CACHED_REQUESTS = 16
"""Requests at their full length that the cache of an engine should hold at least."""
SAME_SIZE = 0.02
"""Largest relative difference between the memory sizes that drivers report for GPUs of one kind."""
ALIKE = "use GPUs of one kind, or set the ranks in deployment yourself"
PLACED = (
    "trainer_gpu_ranks",
    "trainer_processes",
    "engine_gpu_ranks",
    "num_engines",
    "colocated",
    "engine_memory_share",
)
"""The settings of `deployment` that a plan decides. If one of them is set, the run has no plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementPlan:
    """The GPUs of trainer and engines, and the memory needed on each."""

    trainer_ranks: tuple[int, ...]
    engine_ranks: tuple[int, ...]
    num_engines: int
    is_colocated: bool
    trainer_bytes: int
    """Memory of the training on each GPU of the trainer."""
    engine_bytes: int
    """Memory for weights and cache on each GPU of an engine."""

    engine_share: float
    """Share of a GPU's memory that engines take in turns with the trainer; 0 apart, for the engine's default."""

    @property
    def gpus_per_engine(self) -> int:
        """GPUs over which the model of an engine is divided."""
        return len(self.engine_ranks) // self.num_engines

    @property
    def settings(self) -> dict[str, Any]:  # Any: JSON
        """The settings of `deployment` with the values of the plan, without defaults."""
        every: dict[str, Any] = {  # Any: JSON
            "trainer_gpu_ranks": list(self.trainer_ranks),
            "engine_gpu_ranks": list(self.engine_ranks),
            "num_engines": self.num_engines if self.num_engines > 1 else None,
            "colocated": self.is_colocated or None,
            "engine_memory_share": self.engine_share or None,
        }
        return {name: value for name, value in every.items() if value is not None}

    def __str__(self) -> str:
        of_trainer = f"the trainer on GPU {_ranks(self.trainer_ranks)} ({self.trainer_bytes / GIB:.1f} GiB each)"
        of_engines = (
            f"{_engines(self.num_engines, self.gpus_per_engine)} on GPU {_ranks(self.engine_ranks)} "
            f"({self.engine_bytes / GIB:.1f} GiB each)"
        )
        settings = ", ".join(f"{name} = {json.dumps(value)}" for name, value in self.settings.items())
        how = "in turns" if self.is_colocated else "apart"
        return f"placement: {of_trainer}, {of_engines}, {how}; as settings of deployment: {settings}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedWork:
    """The work of some GPUs, with the memory that it needs on each."""

    gpus: str
    """The ranks, such as `0 to 3`."""
    work: str
    num_bytes: int
    """Memory on each of the GPUs, estimated; 0 if it is not known."""


def is_placement_open(config: Config) -> bool:
    """True if a run with engines on GPUs leaves its placement to the plan: no setting of PLACED is set, and no argument
    of the engine divides its model or sets its share of a GPU."""
    engine, default = config.rollout.engine, DeploymentConfig()
    if not config.samples_for_training or engine.spec.is_own:
        return False
    if any(getattr(config.deployment, name) != getattr(default, name) for name in PLACED):
        return False
    chosen = [*filter(None, [engine.spec.memory_argument]), *PARALLEL_ARGUMENTS]
    return not any(sign in argument for argument in engine.extra_args for sign in chosen)


def with_placement(config: Config, settings: Mapping[str, Any]) -> Config:  # Any: JSON
    """The configuration with the `settings` of a plan; unchanged if its placement is not open."""
    if not settings or not is_placement_open(config):
        return config
    placed = DeploymentConfig.model_validate({**config.deployment.model_dump(mode="json"), **settings})
    return config.model_copy(update={"deployment": placed})


def placed_work(config: Config, size: ModelSize) -> list[PlacedWork]:
    """The work of the trainer's GPUs and of the engines' GPUs, by the settings of `deployment`."""
    placement, engine = config.deployment, config.rollout.engine
    found: list[PlacedWork] = []
    if not placement.shares_cpu:
        needed = max((stage.expected_bytes for stage in training_needs(config, size)), default=0)
        found.append(PlacedWork(gpus=_ranks(placement.trainer_gpu_ranks or (0,)), work="trainer", num_bytes=needed))
    if config.samples_for_training and not engine.spec.is_own:
        ranks = placement.engine_gpu_ranks or (0,)
        shared = len(ranks) // placement.num_engines or 1
        turns = ", in turns with the trainer" if placement.colocated else ""
        needed = _engine_bytes(config, size, shared) if size.tensors else 0
        work = f"{_engines(placement.num_engines, shared)}{turns}"
        found.append(PlacedWork(gpus=_ranks(ranks), work=work, num_bytes=needed))
    return found


def plan_placement(config: Config, size: ModelSize, gpu_bytes: Mapping[int, int]) -> PlacementPlan:
    """The placement that leaves the most GPUs to the engines. Trainer and engines share GPUs only if separate GPUs do
    not fit.

    Args:
        config: settings with an engine that runs on GPUs.
        gpu_bytes: the memory of each GPU by its rank.

    Raises:
        ConfigError: the GPUs differ, or no placement fits; the message names the smallest number of GPUs that fits.
    """
    smallest, largest = min(gpu_bytes.values()), max(gpu_bytes.values())
    if largest - smallest > SAME_SIZE * largest:
        shown = ", ".join(f"{each / GIB:.0f}" for each in gpu_bytes.values())
        raise ConfigError(f"placement: the GPUs have {shown} GiB, but a plan needs GPUs of one size: {ALIKE}")
    if (found := next(_placements(config, size, tuple(gpu_bytes), smallest), None)) is not None:
        return found
    for number in (2, 4, 8):
        is_more = number > len(gpu_bytes)
        if is_more and next(_placements(config, size, tuple(range(number)), smallest), None) is not None:
            raise ConfigError(
                f"placement: nothing fits on {len(gpu_bytes)} x {smallest / GIB:.0f} GiB; the smallest plan "
                f"that fits needs {number} such GPUs: take more or larger GPUs, or train adapters (policy.lora)"
            )
    raise ConfigError(
        f"placement: nothing fits on {len(gpu_bytes)} x {smallest / GIB:.0f} GiB, nor on 8 such GPUs: take "
        "larger GPUs, or train adapters (policy.lora)"
    )


def _placements(config: Config, size: ModelSize, ranks: tuple[int, ...], gpu_bytes: int) -> Iterator[PlacementPlan]:
    """The placements that fit and are allowed, in order of preference.

    Args:
        gpu_bytes: the memory of each GPU.
    """
    room, num_gpus = int(USABLE * gpu_bytes), len(ranks)
    for num_trainers in range(1, num_gpus):
        trainer, _ = _trainer_bytes(config, size, num_trainers)
        rest = num_gpus - num_trainers
        for num_shared in (each for each in range(1, rest + 1) if rest % each == 0 and _divides(size, each)):
            engine = _engine_bytes(config, size, num_shared)
            plan = PlacementPlan(
                trainer_ranks=ranks[:num_trainers],
                engine_ranks=ranks[num_trainers:],
                num_engines=rest // num_shared,
                is_colocated=False,
                trainer_bytes=trainer,
                engine_bytes=engine,
                engine_share=0.0,
            )
            if trainer <= room and engine <= ENGINE_SHARE * gpu_bytes and _is_allowed(config, plan):
                yield plan
    trainer, resident = _trainer_bytes(config, size, num_gpus)
    share = math.floor(100 * (ENGINE_SHARE - resident / gpu_bytes)) / 100
    for num_shared in (each for each in range(1, num_gpus + 1) if num_gpus % each == 0 and _divides(size, each)):
        engine = _engine_bytes(config, size, num_shared)
        plan = PlacementPlan(
            trainer_ranks=ranks,
            engine_ranks=ranks,
            num_engines=num_gpus // num_shared,
            is_colocated=True,
            trainer_bytes=trainer,
            engine_bytes=engine,
            engine_share=share,
        )
        if trainer <= room and engine <= share * gpu_bytes and _is_allowed(config, plan):
            yield plan


def _is_allowed(config: Config, plan: PlacementPlan) -> bool:
    """True if the other settings allow the placement; the rules are those of `Config` and of check_weight_transfer."""
    way = config.rollout.engine.weight_transfer
    uses_jax = any(training.policy.backend == "jax" for training in config.trainings.values())
    if uses_jax and len(plan.trainer_ranks) > 1:
        return False
    if way == "tensors" and not (plan.is_colocated and plan.num_engines == 1):
        return False  # each engine maps memory of the trainer's first GPU
    runs_ahead = config.rollout.max_staleness > 0 or config.training.rl.sync_every > 1
    return not (plan.is_colocated and (runs_ahead or way == "nccl"))


def _trainer_bytes(config: Config, size: ModelSize, num_trainers: int) -> tuple[int, int]:
    """Memory of the training on each of its GPUs, and the part that stays allocated while engines generate."""
    ranks = {"trainer_gpu_ranks": tuple(range(num_trainers)), "trainer_processes": 0}
    placed = config.model_copy(update={"deployment": config.deployment.model_copy(update=ranks)})
    stages = training_needs(placed, size)
    graded = [stage for stage in stages if kind_of(stage.kind).is_graded]
    kept = [part.num_bytes for stage in graded for part in stage.certain_parts if part.name != "gradients"]
    return max(stage.expected_bytes for stage in stages), sum(kept)


def _engine_bytes(config: Config, size: ModelSize, num_shared: int) -> int:
    """Memory of an engine's weights and of the smallest useful cache, on each of its GPUs."""
    ranks = {"engine_gpu_ranks": tuple(range(num_shared)), "num_engines": 1}
    placed = config.model_copy(update={"deployment": config.deployment.model_copy(update=ranks)})
    shape = read_shape(size.settings)
    context = config.rollout.engine_context(config.rollout.max_prompt_tokens)
    per_token = 2 * shape.num_layers * shape.kv_size * BFLOAT16_BYTES if shape else 0
    return engine_weight_bytes(placed, size) + CACHED_REQUESTS * context * per_token // num_shared


def _divides(size: ModelSize, num_shared: int) -> bool:
    """True if `num_shared` GPUs can divide the model's attention heads evenly."""
    shape = read_shape(size.settings)
    if shape is None:
        return num_shared == 1
    kv_heads = shape.num_kv_heads
    return shape.num_heads % num_shared == 0 and (kv_heads % num_shared == 0 or num_shared % kv_heads == 0)


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) > 1 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]} to {ranks[-1]}"
    return ", ".join(map(str, ranks))


def _engines(number: int, gpus_of_each: int) -> str:
    of_each = f" of {gpus_of_each} GPUs each" if gpus_of_each > 1 else ""
    return f"{number} engine{'s' * (number > 1)}{of_each}"
