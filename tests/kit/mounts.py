"""Small file systems of a test's own, where the right to mount them is there."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def mounted_tmpfs(path: Path, *options: str) -> Iterator[Path]:
    """A file system in memory at `path`, with options of `mount`; where it cannot be had, the test is skipped."""
    if sys.platform != "linux":
        pytest.skip(f"a file system of the test's own is mounted with Linux's tmpfs, and this is {sys.platform}")
    path.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", ",".join(options), "tmpfs", str(path)]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"a file system of the test's own needs the right to mount one: {mounted.stderr.strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)  # lazily: somebody may still look at it


def fill(disk: Path) -> Path:
    """Leave no byte free; returns the file that takes the room."""
    path = disk / "filler"
    with pytest.raises(OSError, match="No space left"), path.open("wb", buffering=0) as filler:
        while True:
            filler.write(bytes(4096))
    return path
