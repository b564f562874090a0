"""Register files that a policy's programs must not see: data with expected answers, and the store of a run.

The folders that a program sees are chosen in environments/sandbox.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

_private: set[Path] = set()
"""Absolute paths with symbolic links resolved."""


def keep_private(path: str | Path) -> None:
    """Register a file or folder. From now on no policy's program starts if it would see this path."""
    _private.add(Path(path).resolve())


def find_seen(folders: Iterable[str]) -> tuple[Path, str] | None:
    """The first private file inside one of `folders`, and this folder; None if no folder contains a private file."""
    return _find_seen(frozenset(_private), tuple(folders))


@lru_cache(maxsize=1)
def _find_seen(private: frozenset[Path], folders: tuple[str, ...]) -> tuple[Path, str] | None:
    for folder in folders:
        seen = Path(folder).resolve()
        for path in sorted(private):
            if path.is_relative_to(seen):
                return path, folder
    return None
