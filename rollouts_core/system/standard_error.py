"""Standard error that may be gone: a run goes on for hours after `| head`, a killed `tee` or a closed terminal.

And standard streams that were never there: some schedulers and daemons start programs without them.

Not here: what is written (tasks/progress.py, flows/commands/terminal.py).
"""

from __future__ import annotations

import io
import os
import sys
from contextlib import suppress
from typing import TextIO, cast


def open_standard_streams() -> None:
    """Open those that this process was started without on /dev/null; else the next file would get their numbers.

    What a subprocess takes for its standard error could be a database then.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free: that of the stream
            os.set_inheritable(descriptor, True)
            setattr(sys, name, os.fdopen(descriptor, mode, encoding="utf-8", closefd=False))


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
