"""Open files whose names others give, and nothing that only looks like a file.

To open a FIFO waits until a program writes to it, to open a device may set it to work, and /dev/zero never ends.

Not here: writing files (files.py), what is in them.
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
"""O_PATH, which Linux alone has, finds a file without opening it."""


@contextmanager
def found_file(path: Path | str) -> Iterator[str]:
    """A path by which the block opens the regular file at `path`, also if another file takes its place meanwhile.

    Links are followed: another process's memory is named by one (/proc/<pid>/fd/<n>).

    Raises:
        OSError: there is no file, it may not be read, is empty, or is no regular file.
    """
    try:
        descriptor = os.open(path, LOOK_AT)
    except ValueError as error:  # a zero byte in the path
        raise OSError(f"no file can have this name: {error}") from error
    try:
        status = os.fstat(descriptor)
        if problem := _find_problem(status.st_mode):
            raise OSError(f"it is {problem}")
        if not status.st_size:  # so are files of /proc, of which some wait for their next line for ever
            raise OSError("it is empty")
        found = f"/dev/fd/{descriptor}"
        if not os.access(found, os.R_OK):
            raise PermissionError("Permission denied")
        yield found
    finally:
        os.close(descriptor)


def open_file(path: Path | str) -> BufferedReader:
    """Open a regular file, which may be empty, for reading.

    Raises:
        OSError: it may not be read, or is not a regular file; `strerror` says which kind it is.
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
    """Say why a path is not a regular file, to stand after its name: "does not exist", "is a FIFO, not a file"."""
    try:
        problem = _find_problem(path.stat().st_mode)
        return f"is {problem}" if problem else "cannot be read"
    except (OSError, ValueError):
        return "does not exist"


def _find_problem(mode: int) -> str:
    """Say which kind of file it is, "" for a regular file."""
    return "" if stat.S_ISREG(mode) else f"{KINDS.get(stat.S_IFMT(mode), 'something else')}, not a file"


def read_file(path: Path, *, max_bytes: int) -> bytes:
    """The content of a regular file.

    Raises:
        OSError: as by `found_file`, or the file has more than `max_bytes`.
    """
    with found_file(path) as found, open(found, "rb") as file:  # noqa: PTH123 - a Path would be normalised
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise OSError(f"it has more than {max_bytes:,} bytes")
    return content
