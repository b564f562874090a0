"""Locks of files, which the kernel frees when their holder is gone, however it went."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from infra.supervisor.files import internal_path


@contextlib.contextmanager
def locked(path: Path) -> Iterator[int]:
    """Hold a file's exclusive lock; yields its descriptor."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
    finally:
        os.close(descriptor)


def is_locked(path: Path, probe: int) -> bool:
    """Whether a process holds a lock of the file that excludes `probe`, LOCK_SH or LOCK_EX; no file has none."""
    try:
        # NFS wants a file to be open for writing where its lock is exclusive; a look at a job needs no such right.
        descriptor = os.open(path, os.O_RDONLY if probe == fcntl.LOCK_SH else os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, probe | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def is_supervised(run_dir: str) -> bool:
    """True while a supervisor of this job lives (or one is just being started)."""
    # Shared: looking never disturbs another look.
    return is_locked(internal_path(run_dir, "lock"), fcntl.LOCK_SH)
