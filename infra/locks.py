"""Locks of files that the kernel frees when their process is gone, on kill -9 too.

Also sent to nodes, as part of the supervisor: standard library only. Not here: what a lock means (ledger.py,
supervisor/, tasks/trainer_nodes.py, flows/own_server/lend.py).
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def open_lock(path: Path) -> int:
    """Return a descriptor of the file, made where it is not there; whoever closes the last one frees the lock."""
    return os.open(path, os.O_RDWR | os.O_CREAT, 0o600)


def try_lock(lock: int, kind: int) -> bool:
    """Take the lock, LOCK_SH or LOCK_EX, if that needs no waiting; return whether it is taken."""
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def lock_file(path: Path) -> Iterator[int]:
    """Open a lock for the block; it is free afterwards."""
    lock = open_lock(path)
    try:
        yield lock
    finally:
        os.close(lock)


@contextmanager
def locked(path: Path) -> Iterator[int]:
    """Hold a file's exclusive lock for the block, once it can be had; yields its descriptor."""
    with lock_file(path) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield lock


def is_locked(path: Path, probe: int) -> bool:
    """Whether a process holds a lock of the file that excludes `probe`, LOCK_SH or LOCK_EX; no file has none."""
    try:
        # NFS wants a file to be open for writing where its lock is exclusive; a look at a job needs no such right.
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
