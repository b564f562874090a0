"""What a run needs at least of memory and disk, from its settings and the headers of the model's files.

Not here: what a machine has (infra/bootstrap.py), how large the model is (model_size.py). torch is not imported: this
is asked before anything is rented or started. What cannot be known so early, activations above all, is left out; so a
machine with less than this cannot do the work, and one with as much may still not.
"""

from __future__ import annotations

from rollouts_core.config import Config, PolicyConfig
from rollouts_core.model_size import ModelSize

FLOAT32_BYTES = 4
BFLOAT16_BYTES = 2
MOMENTS = 2
"""AdamW's moving averages of each trained weight."""


def least_training_bytes(num_parameters: int, policy: PolicyConfig, *, with_reference: bool, num_processes: int) -> int:
    """The bytes that weights, gradients and the optimizer's state take in each of some processes.

    Trained weights, their gradients and moving averages are float32 and shared between the processes; frozen weights
    have the precision of the matrix products.
    """
    frozen = BFLOAT16_BYTES if policy.precision == "bfloat16" else FLOAT32_BYTES
    if policy.lora.rank:  # without the adapters, which are small; the frozen weights are the reference as well
        return num_parameters * frozen // num_processes
    trained = (2 + MOMENTS) * FLOAT32_BYTES
    return num_parameters * (trained + (frozen if with_reference else 0)) // num_processes


def least_memory_bytes(config: Config, size: ModelSize, *, num_machines: int = 1) -> int:
    """What the trainer takes at least on each of its devices, in the stage that needs most; 0 where the model's
    size is not known."""
    num_processes = config.deployment.num_trainer_processes * num_machines
    sft, rl = config.training.sft, config.training.rl
    stages = {"sft": (sft.policy, False), "rl": (rl.policy, rl.with_reference)}
    return max(
        least_training_bytes(size.num_parameters, policy, with_reference=reference, num_processes=num_processes)
        for kind, (policy, reference) in stages.items()
        if kind in config.mode
    )


def checkpoint_disk_bytes(config: Config, size: ModelSize) -> int:
    """What the checkpoints that a run keeps come to."""
    total = 0
    for kind, stage in (("sft", config.training.sft), ("rl", config.training.rl)):
        if kind in config.mode:
            num_saved = -(-stage.num_steps // stage.checkpoint_every)
            num_kept = min(stage.keep_checkpoints + stage.keep_best, num_saved)
            moments = 0 if stage.policy.lora.rank else MOMENTS
            total += num_kept * size.num_parameters * FLOAT32_BYTES * (1 + moments)
    return total
