"""Find store folders in the paths of a JSON value, and mark these folders as used.

    stages/<stage>-<fingerprint>     runs/<name>-<run id>     inputs/<digest>     engines/<kind>-<version>-<digest>

Not here: recording the use of stages (stage_tasks.py), removing folders (prune.py). This module must not import
prefect, because preflight runs before Prefect's environment is set.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from rollouts.infra.ledger import LEDGER_FILE, Ledger

STAGES, RUNS, INPUTS, ENGINES = "stages", "runs", "inputs", "engines"
RUN_FILE = "run.json"
EVALUATION_FILE = "evaluation.json"
"""The record of an evaluation, in the run's folder."""
BENCHMARKS_FILE = "benchmarks.json"
"""The results of benchmarks of the run's checkpoint, in the run's folder."""
NAMES = {
    STAGES: re.compile(r"[a-z][a-z-]*-[0-9a-f]{16}(-\d+)?"),
    RUNS: re.compile(r".+-[0-9a-f]{8}"),
    INPUTS: re.compile(r"[0-9a-f]{16}"),
    ENGINES: re.compile(r"[a-z_]+-[\w.+!]+-[0-9a-f]{16}"),
}
"""The patterns of names of folders in the store, by the kind of folder."""


def newest_first(paths: Iterable[Path]) -> list[Path]:
    """The existing files among `paths`, the last changed file first. Another command may have just removed a file."""
    found: list[tuple[float, Path]] = []
    for path in paths:
        with suppress(FileNotFoundError):
            found.append((path.stat().st_mtime, path))
    return [path for _, path in sorted(found, reverse=True)]


def is_place(kind: str, name: str) -> bool:
    """True if the name has the form of a folder of this kind, such as "sft-<fingerprint>" for a stage."""
    return NAMES[kind].fullmatch(name) is not None


def places_in(value: Any) -> set[str]:  # Any: JSON
    """The store folders in the paths of a JSON value, such as "stages/sft-<fingerprint>".

    The paths may lie in any store, and the folders need not exist.
    """
    return {
        f"{kind}/{name}"
        for text in _texts(value)
        for kind, name in itertools.pairwise(Path(text).parts)
        if kind in NAMES and is_place(kind, name)
    }


def note_named(value: Any, store: Path) -> None:  # Any: JSON
    """Mark the store folders in a JSON value as used now, so that prune keeps them while this run lasts."""
    places = places_in(value)
    if not places:
        return
    with Ledger(store / LEDGER_FILE) as ledger, ledger.transaction():  # under this lock, prune cannot remove folders
        for place in places:
            with suppress(FileNotFoundError):
                os.utime(store / place)


def _texts(value: Any) -> Iterator[str]:  # Any: JSON
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from _texts(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _texts(each)
