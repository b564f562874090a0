"""The format of checkpoints: directories with a manifest, written atomically and verified before use.

`run_checkpoints.py` writes checkpoints and resumes from them. A training backend defines the files in `trainer/`
(`backends/training_state.py`).

    step_000100/
      model.safetensors config.json tokenizer.json ...   Hugging Face layout: engines load it directly
      trainer/state.json trainer/tensors.safetensors     to resume; no pickles
      adapter/                                           with LoRA: the folder that PEFT loads
      manifest.json                                      written last: step, fingerprint of the settings, size and
                                                         sha256 of every other file
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any

from rollouts_core.errors import CheckpointError
from rollouts_core.roll_back import read_roll_back
from rollouts_core.run_directory import RunDirectory
from rollouts_core.system.concurrency import read_each
from rollouts_core.system.files import link_or_copy, new_directory, remove_directory, write_json

logger = logging.getLogger(__name__)

FORMAT = 1
MANIFEST = "manifest.json"
BESIDE_MODEL = ("trainer/", "adapter/")
"""Folders of a checkpoint whose files do not count for the digest of its model."""
STEP_NAME = re.compile(r"step_(\d{6,})")
LOADABLE_SUFFIXES = frozenset({".safetensors", ".bin", ".pt", ".pth", ".py", ".json", ".jinja"})
"""Suffixes of files that a program may load or run from a checkpoint. A file with one of these suffixes must be in the
manifest."""
SETTLED_NS = 2_000_000_000
"""Nanoseconds. A file that changed more recently is always hashed again, because the coarse clocks of file systems may
hide its next change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """One file of a checkpoint."""

    size: int
    """Size of the file, bytes."""
    sha256: str
    """Digest of the content, hex."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Content of a checkpoint's manifest.json."""

    step: int
    """Number of training steps done before the checkpoint was written."""
    files: dict[str, FileEntry]
    """Every file except the manifest, by its path inside the directory."""
    created_at: float
    """Time of writing, seconds since 1970."""
    settings: Mapping[str, Any] = field(default_factory=dict)  # Any: JSON
    """Settings and inputs of the training, by name (`run_checkpoints.describe_settings`)."""
    is_early: bool = False
    """True if the checkpoint was written only because the user stopped the training. A resumed run deletes the early
    checkpoint after its next checkpoint, so that the run ends with the same checkpoints as a run that was never
    stopped."""

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(json.dumps(dict(self.settings), sort_keys=True).encode()).hexdigest()[:16]

    @property
    def content_digest(self) -> str:
        """One digest over all files of the checkpoint."""
        return self._digest_of(sorted(self.files))

    @property
    def digest(self) -> str:
        """One digest over the files of the model: weights, config and tokenizer.

        The folder `adapter/` is left out, because its settings contain the path of the base model, which differs
        between machines.
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
    settings: Mapping[str, Any] | None = None,  # Any: JSON
    is_early: bool = False,
) -> Iterator[Path]:
    """Yield a temporary directory to fill.

    When the `with` block ends without an error, the manifest is written and the directory is renamed to `path`.
    """
    with new_directory(path) as partial:
        yield partial
        files = {name: _describe(partial / name) for name in _file_names(partial)}
        manifest = Manifest(
            step=step,
            files=files,
            created_at=time.time(),
            settings=dict(settings or {}),
            is_early=is_early,
        )
        write_json(partial / MANIFEST, {"format": FORMAT, "fingerprint": manifest.fingerprint, **asdict(manifest)})


def load_manifest(path: Path) -> Manifest:
    """Read the manifest of a checkpoint. The listed files are not checked.

    Raises:
        CheckpointError: the manifest is missing, unreadable or has another format version.
    """
    try:
        raw = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        if raw["format"] != FORMAT:
            raise CheckpointError(f"{path} has manifest format {raw['format']}, this version reads {FORMAT}")
        return Manifest(
            step=_of_kind(raw["step"], int),
            files={name: _entry_of(name, entry) for name, entry in raw["files"].items()},
            created_at=_of_kind(raw["created_at"], float, int),
            settings=_of_kind(raw.get("settings", {}), dict),
            is_early=_of_kind(raw.get("is_early", False), bool),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is not a whole checkpoint: no readable {MANIFEST} ({error})") from error


def _entry_of(name: str, entry: Mapping[str, Any]) -> FileEntry:  # Any: JSON
    if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
        raise ValueError(f"the file {name!r} would be outside the checkpoint")
    return FileEntry(size=_of_kind(entry["size"], int), sha256=_of_kind(entry["sha256"], str))


def _of_kind(value: Any, *kinds: type) -> Any:  # Any: JSON
    """Return `value` if its type is one of `kinds`.

    Raises TypeError for booleans and for integers of more than 64 bits.
    """
    if type(value) not in kinds or (isinstance(value, int) and value.bit_length() > 64):
        raise TypeError(f"expected {kinds[0].__name__}, found {value!r:.40}")
    return value


def verify_checkpoint(path: Path, *, by_size_alone: bool = False) -> Manifest:
    """Check every file of a checkpoint against its manifest and return the manifest.

    A file is not read again if this process has hashed it and its inode shows no change since then.

    Args:
        by_size_alone: compare sizes only, without reading the files.

    Raises:
        CheckpointError: a file is missing, differs from the manifest, or was added. The message names the first wrong
            file.
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
            raise CheckpointError(f"{path / name} is not in the manifest of its checkpoint: remove the added file")
    return manifest


def _verify_file(file: Path, entry: FileEntry, *, by_size_alone: bool) -> None:
    if (size := file.stat().st_size) != entry.size:
        raise CheckpointError(f"{file} has {size} bytes, its manifest says {entry.size}: truncated or changed")
    if not by_size_alone and _sha256(file) != entry.sha256:
        raise CheckpointError(f"{file} does not have the content that its manifest lists: it was changed")


def step_directory(parent: Path, step: int) -> Path:
    return parent / f"step_{step:06d}"


def newest_step(parent: Path) -> int:
    """The step number of a run's newest checkpoint; 0 if the run has no checkpoint."""
    return max((int(path.name.removeprefix("step_")) for path in list_checkpoints(parent)), default=0)


def list_checkpoints(parent: Path) -> list[Path]:
    """The checkpoint folders of a run, sorted by step, including damaged checkpoints."""
    if not parent.is_dir():
        return []
    named = [(match, path) for path in parent.iterdir() if (match := STEP_NAME.fullmatch(path.name))]
    return [path for match, path in sorted(named, key=lambda pair: int(pair[0][1]))]


def latest_intact_checkpoint(parent: Path) -> Path | None:
    """The newest checkpoint that passes `verify_checkpoint`. Damaged checkpoints are skipped with a warning."""
    for path in reversed(list_checkpoints(parent)):
        try:
            verify_checkpoint(path)
        except CheckpointError as error:
            logger.warning("skipped a damaged checkpoint: %s", error)
            continue
        return path
    return None


def set_damaged_aside(parent: Path) -> list[Path]:
    """Rename damaged checkpoints, so that no run loads them, and return their new paths.

    Checkpoints before the newest intact checkpoint are compared by file size only, because hashing can take hours and a
    resumed run does not need them. Every checkpoint is verified completely before it is loaded.
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
    """Return the checkpoint at a path: the path itself, or the newest checkpoint in a run's folder or `checkpoints`
    folder. If a rule rolled the run back, its folder stands for the best checkpoint.

    Raises:
        CheckpointError: there is no checkpoint at the path.
    """
    if (path / MANIFEST).is_file():
        return path
    if (best := _best_of_rolled_back(path)) is not None:
        return best
    for parent in (path / "checkpoints", path):
        if checkpoints := list_checkpoints(parent):
            return checkpoints[-1]
    raise CheckpointError(
        f"there is no checkpoint at {path}: give the folder of a checkpoint, or of a run that has one"
    )


def _best_of_rolled_back(run_dir: Path) -> Path | None:
    """The best checkpoint of a run that a rule rolled back; None for other runs."""
    with suppress(OSError, ValueError, AttributeError):  # result.json is missing, damaged or of another kind
        if roll_back := read_roll_back(RunDirectory(run_dir).read_result() or {}):
            best = step_directory(run_dir / "checkpoints", roll_back.step)
            return best if best.is_dir() else None
    return None


def adopt_checkpoint(source: Path, parent: Path) -> Path:
    """Copy a checkpoint of another run into this run's folder and return the new path.

    Raises:
        CheckpointError: the checkpoint at `source` is damaged.
    """
    manifest = verify_checkpoint(source)
    path = step_directory(parent, manifest.step)
    with new_directory(path) as partial:
        # copy only listed files, because another file could be a link to another user's file
        for name in (*manifest.files, MANIFEST):
            link_or_copy(source / name, partial / name)
    return path


def prune_checkpoints(parent: Path, *, newest: Path, keep: int, best: Iterable[int] = ()) -> None:
    """Delete all checkpoints except `newest`, the last `keep` checkpoints, and the checkpoints of the steps in `best`.

    Checkpoints after `newest` are deleted: they are damaged leftovers of an earlier attempt. A checkpoint that was
    written only because the user stopped the run does not count as one of the last `keep`, and is deleted as soon as a
    newer checkpoint exists. The run then ends with the same checkpoints as a run that was never stopped.
    """
    checkpoints = list_checkpoints(parent)
    if _is_early(newest):
        for path in checkpoints[: checkpoints.index(newest)]:
            if _is_early(path):
                remove_directory(path)
        return
    regular = [path for path in checkpoints[: checkpoints.index(newest)] if not _is_early(path)] + [newest]
    kept = {*regular[-keep:], *({step_directory(parent, step) for step in best} & set(regular))}
    for path in checkpoints:
        if path not in kept:
            remove_directory(path)


def _is_early(path: Path) -> bool:
    try:
        return load_manifest(path).is_early
    except CheckpointError:  # a damaged checkpoint is kept or deleted by its step, as a regular checkpoint
        return False


def _file_names(root: Path) -> list[str]:
    return sorted(p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file())


def _describe(path: Path) -> FileEntry:
    return FileEntry(size=path.stat().st_size, sha256=_sha256(path))


def _sha256(path: Path) -> str:
    """Return the sha256 of a file. The result is cached as long as the file's inode, size and times do not change."""
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
