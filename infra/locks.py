"""Locks of files that the kernel frees when their process is gone, on kill -9 too.

Not here: what a lock means (ledger.py, tasks/trainer_nodes.py, flows/server.py).
"""

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
