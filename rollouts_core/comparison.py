"""Estimate the score of a checkpoint and compare two checkpoints.

Few prompts make scores uncertain, so results have intervals.

A score is one number per row; higher is better. The score is the mean reward of a prompt's completions, or minus the
mean loss of a demonstration. `evaluate.py` computes the scores.
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
"""The smallest possible p-value of a comparison: the p-value if no random choice of signs reached the observed mean."""
CONFIDENCE = 0.95
VERDICT_SCOPE = "p is about this checkpoint on these rows, not about the recipe"
"""The last words of every verdict. The same training with another seed gives a checkpoint whose score may differ by
several points."""
MAX_EFFECTIVE_ROWS = 1_000.0
"""Wilson's interval counts a row as at most this many rows with a score of 0 or 1. Scores that hardly vary reach this
limit."""
MAX_NUMBERS = 1 << 21
"""Limit for the number of values in one resampling array; 2**21 values take 16 MB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean with its confidence interval."""

    mean: float
    low: float
    """Lower end of the 95 % confidence interval."""
    high: float
    """Upper end of the 95 % confidence interval."""
    num_rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The difference between the scores of two checkpoints on the same rows."""

    difference: float
    """Mean score of the candidate minus mean score of the baseline."""
    low: float
    """Lower end of the 95 % bootstrap interval of the difference."""
    high: float
    """Upper end of the 95 % bootstrap interval of the difference."""
    p_value: float
    """Probability of at least this difference under the assumption that both checkpoints are equally good."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The answer to whether training helped."""

    is_accepted: bool
    """Whether the candidate is accepted. Always true if the settings accept every result."""
    is_improvement: bool | None
    """Whether the candidate is better than the baseline by more than noise; None if no test was made."""
    sentence: str
    """The verdict with its numbers, as a sentence for users."""


def estimate_mean(scores: Sequence[float], *, seed: int = 0) -> Estimate:
    """The mean score of one checkpoint with its 95 % confidence interval.

    `estimate_means` computes the means of several checkpoints.
    """
    return estimate_means([scores], seed=seed)[0]


def estimate_means(compared: Sequence[Sequence[float]], *, seed: int = 0) -> list[Estimate]:
    """Mean scores of several checkpoints, with 95 % confidence intervals by the same method.

    The method is Wilson's interval if all scores are between 0 and 1; otherwise a bootstrap. If (nearly) all rows are
    wrong, a bootstrap interval is too narrow, so the worse checkpoint would look more certain.
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
    """Test whether the candidate scored better than the baseline, with a one-sided paired sign-flip test.

    Under the null hypothesis, each row's difference is as likely positive as negative. The p-value is the share of sign
    choices whose mean difference is at least the observed mean. The sign choices are random, and the observed signs
    count as one more choice.

    Sources: Fisher's randomization test for matched pairs; Phipson and Smyth 2010 for counting the observed signs.
    """
    assert len(baseline) == len(candidate), f"{len(baseline)} scores against {len(candidate)}"
    differences = np.asarray(candidate, dtype=np.float64) - np.asarray(baseline, dtype=np.float64)
    low, high = _bootstrap_interval(differences, seed)
    p_value = _sign_flip_p_value(differences, seed)
    return Comparison(difference=float(differences.mean()), low=low, high=high, p_value=p_value)


def least_p_value(num_rows: int) -> float:
    """The smallest possible p-value with `num_rows` rows: the p-value if every row improved by the same amount."""
    return _sign_flip_p_value(np.ones(num_rows), 0)


def least_wins(num_rows: int, *, margin: float, max_p_value: float) -> int:
    """The number of rows that the candidate must get right, and the baseline wrong, to count as better.

    Assumes scores of 0 and 1, and no rows that only the baseline gets right; each such row would raise the number.
    Returns `num_rows` + 1 if the candidate cannot count as better even if it alone gets every row right.
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
    """Judge whether the candidate scored better than the baseline by more than noise.

    Args:
        names: names of the baseline and the candidate, for the verdict's sentence.
        max_p_value: the highest p-value that is accepted; 1 accepts every result without a test.
        margin: improvement that the candidate needs. A negative margin permits this loss of score.
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
    """The index of the highest mean score.

    If several scores are equal (up to rounding), the first is chosen, because its checkpoint trained least.

    NaN and infinite scores count as the lowest.
    """
    ranked = [score if math.isfinite(score) else -math.inf for score in mean_scores]
    highest = max(ranked)
    return next(i for i, score in enumerate(ranked) if math.isclose(score, highest, rel_tol=1e-9, abs_tol=1e-9))


def _sign_flip_p_value(differences: np.ndarray, seed: int) -> float:
    rng = np.random.default_rng(seed)
    differing = differences[differences != 0]  # differences of 0 have no sign, and must not shift the random draws
    least = differing.sum() - 1e-9
    num_as_large = sum(
        int(((rng.choice((-1.0, 1.0), size=size) * differing).sum(axis=1) >= least).sum())
        for size in _blocks(len(differing))
    )
    return (1 + num_as_large) / (1 + NUM_RESAMPLES)


def _share_of_variance(every: Sequence[np.ndarray]) -> float:
    """Variance of scores between 0 and 1, divided by the variance that scores of 0 and 1 with the same means would
    have.

    The result is 1 for scores of 0 and 1, and less if each score is a mean over several completions. All checkpoints
    are combined, because the scores of a checkpoint with only right or only wrong rows have no variance.
    """
    widest = sum(float(values.mean() * (1 - values.mean())) for values in every)
    return min(1.0, sum(float(values.var()) for values in every) / widest) if widest > 0 else 1.0


def _wilson_interval(values: np.ndarray, share_of_variance: float) -> tuple[float, float]:
    """Wilson's interval for scores between 0 and 1.

    Each row counts as 1 / `share_of_variance` rows, because scores with a smaller variance are more certain.

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
    """Shapes of the blocks of resamples. The block size limits the memory; it does not change the random draws."""
    num_together = max(1, MAX_NUMBERS // max(1, num_rows))
    for start in range(0, NUM_RESAMPLES, num_together):
        yield min(num_together, NUM_RESAMPLES - start), num_rows
