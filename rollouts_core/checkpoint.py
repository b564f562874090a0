"""Checkpoints as directories with a manifest: written whole or not at all, verified before use.

Not here: what a backend puts into one (backends/pytorch.py), when one is written and gone on from (saving.py), how
checkpoints are compared (evaluate.py).

    step_000100/
      model.safetensors config.json tokenizer.json ...   Hugging Face layout: engines load it as it is
      trainer/state.json trainer/tensors.safetensors     to resume; no pickles
      adapter/                                           of adapters: the folder that PEFT loads
      manifest.json                                      written last: step, score, fingerprint of the settings, and
                                                         size and sha256 of every other file
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any

from rollouts_core.errors import CheckpointError
from rollouts_core.system.concurrency import read_each
from rollouts_core.system.files import link_or_copy, new_directory, remove_directory, write_json

logger = logging.getLogger(__name__)

FORMAT = 1
MANIFEST = "manifest.json"
BESIDE_MODEL = ("trainer/", "adapter/")
"""Folders of a checkpoint that are no part of its model."""
STEP_NAME = re.compile(r"step_(\d{6,})")
LOADABLE_SUFFIXES = frozenset({".safetensors", ".bin", ".pt", ".pth", ".py", ".json", ".jinja"})
"""Files that something which loads a checkpoint may read or run: none may lie there that the manifest does not list."""
SETTLED_NS = 2_000_000_000
"""A file that changed less than this ago is hashed anew each time: clocks of file systems are coarse."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """One file of a checkpoint."""

    size: int
    """Bytes."""
    sha256: str
    """Digest of the content, hex."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a checkpoint directory holds."""

    step: int
    """Training steps behind the weights."""
    files: dict[str, FileEntry]
    """Every file but the manifest, by its path inside the directory."""
    created_at: float
    """Seconds since 1970."""
    score: float | None = None
    """How good the policy was during the steps before, higher is better; None where nothing measured it."""
    settings: Mapping[str, Any] = field(default_factory=dict)  # Any: JSON
    """What it was trained with, by name (`saving.describe_settings`)."""
    is_early: bool = False
    """Whether it is there only because somebody ended the training at this step: who goes on needs it until the next
    one is whole, and a training that nobody ends does not have it."""

    @property
    def fingerprint(self) -> str:
        """The identity of the settings."""
        return hashlib.sha256(json.dumps(dict(self.settings), sort_keys=True).encode()).hexdigest()[:16]

    @property
    def content_digest(self) -> str:
        """One digest for every file."""
        return self._digest_of(sorted(self.files))

    @property
    def digest(self) -> str:
        """One digest for the model's content: weights, config and tokenizer, without what else is about its training.

        The adapters name the folder of the model that they were trained on, which differs between machines.
        """
        return self._digest_of(sorted(name for name in self.files if not name.startswith(BESIDE_MODEL)))

    def _digest_of(self, names: list[str]) -> str:
        total = hashlib.sha256()
        for name in names:
            total.update(f"{name}\0{self.files[name].sha256}\n".encode())
        return total.hexdigest()


@contextmanager
def new_checkpoint(
    path: Path,
    *,
    step: int,
    score: float | None = None,
    settings: Mapping[str, Any] | None = None,  # Any: JSON
    is_early: bool = False,
) -> Iterator[Path]:
    """A directory to write a checkpoint into; it appears at `path`, with its manifest, when the block succeeds."""
    with new_directory(path) as partial:
        yield partial
        files = {name: _describe(partial / name) for name in _file_names(partial)}
        manifest = Manifest(
            step=step,
            files=files,
            created_at=time.time(),
            score=score,
            settings=dict(settings or {}),
            is_early=is_early,
        )
        write_json(partial / MANIFEST, {"format": FORMAT, "fingerprint": manifest.fingerprint, **asdict(manifest)})


def load_manifest(path: Path) -> Manifest:
    """The manifest of a checkpoint, without looking at its files.

    Raises:
        CheckpointError: there is none, or none of this format.
    """
    try:
        raw = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        if raw["format"] != FORMAT:
            raise CheckpointError(f"{path} has manifest format {raw['format']}, this version reads {FORMAT}")
        return Manifest(
            step=_of_kind(raw["step"], int),
            files={name: _entry_of(name, entry) for name, entry in raw["files"].items()},
            created_at=_of_kind(raw["created_at"], float, int),
            score=_of_kind(raw.get("score"), float, int, type(None)),
            settings=_of_kind(raw.get("settings", {}), dict),
            is_early=_of_kind(raw.get("is_early", False), bool),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is not a whole checkpoint: no readable {MANIFEST} ({error})") from error


def _entry_of(name: str, entry: Mapping[str, Any]) -> FileEntry:  # Any: JSON
    if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
        raise ValueError(f"the file {name!r} would lie outside of the checkpoint")
    return FileEntry(size=_of_kind(entry["size"], int), sha256=_of_kind(entry["sha256"], str))


def _of_kind(value: Any, *kinds: type) -> Any:  # Any: JSON
    """The value if its type is one of these; True is no number, and no number has more than 64 bits."""
    if type(value) not in kinds or (isinstance(value, int) and value.bit_length() > 64):
        raise TypeError(f"expected {kinds[0].__name__}, found {value!r:.40}")
    return value


def verify_checkpoint(path: Path, *, by_size_alone: bool = False) -> Manifest:
    """The manifest of a checkpoint whose every file has the size and digest it was written with.

    A file that this process has hashed and nobody touched since is not read again.

    Args:
        by_size_alone: read no file but the manifest.

    Raises:
        CheckpointError: names the first file that is missing, differs, or was added.
    """
    manifest = load_manifest(path)

    def verify(name: str) -> None:
        try:
            _verify_file(path / name, manifest.files[name], by_size_alone=by_size_alone)
        except OSError as error:
            raise CheckpointError(f"checkpoint {path} lacks {name}, or it cannot be read ({error.strerror})") from error

    read_each(verify, manifest.files, num_bytes=0 if by_size_alone else sum(e.size for e in manifest.files.values()))
    for name in _file_names(path):
        if name != MANIFEST and name not in manifest.files and Path(name).suffix in LOADABLE_SUFFIXES:
            raise CheckpointError(f"{path / name} is not in the manifest of its checkpoint: it was added, remove it")
    return manifest


def _verify_file(file: Path, entry: FileEntry, *, by_size_alone: bool) -> None:
    if (size := file.stat().st_size) != entry.size:
        raise CheckpointError(f"{file} has {size} bytes, its manifest says {entry.size}: it was cut or changed")
    if not by_size_alone and _sha256(file) != entry.sha256:
        raise CheckpointError(f"{file} does not have the content that its manifest lists: it was changed")


def step_directory(parent: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return parent / f"step_{step:06d}"


def newest_step(parent: Path) -> int:
    """The step of a run's newest checkpoint; 0 without one."""
    return max((int(path.name.removeprefix("step_")) for path in list_checkpoints(parent)), default=0)


def list_checkpoints(parent: Path) -> list[Path]:
    """The checkpoints of a run by step, whole or not."""
    if not parent.is_dir():
        return []
    named = [(match, path) for path in parent.iterdir() if (match := STEP_NAME.fullmatch(path.name))]
    return [path for match, path in sorted(named, key=lambda pair: int(pair[0][1]))]


def latest_intact_checkpoint(parent: Path) -> Path | None:
    """The newest checkpoint that verifies; damaged ones are passed over loudly."""
    for path in reversed(list_checkpoints(parent)):
        try:
            verify_checkpoint(path)
        except CheckpointError as error:
            logger.warning("passed over a damaged checkpoint: %s", error)
            continue
        return path
    return None


def set_damaged_aside(parent: Path) -> list[Path]:
    """Rename checkpoints that do not verify, so that nothing offers them; returns their new paths.

    Those before the newest whole one are compared by size alone: a run that goes on needs none of them, reading them
    takes hours where they are large, and whoever loads one verifies it.
    """
    moved = []
    has_whole = False
    for path in reversed(list_checkpoints(parent)):
        try:
            verify_checkpoint(path, by_size_alone=has_whole)
        except CheckpointError as error:
            logger.warning("set a damaged checkpoint aside: %s", error)
            moved.append(path.rename(parent / f"damaged_{path.name}_{time.time_ns()}"))
        else:
            has_whole = True
    return sorted(moved)


def find_checkpoint(path: Path) -> Path:
    """The checkpoint that a path means: itself, or the newest in the folder of a run or of checkpoints.

    Raises:
        CheckpointError: there is none.
    """
    if (path / MANIFEST).is_file():
        return path
    for parent in (path / "checkpoints", path):
        if checkpoints := list_checkpoints(parent):
            return checkpoints[-1]
    raise CheckpointError(
        f"there is no checkpoint at {path}: give the folder of a checkpoint, or of a run that has one"
    )


def adopt_checkpoint(source: Path, parent: Path) -> Path:
    """Give a run a checkpoint of another run, as its own; returns where it lies.

    Raises:
        CheckpointError: it is damaged.
    """
    manifest = verify_checkpoint(source)
    path = step_directory(parent, manifest.step)
    with new_directory(path) as partial:
        for name in (*manifest.files, MANIFEST):  # anything else may be a link to a file of other people
            link_or_copy(source / name, partial / name)
    return path


def prune_checkpoints(
    parent: Path,
    *,
    newest: Path,
    keep: int,
    keep_best: int = 0,
    is_comparable: Callable[[Mapping[str, Any]], bool] = lambda settings: True,  # Any: JSON
) -> None:
    """Delete all checkpoints up to `newest` but the `keep` last and, besides, the `keep_best` with the highest scores.

    Those after it are of an attempt that went further and was not gone on from, because they are damaged. Early ones
    are neither counted nor kept once there is a newer one: the others are those of a training that nobody ended.

    Args:
        is_comparable: told what a checkpoint was trained with, whether its score is one that others compare with.
    """
    checkpoints = list_checkpoints(parent)
    if _is_early(newest):
        for path in checkpoints[: checkpoints.index(newest)]:
            if _is_early(path):
                remove_directory(path)
        return
    regular = [path for path in checkpoints[: checkpoints.index(newest)] if not _is_early(path)] + [newest]
    kept = {*regular[-keep:], *_best_of(regular, keep_best, is_comparable)}
    for path in checkpoints:
        if path not in kept:
            remove_directory(path)


def _best_of(
    checkpoints: list[Path], num_best: int, is_comparable: Callable[[Mapping[str, Any]], bool]
) -> list[Path]:  # Any: JSON
    """The checkpoints with the highest scores; of equals the earlier, and none without a score."""
    found = [(_score_of(path, is_comparable), path) for path in checkpoints if num_best]
    scored = [(score, path) for score, path in found if score is not None]
    return [path for _, path in sorted(scored, key=lambda pair: -pair[0])[:num_best]]


def _is_early(path: Path) -> bool:
    try:
        return load_manifest(path).is_early
    except CheckpointError:  # damaged: as good as any other that is kept or deleted by its place
        return False


def _score_of(path: Path, is_comparable: Callable[[Mapping[str, Any]], bool]) -> float | None:  # Any: JSON
    try:
        manifest = load_manifest(path)
        is_number = manifest.score is not None and math.isfinite(manifest.score)  # NaN would have no place in an order
        return manifest.score if is_number and is_comparable(manifest.settings) else None
    except CheckpointError as error:
        logger.warning("a damaged checkpoint has no score: %s", error)
        return None


def _file_names(root: Path) -> list[str]:
    return sorted(p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file())


def _describe(path: Path) -> FileEntry:
    return FileEntry(size=path.stat().st_size, sha256=_sha256(path))


def _sha256(path: Path) -> str:
    """The digest of a file, remembered as long as its inode says that nothing touched it."""
    stat = path.stat()
    changed_ns = max(stat.st_mtime_ns, stat.st_ctime_ns)
    if time.time_ns() - changed_ns < SETTLED_NS:
        return _hash_file(path)
    return _hash_unchanged_file(path, stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)


@lru_cache(maxsize=4096)
def _hash_unchanged_file(path: Path, *identity: int) -> str:
    return _hash_file(path)


def _hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
