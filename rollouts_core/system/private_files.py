"""Files that programs of a policy must not see: data with what is expected of them, and the store of a run.

Not here: which folders a program sees (environments/sandbox.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

_private: set[Path] = set()
"""Absolute, and without links."""


def keep_private(path: str | Path) -> None:
    """Have no program of a policy started that sees the file, or the folder."""
    _private.add(Path(path).resolve())


def find_seen(folders: Iterable[str]) -> tuple[Path, str] | None:
    """A private file that lies in one of the folders, and that folder; None if there is no such file."""
    return _find_seen(frozenset(_private), tuple(folders))


@lru_cache(maxsize=1)
def _find_seen(private: frozenset[Path], folders: tuple[str, ...]) -> tuple[Path, str] | None:
    for folder in folders:
        seen = Path(folder).resolve()
        for path in sorted(private):
            if path.is_relative_to(seen):
                return path, folder
    return None
