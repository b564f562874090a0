"""Python runs this file at the start of every process with this folder on PYTHONPATH: its GPU is then a small one.

A pass with gradients over more than CUDA_SMALL_TOKENS padded tokens raises torch's error of a full GPU. Recomputed
activations take half as much. With CUDA_SMALL_RANK only this rank has the small GPU. CUDA_SMALL_LOG is a folder for a
line per pass of each rank. Supervisors pass variables that begin with CUDA_ to their jobs.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from rollouts_core.algorithms.loss import TokenScores
from rollouts_core.batch import TrainBatch
from rollouts_core.model.policy import Policy

LIMIT = int(os.environ["CUDA_SMALL_TOKENS"])
RANK = os.environ.get("RANK", "0")
IS_SMALL = os.environ.get("CUDA_SMALL_RANK", RANK) == RANK
MESSAGE = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB of which 1.20 GiB is free"
    ". Including non-PyTorch memory, this process has 77.89 GiB memory in use. See the documentation."
)

compute = Policy.forward


def forward(policy: Policy, batch: TrainBatch) -> TokenScores:
    """The policy's scores, unless the small GPU has no room for the pass."""
    if torch.is_grad_enabled():
        recomputes = any(getattr(part, "gradient_checkpointing", False) for part in policy.modules())
        num_tokens = batch.inputs_BT.numel()
        if folder := os.environ.get("CUDA_SMALL_LOG"):
            with (Path(folder) / f"passes-{RANK}").open("a") as log:
                log.write(f"{num_tokens} {recomputes}\n")
        if IS_SMALL and num_tokens > LIMIT * (2 if recomputes else 1):
            raise torch.OutOfMemoryError(MESSAGE)
    return compute(policy, batch)


setattr(Policy, "forward", forward)  # noqa: B010 - the process has no other way to get a small GPU
