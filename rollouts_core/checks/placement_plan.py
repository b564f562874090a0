"""Divide the GPUs of a node among the trainer and the engines of a run, by the estimate of the memory that each takes.

    GPUs, model, lengths, optimizer ──> ranks of the trainer, ranks and number of engines, apart or in turns

The plan is only a suggestion: a run uses the settings of `deployment`. resource_needs.py estimates the memory. This
module does not import torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rollouts_core.checks.needed_part import GIB
from rollouts_core.checks.resource_needs import BFLOAT16_BYTES, engine_weight_bytes, training_needs
from rollouts_core.config import Config
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

    @property
    def gpus_per_engine(self) -> int:
        """GPUs over which the model of an engine is divided."""
        return len(self.engine_ranks) // self.num_engines

    def __str__(self) -> str:
        of_trainer = f"the trainer on GPU {_ranks(self.trainer_ranks)} ({self.trainer_bytes / GIB:.1f} GiB each)"
        of_engines = (
            f"{self.num_engines} engine{'s' * (self.num_engines > 1)} on GPU {_ranks(self.engine_ranks)} "
            f"({self.engine_bytes / GIB:.1f} GiB each)"
        )
        settings = [
            f"trainer_gpu_ranks = {list(self.trainer_ranks)}",
            f"engine_gpu_ranks = {list(self.engine_ranks)}",
            *([f"num_engines = {self.num_engines}"] if self.num_engines > 1 else []),
            *(["colocated = true"] if self.is_colocated else []),
        ]
        how = "in turns" if self.is_colocated else "apart"
        return f"placement: {of_trainer}, {of_engines}, {how}; as settings of deployment: {', '.join(settings)}"


def plan_placement(config: Config, size: ModelSize, gpu_bytes: Sequence[int]) -> PlacementPlan:
    """The placement that leaves the most GPUs to the engines. Trainer and engines share GPUs only if separate GPUs do
    not fit.

    Args:
        config: settings with an engine that runs on GPUs.
        gpu_bytes: the memory of each GPU of the node.

    Raises:
        ConfigError: the GPUs differ, or no placement fits; the message names the smallest number of GPUs that fits.
    """
    if max(gpu_bytes) - min(gpu_bytes) > SAME_SIZE * max(gpu_bytes):
        shown = ", ".join(f"{each / GIB:.0f}" for each in gpu_bytes)
        raise ConfigError(f"placement: the GPUs have {shown} GiB, but a plan needs GPUs of one size: {ALIKE}")
    room = int(USABLE * min(gpu_bytes))
    fitting = _placements(config, size, len(gpu_bytes), room)
    if (found := next(fitting, None)) is not None:
        return found
    for number in (2, 4, 8):
        if number > len(gpu_bytes) and next(_placements(config, size, number, room), None) is not None:
            raise ConfigError(
                f"placement: nothing fits on {len(gpu_bytes)} x {min(gpu_bytes) / GIB:.0f} GiB; the smallest plan "
                f"that fits needs {number} such GPUs: take more or larger GPUs, or train adapters (policy.lora)"
            )
    raise ConfigError(
        f"placement: nothing fits on {len(gpu_bytes)} x {min(gpu_bytes) / GIB:.0f} GiB, nor on 8 such GPUs: take "
        "larger GPUs, or train adapters (policy.lora)"
    )


def _placements(config: Config, size: ModelSize, num_gpus: int, room: int) -> Iterator[PlacementPlan]:
    """The placements that fit, in order of preference."""
    for num_trainers in range(1, num_gpus):
        trainer, _ = _trainer_bytes(config, size, num_trainers)
        rest = num_gpus - num_trainers
        for num_shared in (each for each in range(1, rest + 1) if rest % each == 0 and _divides(size, each)):
            engine = _engine_bytes(config, size, num_shared)
            if trainer <= room and engine <= room:
                ranks = tuple(range(num_gpus))
                yield PlacementPlan(
                    trainer_ranks=ranks[:num_trainers],
                    engine_ranks=ranks[num_trainers:],
                    num_engines=rest // num_shared,
                    is_colocated=False,
                    trainer_bytes=trainer,
                    engine_bytes=engine,
                )
    trainer, resident = _trainer_bytes(config, size, num_gpus)
    for num_shared in (each for each in range(1, num_gpus + 1) if num_gpus % each == 0 and _divides(size, each)):
        engine = _engine_bytes(config, size, num_shared)
        if trainer <= room and resident + engine <= room:
            yield PlacementPlan(
                trainer_ranks=tuple(range(num_gpus)),
                engine_ranks=tuple(range(num_gpus)),
                num_engines=num_gpus // num_shared,
                is_colocated=True,
                trainer_bytes=trainer,
                engine_bytes=engine,
            )


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
    return str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]} to {ranks[-1]}"
