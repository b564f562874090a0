"""Escape text from machines, models, data and users, so that Markdown shows the text unchanged.

Not here: pages of HTML, whose templates escape everything (page.py).
"""

from __future__ import annotations

import re

_MARKUP = re.compile(r"[\\`*\[\]<>|~&!]|(?<![^\W_])_|_(?![^\W_])|^[#+=-]|^(?:\d+)[.)]")
"""Matches characters with a meaning in Markdown. An underscore between letters and digits has no meaning there."""


def escaped(text: str) -> str:
    """The text as one line of Markdown that shows exactly this text. Markup in the text, such as links, images, HTML
    and tables, is shown as plain characters."""
    printable = "".join(each if each.isprintable() else " " for each in text)
    return _MARKUP.sub(_escape, " ".join(printable.split()))


def as_code(text: str) -> str:
    """The text as code in one line of Markdown; empty for an empty text."""
    line = " ".join("".join(each if each.isprintable() else " " for each in text).split())
    longest = max((len(each) for each in re.findall("`+", line)), default=0)
    fence, space = "`" * (longest + 1), " " if line.startswith("`") or line.endswith("`") else ""
    return f"{fence}{space}{line}{space}{fence}" if line else ""


def _escape(found: re.Match[str]) -> str:
    return f"{found[0][:-1]}\\{found[0][-1]}"
