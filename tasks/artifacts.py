"""Is what a finished stage left still there and whole? And if not, make room for doing that part again.

Not here: running stages (stage.py), the format of checkpoints (rollouts_core/checkpoint.py).
"""

from __future__ import annotations

import logging
from pathlib import Path

from rollouts_core.checkpoint import list_checkpoints, verify_checkpoint
from rollouts_core.errors import CheckpointError
from rollouts_core.run_directory import RunDirectory
from tasks.records import Stage

logger = logging.getLogger(__name__)


def find_damage(stage: Stage) -> str:
    """Why a stage's record cannot be used, in a sentence; "" when it is whole, or was never finished."""
    directory = RunDirectory(Path(stage.run_dir))
    try:
        result = directory.read_result()
    except ValueError as error:
        return f"{directory.result} is not readable ({error})"
    for entry in (result or {}).get("checkpoints", []):
        if "digest" not in entry:  # scores of an evaluation, not checkpoints of its own
            continue
        path = directory.checkpoints / entry["name"]
        try:
            manifest = verify_checkpoint(path)
        except CheckpointError as error:
            return str(error)
        if manifest.digest != entry["digest"]:
            return f"{path} is not the checkpoint that {directory.result} lists"
    return ""


def is_finished(stage: Stage) -> bool:
    """True when the stage's record exists and everything it names is whole."""
    return RunDirectory(Path(stage.run_dir)).result.is_file() and not find_damage(stage)


def set_damage_aside(stage: Stage) -> str:
    """Make an unusable stage unfinished again; returns what was wrong, or "" when nothing was.

    Its record, and its checkpoints from the first damaged one on, move to damaged-<n>/, so that the next attempt
    trains them again from the last whole one before.
    """
    if not (damage := find_damage(stage)):
        return ""
    directory = RunDirectory(Path(stage.run_dir))
    aside = directory.root / f"damaged-{sum(1 for _ in directory.root.glob('damaged-*')) + 1}"
    aside.mkdir()
    is_whole = True
    for path in list_checkpoints(directory.checkpoints):
        is_whole = is_whole and _verifies(path)
        if not is_whole:
            path.rename(aside / path.name)
    directory.result.rename(aside / directory.result.name)
    logger.warning("%s will be done again: %s", stage.name, damage)
    return damage


def _verifies(path: Path) -> bool:
    try:
        verify_checkpoint(path)
    except CheckpointError:
        return False
    return True
