"""The folders of a store: find their names in a path or a JSON value, and note their use.

    stages/<stage>-<fingerprint>     runs/<name>-<run id>     inputs/<digest>     engines/<kind>-<version>-<digest>

Not here: which stages a run comes to (stage_tasks.py), what is removed (prune.py). This module does not import prefect.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from rollouts.infra.ledger import LEDGER_FILE, Ledger

STAGES, RUNS, INPUTS, ENGINES = "stages", "runs", "inputs", "engines"
RUN_FILE = "run.json"
EVALUATION_FILE = "evaluation.json"
"""In a run's folder: the record of an evaluation."""
NAMES = {
    STAGES: re.compile(r"[a-z][a-z-]*-[0-9a-f]{16}(-\d+)?"),
    RUNS: re.compile(r".+-[0-9a-f]{8}"),
    INPUTS: re.compile(r"[0-9a-f]{16}"),
    ENGINES: re.compile(r"[a-z]+-[\w.+!]+-[0-9a-f]{16}"),
}
"""How folders of each kind are called."""


def is_place(kind: str, name: str) -> bool:
    """True for what the project itself would call a folder of this kind."""
    return NAMES[kind].fullmatch(name) is not None


def places_in(value: Any) -> set[str]:  # Any: JSON
    """The places that the texts of a value name by path: stages/sft-<fingerprint> and so on, of whatever store."""
    return {
        f"{kind}/{name}"
        for text in _texts(value)
        for kind, name in itertools.pairwise(Path(text).parts)
        if kind in NAMES and is_place(kind, name)
    }


def note_named(value: Any, store: Path) -> None:  # Any: JSON
    """Let everybody know that what the value names is used now: what a run that goes on used is not pruned."""
    places = places_in(value)
    if not places:
        return
    with Ledger(store / LEDGER_FILE) as ledger, ledger.transaction():  # under its lock, places are moved away
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
