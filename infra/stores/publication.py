"""Publish folders in an object store so that readers find all of a publication, verified, or the one before.

    <url>/<run name>/
      publication.json            written last, in one step; readers go by it: folders, and size and sha256 of files
      checkpoints/<digest>/       a checkpoint as it lies in the run directory, its manifest.json after its other files
      runs/<run id>-<digest>/     report.html, run.json, config.toml

Folders are named by their content and never change, so that an interrupted publication leaves the one before as it was,
goes on where it was, and a second one sends only what is not there. Nothing is deleted here.

Not here: single objects (object_store.py), fetching (download.py).
"""

import hashlib
import json
import logging
import math
import re
import secrets
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollouts.infra.errors import ObjectDamagedError, StoreRefusedError, StoreUnavailableError, TransientInfraError
from rollouts.infra.foreign_text import shown_line
from rollouts.infra.run_ids import short_id
from rollouts.infra.stores.object_store import MAX_OBJECTS, FileDigest, ObjectStore
from rollouts.infra.sync import receiver
from rollouts.infra.sync.push import list_files

FORMAT = 1
PUBLICATION, MANIFEST = "publication.json", "manifest.json"
CHECKPOINT_FOLDER = "checkpoints/{digest}"
PROBE = ".write-probe"
DIGEST_CHARS = 16
MAX_SIZE = (1 << 63) - 1
"""Bytes of a file."""
MAX_SHOWN_CHARACTERS = 200
NOT_OF_OURS = (ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError)
"""What reading something else than a manifest raises."""
_SHA256 = re.compile(r"[0-9a-f]{64}")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SentFolder:
    """A folder that lies in the store now."""

    folder: str
    """Its name in the store."""
    files: Mapping[str, FileDigest]
    """Its files, by their paths below the folder."""
    num_sent_bytes: int
    """What was not there before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """What the newest publication of a run's name holds."""

    run_id: str
    checkpoint: str
    """Folder of the checkpoint in the store."""
    records: str
    """Folder of report.html, run.json and config.toml in the store."""
    files: Mapping[str, tuple[int, str]]
    """Size and sha256 of every file, by its name in the store."""
    published_at: float
    """Seconds since 1970."""


def check_writable_store(store: ObjectStore) -> None:
    """Return if objects can be written and read there: writes one, and removes it where that is allowed.

    Raises:
        StoreRefusedError, StoreUnavailableError: one sentence.
    """
    probe = f"{PROBE}-{secrets.token_hex(4)}"  # runs of one name may begin at once
    content = f"{time.time_ns()}".encode()
    try:
        store.write(probe, content)
        is_right = store.read_small(probe) == content
    except (StoreRefusedError, StoreUnavailableError) as error:
        raise type(error)(str(error).replace(probe, PROBE)) from error
    if not is_right:
        raise StoreRefusedError(f"{store.url}/{PROBE} is not what was written: does somebody else write there?")
    try:
        store.remove(probe)
    except StoreRefusedError as error:  # publishing never removes anything
        logger.info("%s was left behind: %s", probe, error)


def publish_run(store: ObjectStore, *, run_id: str, checkpoint: Path, records: Mapping[str, Path]) -> int:
    """Make a checkpoint and the records of its run the publication of a store; returns how many bytes were sent.

    Raises:
        TransientInfraError: the connection broke, or a file changed meanwhile; the next call goes on from there.
        PermanentInfraError: the store refuses, or the checkpoint holds something else than plain files.
    """
    sent = send_folder(store, CHECKPOINT_FOLDER, {name: checkpoint / name for name in list_files(checkpoint)})
    noted = send_folder(store, f"runs/{short_id(run_id)}-{{digest}}", records)
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


def send_folder(store: ObjectStore, folder: str, files: Mapping[str, Path]) -> SentFolder:
    """Bring files to a folder of the store, each compared afterwards; what lies there already is not sent again.

    Args:
        folder: its name; "{digest}" in it becomes the beginning of a digest of all files.
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
    """What a folder of these files is called in the store, and their digests; see `send_folder`."""
    digests = {name: store.digest(path) for name, path in sorted(files.items())}
    total = hashlib.sha256("".join(f"{name}\0{each.sha256}\n" for name, each in digests.items()).encode())
    return folder.format(digest=total.hexdigest()[:DIGEST_CHARS]), digests


def find_missing(store: ObjectStore, place: str, digests: Mapping[str, FileDigest]) -> list[str]:
    """The files that are not in a folder of the store as they should be, in the order in which they are sent."""
    there = store.list(place)
    in_order = sorted(digests, key=lambda name: (Path(name).name == MANIFEST, name))
    return [
        name
        for name in in_order
        if f"{place}/{name}" not in there or not store.holds(f"{place}/{name}", there[f"{place}/{name}"], digests[name])
    ]


def read_publication(store: ObjectStore) -> Publication | None:
    """The publication of a store; None where there is none.

    Raises:
        ObjectDamagedError: it is none of this format.
    """
    content = store.read_small(PUBLICATION)
    return None if content is None else parse_publication(content, f"{store.url}/{PUBLICATION}")


def parse_publication(content: bytes, url: str) -> Publication:
    """The publication that a manifest describes.

    Raises:
        ObjectDamagedError: it is none of this format, or names files that leave their folder.
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
        raise ObjectDamagedError(f"{url} is no publication ({error.message}): publish again, or remove it") from error
    except NOT_OF_OURS as error:
        reason = shown_line(f"{error}")[:MAX_SHOWN_CHARACTERS]
        raise ObjectDamagedError(f"{url} is no publication ({reason}): publish again, or remove it") from error


def read_manifest_digests(store: ObjectStore) -> dict[str, tuple[int, str]]:
    """Size and sha256 of the files that a checkpoint's manifest.json lists; {} if it is something else.

    Raises:
        ObjectDamagedError: it lists digests, and a file that leaves its folder, or whose size or digest is none.
    """
    content = store.read_small(MANIFEST)
    try:
        listed = json.loads(content or b"{}").get("files", {})
        has_digests = any("sha256" in entry for entry in listed.values())
    except NOT_OF_OURS:
        return {}
    if not has_digests:
        return {}
    try:
        files = {name: _size_and_digest(entry) for name, entry in listed.items()}
        for name in files:
            receiver.check_name(name)
    except receiver.CopyError as error:
        raise ObjectDamagedError(f"{store.url}/{MANIFEST}: {error.message}") from error
    except NOT_OF_OURS as error:
        reason = shown_line(f"{error}")[:MAX_SHOWN_CHARACTERS]
        raise ObjectDamagedError(f"{store.url}/{MANIFEST} is damaged ({reason}): publish it again") from error
    return files


def _named_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:  # Any: JSON
    """An object of JSON; ValueError for a name that is there twice, of which readers take different ones."""
    named = dict(pairs)
    if len(named) < len(pairs):
        [(name, _)] = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"{name!r} is there twice")
    return named


def _size_and_digest(entry: Mapping[str, Any]) -> tuple[int, str]:  # Any: JSON
    size, sha256 = entry["size"], _text(entry["sha256"])
    if type(size) is not int or not 0 <= size <= MAX_SIZE:
        raise ValueError(f"no file has the size {size!r}")
    if not _SHA256.fullmatch(sha256):
        raise ValueError(f"{sha256!r} is no sha256")
    return size, sha256


def _text(value: Any) -> str:  # Any: JSON
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value
