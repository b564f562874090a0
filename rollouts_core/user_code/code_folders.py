"""Folders, besides those on PYTHONPATH, from which the user's modules can be imported.

These folders come last on sys.path, in this process and in jobs that it starts, so that a file named like an installed
package does not hide the package. PYTHONPATH would put them before the standard library.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterable
from pathlib import Path

VARIABLE = "ROLLOUTS_CODE_PATH"
"""Environment variable with these folders for the processes that this process starts."""


def add_code_folders(folders: Iterable[str | Path]) -> None:
    """Make modules in these folders importable. These folders come before folders that were added earlier."""
    known = _listed()
    first = list(dict.fromkeys(str(Path(each).resolve()) for each in folders))
    os.environ[VARIABLE] = os.pathsep.join([*first, *(each for each in known if each not in first)])
    use_code_folders()


def use_code_folders() -> None:
    """Add the folders of the environment variable to this process's import path."""
    first = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    last = [each for each in _listed() if each not in first]
    if not last or sys.path[-len(last) :] == last:
        return
    sys.path[:] = [*(each for each in sys.path if each not in last), *last]
    importlib.invalidate_caches()


def _listed() -> list[str]:
    return [each for each in os.environ.get(VARIABLE, "").split(os.pathsep) if each]
