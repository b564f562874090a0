"""Standard error that may be gone: a run goes on for hours after `| head`, a killed `tee` or a closed terminal.

Not here: what is written (tasks/progress.py, flows/terminal.py).
"""

from __future__ import annotations

import io
import sys
from contextlib import suppress
from typing import TextIO, cast


def standard_error() -> TextIO:
    """What is written to it goes to standard error; where nobody reads that any more it is lost, and nothing is raised.

    Standard error is found anew each time: progress bars, and tests, put something else in its place.
    """
    return cast(TextIO, _StandardError())


class _StandardError(io.TextIOBase):
    @property
    def encoding(self) -> str:  # type: ignore[override]  # a plain attribute there
        return _stream().encoding

    def write(self, text: str) -> int:
        with suppress(OSError):
            _stream().write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            _stream().flush()

    def isatty(self) -> bool:
        return _stream().isatty()

    def fileno(self) -> int:
        return _stream().fileno()

    def writable(self) -> bool:
        return True


def _stream() -> TextIO:
    """Standard error itself, also while a bar of rich's shows what is written to it, by writing it here."""
    return cast(TextIO, getattr(sys.stderr, "rich_proxied_file", sys.stderr))
