"""Write files so that a reader, or a crash, never meets half of one.

Not here: what the files mean (run_directory.py, checkpoint.py).
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace `path` by `content` in one step: a temporary file, fsync, rename."""
    raw = content.encode() if isinstance(content, str) else content
    with appearing_whole(path) as partial, partial.open("wb") as file:
        file.write(raw)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def appearing_whole(path: Path) -> Iterator[Path]:
    """A temporary file that replaces `path` when the block, which syncs it, succeeds, and vanishes when it fails."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    fsync_directory(path.parent)


def write_json(path: Path, value: Any) -> None:  # Any: JSON
    """`write_atomically` of `value` as JSON."""
    write_atomically(path, json.dumps(value, indent=1) + "\n")


def fsync_directory(path: Path) -> None:
    """Make the names in a directory survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """A temporary directory that becomes `path` when the block succeeds and vanishes when it fails.

    What lay at `path` is replaced. The block's files are synced to disk before the rename.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{path.name}.partial-", dir=path.parent))
    partial.chmod(0o755)
    try:
        yield partial
        for file in partial.rglob("*"):
            _fsync_file(file) if file.is_file() else fsync_directory(file)
        if path.exists():
            shutil.rmtree(path)
        partial.rename(path)
        fsync_directory(path.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def remove_directory(path: Path) -> None:
    """Delete a directory so that a crash on the way leaves no half of it under its name."""
    doomed = path.with_name(f".{path.name}.partial-removed-{os.getpid()}")
    path.rename(doomed)
    shutil.rmtree(doomed)


def remove_partial_directories(parent: Path) -> None:
    """Delete what `new_directory` and `remove_directory` left behind when their process was killed."""
    for leftover in parent.glob(".*.partial-*"):
        shutil.rmtree(leftover, ignore_errors=True)


def link_or_copy(source: Path, destination: Path) -> None:
    """The file at a second place, whole or not at all, without a second copy where the file system allows that."""
    destination.parent.mkdir(parents=True, exist_ok=True)
    try:
        destination.hardlink_to(source.resolve())  # where it is a link itself: to a link the way would be another
    except OSError:  # another file system, or one without hard links
        with appearing_whole(destination) as partial:
            shutil.copy(source, partial)  # with its mode
            _fsync_file(partial)


def _fsync_file(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
