"""Estimate the GPU memory and disk space that a run needs, from its settings and the headers of the model's files.

    certain     weights, gradients, AdamW's moments, the reference model, classifiers; the weights of an engine
                -> a GPU with less memory is rejected
    estimated   activations, logits, adapters, copies of weights, gathered layers (activation_needs.py)
                -> a GPU with less memory gets a warning

The estimate runs before a machine is rented, so this module reads no weights and does not import torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rollouts_core.checks.activation_needs import Rows, activation_parts, rl_rows, sft_rows
from rollouts_core.checks.needed_part import GIB, Part, describe_parts, sum_bytes
from rollouts_core.config import Config, PolicyConfig, RLTrainingConfig, SFTTrainingConfig
from rollouts_core.errors import ConfigError
from rollouts_core.model.attention_choice import expected_kernel, shared_prompts, with_kernel
from rollouts_core.model.model_shape import read_shape
from rollouts_core.model.model_size import ModelSize, read_folder
from rollouts_core.stages import kind_of
from rollouts_core.stages.kind import load

FLOAT32_BYTES = 4
BFLOAT16_BYTES = 2
MOMENTS = 2
"""Number of AdamW's moving averages per trained weight."""
KEPT_PUBLICATIONS = 2
"""Number of versions of the weights on disk, for engines that read weights from files."""
ENGINE_SHARE = 0.9
"""Share of a GPU's memory that SGLang and vLLM take by default, approximately."""
SMALLER_ENGINE_ARGUMENTS = ("--dtype", "quantization", "torchao", "offload")
"""Parts of names of engine arguments. With such an argument, weights may take less memory than in bfloat16."""

PARALLEL_ARGUMENTS = ("parallel", "-tp", "-dp", "-pp")
"""Parts of names of engine arguments. With such an argument, SGLang and vLLM may not divide the model evenly over the
GPUs of an engine."""


def stored_weight_bytes(policy: PolicyConfig) -> int:
    """Bytes per weight in the trainer.

    Trained weights are float32. If adapters are trained, the frozen weights have the precision of the matrix products.
    """
    return BFLOAT16_BYTES if policy.lora.rank and policy.precision == "bfloat16" else FLOAT32_BYTES


def state_parts(num_parameters: int, policy: PolicyConfig, *, with_reference: bool, num_processes: int) -> list[Part]:
    """Memory of weights, gradients and optimizer state in each process. The processes share this memory evenly.

    If adapters are trained, only the frozen weights count here. The frozen weights also serve as the reference model.
    """
    share = num_parameters * FLOAT32_BYTES // num_processes
    if policy.lora.rank:
        return [Part("frozen weights", num_parameters * stored_weight_bytes(policy) // num_processes)]
    parts = [Part("weights", share), Part("gradients", share), Part("AdamW's moments", MOMENTS * share)]
    return [*parts, Part("the reference model", share)] if with_reference else parts


def training_parts(
    size: ModelSize,
    policy: PolicyConfig,
    rows: Rows,
    *,
    with_reference: bool = False,
    num_processes: int = 1,
    beside: Sequence[Part] = (),
) -> list[Part]:
    """Memory that a training needs on each device.

    Args:
        rows: the largest micro-batch.
        beside: other needs of memory on the same device, such as classifiers that grade.
    """
    states = state_parts(size.num_parameters, policy, with_reference=with_reference, num_processes=num_processes)
    return [*states, *beside, *activation_parts(size, policy, rows, num_processes=num_processes)]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageNeeds:
    """Memory that a training stage needs on each of its devices."""

    kind: str
    parts: Sequence[Part]
    remedies: Sequence[str]
    """Advice for messages: settings that lower the memory."""

    @property
    def certain_parts(self) -> list[Part]:
        """The parts of the memory that are not estimates."""
        return [part for part in self.parts if part.is_certain]

    @property
    def least_bytes(self) -> int:
        return sum_bytes(self.certain_parts)

    @property
    def expected_bytes(self) -> int:
        return sum_bytes(self.parts)

    def __str__(self) -> str:
        shown = describe_parts(self.parts)
        total = f"training.{self.kind} takes about {self.expected_bytes / GIB:.1f} GiB on each GPU"
        return f"{total} ({shown})" if shown else total

    def warning(self, gpu: str, gpu_bytes: float) -> str:
        """A warning if a GPU may have too little memory for the stage; else "".

        Args:
            gpu: the GPU's name, for the message.
        """
        if self.expected_bytes <= gpu_bytes:
            return ""
        return (
            f"{self}, but {gpu} has only {gpu_bytes / GIB:.1f} GiB and may run out of memory: "
            f"{', '.join(self.remedies)}, train on more GPUs, or use larger GPUs"
        )


def training_needs(config: Config, size: ModelSize, *, num_machines: int = 1) -> list[StageNeeds]:
    """Memory that each training stage of a run needs on each device. Returns an empty list if the size of the model is
    unknown."""
    if not size.tensors:
        return []
    num_processes = config.deployment.num_trainer_processes * num_machines
    return [
        StageNeeds(
            kind=name,
            parts=load(kind_of(name).memory)(training, config, size, num_processes),
            remedies=find_remedies(name, training),
        )
        for name, training in config.trainings.items()
    ]


def sft_memory(training: SFTTrainingConfig, config: Config, size: ModelSize, num_processes: int) -> list[Part]:
    sft = with_kernel(training, expected_kernel(training.policy, size.settings, None))
    return training_parts(size, sft.policy, sft_rows(sft), with_reference=False, num_processes=num_processes)


def rl_memory(training: RLTrainingConfig, config: Config, size: ModelSize, num_processes: int) -> list[Part]:
    """Memory that RL needs on each GPU, by purpose, including classifiers that grade on these GPUs."""
    kernel = expected_kernel(training.policy, size.settings, shared_prompts(training, config.rollout))
    rl = with_kernel(training, kernel)
    return training_parts(
        size,
        rl.policy,
        rl_rows(rl, config.rollout),
        with_reference=rl.with_reference,
        num_processes=num_processes,
        beside=classifier_parts(config),
    )


def classifier_parts(config: Config) -> list[Part]:
    """Memory of the classifiers that grade completions on the trainer's GPUs: the size of their weight files."""
    rewards = () if config.data.rollouts else config.rollout.rewards
    folders = [Path(each.model) for each in rewards if each.kind == "classifier"]
    return [Part(f"classifier {folder.name}", read_folder(folder).num_file_bytes) for folder in folders]


def find_remedies(kind: str, stage: SFTTrainingConfig | RLTrainingConfig) -> list[str]:
    """Advice for messages: settings that lower the GPU memory of a training."""
    section = f"training.{kind}"
    remedies = list[str](load(kind_of(kind).remedies)(stage, section))
    if not stage.policy.activation_checkpointing:
        remedies.append(f"set {section}.policy.activation_checkpointing")
    if not stage.policy.lora.rank and stage.policy.backend == "pytorch":
        remedies.append(f"train adapters ({section}.policy.lora)")
    return remedies


def sft_remedies(training: SFTTrainingConfig, section: str) -> list[str]:
    smaller = [f"lower {section}.micro_batch_size (the result stays the same)"]
    return smaller * (min(training.micro_batch_size, training.batch_size) > 1) + [f"lower {section}.max_length"]


def rl_remedies(training: RLTrainingConfig, section: str) -> list[str]:
    return [
        f"lower {section}.max_micro_batch_tokens (the result stays the same)",
        "lower rollout.sampling.max_new_tokens",
    ]


def least_memory_bytes(config: Config, size: ModelSize, *, num_machines: int = 1) -> int:
    """Memory that each GPU of a run must have at least. 0 if the size of the model is unknown."""
    stages = [] if config.deployment.shares_cpu else training_needs(config, size, num_machines=num_machines)
    return max([*(stage.least_bytes for stage in stages), engine_weight_bytes(config, size)])


# ── engines ──


def engine_weight_bytes(config: Config, size: ModelSize) -> int:
    """Memory of an engine's weights on each of its GPUs. 0 if the engine uses no GPU, or if its weights may be
    compressed."""
    engine, placement = config.rollout.engine, config.deployment
    num_gpus = len(placement.engine_gpu_ranks) // placement.num_engines
    if not config.samples_for_training or engine.spec.is_own or not num_gpus:
        return 0
    if "quantization_config" in size.settings or any(
        name in argument for argument in engine.extra_args for name in SMALLER_ENGINE_ARGUMENTS
    ):
        return 0
    # On a GPU, dtype "auto" never means float32 (engines/launch.py).
    num_bytes_each = FLOAT32_BYTES if engine.dtype == "float32" else BFLOAT16_BYTES
    return size.num_parameters * num_bytes_each // num_gpus


def engine_share(config: Config) -> float:
    """The share of a GPU's memory that an engine takes: by an argument, by `engine_memory_share`, or by default."""
    arguments = [part for each in config.rollout.engine.extra_args for part in each.split("=", 1)]
    for name, value in itertools.pairwise(arguments):
        if name == config.rollout.engine.spec.memory_argument:
            try:
                return float(value)
            except ValueError:  # the engine reports the invalid argument
                break
    return config.deployment.engine_memory_share or ENGINE_SHARE


def engine_warning(config: Config, size: ModelSize, gpu_bytes: float, *, num_machines: int = 1) -> str:
    """A warning if engines may have too little memory on GPUs of this size; else "".

    An engine uses its share of the GPU for weights and cache. The cache must hold at least the longest request: two
    bfloat16 vectors of `kv_size` per layer and token. If the trainer shares the GPU, its weights and moments stay in
    memory while the engine runs. The trainer's gradients and activations exist only while the engine has released its
    memory.

    Args:
        gpu_bytes: the memory of the smallest GPU of the engines.
    """
    weights = engine_weight_bytes(config, size)
    shape = read_shape(size.settings)
    if not weights or shape is None:
        return ""
    placement, share = config.deployment, engine_share(config)
    num_gpus = len(placement.engine_gpu_ranks) // placement.num_engines
    context = config.rollout.engine_context(config.rollout.max_prompt_tokens)
    cache = context * 2 * shape.num_layers * shape.kv_size * BFLOAT16_BYTES // num_gpus
    if weights + cache > share * gpu_bytes:
        return (
            f"an engine needs {weights / GIB:.1f} GiB for weights and {cache / GIB:.1f} GiB for the cache of one "
            f"request of {context} tokens on each GPU, but its share of a GPU is only {share * gpu_bytes / GIB:.1f} "
            "GiB: use more GPUs per engine (deployment.engine_gpu_ranks), larger GPUs, or a larger share "
            "(rollout.engine.extra_args)"
        )
    resident = _resident_bytes(config, size, num_machines=num_machines) if placement.colocated else 0
    if resident > (1 - share) * gpu_bytes:
        return (
            f"weights and moments of the trainer ({resident / GIB:.1f} GiB) stay on the GPU beside an engine that "
            f"takes {share:.0%} of its {gpu_bytes / GIB:.1f} GiB: lower "
            f"{config.rollout.engine.spec.memory_argument} in rollout.engine.extra_args"
        )
    return ""


def check_kernels_without_gpu(config: Config) -> None:
    """Raise ConfigError if the attention kernel of a training needs a GPU. Call this for a machine without GPUs."""
    for name, training in config.trainings.items():
        if training.policy.needs_gpu:
            raise ConfigError(
                f'training.{name}.policy.attention "{training.policy.attention}" needs a GPU, but torch finds none on '
                'the machine that trains: set attention = "auto"'
            )


def shared_gpu_warning(config: Config) -> str:
    """A warning if an engine occupies most of the memory of a GPU on which the trainer also computes; else ""."""
    placement, engine = config.deployment, config.rollout.engine
    has_engines = config.samples_for_training and not engine.spec.is_own
    if not has_engines or placement.colocated or placement.shares_cpu or engine_share(config) < ENGINE_SHARE:
        return ""
    shared = {*(placement.trainer_gpu_ranks or (0,))} & {*(placement.engine_gpu_ranks or (0,))}
    if not shared:
        return ""
    return (
        f"an engine takes {ENGINE_SHARE:.0%} of GPU {min(shared)} and keeps this memory during training, so the "
        "trainer on the same GPU may run out of memory: set deployment.colocated, so that engine and trainer take "
        f"turns, use other GPUs for engines (deployment.engine_gpu_ranks), or lower {engine.spec.memory_argument} in "
        "rollout.engine.extra_args"
    )


def _resident_bytes(config: Config, size: ModelSize, *, num_machines: int) -> int:
    """Bytes of the RL trainer that stay allocated on a GPU while engines on the same GPU generate."""
    stages = training_needs(config, size, num_machines=num_machines)
    parts = [part for stage in stages if kind_of(stage.kind).is_graded for part in stage.parts if part.is_certain]
    return sum_bytes(part for part in parts if part.name != "gradients")


# ── disk ──


def checkpoint_disk_bytes(config: Config, size: ModelSize) -> int:
    """Disk space of the checkpoints that all trainings of a run keep."""
    total = 0
    for training in config.trainings.values():
        num_saved = -(-training.num_steps // training.checkpoint_every)
        num_kept = min(training.keep_checkpoints + training.keep_best, num_saved)
        moments = 0 if training.policy.lora.rank else MOMENTS * FLOAT32_BYTES
        total += num_kept * size.num_parameters * (FLOAT32_BYTES + moments)
    return total


def publication_disk_bytes(config: Config, size: ModelSize) -> int:
    """Disk space of the weights that RL writes to files for its engines.

    0 if the trainer sends weights through memory or over the network instead.
    """
    engine, rl = config.rollout.engine, config.training.rl
    has_files = not engine.spec.is_own and engine.weight_transfer == "auto" and not config.data.rollouts
    if not config.is_graded or not has_files:
        return 0
    num_versions = min(KEPT_PUBLICATIONS, rl.num_steps // rl.sync_every)
    # Merged adapters have the number format of the frozen weights, except for engines that compute in float32.
    num_bytes_each = FLOAT32_BYTES if engine.dtype == "float32" else stored_weight_bytes(rl.policy)
    return num_versions * size.num_parameters * num_bytes_each


def needed_disk(config: Config, size: ModelSize, *, sends_weights: bool = False) -> list[Part]:
    """Disk space that a run needs on an empty machine, by purpose.

    Args:
        sends_weights: whether weights are sent over the network, to engines on other machines.
    """
    published = 0 if sends_weights else publication_disk_bytes(config, size)
    parts = [
        Part("checkpoints", checkpoint_disk_bytes(config, size)),
        Part("the model's files", size.num_file_bytes),
        *([] if not config.is_graded else dict.fromkeys(classifier_parts(config))),
        Part("weights for engines", published),
    ]
    return [part for part in parts if part.num_bytes]
