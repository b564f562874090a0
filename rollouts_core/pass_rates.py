"""Score several completions of a prompt: pass@k and majority@k, a number per prompt.

    n completions of a prompt, c of them right  ->  pass@k = 1 - C(n - c, k) / C(n, k)
    their final answers, as votes               ->  majority@n = whether the most frequent answer is right

A number per prompt can be averaged, resampled and compared as a score: comparison.py treats a prompt as one row, so
completions of one prompt never count as independent.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """The chance that any of k completions is right, estimated from `num_samples` completions without bias.

    Source: Chen et al. 2021, "Evaluating Large Language Models Trained on Code", equation 1.
    """
    assert 0 <= num_right <= num_samples, f"{num_right} right of {num_samples}"
    assert 1 <= k <= num_samples, f"k {k} of {num_samples} completions"
    return 1.0 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)


def majority_at_n(votes: Sequence[str | None], is_right: Sequence[bool]) -> float:
    """Whether the most frequent answer is right. Ties count as an even draw among their answers.

    Args:
        votes: the final answer of each completion; None does not vote.
        is_right: whether the completion is right. Completions of the same answer may differ, as with a graded format.

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
    """The k of pass@k that are shown: powers of two, and all completions."""
    return sorted({num_samples, *(1 << i for i in range(num_samples.bit_length()) if 1 << i <= num_samples)})


def measures_of(entry: Mapping[str, Any]) -> dict[str, list[float]]:  # Any: JSON
    """pass@k and majority@n of a checkpoint by name, a number per prompt.

    Args:
        entry: the checkpoint in an evaluation's result.json. With one completion per prompt, or written by an older
            version, it has no counts, and the result is empty.
    """
    num_samples = entry.get("samples_per_prompt", 1)
    if num_samples < 2 or "num_right" not in entry:
        return {}
    measures = {
        f"pass@{k}": [pass_at_k(num_samples, num_right, k) for num_right in entry["num_right"]]
        for k in shown_ks(num_samples)
    }
    return measures | ({f"majority@{num_samples}": list(entry["majority"])} if "majority" in entry else {})
