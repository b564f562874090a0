"""A simple task for small models: transform a text by a rule, for instance reverse it or sort its words.

A row has the fields `operation`, a key of `OPERATIONS`, and `text`. `draw_row` creates such rows.
"""

from __future__ import annotations

import random
import string
from collections.abc import Callable, Mapping
from typing import Any

from rollouts_core.config.messages import closest_name
from rollouts_core.types import Sample

OPERATIONS: dict[str, Callable[[str], str]] = {
    "reverse": lambda text: text[::-1],
    "uppercase": str.upper,
    "reverse words": lambda text: " ".join(reversed(text.split())),
    "sort words": lambda text: " ".join(sorted(text.split())),
    "remove vowels": lambda text: "".join(letter for letter in text if letter.lower() not in "aeiou"),
    "double letters": lambda text: "".join(letter * 2 if letter.isalpha() else letter for letter in text),
}


class TextTransformationEnvironment:
    """Rewards a completion that equals the transformed text."""

    row_fields = ("operation", "text")

    def check_row(self, row: Mapping[str, Any]) -> None:  # Any: JSON
        """Raise ValueError for an unknown operation, or a text that is not a string."""
        if row["operation"] not in OPERATIONS:
            hint = closest_name(str(row["operation"]), list(OPERATIONS))
            raise ValueError(f"unknown operation {row['operation']!r}{hint}")
        if not isinstance(row["text"], str):
            raise ValueError(f"expected `text` to be text, found {type(row['text']).__name__}")

    def grade(self, sample: Sample) -> float:
        """1 if the completion without surrounding white space equals the transformed text, else 0."""
        transform = OPERATIONS[sample.metadata["operation"]]
        return float(sample.response.strip() == transform(sample.metadata["text"]).strip())


def draw_row(rng: random.Random, *, num_words: int = 3) -> dict[str, Any]:  # Any: JSON
    """Create a random row of a prompt file, with some words and an operation."""
    words = ["".join(rng.choices(string.ascii_lowercase, k=rng.randint(2, 6))) for _ in range(num_words)]
    operation, text = rng.choice(sorted(OPERATIONS)), " ".join(words)
    return {
        "id": f"{operation}: {text}",
        "prompt": f"{operation}: {text}",
        "answer": OPERATIONS[operation](text),
        "operation": operation,
        "text": text,
    }
