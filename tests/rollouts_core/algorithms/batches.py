"""Small batches for tests of the losses, with numbers that can be checked by hand.

Not here: single samples (tests/rollouts_core/make.py), what other systems return (recorded.py).
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rollouts_core.algorithms.loss import (
    TokenScores,
)
from rollouts_core.batch import TrainBatch, build_batch
from tests.rollouts_core.make import make_random_samples, make_sample


def make_one_token_batch(advantage: float) -> TrainBatch:
    """One trained token that was sampled with log-prob 0."""
    return build_batch([[make_sample([1, 2])]], advantages=[[advantage]], pad_id=0)


def make_random_batch(num_per_row: int = 1) -> TrainBatch:
    """Six samples with advantages of both signs."""
    samples = make_random_samples(6)
    advantages = [1.0, -2.0, 0.5, -0.25, 3.0, 0.0]
    starts = range(0, 6, num_per_row)
    return build_batch(
        [samples[i : i + num_per_row] for i in starts],
        advantages=[advantages[i : i + num_per_row] for i in starts],
        pad_id=0,
    )


def draw_logprobs(batch: TrainBatch, seed: int = 0) -> Tensor:
    """Log-probs near those of the rollouts: most ratios are inside the clip range, some outside."""
    noise = 0.4 * torch.randn(batch.rollout_logprobs_BT.shape, generator=torch.Generator().manual_seed(seed))
    return (batch.rollout_logprobs_BT + noise).requires_grad_()


def make_batch_of_ratios(log_ratios: list[list[float]], advantages: list[float], **columns: Any) -> TrainBatch:
    """Rows of trained tokens whose log-prob now is `log_ratios` and was 0 before."""
    rows = [[make_sample(range(len(row) + 1))] for row in log_ratios]
    batch = build_batch(rows, advantages=[[advantage] for advantage in advantages], pad_id=0)
    return replace(batch, **columns)


def score(log_ratios: list[list[float]]) -> TokenScores:
    width = max(map(len, log_ratios))
    return TokenScores(logprobs_BT=torch.tensor([[*row, *[0.0] * (width - len(row))] for row in log_ratios]))
