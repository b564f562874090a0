"""Plan which GPUs of a machine train and which serve inference engines, by estimates of the memory that each needs.

    GPUs, model, lengths, optimizer ──> GPU ranks of the trainer, GPU ranks and number of engines

Trainer and engines get separate GPUs if possible. If separate GPUs do not suffice, trainer and engines share all GPUs
and use them in turns ("colocated"). A run follows the plan if its settings do not place trainer and engines
(`is_placement_open`). resource_needs.py estimates the memory. This module does not import torch. Not here: reading the
GPUs of a node, storing the plan (tasks/gpu_placement.py).
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
"""A trainer may use this share of a GPU's memory. CUDA itself needs the remaining memory."""
CACHED_REQUESTS = 16
"""A plan reserves cache in each engine for this many requests of full length."""
SAME_SIZE = 0.02
"""GPUs count as equal if their memory sizes differ by at most this share, because drivers report slightly different
sizes for the same kind of GPU."""
ALIKE = "use GPUs of one kind, or set the ranks in deployment yourself"
PLACED = (
    "trainer_gpu_ranks",
    "trainer_processes",
    "engine_gpu_ranks",
    "num_engines",
    "colocated",
    "engine_memory_share",
)
"""The settings of `deployment` that a plan decides. If the user sets one of these, the run makes no plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementPlan:
    """The planned GPUs of trainer and engines, and the memory that they need on each GPU."""

    trainer_ranks: tuple[int, ...]
    engine_ranks: tuple[int, ...]
    num_engines: int
    is_colocated: bool
    trainer_bytes: int
    """Memory that the training needs on each GPU of the trainer."""
    engine_bytes: int
    """Memory that an engine needs for weights and cache on each of its GPUs."""

    engine_share: float
    """Share of a GPU's memory that an engine may use if it shares the GPU with the trainer. 0 on separate GPUs, where
    the engine's default applies."""

    @property
    def gpus_per_engine(self) -> int:
        """Number of GPUs over which each engine divides the model."""
        return len(self.engine_ranks) // self.num_engines

    @property
    def settings(self) -> dict[str, Any]:  # Any: JSON
        """The plan as settings of `deployment`, without settings at their defaults."""
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
    """The work of some GPUs, trainer or engines, for messages."""

    gpus: str
    """The GPU ranks, such as "0 to 3"."""
    work: str
    """Text such as "trainer" or "2 engines of 2 GPUs each"."""
    num_bytes: int
    """Estimated memory on each of the GPUs; 0 if unknown."""


def is_placement_open(config: Config) -> bool:
    """True if the run must plan which GPUs train and which serve engines.

    False if RL uses no engine on GPUs, if a setting in PLACED is set, or if an argument of the engine divides the model
    or sets the engine's share of GPU memory.
    """
    engine, default = config.rollout.engine, DeploymentConfig()
    if not config.samples_for_training or engine.spec.is_own:
        return False
    if any(getattr(config.deployment, name) != getattr(default, name) for name in PLACED):
        return False
    chosen = [*filter(None, [engine.spec.memory_argument]), *PARALLEL_ARGUMENTS]
    return not any(sign in argument for argument in engine.extra_args for sign in chosen)


def with_placement(config: Config, settings: Mapping[str, Any]) -> Config:  # Any: JSON
    """The configuration with the planned settings of `deployment`. The configuration is returned unchanged if the run
    needs no plan (`is_placement_open`).

    Args:
        settings: from `PlacementPlan.settings`; empty without a plan.
    """
    if not settings or not is_placement_open(config):
        return config
    placed = DeploymentConfig.model_validate({**config.deployment.model_dump(mode="json"), **settings})
    return config.model_copy(update={"deployment": placed})


def placed_work(config: Config, size: ModelSize) -> list[PlacedWork]:
    """Which GPUs train and which serve engines according to the settings of `deployment`, with estimates of memory."""
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
    """Find the placement with the most GPUs for the engines. Trainer and engines share GPUs only if nothing else fits.

    Args:
        config: settings with an engine that runs on GPUs.
        gpu_bytes: the memory of each GPU, by GPU rank.

    Raises:
        ConfigError: the GPUs differ in size, or no placement fits. The message says how many GPUs of this size would
            suffice.
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
    """Yield the placements that fit into memory and are allowed by the other settings, best first.

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
    """True if the user's other settings allow the placement, by the rules of `Config` and `check_weight_transfer`."""
    way = config.rollout.engine.weight_transfer
    uses_jax = any(training.policy.backend == "jax" for training in config.trainings.values())
    if uses_jax and len(plan.trainer_ranks) > 1:
        return False
    if way == "tensors" and not (plan.is_colocated and plan.num_engines == 1):
        return False  # with weight_transfer "tensors", the engine maps memory of the trainer's first GPU
    runs_ahead = config.rollout.max_staleness > 0 or config.training.rl.sync_every > 1
    return not (plan.is_colocated and (runs_ahead or way == "nccl"))


def _trainer_bytes(config: Config, size: ModelSize, num_trainers: int) -> tuple[int, int]:
    """Bytes that a training on `num_trainers` GPUs needs on each GPU: in total, and while engines generate.

    The second number is the memory that stays allocated while engines on the same GPUs generate.
    """
    ranks = {"trainer_gpu_ranks": tuple(range(num_trainers)), "trainer_processes": 0}
    placed = config.model_copy(update={"deployment": config.deployment.model_copy(update=ranks)})
    stages = training_needs(placed, size)
    graded = [stage for stage in stages if kind_of(stage.kind).is_graded]
    kept = [part.num_bytes for stage in graded for part in stage.certain_parts if part.name != "gradients"]
    return max(stage.expected_bytes for stage in stages), sum(kept)


def _engine_bytes(config: Config, size: ModelSize, num_shared: int) -> int:
    """Bytes that an engine on `num_shared` GPUs needs on each GPU, for weights and for `CACHED_REQUESTS` requests."""
    ranks = {"engine_gpu_ranks": tuple(range(num_shared)), "num_engines": 1}
    placed = config.model_copy(update={"deployment": config.deployment.model_copy(update=ranks)})
    shape = read_shape(size.settings)
    context = config.rollout.engine_context(config.rollout.max_prompt_tokens)
    per_token = 2 * shape.num_layers * shape.kv_size * BFLOAT16_BYTES if shape else 0
    return engine_weight_bytes(placed, size) + CACHED_REQUESTS * context * per_token // num_shared


def _divides(size: ModelSize, num_shared: int) -> bool:
    """True if the model's attention heads can be divided evenly over `num_shared` GPUs."""
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
