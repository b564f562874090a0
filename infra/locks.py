"""File locks that the kernel frees when their process ends, also after kill -9.

Sent to nodes as a part of the supervisor, so it uses only the standard library.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def open_lock(path: Path) -> int:
    """Return a descriptor of the lock file, which is created if needed. Closing the last descriptor frees the lock."""
    return os.open(path, os.O_RDWR | os.O_CREAT, 0o600)


def try_lock(lock: int, kind: int) -> bool:
    """Try to take the lock (LOCK_SH or LOCK_EX) without waiting; return whether it was taken."""
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def lock_file(path: Path) -> Iterator[int]:
    """Open a lock file for the block and close it afterwards, which frees the lock."""
    lock = open_lock(path)
    try:
        yield lock
    finally:
        os.close(lock)


@contextmanager
def locked(path: Path) -> Iterator[int]:
    """Wait for a file's exclusive lock, hold it for the block, and yield its descriptor."""
    with lock_file(path) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield lock


def is_locked(path: Path, probe: int) -> bool:
    """Return whether a process holds a lock that excludes `probe` (LOCK_SH or LOCK_EX). False without such a file."""
    try:
        # NFS needs a writable descriptor for an exclusive lock; a shared one works without permission to write.
        lock = os.open(path, os.O_RDONLY if probe == fcntl.LOCK_SH else os.O_RDWR)
    except FileNotFoundError:
        return False
    except OSError as error:
        if error.errno != errno.EROFS:
            raise
        lock = os.open(path, os.O_RDONLY)
    try:
        return not try_lock(lock, probe)
    finally:
        os.close(lock)
