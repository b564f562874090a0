r"""Word problems with one final answer, as in GSM8K and MATH: it stands after `####` or in `\boxed{}`."""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation

from rollouts_core.types import Sample

HASHES = re.compile(r"####\s*([^\n]+)")
BOXED = "\\boxed{"
THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
NOISE = re.compile(r"[\s$%]|\\[!,; ]|\.$")


class MathEnvironment:
    """Rewards a completion whose marked final answer equals the reference."""

    def grade(self, sample: Sample) -> float:
        """1 for the right final answer, 0 for a wrong one or none."""
        found = final_answer(sample.response)
        reference = str(sample.metadata.get("answer", ""))
        expected = final_answer(reference) or _normalise(reference)
        return float(found is not None and found != "" and found == expected)


def final_answer(text: str) -> str | None:
    r"""The last answer marked by `####`, else by `\boxed{}`, in a form that can be compared; None without one."""
    if after_hashes := HASHES.findall(text):
        last = after_hashes[-1]
        return _normalise(_last_boxed(last) or last)
    boxed = _last_boxed(text)
    return None if boxed is None else _normalise(boxed)


def _last_boxed(text: str) -> str | None:
    r"""What stands in the braces of the last `\boxed{...}`, which may hold further braces."""
    start = text.rfind(BOXED)
    if start < 0:
        return None
    content = text[start + len(BOXED) :]
    depth = 1
    for place, character in enumerate(content):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return content[:place]
    return None


def _normalise(answer: str) -> str:
    bare = NOISE.sub("", THOUSANDS.sub("", answer.strip()))
    try:
        number = Decimal(bare)
    except InvalidOperation:
        return bare.lower()
    return format(number.normalize(), "f") if number.is_finite() else bare.lower()
