"""Make text from other programs, machines and services safe to print. A terminal would execute control sequences in the
text.

Not here: file names with control characters, which sync/receiver.py refuses.
"""

import re

_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b\n]*(?:\x07|\x1b\\)?|[ -/]*[0-~])")
"""Sequences that begin with ESC: colors, cursor movements, window titles, and all other sequences."""
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]+")
"""All control characters except tabs and line feeds. Unicode's line separators and direction marks are included.
Direction marks would also reorder our words around the foreign text."""


def shown_lines(text: str) -> str:
    """Return the text as a terminal would show it, without colors and control characters. Only the last state of a
    progress bar is kept."""
    lines = _ESCAPES.sub("", text).split("\n")
    return "\n".join(_CONTROLS.sub(" ", line.rstrip("\r").rpartition("\r")[2]) for line in lines)


def shown_line(text: str) -> str:
    return " ".join(shown_lines(text).split())
