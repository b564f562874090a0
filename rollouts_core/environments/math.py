r"""Word problems with one final number, as in GSM8K and MATH: the answer stands after `####` or in `\boxed{}`."""

from __future__ import annotations

import re

from rollouts_core.types import Sample

FINAL_ANSWER = re.compile(r"####\s*([^\n]+)|\\boxed\{([^{}]*)\}")
NOISE = re.compile(r"[\s,$%]|\\[!,; ]|\.$")


class MathEnvironment:
    """Rewards a completion whose marked final answer equals the reference."""

    def grade(self, sample: Sample) -> float:
        """1 for the right final answer, 0 for a wrong one or none."""
        found = final_answer(sample.response)
        reference = str(sample.metadata.get("answer", ""))
        return float(found is not None and found == (final_answer(reference) or _normalise(reference)))


def final_answer(text: str) -> str | None:
    r"""The last answer marked by `####` or `\boxed{}`, in a form that can be compared; None without one."""
    marked = [first or second for first, second in FINAL_ANSWER.findall(text)]
    return _normalise(marked[-1]) if marked else None


def _normalise(answer: str) -> str:
    bare = NOISE.sub("", answer.strip())
    try:
        number = float(bare)
    except ValueError:
        return bare.lower()
    return str(int(number)) if number.is_integer() else str(number)
