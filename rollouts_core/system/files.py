"""Write files and folders atomically: no reader, even after a crash, sees a partial file or folder."""

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
    """A temporary file that replaces `path` if the block succeeds, else is deleted. The block must sync the file."""
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
    """Sync a directory, so that its names survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """A temporary directory that becomes `path` if the block succeeds, and is deleted if it fails.

    An existing `path` is replaced. The block's files are synced to disk before the rename.
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
    """Delete a directory so that a crash in between leaves nothing partial under its name."""
    doomed = path.with_name(f".{path.name}.partial-removed-{os.getpid()}")
    path.rename(doomed)
    shutil.rmtree(doomed)


def remove_partial_directories(parent: Path) -> None:
    """Delete leftovers of `new_directory` and `remove_directory` calls that were killed."""
    for leftover in parent.glob(".*.partial-*"):
        shutil.rmtree(leftover, ignore_errors=True)


def link_or_copy(source: Path, destination: Path) -> None:
    """Make the file available at a second path, atomically: as a hard link if possible, else as a copy."""
    destination.parent.mkdir(parents=True, exist_ok=True)
    try:
        destination.hardlink_to(source.resolve())  # a link to a relative symbolic link would point elsewhere
    except OSError:  # another file system, or one without hard links
        with appearing_whole(destination) as partial:
            shutil.copy(source, partial)  # keeps the mode
            _fsync_file(partial)


def _fsync_file(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
