"""Pins that an update adds up its micro-batches, and that a loss that is no number changes nothing.

Without it one bad sample would write NaN into every weight, or half of an update's gradient would leak into the next.
"""

import asyncio

import pytest
import torch

from rollouts_core.algorithms.loss import LossMetrics, TokenScores, cross_entropy_loss
from rollouts_core.backends.pytorch import PyTorchTrainingBackend, create_pytorch_backend
from rollouts_core.batch import TrainBatch, build_batch, with_step_totals
from rollouts_core.config import ModelConfig, OptimConfig
from rollouts_core.errors import NonFiniteError
from rollouts_core.optimizer_step import SkipCounter, update_policy
from tests.rollouts_core.make import make_random_samples

POISON = 24
"""A loss over a batch with this token is NaN."""


def poisoned_loss(scores: TokenScores, batch: TrainBatch) -> tuple[torch.Tensor, LossMetrics]:
    """Cross entropy, but no number where the batch holds the poison."""
    loss, metrics = cross_entropy_loss(scores, batch)
    is_poisoned = bool((batch.targets_BT == POISON).any())
    return (loss * float("nan"), {"loss": float("nan")}) if is_poisoned else (loss, metrics)


def create_backend(model: ModelConfig) -> PyTorchTrainingBackend:
    """A backend that trains by the poisoned loss."""
    return create_pytorch_backend(model, OptimConfig(lr=0.01), poisoned_loss, num_steps=10, device="cpu")


def make_update(*, poisoned: bool) -> list[TrainBatch]:
    """Two micro-batches; the second one may be poisoned."""
    samples = make_random_samples(4, vocabulary=POISON)
    if poisoned:
        samples[-1].tokens[-1] = POISON
    halves = [build_batch([[sample] for sample in half], pad_id=0) for half in (samples[:2], samples[2:])]
    return with_step_totals(halves, samples)


def copy_weights(backend: PyTorchTrainingBackend) -> dict[str, torch.Tensor]:
    """The weights as they are now."""
    return {name: value.clone() for name, value in asyncio.run(backend.get_weights().result()).items()}


def test_an_update_sums_the_losses_of_its_micro_batches(base_model: ModelConfig) -> None:
    backend, apart = create_backend(base_model), create_backend(base_model)
    metrics = asyncio.run(update_policy(backend, make_update(poisoned=False)))
    losses = [asyncio.run(apart.forward_backward(batch).result())["loss"] for batch in make_update(poisoned=False)]
    assert metrics["loss"] == pytest.approx(sum(losses))
    assert metrics["num_nonfinite"] == 0
    assert backend.weight_version == 1


def test_a_loss_that_is_no_number_names_its_samples_and_stops(base_model: ModelConfig) -> None:
    backend = create_backend(base_model)
    with pytest.raises(NonFiniteError, match=r"the loss became nan after 0 optimizer steps.*samples: 0/0, 0/0"):
        asyncio.run(update_policy(backend, make_update(poisoned=True)))


def test_a_skipped_update_leaves_no_trace(base_model: ModelConfig) -> None:
    backend, undisturbed = create_backend(base_model), create_backend(base_model)
    before = copy_weights(backend)
    assert asyncio.run(update_policy(backend, make_update(poisoned=True), on_nonfinite="skip")) == {"num_nonfinite": 1}
    assert all(torch.equal(value, before[name]) for name, value in copy_weights(backend).items())
    after = asyncio.run(update_policy(backend, make_update(poisoned=False), on_nonfinite="skip"))
    assert after == asyncio.run(update_policy(undisturbed, make_update(poisoned=False)))
    assert all(torch.equal(value, copy_weights(undisturbed)[name]) for name, value in copy_weights(backend).items())


SKIPPED = {"num_nonfinite": 1.0}
MADE = {"num_nonfinite": 0.0, "grad_norm": 1.0}
WITHOUT_SIGNAL = {"num_nonfinite": 0.0, "skipped": 1.0}


def test_as_many_skips_in_a_row_as_the_limit_are_borne_and_one_more_is_not() -> None:
    skips = SkipCounter(2)
    for step, metrics in enumerate([SKIPPED, SKIPPED, MADE, SKIPPED, WITHOUT_SIGNAL, SKIPPED], start=1):
        skips.after_step(step, metrics)
    with pytest.raises(NonFiniteError, match=r"^step 7: 3 updates in a row were skipped .* max_skipped_updates is 2"):
        skips.after_step(7, SKIPPED)


def test_a_step_with_several_skips_counts_all_of_them_unless_it_made_an_update() -> None:
    skips = SkipCounter(5)
    skips.after_step(1, {"num_nonfinite": 4.0})
    skips.after_step(2, {"num_nonfinite": 4.0, "grad_norm": 1.0})
    skips.after_step(3, {"num_nonfinite": 4.0})
    assert skips.num_in_a_row == 4


def test_a_limit_of_zero_is_none() -> None:
    skips = SkipCounter(0, num_in_a_row=1000)
    skips.after_step(1, SKIPPED)
    assert skips.num_in_a_row == 1001
