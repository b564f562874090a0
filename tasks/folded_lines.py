"""Fold a line for a terminal between words, so that the rest of a sentence stands below its beginning.

sft            1200 steps, trains all weights, on this machine; about
               12 min at the pace of small-b6071f4b
"""

from __future__ import annotations

import textwrap

from rich.console import Console

MIN_WIDTH = 60
"""Narrower terminals get the rest of a sentence with a small indent, so that room for words is left."""
SMALL_INDENT = 2


def folded(mark: str, message: str, console: Console) -> str:
    """Return the message after the mark, folded to the width of a terminal. Lines for other outputs stay whole.

    A word that is longer than a line is not broken, so that a path can be copied.

    Args:
        mark: the start of the line with its spaces, for example the name of a stage.
    """
    if not console.is_terminal:
        return f"{mark}{message}"
    indent = " " * (len(mark) if console.width >= MIN_WIDTH else SMALL_INDENT)
    return "\n".join(
        textwrap.fill(
            line,
            console.width,
            initial_indent=mark if number == 0 else indent,
            subsequent_indent=indent,
            break_long_words=False,
            break_on_hyphens=False,
        )
        for number, line in enumerate(message.split("\n"))
    )
