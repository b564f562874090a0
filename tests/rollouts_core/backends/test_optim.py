"""Pins the learning rate of every part of a schedule by hand, and what weight decay acts on.

Without it an off-by-one in the warmup or a decayed norm would train slightly worse with no error anywhere.
"""

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from rollouts_core.backends.optim import (
    create_adamw_optimizer,
    create_warmup_cosine_scheduler,
    lr_ratio,
    optimizer_tensors,
    restore_optimizer_tensors,
)
from rollouts_core.config import OptimConfig


def take_steps(model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int) -> None:
    """Some optimizer steps on made-up gradients."""
    for step in range(num_steps):
        for p in model.parameters():
            p.grad = torch.full_like(p, 0.1 * (step + 1))
        optimizer.step()


@pytest.mark.parametrize(("step", "expected"), [(0, 0.25), (1, 0.5), (2, 0.75), (3, 1.0)])
def test_the_learning_rate_rises_in_equal_parts_to_its_peak(step: int, expected: float) -> None:
    config = OptimConfig(num_warmup_steps=4)
    assert lr_ratio(step, config=config, num_steps=12) == expected


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_the_peak_is_used_once_and_the_minimum_at_the_last_step(schedule: str) -> None:
    config = OptimConfig(num_warmup_steps=4, schedule=schedule, min_lr_ratio=0.1)
    ratios = [lr_ratio(step, config=config, num_steps=12) for step in range(12)]
    assert ratios.count(1.0) == 1
    assert ratios[-1] == pytest.approx(0.1)


def test_without_warmup_the_first_step_has_the_peak() -> None:
    assert lr_ratio(0, config=OptimConfig(), num_steps=12) == 1.0


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_half_way_the_learning_rate_is_between_peak_and_minimum(schedule: str) -> None:
    # the peak at step 3, the minimum at step 11: the middle is step 7, and (1 + 0.2) / 2 = 0.6
    config = OptimConfig(num_warmup_steps=4, schedule=schedule, min_lr_ratio=0.2)
    assert lr_ratio(7, config=config, num_steps=12) == pytest.approx(0.6)


def test_a_quarter_of_the_way_cosine_is_above_linear() -> None:
    # cos(pi / 4) = 0.70711: (1 + 0.70711) / 2 = 0.85355, times 0.8 plus 0.2
    cosine = OptimConfig(schedule="cosine", min_lr_ratio=0.2)
    linear = OptimConfig(schedule="linear", min_lr_ratio=0.2)
    assert lr_ratio(2, config=cosine, num_steps=9) == pytest.approx(0.2 + 0.8 * 0.853553, abs=1e-6)
    assert lr_ratio(2, config=linear, num_steps=9) == pytest.approx(0.2 + 0.8 * 0.75)


@pytest.mark.parametrize("step", [0, 5, 11, 100])
def test_a_constant_schedule_stays_at_its_peak(step: int) -> None:
    config = OptimConfig(schedule="constant", min_lr_ratio=0.0)
    assert lr_ratio(step, config=config, num_steps=12) == 1.0


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_after_the_planned_steps_the_learning_rate_stays_at_its_minimum(schedule: str) -> None:
    config = OptimConfig(schedule=schedule, min_lr_ratio=0.1)
    assert lr_ratio(1000, config=config, num_steps=12) == pytest.approx(0.1)


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_the_learning_rate_never_rises_after_warmup(schedule: str) -> None:
    config = OptimConfig(num_warmup_steps=3, schedule=schedule)
    ratios = [lr_ratio(step, config=config, num_steps=20) for step in range(3, 25)]
    assert ratios == sorted(ratios, reverse=True)


def test_warmup_longer_than_the_training_only_rises() -> None:
    ratios = [lr_ratio(step, config=OptimConfig(num_warmup_steps=10), num_steps=4) for step in range(4)]
    assert ratios == [0.1, 0.2, 0.3, 0.4]


def test_the_first_step_uses_the_first_learning_rate_of_the_schedule() -> None:
    model = nn.Linear(2, 2)
    config = OptimConfig(lr=0.5, num_warmup_steps=5)
    optimizer = create_adamw_optimizer(model, config)
    create_warmup_cosine_scheduler(optimizer, config, num_steps=10)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.1]


def test_weight_decay_acts_on_matrices_and_not_on_norms_and_biases(tiny_model: PreTrainedModel) -> None:
    config = OptimConfig(lr=0.1, weight_decay=0.5)
    optimizer = create_adamw_optimizer(tiny_model, config)
    before = {name: p.detach().clone() for name, p in tiny_model.named_parameters()}
    for p in tiny_model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for name, p in tiny_model.named_parameters():
        # a zero gradient leaves the decay alone: w * (1 - lr * decay)
        expected = before[name] * (0.95 if p.ndim > 1 else 1.0)
        torch.testing.assert_close(p.detach(), expected, atol=1e-7, rtol=1e-6)


def test_frozen_parameters_are_not_optimized(tiny_model: PreTrainedModel) -> None:
    frozen = tiny_model.get_input_embeddings().weight.requires_grad_(False)
    optimizer = create_adamw_optimizer(tiny_model, OptimConfig())
    assert all(p is not frozen for group in optimizer.param_groups for p in group["params"])


def test_restored_optimizer_state_takes_the_same_next_step() -> None:
    torch.manual_seed(0)
    model, twin = nn.Linear(3, 2), nn.Linear(3, 2)
    optimizer, restored = (create_adamw_optimizer(m, OptimConfig(lr=0.1)) for m in (model, twin))
    take_steps(model, optimizer, 3)
    twin.load_state_dict(model.state_dict())
    restore_optimizer_tensors(twin, restored, optimizer_tensors(model, optimizer))
    take_steps(model, optimizer, 2)
    take_steps(twin, restored, 2)
    assert torch.equal(model.weight, twin.weight) and torch.equal(model.bias, twin.bias)


def test_restoring_copies_the_tensors_it_is_given() -> None:
    model = nn.Linear(3, 2)
    optimizer = create_adamw_optimizer(model, OptimConfig())
    take_steps(model, optimizer, 1)
    saved = {name: value.clone() for name, value in optimizer_tensors(model, optimizer).items()}
    restore_optimizer_tensors(model, optimizer, saved)
    take_steps(model, optimizer, 1)
    assert float(saved["weight/step"]) == 1.0
