"""`training.sft.optim` and `training.rl.optim`: AdamW and its learning rate."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rollouts_core.config.record import Finite, Record


class OptimConfig(Record):
    """AdamW and its learning-rate schedule."""

    lr: Annotated[Finite, Field(ge=0)] = 1e-5
    """Peak learning rate."""
    betas: tuple[Annotated[Finite, Field(ge=0, lt=1)], Annotated[Finite, Field(ge=0, lt=1)]] = (0.9, 0.95)
    """Decay of AdamW's two moving averages."""
    eps: Annotated[Finite, Field(gt=0)] = 1e-8
    """AdamW's epsilon."""
    weight_decay: Annotated[Finite, Field(ge=0)] = 0.0
    """Decoupled weight decay, on matrices only."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """Shape of the learning rate after warmup."""
    num_warmup_steps: int = Field(default=0, ge=0)
    """Updates over which the learning rate rises from 0 to its peak. A step of SFT is one update, a step of RL up to
    `num_minibatches` x `num_epochs` updates."""
    min_lr_ratio: Annotated[Finite, Field(ge=0, le=1)] = 0.1
    """Learning rate at the last update, divided by the peak."""
    max_grad_norm: Annotated[Finite, Field(gt=0)] = 1.0
    """Largest norm of the gradients; larger gradients are scaled down to it."""


class RLOptimConfig(OptimConfig):
    """AdamW with the defaults of RL, which also apply if only some settings are given."""

    lr: Annotated[Finite, Field(ge=0)] = 1e-6
    """Peak learning rate."""
    schedule: Literal["cosine", "linear", "constant"] = "constant"
    """Shape of the learning rate after warmup."""
