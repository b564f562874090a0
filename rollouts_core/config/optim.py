"""`training.sft.optim` and `training.rl.optim`: AdamW and its learning rate."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rollouts_core.config.record import Finite, Record


class OptimConfig(Record):
    """AdamW and its learning-rate schedule."""

    lr: Annotated[Finite, Field(ge=0)] = 1e-5
    """Largest learning rate, which is reached at the end of the warmup."""
    betas: tuple[Annotated[Finite, Field(ge=0, lt=1)], Annotated[Finite, Field(ge=0, lt=1)]] = (0.9, 0.95)
    """Decay factors of AdamW's moving averages of the gradient and of its square."""
    eps: Annotated[Finite, Field(gt=0)] = 1e-8
    """AdamW's epsilon, which is added to the divisor of each update."""
    weight_decay: Annotated[Finite, Field(ge=0)] = 0.0
    """AdamW's weight decay, which applies only to matrices."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """How the learning rate changes after the warmup."""
    num_warmup_steps: int = Field(default=0, ge=0)
    """Number of optimizer updates over which the learning rate rises from 0 to `lr`. A step of SFT is one update. A
    step of RL has up to `num_minibatches` x `num_epochs` updates."""
    min_lr_ratio: Annotated[Finite, Field(ge=0, le=1)] = 0.1
    """Learning rate at the last update, as a share of `lr`."""
    max_grad_norm: Annotated[Finite, Field(gt=0)] = 1.0
    """Largest norm of the gradient. A larger gradient is scaled down to this norm."""


class RLOptimConfig(OptimConfig):
    """AdamW with the defaults of RL. The defaults also apply if only some of these settings are given."""

    lr: Annotated[Finite, Field(ge=0)] = 1e-6
    """Largest learning rate, which is reached at the end of the warmup."""
    schedule: Literal["cosine", "linear", "constant"] = "constant"
    """How the learning rate changes after the warmup."""
