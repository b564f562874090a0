"""Create AdamW and its learning-rate schedule, and convert its state to named tensors and back."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

if TYPE_CHECKING:
    from rollouts_core.config import OptimConfig


def create_adamw_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.AdamW:
    """Create AdamW for the trainable parameters. Weight decay applies to matrices, not to norms and biases."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in trainable if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)


def create_warmup_cosine_scheduler(
    optimizer: torch.optim.Optimizer, config: OptimConfig, *, num_steps: int
) -> LambdaLR:
    """Create a schedule with linear warmup, then `config.schedule` down to `min_lr_ratio` at the last step."""
    return LambdaLR(optimizer, partial(lr_ratio, config=config, num_steps=num_steps))


def lr_ratio(step: int, *, config: OptimConfig, num_steps: int) -> float:
    """The learning rate of step 0, 1, ..., divided by the peak learning rate.

    The peak is at the last warmup step, or at the first step if there is no warmup. The minimum is at the last step.
    """
    if step < config.num_warmup_steps:
        return (step + 1) / config.num_warmup_steps
    peak_step = max(0, config.num_warmup_steps - 1)
    progress = min(1.0, (step - peak_step) / max(1, num_steps - 1 - peak_step))
    return config.min_lr_ratio + (1 - config.min_lr_ratio) * SCHEDULES[config.schedule](progress)


SCHEDULES: dict[str, Callable[[float], float]] = {
    "cosine": lambda progress: 0.5 * (1 + math.cos(math.pi * progress)),
    "linear": lambda progress: 1 - progress,
    "constant": lambda progress: 1.0,
}


def restore_schedule(scheduler: LambdaLR, state: Mapping[str, Any]) -> None:  # Any: JSON
    """Move a schedule to a saved step. The peak and the number of steps of the schedule remain those of the current
    settings."""
    scheduler.last_epoch = state["last_epoch"]
    scheduler._step_count = state["_step_count"]
    ratios = [ratio_of(scheduler.last_epoch) for ratio_of in scheduler.lr_lambdas]
    scheduler._last_lr = [base * ratio for base, ratio in zip(scheduler.base_lrs, ratios, strict=True)]
    for group, lr in zip(scheduler.optimizer.param_groups, scheduler._last_lr, strict=True):
        group["lr"] = lr


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the optimizer's state as tensors with names of the form `<parameter>/<quantity>`."""
    named: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        for quantity, value in optimizer.state.get(parameter, {}).items():
            named[f"{name}/{quantity}"] = value
    return named


def restore_optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """Restore an optimizer's state from the tensors of `optimizer_tensors`."""
    parameters = dict(model.named_parameters())
    optimizer.state.clear()
    for key, value in tensors.items():
        name, quantity = key.rsplit("/", 1)
        parameter = parameters[name]
        optimizer.state[parameter][quantity] = value.to(parameter.device, copy=True)  # fused AdamW runs on one device
