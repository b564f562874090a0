"""Make writing to standard error safe if its reader has ended, as after `| head`, a killed `tee` or a closed terminal.

`open_standard_streams` handles processes that start without standard streams, as from some schedulers and daemons.
"""

from __future__ import annotations

import io
import os
import sys
from contextlib import suppress
from typing import TextIO, cast


def open_standard_streams() -> None:
    """Open missing standard streams on /dev/null.

    Otherwise the next opened files would get the descriptors 0 to 2 of the standard streams. A subprocess could then
    write its error messages into a database file.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)  # the lowest free descriptor is the missing stream's
            os.set_inheritable(descriptor, True)
            setattr(sys, name, os.fdopen(descriptor, mode, encoding="utf-8", closefd=False))


def standard_error() -> TextIO:
    """A stream that writes to standard error, but drops the text without an error if standard error is closed.

    Each write looks up `sys.stderr`, because progress bars and tests replace it.
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
    """Standard error itself, even while a progress bar of rich replaces `sys.stderr`.

    The progress bar writes through this module, so writing to the bar's replacement of `sys.stderr` would recurse.
    """
    return cast(TextIO, getattr(sys.stderr, "rich_proxied_file", sys.stderr))
