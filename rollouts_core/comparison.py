"""Estimate a checkpoint's score and compare two checkpoints, with the uncertainty of few prompts.

A score is a number per row, higher is better: the mean reward of a prompt's completions, or minus the mean loss of a
demonstration. `evaluate.py` computes the scores.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

NUM_RESAMPLES = 10_000
LEAST_P_VALUE = 1 / (1 + NUM_RESAMPLES)
"""The smallest possible p-value of a comparison."""
CONFIDENCE = 0.95
VERDICT_SCOPE = "p is about this checkpoint on these rows, not about the recipe"
"""End of every verdict. Another seed trains another checkpoint, which may score several points better or worse."""
MAX_EFFECTIVE_ROWS = 1_000.0
"""Upper limit of the number of rows with scores 0 or 1 that one row counts as, also if all scores are equal."""
MAX_NUMBERS = 1 << 21
"""Limit of numbers in memory while resampling, 16 MB per array."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean with its confidence interval."""

    mean: float
    low: float
    """Lower end of the 95 % interval."""
    high: float
    """Upper end."""
    num_rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """How much better one checkpoint scored than another on the same rows."""

    difference: float
    """Mean score of the candidate minus that of the baseline."""
    low: float
    """Lower end of the 95 % bootstrap interval of the difference."""
    high: float
    """Upper end."""
    p_value: float
    """Probability of at least this difference if the two checkpoints were equally good."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The answer to whether training helped."""

    is_accepted: bool
    """Whether the candidate counts as better; always true if every result is accepted."""
    is_improvement: bool | None
    """Whether the candidate is better beyond noise; None if no test was made."""
    sentence: str
    """The verdict with its numbers, for readers."""


def estimate_mean(scores: Sequence[float], *, seed: int = 0) -> Estimate:
    """The mean score of one checkpoint with its 95 % interval over rows; see `estimate_means` for several."""
    return estimate_means([scores], seed=seed)[0]


def estimate_means(compared: Sequence[Sequence[float]], *, seed: int = 0) -> list[Estimate]:
    """Mean scores of several checkpoints, with 95 % intervals by the same method.

    The method is Wilson's interval if all scores are between 0 and 1, else a bootstrap. A bootstrap of rows that are
    (nearly) all wrong is too narrow, and would make the worse checkpoint look more certain than a Wilson interval does.
    """
    every = [np.asarray(scores, dtype=np.float64) for scores in compared]
    if all(bool(((values >= 0) & (values <= 1)).all()) for values in every):
        share = _share_of_variance(every)
        intervals = [_wilson_interval(values, share) for values in every]
    else:
        intervals = [_bootstrap_interval(values, seed) for values in every]
    return [
        Estimate(mean=float(values.mean()), low=low, high=high, num_rows=len(values))
        for values, (low, high) in zip(every, intervals, strict=True)
    ]


def compare_paired(baseline: Sequence[float], candidate: Sequence[float], *, seed: int = 0) -> Comparison:
    """Test whether the candidate beats the baseline: a one-sided paired sign-flip test.

    Under the null hypothesis the sign of each row's difference is arbitrary. The p-value is the share of random sign
    choices, including the observed one, whose mean is at least the observed mean.

    Source: Fisher's randomization test for matched pairs; Phipson and Smyth 2010 for including the observed choice.
    """
    assert len(baseline) == len(candidate), f"{len(baseline)} scores against {len(candidate)}"
    differences = np.asarray(candidate, dtype=np.float64) - np.asarray(baseline, dtype=np.float64)
    low, high = _bootstrap_interval(differences, seed)
    p_value = _sign_flip_p_value(differences, seed)
    return Comparison(difference=float(differences.mean()), low=low, high=high, p_value=p_value)


def least_p_value(num_rows: int) -> float:
    """The p-value if every row improved by the same amount: no result on so many rows has a smaller one."""
    return _sign_flip_p_value(np.ones(num_rows), 0)


def least_wins(num_rows: int, *, margin: float, max_p_value: float) -> int:
    """The number of rows that the candidate must get right beyond the baseline to count as better.

    Assumes scores of 0 and 1 and no row that only the baseline gets right; such rows raise the number. Returns
    `num_rows` + 1 if even all rows are not enough.
    """

    def is_enough(num_wins: int) -> bool:
        differences = np.repeat([1.0 - margin, -margin], [num_wins, num_rows - num_wins])
        return _sign_flip_p_value(differences, 0) <= max_p_value

    return bisect.bisect_left(range(num_rows + 1), True, key=is_enough)


def judge_improvement(
    baseline: Sequence[float],
    candidate: Sequence[float],
    *,
    names: tuple[str, str],
    max_p_value: float,
    margin: float = 0.0,
) -> Verdict:
    """Judge whether the candidate scored better than the baseline beyond noise.

    Args:
        names: names of the baseline and the candidate, for the sentence.
        max_p_value: highest accepted p-value; 1 accepts everything without a test.
        margin: required improvement; a negative margin permits that much loss.
    """
    comparison = compare_paired([score + margin for score in baseline], candidate)
    before, after = float(np.mean(baseline)), float(np.mean(candidate))
    is_accepted = comparison.p_value <= max_p_value
    p_value = "p < 0.001" if comparison.p_value < 0.001 else f"p = {comparison.p_value:.3g}"
    figures = f"mean score {before:.3f} -> {after:.3f} on the same {len(baseline)} held-out rows, {p_value}"
    if max_p_value >= 1:
        sentence = f"{names[1]} counts without a test against {names[0]}: {figures}; {VERDICT_SCOPE}"
        return Verdict(is_accepted=True, is_improvement=None, sentence=sentence)
    more = f" by more than {margin:g}" if margin else ""
    claim = f"improved on {names[0]}{more}" if is_accepted else f"did not improve on {names[0]}{more} beyond noise"
    if margin < 0:
        claim = f"{'is at most' if is_accepted else 'may be more than'} {-margin:g} worse than {names[0]}"
    sentence = f"{names[1]} {claim}: {figures} (at most {max_p_value:g} counts); {VERDICT_SCOPE}"
    return Verdict(is_accepted=is_accepted, is_improvement=is_accepted, sentence=sentence)


def select_best(mean_scores: Sequence[float]) -> int:
    """The index of the highest mean score. Among equal scores (up to rounding) the first, which trained least.

    A score that is not finite counts as lowest.
    """
    ranked = [score if math.isfinite(score) else -math.inf for score in mean_scores]
    highest = max(ranked)
    return next(i for i, score in enumerate(ranked) if math.isclose(score, highest, rel_tol=1e-9, abs_tol=1e-9))


def _sign_flip_p_value(differences: np.ndarray, seed: int) -> float:
    rng = np.random.default_rng(seed)
    differing = differences[differences != 0]  # zeros have no sign, and must not shift the random draws
    least = differing.sum() - 1e-9
    num_as_large = sum(
        int(((rng.choice((-1.0, 1.0), size=size) * differing).sum(axis=1) >= least).sum())
        for size in _blocks(len(differing))
    )
    return (1 + num_as_large) / (1 + NUM_RESAMPLES)


def _share_of_variance(every: Sequence[np.ndarray]) -> float:
    """Variance of scores between 0 and 1, divided by the variance of 0/1 scores with the same means.

    1 for scores of 0 and 1; less for means of several completions. Computed over all checkpoints, because a checkpoint
    with only right or only wrong rows has no variance.
    """
    widest = sum(float(values.mean() * (1 - values.mean())) for values in every)
    return min(1.0, sum(float(values.var()) for values in every) / widest) if widest > 0 else 1.0


def _wilson_interval(values: np.ndarray, share_of_variance: float) -> tuple[float, float]:
    """Wilson's interval for scores between 0 and 1; a smaller variance counts as proportionally more rows.

    Sources: Wilson 1927; for the effective number of rows, Franco et al. 2019.
    """
    num_rows = len(values) / max(share_of_variance, 1 / MAX_EFFECTIVE_ROWS)
    num_right = float(values.mean()) * num_rows
    z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    centre = num_right + z**2 / 2
    half = z * math.sqrt(num_right * (num_rows - num_right) / num_rows + z**2 / 4)
    return max(0.0, (centre - half) / (num_rows + z**2)), min(1.0, (centre + half) / (num_rows + z**2))


def _bootstrap_interval(values: np.ndarray, seed: int) -> tuple[float, float]:
    rng = np.random.default_rng(seed)
    means = np.concatenate([rng.choice(values, size=size).mean(axis=1) for size in _blocks(len(values))])
    tail = (1 - CONFIDENCE) / 2
    return float(np.quantile(means, tail)), float(np.quantile(means, 1 - tail))


def _blocks(num_rows: int) -> Iterator[tuple[int, int]]:
    """Shapes of blocks that together are all resamples; the block size limits memory and does not change the draws."""
    num_together = max(1, MAX_NUMBERS // max(1, num_rows))
    for start in range(0, NUM_RESAMPLES, num_together):
        yield min(num_together, NUM_RESAMPLES - start), num_rows
