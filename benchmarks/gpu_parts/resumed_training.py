"""A short SFT that goes on from its newest checkpoint, and is killed at a step if asked.

python -m gpu_parts.resumed_training MODEL FOLDER DEVICE KILL_AT
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

from inputs import PAD_ID, as_samples, make_documents

from gpu_parts.models import OPTIM, VOCABULARY, create_backend
from rollouts_core import PyTorchTrainingBackend, run_sft_training
from rollouts_core.config import ModelConfig, SFTTrainingConfig

NUM_STEPS = 8


class Killer:
    """A `MetricsLogger` that kills this process at a step; 0 lets it live."""

    def __init__(self, step: int) -> None:
        self._step = step

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Called after each step."""
        if step == self._step:
            os.kill(os.getpid(), signal.SIGKILL)


def train(model: ModelConfig, folder: Path, device: str, *, killed_at: int = 0) -> PyTorchTrainingBackend:
    """Train to the end, from the newest checkpoint in `folder`; returns the trained backend."""
    config = SFTTrainingConfig(
        num_steps=NUM_STEPS,
        batch_size=4,
        micro_batch_size=2,
        max_length=256,
        checkpoint_every=4,
        log_every=1,
        optim=OPTIM,
    )
    backend = create_backend(model, device)
    samples = as_samples(make_documents(VOCABULARY, count=60))
    killer = Killer(killed_at)
    asyncio.run(run_sft_training(backend, samples, config, killer, pad_id=PAD_ID, checkpoint_dir=folder))
    return backend


if __name__ == "__main__":
    train(ModelConfig(path=sys.argv[1]), Path(sys.argv[2]), sys.argv[3], killed_at=int(sys.argv[4]))
