"""Add folders with the user's modules to the import path of this process and of its jobs.

The folders come last on sys.path, so that a user's file with the name of an installed package does not hide the
package. PYTHONPATH is not used for the folders, because it would put them before the standard library.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterable
from pathlib import Path

VARIABLE = "ROLLOUTS_CODE_PATH"
"""Environment variable that passes the added folders on to child processes."""


def add_code_folders(folders: Iterable[str | Path]) -> None:
    """Make modules in folders importable. The new folders are searched before folders that were added earlier."""
    known = _listed()
    first = list(dict.fromkeys(str(Path(each).resolve()) for each in folders))
    os.environ[VARIABLE] = os.pathsep.join([*first, *(each for each in known if each not in first)])
    use_code_folders()


def use_code_folders() -> None:
    """Add the folders in the environment variable ROLLOUTS_CODE_PATH to this process's import path."""
    first = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    last = [each for each in _listed() if each not in first]
    if not last or sys.path[-len(last) :] == last:
        return
    sys.path[:] = [*(each for each in sys.path if each not in last), *last]
    importlib.invalidate_caches()


def _listed() -> list[str]:
    return [each for each in os.environ.get(VARIABLE, "").split(os.pathsep) if each]
