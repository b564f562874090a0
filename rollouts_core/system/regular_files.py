"""Open files whose paths come from untrusted input, and reject everything that is not a regular file.

Other kinds of files are dangerous: opening a FIFO blocks until there is a writer, opening a device may start the
device, and reading /dev/zero never ends.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path

KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFDIR: "a directory",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
LOOK_AT = getattr(os, "O_PATH", os.O_RDONLY | os.O_NONBLOCK)
"""Flags of `os.open` to inspect a path. O_PATH, which only Linux has, does not open the file itself."""


@contextmanager
def found_file(path: Path | str) -> Iterator[str]:
    """Yield a path that opens the regular file at `path`, even if another file replaces it during the `with` block.

    Symlinks are followed, because the path of another process's memory is a symlink (/proc/<pid>/fd/<n>).

    Raises:
        OSError: the file does not exist, is not readable, is empty, or is not a regular file.
    """
    try:
        descriptor = os.open(path, LOOK_AT)
    except ValueError as error:  # a zero byte in the path
        raise OSError(f"no file can have this name: {error}") from error
    try:
        status = os.fstat(descriptor)
        if problem := _find_problem(status.st_mode):
            raise OSError(f"it is {problem}")
        if not status.st_size:  # also rejects files of /proc, some of which block readers forever
            raise OSError("it is empty")
        found = f"/dev/fd/{descriptor}"
        if not os.access(found, os.R_OK):
            raise PermissionError("Permission denied")
        yield found
    finally:
        os.close(descriptor)


def open_file(path: Path | str) -> BufferedReader:
    """Open a regular file for reading. The file may be empty.

    Raises:
        OSError: the file is not readable, or not a regular file. For a file that is not regular, `strerror` says what
            the file is, such as a FIFO.
    """
    descriptor = os.open(path, LOOK_AT)
    try:
        if problem := _find_problem(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, f"it is {problem}", str(path))
        return open(f"/dev/fd/{descriptor}", "rb")  # noqa: PTH123 - a Path would be normalised
    except PermissionError as error:
        raise PermissionError(error.errno, error.strerror, str(path)) from error
    finally:
        os.close(descriptor)


def describe_missing(path: Path) -> str:
    """Text to follow a path in messages: why it is not a readable file, such as "is a FIFO, not a file"."""
    try:
        problem = _find_problem(path.stat().st_mode)
        return f"is {problem}" if problem else "cannot be read"
    except (OSError, ValueError):
        return "does not exist"


def _find_problem(mode: int) -> str:
    """Text such as "a FIFO, not a file" if the mode belongs to anything but a regular file; else empty."""
    return "" if stat.S_ISREG(mode) else f"{KINDS.get(stat.S_IFMT(mode), 'something else')}, not a file"


def read_file(path: Path, *, max_bytes: int) -> bytes:
    """The content of a regular file.

    Raises:
        OSError: the file is missing, empty, unreadable, not a regular file, or larger than `max_bytes`.
    """
    with found_file(path) as found, open(found, "rb") as file:  # noqa: PTH123 - a Path would be normalised
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise OSError(f"it has more than {max_bytes:,} bytes")
    return content
