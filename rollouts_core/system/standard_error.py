"""Write to standard error even if its reader is gone, as after `| head`, a killed `tee` or a closed terminal.

Also handles processes started without standard streams, as by some schedulers and daemons.
"""

from __future__ import annotations

import io
import os
import sys
from contextlib import suppress
from typing import TextIO, cast


def open_standard_streams() -> None:
    """Open missing standard streams on /dev/null; otherwise the next opened files would get their numbers.

    A subprocess could then write its errors into a database.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is the stream's
            os.set_inheritable(descriptor, True)
            setattr(sys, name, os.fdopen(descriptor, mode, encoding="utf-8", closefd=False))


def standard_error() -> TextIO:
    """A stream that writes to standard error; if standard error is closed, text is dropped without an error.

    `sys.stderr` is looked up at each write, because progress bars and tests replace it.
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
    """Standard error itself, even while a progress bar of rich redirects it and writes through this module."""
    return cast(TextIO, getattr(sys.stderr, "rich_proxied_file", sys.stderr))
