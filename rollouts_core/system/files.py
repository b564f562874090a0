"""Write files and folders atomically, so that readers never see a partial file or folder, even after a crash."""

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
    """Replace the content of a file atomically: write a temporary file, sync it to disk, and rename it."""
    raw = content.encode() if isinstance(content, str) else content
    with appearing_whole(path) as partial, partial.open("wb") as file:
        file.write(raw)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def appearing_whole(path: Path) -> Iterator[Path]:
    """Yield the path of a temporary file, which replaces `path` if the `with` block succeeds, else is deleted.

    The block must write the file and sync it to disk.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    fsync_directory(path.parent)


def write_json(path: Path, value: Any) -> None:  # Any: JSON
    """Replace the content of a file by `value` as JSON, atomically."""
    write_atomically(path, json.dumps(value, indent=1) + "\n")


def fsync_directory(path: Path) -> None:
    """Sync a directory to disk, so that the names of its files survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """Yield a temporary directory, which replaces `path` if the `with` block succeeds, and is deleted if it fails.

    The files that the block writes are synced to disk before the directory is renamed.
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
    """Delete a directory. The directory is renamed first, so that a crash never leaves a part of the directory at
    `path`."""
    doomed = path.with_name(f".{path.name}.partial-removed-{os.getpid()}")
    path.rename(doomed)
    shutil.rmtree(doomed)


def remove_partial_directories(parent: Path) -> None:
    """Delete temporary directories that killed processes left (`new_directory`, `remove_directory`)."""
    for leftover in parent.glob(".*.partial-*"):
        shutil.rmtree(leftover, ignore_errors=True)


def link_or_copy(source: Path, destination: Path) -> None:
    """Create a file at a second path atomically: as a hard link if possible, else as a copy."""
    destination.parent.mkdir(parents=True, exist_ok=True)
    try:
        destination.hardlink_to(source.resolve())  # a hard link to a relative symlink would point to another file
    except OSError:  # the paths are on different file systems, or the file system has no hard links
        with appearing_whole(destination) as partial:
            shutil.copy(source, partial)  # keeps the mode
            _fsync_file(partial)


def _fsync_file(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
