"""What programs, machines and services of others wrote, as it may be shown: a terminal would obey parts of it.

Not here: file names, which are refused (sync/receiver.py).
"""

import re

_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b\n]*(?:\x07|\x1b\\)?|[ -/]*[0-~])")
"""Colours and movements of the cursor, titles of windows, and the other sequences that begin with ESC."""
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]+")
"""All but the ends of lines and tabs; with those of Unicode that turn the direction of what follows, also of our own
words around, and other ends of lines."""


def shown_lines(text: str) -> str:
    """The text as a terminal would leave it: of a progress bar its last state, no colours, nothing to obey."""
    lines = _ESCAPES.sub("", text).split("\n")
    return "\n".join(_CONTROLS.sub(" ", line.rstrip("\r").rpartition("\r")[2]) for line in lines)


def shown_line(text: str) -> str:
    """The same as one line."""
    return " ".join(shown_lines(text).split())
