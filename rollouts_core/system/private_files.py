"""Register files that programs written by the policy must not read, such as data with expected answers.

environments/sandbox.py decides which folders programs written by the policy can read.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

_private: set[Path] = set()
"""Registered files and folders, as absolute paths without symlinks."""


def keep_private(path: str | Path) -> None:
    """Register a file or folder. The sandbox refuses to start a policy's program that could read the registered
    path."""
    _private.add(Path(path).resolve())


def find_seen(folders: Iterable[str]) -> tuple[Path, str] | None:
    """Find a registered file that is inside one of `folders`. Returns the file and the folder, or None."""
    return _find_seen(frozenset(_private), tuple(folders))


@lru_cache(maxsize=1)
def _find_seen(private: frozenset[Path], folders: tuple[str, ...]) -> tuple[Path, str] | None:
    for folder in folders:
        seen = Path(folder).resolve()
        for path in sorted(private):
            if path.is_relative_to(seen):
                return path, folder
    return None
