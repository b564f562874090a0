"""Read files that settings name. Files that are not regular files raise an error, because reading a FIFO or a device
may block forever.

Not here: files with secrets (secret_file.py), copies of folders (sync/).
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def read_bytes(path: Path) -> bytes:
    """Return the content of a regular file.

    Raises:
        OSError: the file cannot be read, or is not a regular file.
    """
    if not stat.S_ISREG(path.stat().st_mode):  # check first, because opening a device may start it
        raise _not_a_file(path)
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):  # the file was replaced after the first check
            raise _not_a_file(path)
        return file.read()


def read_text(path: Path, *, errors: str = "strict") -> str:
    """Return the text of a regular UTF-8 file. Raises the errors of `read_bytes`, and UnicodeDecodeError."""
    return read_bytes(path).decode("utf-8", errors)


def _not_a_file(path: Path) -> OSError:
    return OSError(errno.EINVAL, "it is a folder, a FIFO, a socket or a device, not a file", str(path))
