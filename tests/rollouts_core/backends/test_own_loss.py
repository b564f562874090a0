"""Pins what a backend asks of a user's own loss: without it a wrong one ends in a KeyError, or trains on nothing."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from torch import Tensor

from rollouts_core.algorithms.loss import TokenScores, cross_entropy_loss
from rollouts_core.backends.pytorch import create_pytorch_backend
from rollouts_core.batch import TrainBatch
from rollouts_core.config import ModelConfig
from rollouts_core.errors import ConfigError
from rollouts_core.optimizer_step import update_policy
from tests.rollouts_core.backends.test_pytorch import OPTIM, make_batch


def own_loss(returned: Any) -> Any:  # Any: what a user may write
    """A loss that returns the cross entropy with other metrics, or anything."""

    def my_loss(scores: TokenScores, batch: TrainBatch) -> Any:  # Any: what a user may return
        loss, _ = cross_entropy_loss(scores, batch)
        return returned(loss)

    return my_loss


@pytest.mark.parametrize(
    ("returned", "sentence"),
    [
        (
            lambda loss: (loss, {}),
            r'my_loss returned metrics without "loss" \(none\): expected a tensor of one element',
        ),
        (lambda loss: (loss, {"accuracy": 1.0}), r'my_loss returned metrics without "loss" \(accuracy\)'),
        (lambda loss: loss, r"my_loss returned a tensor of shape \(\): expected"),
        (lambda loss: (loss.item(), {"loss": loss}), "my_loss returned float as the loss"),
        (lambda loss: (loss.expand(3), {"loss": loss}), r"returned a tensor of shape \(3,\) as the loss"),
        (lambda loss: (loss, {"loss": loss, "all": torch.ones(3)}), r'shape \(3,\) as the metric "all"'),
        (lambda loss: (loss, {"loss": loss, "name": "x"}), 'returned str as the metric "name"'),
    ],
)
def test_a_loss_that_returns_something_else_is_named_at_the_first_step(
    base_model: ModelConfig, returned: Any, sentence: str
) -> None:
    backend = create_pytorch_backend(base_model, OPTIM, own_loss(returned), num_steps=1, device="cpu")
    with pytest.raises(ConfigError, match=sentence):
        asyncio.run(update_policy(backend, [make_batch()]))


def test_tensors_among_the_metrics_become_numbers_and_the_weights_move(base_model: ModelConfig) -> None:
    def returned(loss: Tensor) -> object:
        return loss.reshape(1), {"loss": loss, "share": torch.tensor([0.5]), "num_right": 3}

    backend = create_pytorch_backend(base_model, OPTIM, own_loss(returned), num_steps=1, device="cpu")
    metrics = asyncio.run(update_policy(backend, [make_batch()]))
    assert (metrics["share"], metrics["num_right"]) == (0.5, 3.0)
    assert {type(value) for value in metrics.values()} == {float} and metrics["grad_norm"] > 0


def test_metrics_that_some_micro_batches_lack_are_named(base_model: ModelConfig) -> None:
    calls: list[None] = []

    def returned(loss: Tensor) -> object:
        calls.append(None)
        return loss, {"loss": loss} | ({"rare": 1.0} if len(calls) == 2 else {})

    backend = create_pytorch_backend(base_model, OPTIM, own_loss(returned), num_steps=1, device="cpu")
    with pytest.raises(ConfigError, match="the metrics rare for only some micro-batches"):
        asyncio.run(update_policy(backend, [make_batch(), make_batch(1)]))
