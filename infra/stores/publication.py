"""Publish a run's checkpoint and records in an object store, and the checkpoints of a running training.

A reader always finds a complete, verified publication: the new publication, or the previous publication.

    <url>/<run name>/
      publication.json            written last, atomically; lists the folders, and size and sha256 of their files
      checkpoints/<digest>/       the files of the run directory's checkpoint, its manifest.json last
      runs/<run id>-<digest>/     report.html, run.json, config.toml

Folders are named by a digest of their content and never change. An interrupted upload therefore leaves the previous
publication intact, and the next attempt uploads only the missing files. Publishing never deletes anything.

Not here: single objects (object_store.py), downloads (download.py).
"""

import hashlib
import json
import logging
import math
import re
import secrets
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollouts.infra.errors import (
    InfraError,
    ObjectDamagedError,
    StoreRefusedError,
    StoreUnavailableError,
    TransientInfraError,
)
from rollouts.infra.foreign_text import shown_line
from rollouts.infra.repeating import repeating
from rollouts.infra.run_ids import short_id
from rollouts.infra.stores.object_store import MAX_OBJECTS, FileDigest, ObjectStore
from rollouts.infra.sync import receiver
from rollouts.infra.sync.push import list_files

FORMAT = 1
PUBLICATION, MANIFEST = "publication.json", "manifest.json"
CHECKPOINT_FOLDER = "checkpoints/{digest}"
PROBE = ".write-probe"
_DIGEST_CHARS = 16
_MAX_SIZE = (1 << 63) - 1
MAX_SHOWN_CHARACTERS = 200
_NOT_OF_OURS = (ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError)
"""Exceptions that parsing raises if a file is not a manifest or publication."""
_SHA256 = re.compile(r"[0-9a-f]{64}")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SentFolder:
    folder: str
    files: Mapping[str, FileDigest]
    num_sent_bytes: int
    """Number of uploaded bytes. Files that the store already had do not count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """The newest publication under a run's name."""

    run_id: str
    checkpoint: str
    records: str
    """Folder of report.html, run.json and config.toml in the store."""
    files: Mapping[str, tuple[int, str]]
    """Size and sha256 of every file, by its name in the store."""
    published_at: float


def check_writable_store(store: ObjectStore) -> None:
    """Check that the store accepts writes. Writes and reads a test object, and removes the object if the store permits
    deletion.

    Raises:
        StoreRefusedError, StoreUnavailableError: the store cannot be written. The error's text is one sentence.
    """
    probe = f"{PROBE}-{secrets.token_hex(4)}"  # runs of the same name may start at the same time
    content = f"{time.time_ns()}".encode()
    try:
        store.write(probe, content)
        is_right = store.read_small(probe) == content
    except (StoreRefusedError, StoreUnavailableError) as error:
        raise type(error)(str(error).replace(probe, PROBE)) from error
    if not is_right:
        raise StoreRefusedError(f"{store.url}/{PROBE} is not what was written: does another program write there?")
    try:
        store.remove(probe)
    except StoreRefusedError as error:  # publishing works without permission to delete
        logger.info("%s was left behind: %s", probe, error)


def publish_run(store: ObjectStore, *, run_id: str, checkpoint: Path, records: Mapping[str, Path]) -> int:
    """Publish a checkpoint and the records of its run in a store. Returns the number of uploaded bytes.

    Raises:
        TransientInfraError: the connection broke, or a file changed meanwhile. The next call uploads only the missing
            files.
        PermanentInfraError: the store refuses the upload, or the checkpoint contains something other than plain files.
    """
    sent = _send_folder(store, CHECKPOINT_FOLDER, {name: checkpoint / name for name in list_files(checkpoint)})
    noted = _send_folder(store, f"runs/{short_id(run_id)}-{{digest}}", records)
    files = {f"{each.folder}/{name}": digest for each in (sent, noted) for name, digest in each.files.items()}
    content = {
        "format": FORMAT,
        "run_id": run_id,
        "checkpoint": sent.folder,
        "records": noted.folder,
        "files": {name: {"size": digest.size, "sha256": digest.sha256} for name, digest in files.items()},
        "published_at": time.time(),
    }
    store.write(PUBLICATION, json.dumps(content, indent=1).encode())
    return sent.num_sent_bytes + noted.num_sent_bytes


def _send_folder(store: ObjectStore, folder: str, files: Mapping[str, Path]) -> SentFolder:
    """Upload files to a folder of the store and verify each file. Files that the store already has are skipped.

    Args:
        folder: the folder's name. "{digest}" in the name is replaced by the start of a digest of all files.
    """
    try:
        place, digests = digest_folder(store, folder, files)
        missing = find_missing(store, place, digests)
        for name in missing:
            store.upload(f"{place}/{name}", files[name], digests[name])
    except FileNotFoundError as error:
        raise TransientInfraError(f"{error.filename} was removed while it was published") from error
    num_sent_bytes = sum(digests[name].size for name in missing)
    return SentFolder(folder=place, files=digests, num_sent_bytes=num_sent_bytes)


def digest_folder(store: ObjectStore, folder: str, files: Mapping[str, Path]) -> tuple[str, dict[str, FileDigest]]:
    """Return the folder's name in the store for these files, and the files' digests; see `_send_folder`."""
    digests = {name: store.digest(path) for name, path in sorted(files.items())}
    total = hashlib.sha256("".join(f"{name}\0{each.sha256}\n" for name, each in digests.items()).encode())
    return folder.format(digest=total.hexdigest()[:_DIGEST_CHARS]), digests


def find_missing(store: ObjectStore, place: str, digests: Mapping[str, FileDigest]) -> list[str]:
    """Return the files that a folder of the store lacks or has with other content, in the order of the upload."""
    there = store.list(place)
    in_order = sorted(digests, key=lambda name: (Path(name).name == MANIFEST, name))
    return [
        name
        for name in in_order
        if f"{place}/{name}" not in there or not store.holds(f"{place}/{name}", there[f"{place}/{name}"], digests[name])
    ]


def read_publication(store: ObjectStore) -> Publication | None:
    """Return the store's publication, or None if the store has no publication.

    Raises:
        ObjectDamagedError: publication.json is damaged or has another format.
    """
    content = store.read_small(PUBLICATION)
    return None if content is None else parse_publication(content, f"{store.url}/{PUBLICATION}")


def parse_publication(content: bytes, url: str) -> Publication:
    """Parse a publication.json.

    Raises:
        ObjectDamagedError: the content is not a valid publication, or names files outside their folder.
    """
    try:
        raw = json.loads(content, object_pairs_hook=_named_once)
        if raw["format"] != FORMAT:
            raise ObjectDamagedError(f"{url} has format {raw['format']!r:.40}, this version reads {FORMAT}")
        files = {name: _size_and_digest(entry) for name, entry in raw["files"].items()}
        if len(files) > MAX_OBJECTS:
            raise ValueError(f"it names {len(files)} files, the limit is {MAX_OBJECTS}")
        folders = {name: _text(raw[name]) for name in ("checkpoint", "records")}
        for name in (*files, *folders.values()):
            receiver.check_name(name)
        if not any(name.startswith(f"{folders['checkpoint']}/") for name in files):
            raise ValueError(f"it names no file of its checkpoint {folders['checkpoint']}")
        published_at = float(raw["published_at"])
        if not math.isfinite(published_at):
            raise ValueError(f"published_at is {published_at}")
        return Publication(run_id=_text(raw["run_id"]), files=files, published_at=published_at, **folders)
    except receiver.CopyError as error:
        raise ObjectDamagedError(
            f"{url} is not a publication ({error.message}): publish again, or remove it"
        ) from error
    except _NOT_OF_OURS as error:
        reason = shown_line(f"{error}")[:MAX_SHOWN_CHARACTERS]
        raise ObjectDamagedError(f"{url} is not a publication ({reason}): publish again, or remove it") from error


def read_manifest_digests(store: ObjectStore) -> dict[str, tuple[int, str]]:
    """Return size and sha256 of the files in a checkpoint's manifest.json, or an empty dict if the manifest lists no
    digests.

    Raises:
        ObjectDamagedError: the manifest lists an invalid size or digest, or a file outside its folder.
    """
    content = store.read_small(MANIFEST)
    try:
        listed = json.loads(content or b"{}").get("files", {})
        has_digests = any("sha256" in entry for entry in listed.values())
    except _NOT_OF_OURS:
        return {}
    if not has_digests:
        return {}
    try:
        files = {name: _size_and_digest(entry) for name, entry in listed.items()}
        for name in files:
            receiver.check_name(name)
    except receiver.CopyError as error:
        raise ObjectDamagedError(f"{store.url}/{MANIFEST}: {error.message}") from error
    except _NOT_OF_OURS as error:
        reason = shown_line(f"{error}")[:MAX_SHOWN_CHARACTERS]
        raise ObjectDamagedError(f"{store.url}/{MANIFEST} is damaged ({reason}): publish it again") from error
    return files


def _named_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:  # Any: JSON
    """Convert pairs to a JSON object. Raises ValueError for a repeated name, because JSON readers disagree about its
    value."""
    named = dict(pairs)
    if len(named) < len(pairs):
        [(name, _)] = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"{name!r} occurs twice")
    return named


def _size_and_digest(entry: Mapping[str, Any]) -> tuple[int, str]:  # Any: JSON
    size, sha256 = entry["size"], _text(entry["sha256"])
    if type(size) is not int or not 0 <= size <= _MAX_SIZE:
        raise ValueError(f"a file cannot have the size {size!r}")
    if not _SHA256.fullmatch(sha256):
        raise ValueError(f"{sha256!r} is not a sha256")
    return size, sha256


def _text(value: Any) -> str:  # Any: JSON
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a text")
    return value


# ── checkpoints of a running training ──


_UPLOAD_INTERVAL_S = 30.0


@contextmanager
def checkpoints_published(checkpoints: Path, url: str, *, interval_s: float = _UPLOAD_INTERVAL_S) -> Iterator[None]:
    """Upload the newest checkpoint of a folder to `url` at intervals while the block runs. A failed upload is logged,
    and retried at the next interval.

    At the end of the block, the newest checkpoint is uploaded, unless the block raised an exception.
    """
    published = ""

    def publish() -> None:
        nonlocal published
        newest = _newest_checkpoint(checkpoints)
        if newest is None or newest.name == published:
            return
        try:
            _send_folder(ObjectStore(url), newest.name, {name: newest / name for name in list_files(newest)})
            published = newest.name
        except (InfraError, OSError) as error:  # OSError: the training may have deleted the checkpoint
            logger.warning("%s was not published: %s", newest, error)

    with repeating(publish, interval_s=interval_s, thread_name=f"publication of {checkpoints}", once_more=True):
        yield


def _newest_checkpoint(checkpoints: Path) -> Path | None:
    """Return the newest complete checkpoint of a folder, or None if the folder has no complete checkpoint."""
    whole = [path.parent for path in checkpoints.glob(f"step_*/{MANIFEST}")]
    return max(whole, key=lambda path: (len(path.name), path.name), default=None)
