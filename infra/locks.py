"""File locks. The kernel frees a lock when the process that holds it ends, also after kill -9.

This module is sent to nodes as a part of the supervisor, so it uses only the standard library.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def open_lock(path: Path) -> int:
    """Open the lock file, and create the file if it is missing. Returns a descriptor. A lock is freed when its last
    descriptor is closed."""
    return os.open(path, os.O_RDWR | os.O_CREAT, 0o600)


def try_lock(lock: int, kind: int) -> bool:
    """Try to take the lock (LOCK_SH or LOCK_EX) without waiting. Returns whether the lock was taken."""
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def lock_file(path: Path) -> Iterator[int]:
    """Open a lock file for the block. At the end of the block, the file is closed, which frees the lock."""
    lock = open_lock(path)
    try:
        yield lock
    finally:
        os.close(lock)


@contextmanager
def locked(path: Path) -> Iterator[int]:
    """Wait for the exclusive lock of a file and hold it during the block. Yields the file's descriptor."""
    with lock_file(path) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield lock


def is_locked(path: Path, probe: int) -> bool:
    """Return whether a process holds the lock in a way that excludes a lock of kind `probe` (LOCK_SH or LOCK_EX). False
    if the file is missing."""
    try:
        # NFS needs a writable descriptor for an exclusive lock. A shared lock must also be possible without write
        # permission.
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
