"""Continue a training whose GPU ran out of memory: lower one setting, restart, resume from the last checkpoint.

    a step runs out of memory -> find_next -> event "less_memory" -> exit code FULL_GPU_CODE -> restart
                                                     |
        the next attempts' settings <- with_less <---+

Each attempt gets a new job.json, so the events store the lowered settings. The lowered settings change only the order
of sums, so they are not part of a stage's fingerprint.

Not here: restarting the job (infra/supervisor/supervise.py; tasks/stage.py for several machines).
"""

from __future__ import annotations

import json
import re
from typing import NamedTuple, TypeVar

from rollouts_core.config import RLTrainingConfig, SFTTrainingConfig
from rollouts_core.job import TrainingJob
from rollouts_core.metrics import read_json_lines
from rollouts_core.run_directory import RunDirectory
from rollouts_core.stages import kind_of
from rollouts_core.stages.kind import load

FULL_GPU_CODE = 76
"""Exit code of a training that ran out of GPU memory and needs less memory at its next start."""
LESS_MEMORY = "less_memory"
"""Name of the event that records a lowered setting."""
FULL_GPU = re.compile(
    r"^RESOURCE_EXHAUSTED|\b(CUDA|HIP) (error|failure \d+):? '?out of memory|_STATUS_ALLOC_FAILED", re.IGNORECASE
)
"""Matches error texts about a full GPU. The driver, cuBLAS and NCCL do not raise torch's OutOfMemoryError."""
RECOMPUTED = "policy.activation_checkpointing"

JobT = TypeVar("JobT", bound=TrainingJob)
Training = SFTTrainingConfig | RLTrainingConfig


class Lowered(NamedTuple):
    """A setting that a training changes to need less memory."""

    setting: str
    """Name within the stage's settings."""
    was: int | bool
    now: int | bool

    def describe(self, kind: str) -> str:
        """The setting as an assignment, for example `training.sft.micro_batch_size = 4`."""
        return f"training.{kind}.{self.setting} = {json.dumps(self.now)}"


def is_gpu_full(error: RuntimeError) -> bool:
    """True if a GPU ran out of memory, in torch or JAX, or in a library that they call."""
    return type(error).__name__ == "OutOfMemoryError" or FULL_GPU.search(str(error)) is not None


def find_lowered(job: TrainingJob, directory: RunDirectory) -> list[Lowered]:
    """The settings that earlier attempts lowered, in order; empty if the job must stop at a full GPU."""
    if job.training.policy.on_out_of_memory == "stop":
        return []
    lines = (line for line in read_json_lines(directory.events) if line["event"] == LESS_MEMORY)
    return [Lowered(line["setting"], line["was"], line["now"]) for line in lines]


def with_less(job: JobT, directory: RunDirectory) -> JobT:
    """The job with the settings that earlier attempts lowered. A configured value that is even lower stays."""
    training = job.training
    for lowered in find_lowered(job, directory):
        if lowered.setting == RECOMPUTED:
            policy = training.policy.model_copy(update={"activation_checkpointing": True})
            training = training.model_copy(update={"policy": policy})
        else:
            lower = min(getattr(training, lowered.setting), lowered.now)
            training = training.model_copy(update={lowered.setting: lower})
    return job.model_copy(update={"training": training})


def find_next(job: TrainingJob, directory: RunDirectory) -> Lowered | None:
    """The next setting to lower; None if no setting can be lowered further, or if the job must stop at a full GPU.

    Args:
        job: result of `with_less`.
    """
    training = job.training
    if training.policy.on_out_of_memory == "stop":
        return None
    num_processes = job.deployment.num_trainer_processes * (1 + len(job.further_trainers))
    smaller: Lowered | None = load(kind_of(job.kind).smaller_batch)(training, directory, num_processes)
    if smaller:
        return smaller
    return None if training.policy.activation_checkpointing else Lowered(RECOMPUTED, was=False, now=True)


def smaller_sft_batch(training: SFTTrainingConfig, directory: RunDirectory, num_processes: int) -> Lowered | None:
    """The `micro_batch_size` that at least halves the rows per pass of a device; None if a pass has one row."""
    num_rows = min(training.micro_batch_size, -(-training.batch_size // num_processes))
    smaller = [size for size in range(1, num_rows // 2 + 1) if training.batch_size % size == 0]
    return Lowered("micro_batch_size", training.micro_batch_size, smaller[-1]) if smaller else None


def smaller_rl_batch(training: RLTrainingConfig, directory: RunDirectory, num_processes: int) -> Lowered | None:
    """The `max_micro_batch_tokens` that halves the tokens per pass, but fits the longest sample of the last step. None
    if the setting is already that low.

    A value below the longest sample would have no effect, because a pass has at least one row.
    """
    newest = max(directory.samples.glob("step_*.jsonl"), default=None)  # a step's file is written before its training
    lengths = [len(line["tokens"]) for line in read_json_lines(newest)] if newest else []
    if not lengths:
        return None
    num_tokens = min(training.max_micro_batch_tokens, sum(lengths) // num_processes)
    smaller = max(num_tokens // 2, *lengths)
    if smaller >= training.max_micro_batch_tokens:
        return None
    return Lowered("max_micro_batch_tokens", training.max_micro_batch_tokens, smaller)
