r"""Multiple-choice questions with letters, as in MMLU and ARC.

A completion gives its letter in `\boxed{}`, after the word "answer", or as the whole text. In a box or as the whole
text, the text of the choice may follow the letter: "B. Paris".
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from rollouts_core.types import Sample

# The text of the choice may follow a punctuation mark: \boxed{B. Paris}.
BOXED = re.compile(
    r"\\boxed\{\s*(?:\\(?:text|math)(?:bf|rm|it)?\{)?\(?([A-Ja-j])(?:[).:]|[).:]\}?\s[^{}\n]*+)?\}?\s*\}"
)
REASON = r"because|since|as"
OTHER = r"[ \t]*[,/&+][ \t]*(?:(?:and|or)[ \t]+)?\(?[A-J]\b(?!['’]|[ \t]+(?!(?:and|or)\b)\w)"
"""Matches a second chosen letter, as in "C / A". A remark about another letter does not match: "C, A is wrong"."""
# Matches the chosen letter after "answer". If a word follows, the letter is part of a sentence ("I think") and does not
# match, unless the word begins a reason. A lower-case letter matches only at the end of a line, because "a" is a word.
# Marks of Markdown, TeX and XML may stand before the letter. Possessive quantifiers (`+`) avoid backtracking, because a
# policy may write thousands of marks.
NAMED = re.compile(
    r"\b(?i:answer)\b[>*]*+(?:\s++is)?+[\s*]*+[:=]?+[\s*$`\"“'‘\[]*+(?:(?i:option|choice)\s++)?+(?:\\\()?+"
    r"(?:\\(?:text|math)(?:bf|rm|it)?+\{)?+"
    rf"\(?([A-J]\b(?!['’]\w|[ \t]*=|[ \t]+(?!(?:{REASON})\b)\w|{OTHER})|[a-j](?=[).*`$]*+[ \t]*+(?:\n|<|\Z)))"
)
ALONE = re.compile(r"[\s*]*+\(?([A-Ja-j])(?:\)?[.:]?|[).][ \t][^\n]*+)[\s*]*+")


class MultipleChoiceEnvironment:
    """Rewards a completion whose chosen letter is the row's answer."""

    row_fields = ("answer",)

    def check_row(self, row: Mapping[str, Any]) -> None:  # Any: JSON
        """Raise ValueError if the answer is not a letter that a completion can choose."""
        if not re.fullmatch("[A-J]", _read_letter(row["answer"])):
            raise ValueError(f"expected a letter from A to J as `answer`, found {row['answer']!r}")

    def grade(self, sample: Sample) -> float:
        """1 for the right letter, 0 for a wrong or missing letter."""
        return float(chosen_letter(sample.response) == _read_letter(str(sample.metadata.get("answer", ""))))

    def vote(self, sample: Sample) -> str | None:
        """The chosen letter of a completion; None without a letter."""
        return chosen_letter(sample.response)


def _read_letter(answer: str) -> str:
    return answer.strip(" ().").upper()


def chosen_letter(text: str) -> str | None:
    r"""The last letter in `\boxed{}`, else the last letter after "answer", else a letter that is the whole text."""
    for pattern in (BOXED, NAMED):
        if found := pattern.findall(text):
            return str(found[-1]).upper()
    alone = ALONE.fullmatch(text)
    return alone[1].upper() if alone else None
