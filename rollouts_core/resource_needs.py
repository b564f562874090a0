"""What a run needs at least of memory and disk, from its settings and the headers of the model's files.

Not here: what a machine has (infra/bootstrap.py). No weights are read and torch is not imported: this is asked before
anything is rented or started. What cannot be known so early, activations above all, is left out; so a machine with less
than this cannot do the work, and one with as much may still not.
"""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path

from rollouts_core.config import Config, PolicyConfig

FLOAT32_BYTES = 4
BFLOAT16_BYTES = 2
MOMENTS = 2
"""AdamW's moving averages of each trained weight."""


def count_parameters(model_dir: Path) -> int:
    """The weights in the safetensors files of a folder; 0 where none can be read, as for a model of the hub."""
    try:
        return sum(_count_in(path) for path in _weight_files(model_dir))
    except (OSError, ValueError, KeyError, TypeError, struct.error):  # damaged: who loads it says so in a sentence
        return 0


def _weight_files(model_dir: Path) -> list[Path]:
    """The files that a loader reads: a folder may hold the same weights in another form besides."""
    index, whole = model_dir / "model.safetensors.index.json", model_dir / "model.safetensors"
    if index.is_file():
        return [model_dir / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    return [whole] if whole.is_file() else sorted(model_dir.glob("*.safetensors"))


def _count_in(path: Path) -> int:
    with path.open("rb") as file:
        (num_header_bytes,) = struct.unpack("<Q", file.read(8))
        if num_header_bytes > path.stat().st_size:
            raise ValueError(f"{path} is no safetensors file")
        header = json.loads(file.read(num_header_bytes))
    return sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")


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


def least_memory_bytes(config: Config, *, num_machines: int = 1) -> int:
    """What the trainer takes at least on each of its devices, in the stage that needs most."""
    num_parameters = count_parameters(Path(config.model.path))
    num_processes = config.deployment.num_trainer_processes * num_machines
    sft, rl = config.training.sft, config.training.rl
    stages = {"sft": (sft.policy, False), "rl": (rl.policy, rl.with_reference)}
    return max(
        least_training_bytes(num_parameters, policy, with_reference=reference, num_processes=num_processes)
        for kind, (policy, reference) in stages.items()
        if kind in config.mode
    )


def checkpoint_disk_bytes(config: Config) -> int:
    """What the checkpoints that a run keeps come to."""
    num_parameters = count_parameters(Path(config.model.path))
    total = 0
    for kind, stage in (("sft", config.training.sft), ("rl", config.training.rl)):
        if kind in config.mode:
            num_saved = -(-stage.num_steps // stage.checkpoint_every)
            num_kept = min(stage.keep_checkpoints + stage.keep_best, num_saved)
            moments = 0 if stage.policy.lora.rank else MOMENTS
            total += num_kept * num_parameters * FLOAT32_BYTES * (1 + moments)
    return total
