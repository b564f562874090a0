"""Checkpoints as directories with a manifest: written whole or not at all, verified before use.

Not here: what a backend puts into one (pytorch_backend.py), which one is best (evaluate.py).

    step_000100/
      model.safetensors config.json tokenizer.json ...   Hugging Face layout: engines load it as it is
      trainer/state.json trainer/tensors.safetensors     to resume; no pickles
      manifest.json                                      written last: step, size and sha256 of every other file
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import shutil
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from rollouts_core.errors import CheckpointError
from rollouts_core.files import new_directory, write_json

logger = logging.getLogger(__name__)

FORMAT = 1
MANIFEST = "manifest.json"
HASH_BLOCK_BYTES = 1 << 20
STEP_NAME = re.compile(r"step_(\d{6,})")


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

    @property
    def digest(self) -> str:
        """One digest for the model's content: weights, config and tokenizer, without the trainer's state."""
        total = hashlib.sha256()
        for name in sorted(name for name in self.files if not name.startswith("trainer/")):
            total.update(f"{name}\0{self.files[name].sha256}\n".encode())
        return total.hexdigest()


@contextmanager
def new_checkpoint(path: Path, *, step: int) -> Iterator[Path]:
    """A directory to write a checkpoint into; it appears at `path`, with its manifest, when the block succeeds."""
    with new_directory(path) as partial:
        yield partial
        files = {name: _describe(partial / name) for name in _file_names(partial)}
        manifest = Manifest(step=step, files=files, created_at=time.time())
        write_json(partial / MANIFEST, {"format": FORMAT, **asdict(manifest)})


def load_manifest(path: Path) -> Manifest:
    """The manifest of a checkpoint, without looking at its files.

    Raises:
        CheckpointError: there is none, or none of this format.
    """
    try:
        raw = json.loads((path / MANIFEST).read_text())
        if raw["format"] != FORMAT:
            raise CheckpointError(f"{path} has manifest format {raw['format']}, this version reads {FORMAT}")
        files = {name: FileEntry(**entry) for name, entry in raw["files"].items()}
        return Manifest(step=raw["step"], files=files, created_at=raw["created_at"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is not a whole checkpoint: no readable {MANIFEST} ({error})") from error


def verify_checkpoint(path: Path) -> Manifest:
    """The manifest of a checkpoint whose every file has the size and digest it was written with.

    Raises:
        CheckpointError: names the first file that is missing or differs.
    """
    manifest = load_manifest(path)
    for name, entry in manifest.files.items():
        try:
            _verify_file(path / name, entry)
        except OSError as error:
            raise CheckpointError(f"checkpoint {path} lacks {name}, or it cannot be read ({error.strerror})") from error
    return manifest


def _verify_file(file: Path, entry: FileEntry) -> None:
    if (size := file.stat().st_size) != entry.size:
        raise CheckpointError(f"{file} has {size} bytes, its manifest says {entry.size}: it was cut or changed")
    if _sha256(file) != entry.sha256:
        raise CheckpointError(f"{file} does not have the content that its manifest lists: it was changed")


def step_directory(parent: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return parent / f"step_{step:06d}"


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
    """Rename checkpoints that do not verify, so that nothing offers them; returns their new paths."""
    moved = []
    for path in list_checkpoints(parent):
        try:
            verify_checkpoint(path)
        except CheckpointError as error:
            logger.warning("set a damaged checkpoint aside: %s", error)
            moved.append(path.rename(parent / f"damaged_{path.name}_{time.time_ns()}"))
    return moved


def prune_checkpoints(parent: Path, *, newest: Path, keep: int) -> None:
    """Delete all but the `keep` last checkpoints up to `newest`.

    Those after it are of an attempt that went further and was not gone on from, because they are damaged.
    """
    checkpoints = list_checkpoints(parent)
    place = checkpoints.index(newest)
    for path in checkpoints[: max(0, place + 1 - keep)] + checkpoints[place + 1 :]:
        shutil.rmtree(path)


def estimate_checkpoint_bytes(model_dir: Path) -> int:
    """How large a training checkpoint of the model in a folder gets, in bytes; 0 where no weights lie there.

    Weights in float32 and AdamW's two moving averages, from the sizes of the safetensors files.
    """
    stored = sum(path.stat().st_size for path in model_dir.glob("*.safetensors"))
    return 3 * stored


def tensor_digests(directory: Path) -> dict[str, str]:
    """sha256 of the raw bytes of every tensor in the safetensors files of a directory, by name.

    Source of the layout: the safetensors format (8 bytes of header length, JSON header, data).
    """
    digests: dict[str, str] = {}
    for path in sorted(directory.glob("*.safetensors")):
        with path.open("rb") as file:
            (header_bytes,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(header_bytes))
            for name, entry in header.items():
                if name != "__metadata__":
                    start, end = entry["data_offsets"]
                    file.seek(8 + header_bytes + start)
                    digests[name] = hashlib.sha256(file.read(end - start)).hexdigest()
    return digests


def _file_names(root: Path) -> list[str]:
    return sorted(p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file())


def _describe(path: Path) -> FileEntry:
    return FileEntry(size=path.stat().st_size, sha256=_sha256(path))


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(HASH_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()
