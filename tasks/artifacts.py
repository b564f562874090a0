"""Is what a finished stage left still there and whole? And if not, make room for doing that part again.

Not here: running stages (stage.py), the format of checkpoints (rollouts_core/checkpoint.py).
"""

from __future__ import annotations

import logging
from itertools import count
from pathlib import Path

from rollouts.infra.locks import locked
from rollouts.tasks.records import Stage
from rollouts_core.checkpoint import STEP_NAME, list_checkpoints, verify_checkpoint
from rollouts_core.errors import CheckpointError
from rollouts_core.run_directory import RunDirectory

logger = logging.getLogger(__name__)


def find_damage(stage: Stage) -> str:
    """Why a stage's record cannot be used, in a sentence; "" when it is whole, or was never finished."""
    directory = RunDirectory(Path(stage.run_dir))
    try:
        digests = read_digests(directory)
    except ValueError as error:
        return f"{directory.result} is not readable ({error})"
    damages = (find_checkpoint_damage(directory.checkpoints / name, digest) for name, digest in digests.items())
    return next(filter(None, damages), "")


def is_finished(stage: Stage) -> bool:
    """True when the stage's record exists and everything it names is whole."""
    return RunDirectory(Path(stage.run_dir)).result.is_file() and not find_damage(stage)


def set_damage_aside(stage: Stage) -> str:
    """Make an unusable stage unfinished again; returns what was wrong, or "" when nothing was.

    Its record moves to damaged-<n>/, with its checkpoints from the first damaged or missing one on. The next attempt
    resumes from the last whole checkpoint before. If several runs find the damage at once, one moves it.
    """
    if not find_damage(stage):
        return ""
    directory = RunDirectory(Path(stage.run_dir))
    with locked(directory.root / ".damage.lock"):
        if not (damage := find_damage(stage)):  # another run was faster
            return ""
        # The number of files does not count: a user may have deleted the first ones to make room.
        aside = next(path for n in count(1) if not (path := directory.root / f"damaged-{n}").exists())
        aside.mkdir()
        try:
            digests = read_digests(directory)
        except ValueError:
            digests = {}
        is_whole = True
        paths = {*list_checkpoints(directory.checkpoints), *map(directory.checkpoints.joinpath, digests)}
        for path in sorted(paths, key=lambda path: (len(path.name), path.name)):
            is_whole = is_whole and not find_checkpoint_damage(path, digests.get(path.name))
            if not is_whole and path.exists():
                path.rename(aside / path.name)
        directory.result.rename(aside / directory.result.name)
    logger.warning("%s will be done again: %s", stage.name, damage)
    return damage


def read_digests(directory: RunDirectory) -> dict[str, str]:
    """The digest of each checkpoint of its own that a stage's record lists, by name, in order of steps.

    Raises:
        ValueError: the record is not one.
    """
    try:
        result = directory.read_result()
        entries = [] if result is None else result.get("checkpoints", [])
        # Entries without a digest are scores of an evaluation, not checkpoints of its own.
        digests = {entry["name"]: entry["digest"] for entry in entries if "digest" in entry}
        others = [name for name in digests if not STEP_NAME.fullmatch(name)]
    except FileNotFoundError:  # another run has set it aside this moment
        return {}
    except (AttributeError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"it is not the record of a stage: {error}") from error
    if others:  # the record is the node's word, and what it names is moved when it is damaged
        raise ValueError(f"it is not the record of a stage: {others[0]!r} is no checkpoint of it")
    return digests


def find_checkpoint_damage(path: Path, digest: str | None) -> str:
    """Why a checkpoint is not the one with this digest, or not whole, in a sentence; "" when it is."""
    try:
        manifest = verify_checkpoint(path)
    except CheckpointError as error:
        return str(error)
    return "" if digest in (None, manifest.digest) else f"{path} is not the checkpoint that its result.json lists"
