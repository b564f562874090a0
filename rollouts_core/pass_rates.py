"""Compute pass@k and majority@k from several completions of each prompt. Each measure gives one number per prompt.

    n completions of a prompt, c of them right  ->  pass@k = 1 - C(n - c, k) / C(n, k)
    their final answers, as votes               ->  majority@n = whether the most frequent answer is right

`comparison.py` averages, resamples and compares these numbers like any score. Each prompt is one row of a comparison,
so completions of the same prompt never count as independent.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """Unbiased estimate, from `num_samples` completions, of the probability that at least one of k completions is
    right.

    Source: Chen et al. 2021, "Evaluating Large Language Models Trained on Code", equation 1.
    """
    assert 0 <= num_right <= num_samples, f"{num_right} right of {num_samples}"
    assert 1 <= k <= num_samples, f"k {k} of {num_samples} completions"
    return 1.0 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)


def majority_at_n(votes: Sequence[str | None], is_right: Sequence[bool]) -> float:
    """The share of right completions among the completions with the most frequent answer. If several answers are
    equally frequent: the mean of their shares.

    Usually the completions with the most frequent answer are all right (result 1) or all wrong (result 0).

    Args:
        votes: the final answer of each completion. None counts as no vote.
        is_right: whether each completion is right. Completions with the same answer may differ, for example if the
            format is graded.

    Source: Wang et al. 2023, "Self-Consistency Improves Chain of Thought Reasoning in Language Models".
    """
    assert len(votes) == len(is_right), f"{len(votes)} votes of {len(is_right)} completions"
    counts = Counter(vote for vote in votes if vote is not None)
    if not counts:
        return 0.0
    most = max(counts.values())
    winners = [vote for vote, count in counts.items() if count == most]
    right = Counter(vote for vote, each in zip(votes, is_right, strict=True) if each)
    return sum(right[vote] / most for vote in winners) / len(winners)


def shown_ks(num_samples: int) -> list[int]:
    """The values of k for which pass@k is shown: powers of two, and the number of all completions."""
    return sorted({num_samples, *(1 << i for i in range(num_samples.bit_length()) if 1 << i <= num_samples)})


def measures_of(entry: Mapping[str, Any]) -> dict[str, list[float]]:  # Any: JSON
    """pass@k and majority@n of a checkpoint, by the name of the measure. Each measure has one number per prompt.

    Args:
        entry: the checkpoint in an evaluation's result.json. If the entry has no counts (one completion per prompt, or
            written by an older version), the result is empty.
    """
    num_samples = entry.get("samples_per_prompt", 1)
    if num_samples < 2 or "num_right" not in entry:
        return {}
    measures = {
        f"pass@{k}": [pass_at_k(num_samples, num_right, k) for num_right in entry["num_right"]]
        for k in shown_ks(num_samples)
    }
    return measures | ({f"majority@{num_samples}": list(entry["majority"])} if "majority" in entry else {})
