"""Pins: which tokens can be chosen, how often, and that the reported logprob is of the tempered distribution.

Without it a restriction that is not applied, or a logprob of another distribution, would bias the policy gradient.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rollouts_core.embedded.sampling import (
    SamplingParams,
    SamplingRows,
    penalize,
    sample_tokens,
    uniform_numbers,
)

PROBS = torch.tensor([0.5, 0.25, 0.15, 0.06, 0.04])


def rows_of(params: list[SamplingParams], seeds: list[int]) -> SamplingRows:
    rows = SamplingRows(len(params))
    for row, (asked, seed) in enumerate(zip(params, seeds, strict=True)):
        rows.set(row, asked, seed)
    return rows


def draw(params: SamplingParams, count: int, logits_V: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`count` independent draws from one distribution, by default PROBS."""
    logits = PROBS.log() if logits_V is None else logits_V
    rows = rows_of([params] * count, [7] * count)
    return sample_tokens(logits.expand(count, -1), rows, np.arange(count))


def test_tokens_appear_as_often_as_their_probability_says() -> None:
    tokens, _ = draw(SamplingParams(), 20000)
    shares = torch.bincount(tokens, minlength=5) / 20000
    torch.testing.assert_close(shares, PROBS, atol=0.015, rtol=0)  # four standard errors of a share of one half


def test_logprobs_are_of_the_tempered_distribution() -> None:
    tokens, logprobs = draw(SamplingParams(temperature=0.7), 50)
    expected = (PROBS.log() / 0.7).log_softmax(-1)[tokens]
    torch.testing.assert_close(logprobs, expected, atol=1e-6, rtol=0)


def test_temperature_zero_takes_the_most_probable_token_with_its_raw_logprob() -> None:
    tokens, logprobs = draw(SamplingParams(temperature=0.0), 20)
    assert set(tokens.tolist()) == {0}
    torch.testing.assert_close(logprobs, PROBS.log()[:1].expand(20), atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("restriction", "allowed"),
    [
        ({"top_k": 2}, {0, 1}),
        ({"top_k": 1}, {0}),
        ({"top_p": 0.6}, {0, 1}),
        ({"top_p": 0.01}, {0}),
        ({"min_p": 0.2}, {0, 1, 2}),
        ({"min_p": 1.0}, {0}),
        ({"top_k": 4, "top_p": 0.95, "min_p": 0.4}, {0, 1}),
        ({"top_k": -1, "top_p": 1.0, "min_p": 0.0}, {0, 1, 2, 3, 4}),
    ],
)
def test_restrictions_exclude_exactly_the_improbable_tokens(restriction: dict[str, Any], allowed: set[int]) -> None:
    tokens, logprobs = draw(SamplingParams(**restriction), 2000)
    assert set(tokens.tolist()) == allowed
    torch.testing.assert_close(logprobs, PROBS.log()[tokens], atol=1e-6, rtol=0)  # not renormalised


@pytest.mark.parametrize(
    ("penalties", "expected"),
    [
        ({"presence_penalty": 0.5}, [0.5, -2.5, 3.0]),
        ({"frequency_penalty": 0.5}, [0.0, -2.5, 3.0]),
        ({"repetition_penalty": 2.0}, [0.5, -4.0, 3.0]),
        ({"presence_penalty": 0.5, "repetition_penalty": 2.0}, [0.25, -5.0, 3.0]),
    ],
)
def test_penalties_change_the_logits_of_what_the_completion_has(
    penalties: dict[str, Any], expected: list[float]
) -> None:
    logits_V = torch.tensor([1.0, -2.0, 3.0])
    penalize(logits_V, np.array([0, 1, 0]), SamplingParams(**penalties))
    assert logits_V.tolist() == expected


def test_without_output_penalties_change_nothing() -> None:
    logits_V = torch.tensor([1.0, -2.0])
    penalize(logits_V, np.array([], dtype=np.int64), SamplingParams(repetition_penalty=2.0))
    assert logits_V.tolist() == [1.0, -2.0]


def test_rows_with_different_parameters_do_not_influence_each_other() -> None:
    logits_BV = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    params = [SamplingParams(temperature=0.0), SamplingParams(top_k=3, temperature=2.0), SamplingParams()]
    seeds, positions = [1, 2, 3], np.array([10, 20, 30])
    tokens, logprobs = sample_tokens(logits_BV, rows_of(params, seeds), positions)
    for row in range(3):
        alone = rows_of([params[row]], [seeds[row]])
        token, logprob = sample_tokens(logits_BV[row : row + 1], alone, positions[row : row + 1])
        assert (token[0], logprob[0]) == (tokens[row], logprobs[row])


def test_a_token_of_probability_zero_is_never_drawn() -> None:
    logits = torch.tensor([float("-inf"), 0.0, float("-inf"), 0.0, float("-inf")])
    tokens, _ = draw(SamplingParams(), 2000, logits)
    assert set(tokens.tolist()) == {1, 3}


def test_uniform_numbers_depend_on_seed_and_position_alone() -> None:
    seeds, positions = np.array([5, -5, 2**63 - 1]), np.array([0, 1, 2])
    together = uniform_numbers(seeds, positions)
    alone = [uniform_numbers(seeds[i : i + 1], positions[i : i + 1])[0] for i in range(3)]
    assert together.tolist() == alone


def test_uniform_numbers_are_spread_evenly_over_seeds_and_positions() -> None:
    grid = uniform_numbers(np.repeat(np.arange(200), 200), np.tile(np.arange(200), 200)).reshape(200, 200)
    assert grid.min() >= 0.0
    assert grid.max() < 1.0
    counts = np.histogram(grid, bins=20, range=(0, 1))[0]
    assert np.abs(counts - 2000).max() < 220  # five standard deviations of a bin
    assert abs(np.corrcoef(grid[:-1].ravel(), grid[1:].ravel())[0, 1]) < 0.025
    assert abs(np.corrcoef(grid[:, :-1].ravel(), grid[:, 1:].ravel())[0, 1]) < 0.025


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("top_k", 0),
        ("top_k", -2),
        ("max_new_tokens", -1),
        ("sampling_seed", 2**63),
    ],
)
def test_values_outside_their_range_are_refused_by_name(field: str, value: float) -> None:
    settings: dict[str, Any] = {field: value}
    with pytest.raises(ValueError, match=f"{field} must be"):
        SamplingParams(**settings)
