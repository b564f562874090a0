"""Verify the result.json and the checkpoints of a finished stage. Move damaged files away, so that the stage reruns.

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
    """Describe the first damage in a stage's result.json or checkpoints. Returns "" for an intact or unfinished stage.

    Every checkpoint that has a digest in result.json must exist.
    """
    directory = RunDirectory(Path(stage.run_dir))
    try:
        digests = read_digests(directory)
    except ValueError as error:
        return f"{directory.result} is not readable ({error})"
    damages = (find_checkpoint_damage(directory.checkpoints / name, digest) for name, digest in digests.items())
    return next(filter(None, damages), "")


def is_finished(stage: Stage) -> bool:
    """True if the stage has a result.json and all checkpoints that result.json lists are intact."""
    return RunDirectory(Path(stage.run_dir)).result.is_file() and not find_damage(stage)


def set_damage_aside(stage: Stage) -> str:
    """Move damaged files of a stage to damaged-<n>/, so that the stage runs again. Returns the damage in words, or "".

    The moved files are result.json, the first damaged checkpoint and all later checkpoints. The next attempt resumes
    from the last intact checkpoint. If several runs find the damage at once, only one run moves the files.
    """
    if not find_damage(stage):
        return ""
    directory = RunDirectory(Path(stage.run_dir))
    with locked(directory.root / ".damage.lock"):
        if not (damage := find_damage(stage)):  # another run has already moved the files
            return ""
        # If a user has deleted a damaged-<n> folder, the number of these folders may be the n of an existing folder.
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
    logger.warning("stage %s will run again: %s", stage.name, damage)
    return damage


def read_digests(directory: RunDirectory) -> dict[str, str]:
    """The digests of the checkpoints in a stage's result.json, by checkpoint name and in order of steps.

    Raises:
        ValueError: result.json is not the record of a stage.
    """
    try:
        result = directory.read_result()
        entries = [] if result is None else result.get("checkpoints", [])
        # Entries of result.json without a digest are scores of an evaluation, not checkpoints.
        digests = {entry["name"]: entry["digest"] for entry in entries if "digest" in entry}
        others = [name for name in digests if not STEP_NAME.fullmatch(name)]
    except FileNotFoundError:  # another run has just moved result.json to damaged-<n>/
        return {}
    except (AttributeError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"the file is not the record of a stage: {error}") from error
    if others:  # a forged name such as ../x would make `set_damage_aside` move files of other folders
        raise ValueError(f"the file is not the record of a stage: {others[0]!r} is not the name of a checkpoint")
    return digests


def find_checkpoint_damage(path: Path, digest: str | None) -> str:
    """Describe a checkpoint's damage or wrong digest. Returns "" for an intact checkpoint.

    Args:
        digest: the expected digest; None accepts any digest.
    """
    try:
        manifest = verify_checkpoint(path)
    except CheckpointError as error:
        return str(error)
    return "" if digest in (None, manifest.digest) else f"{path} does not have the digest that result.json lists"
