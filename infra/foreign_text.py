"""Make text of other programs, machines and services safe to print: a terminal would obey its control sequences.

Not here: file names with control characters are refused (sync/receiver.py).
"""

import re

_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b\n]*(?:\x07|\x1b\\)?|[ -/]*[0-~])")
"""Colors, cursor movements, window titles, and all other sequences that begin with ESC."""
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]+")
"""All control characters except tabs and line feeds, Unicode's line separators, and its direction marks, which would
also reorder our own words around the text."""


def shown_lines(text: str) -> str:
    """Return the text as a terminal shows it: the last state of a progress bar, no colors, no control characters."""
    lines = _ESCAPES.sub("", text).split("\n")
    return "\n".join(_CONTROLS.sub(" ", line.rstrip("\r").rpartition("\r")[2]) for line in lines)


def shown_line(text: str) -> str:
    return " ".join(shown_lines(text).split())
