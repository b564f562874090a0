"""Download a folder or file from an object store, verified and all at once. An interrupted download continues.

    a publication, a folder or one object ──> files with sizes and digests        (find_wanted)
    several pieces at a time, in order    ──> .<name>.incoming-<digest>/          complete files
                                              .<name>.incoming-<digest>/.parts/   incomplete files
    all files checked                     ──> <name>                              renamed

A file is checked by the sha256 of a manifest. Without a manifest, it is checked by the store's MD5, if the store has
one of the whole file. Its size is always checked, and also that the object did not change during the download.

Not here: single objects (object_store.py), manifests (publication.py).
"""

import fcntl
import glob
import hashlib
import json
import os
import shutil
import stat
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from rollouts.infra.errors import (
    DiskFullError,
    ObjectDamagedError,
    ObjectMissingError,
    PermanentInfraError,
    StoreUnavailableError,
)
from rollouts.infra.locks import is_locked, locked
from rollouts.infra.stores.object_store import ObjectStore, StoredObject
from rollouts.infra.stores.publication import MANIFEST, read_manifest_digests, read_publication
from rollouts.infra.stores.shared_folder import PRIVATE
from rollouts.infra.sync import receiver

PIECE_BYTES = 8 << 20
NUM_STREAMS = 8
"""Number of pieces that are downloaded at a time."""
_INCOMING = ".incoming-"
_PARTS = ".parts"
_HASH_BYTES = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedFile:
    """A file to download."""

    name: str
    """Its path below the folder."""
    key: str
    """Its name in the store."""
    size: int
    sha256: str = ""
    """Its digest in a manifest; empty if no manifest lists it."""
    md5: str = ""
    """The store's digest of the whole file, in hex; empty if a manifest lists the file, or the store has none."""
    identity: str = ""
    """The store's identifier of the content; empty if a manifest lists the file. It need not be a digest, so it is only
    compared with the store's identifier after the download."""


@dataclass(frozen=True, slots=True)
class _Piece:
    file: WantedFile
    start: int
    end: int


def find_wanted(store: ObjectStore) -> list[WantedFile]:
    """Return the files of a URL: the checkpoint of a publication, or all objects below the URL, or the object itself.

    Raises:
        ObjectMissingError: the store has nothing there.
        PermanentInfraError: a file name is refused.
    """
    if (publication := read_publication(store)) is not None:
        start = len(publication.checkpoint) + 1
        wanted = [
            WantedFile(name=key[start:], key=key, size=size, sha256=sha256)
            for key, (size, sha256) in publication.files.items()
            if key.startswith(f"{publication.checkpoint}/")
        ]
        for each in wanted:
            _check_name(each.name, store)
        return wanted
    objects = _without_markers(store, _list_with_itself(store))
    if not objects:
        raise ObjectMissingError(f"there is nothing at {store.url}: correct the URL")
    listed = read_manifest_digests(store) if MANIFEST in objects else {}
    if missing := sorted(listed.keys() - objects.keys()):
        raise ObjectDamagedError(f"{store.url}/{missing[0]} is listed in {MANIFEST} and missing: publish it again")
    wanted = []
    for key, there in objects.items():
        name = key or store.name
        _check_name(name, store)
        if key in listed:
            size, sha256 = listed[key]
            wanted.append(WantedFile(name=name, key=key, size=size, sha256=sha256))
        elif not listed or key == MANIFEST:  # files that the manifest does not list do not belong to its folder
            md5 = "" if "-" in there.md5 else there.md5
            wanted.append(WantedFile(name=name, key=key, size=there.size, identity=there.identity, md5=md5))
    return wanted


def _list_with_itself(store: ObjectStore) -> dict[str, StoredObject]:
    """List all objects below a URL, and the object at the URL itself, which drivers omit if it is also a folder."""
    objects = store.list()
    if objects and "" not in objects and (itself := store.find("")) is not None:
        return {"": itself, **objects}
    return objects


def _without_markers(store: ObjectStore, objects: Mapping[str, StoredObject]) -> dict[str, StoredObject]:
    """Return the objects without the empty ones that mark a folder, which some tools create.

    Raises:
        PermanentInfraError: an object and a folder have the same name, which a disk does not allow.
    """
    folders = {folder: key for key in objects for folder in _folders_of(key)}
    for key in sorted(objects.keys() & folders.keys()):
        if objects[key].size:
            raise PermanentInfraError(
                f"{store.url_of(key)} is an object, and also a folder with {folders[key]}, which a disk does not "
                "allow: rename or remove one of them, or give the URL of the wanted object in the folder"
            )
    return {key: there for key, there in objects.items() if key not in folders}


def _folders_of(key: str) -> list[str]:
    """Return the folders of an object's name, from "" on; empty for the object at the URL itself."""
    parts = key.split("/")[:-1]
    return ["/".join(parts[:depth]) for depth in range(len(parts) + 1)] if key else []


def digest_of(wanted: Sequence[WantedFile]) -> str:
    """Return a digest of the files to download, which changes with any of them."""
    parts = [[each.name, each.size, each.sha256 or each.identity] for each in wanted]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def download(store: ObjectStore, wanted: Sequence[WantedFile], target: Path) -> None:
    """Create `target` from the files: one file if the URL names an object, else a folder.

    An existing target is kept. If several processes download the same files, one of them works. Interrupted downloads
    of other content for this target are removed.

    Raises:
        StoreUnavailableError: the connection broke, or an object changed meanwhile; the next call continues.
        ObjectDamagedError: an object differs from its manifest.
        DiskFullError: this disk has no room.
        PermanentInfraError: the target cannot be written.
    """
    prefix = f".{target.name[:60]}{_INCOMING}"
    incoming = target.with_name(f"{prefix}{digest_of(wanted)[:16]}")
    lock = _lock_of(incoming)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with locked(lock):
            if not target.exists():
                _fill(store, wanted, incoming)
                is_one_object = [each.key for each in wanted] == [""]
                (incoming / wanted[0].name if is_one_object else incoming).rename(target)
                receiver.flush_directory(target.parent)
            shutil.rmtree(incoming, ignore_errors=True)
            lock.unlink(missing_ok=True)
        _remove_left(target.parent, prefix)
    except OSError as error:
        reason = f"{error.filename} is a file" if isinstance(error, FileExistsError) else error.strerror
        raise PermanentInfraError(f"{target} cannot be written: {reason}") from error


def is_being_fetched(folder: Path) -> bool:
    for lock in folder.glob(f".*{_INCOMING}*.lock"):
        with suppress(FileNotFoundError):
            descriptor = os.open(lock, os.O_RDONLY)
            try:
                fcntl.flock(
                    descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB
                )  # shared, so that checks do not disturb each other
            except BlockingIOError:
                return True
            finally:
                os.close(descriptor)
    return False


def _remove_left(folder: Path, prefix: str) -> None:
    """Remove interrupted downloads of earlier content, which no process downloads any more."""
    for left in folder.glob(f"{glob.escape(prefix)}*"):
        if left.is_dir() and not is_locked(_lock_of(left), fcntl.LOCK_EX):
            shutil.rmtree(left, ignore_errors=True)
            _lock_of(left).unlink(missing_ok=True)


def _lock_of(incoming: Path) -> Path:
    return incoming.with_name(f"{incoming.name}.lock")


def _fill(store: ObjectStore, wanted: Sequence[WantedFile], incoming: Path) -> None:
    _make_own(incoming)
    (incoming / _PARTS).mkdir(exist_ok=True)
    missing = [each for each in wanted if not (incoming / each.name).is_file()]
    needed = sum(each.size for each in missing) - sum(path.stat().st_size for path in (incoming / _PARTS).iterdir())
    if shutil.disk_usage(incoming).free < needed:
        raise DiskFullError(str(incoming.parent), needed)
    damaged = _fetch(store, missing, incoming, {})
    damaged = _fetch(store, list(damaged), incoming, damaged)  # an earlier download may have left the damaged part
    compared = [each for each in list(damaged) or wanted if each.identity]
    there = store.list() if compared else {}  # one listing instead of a request per object
    for each in compared:
        if each.key not in there or there[each.key].identity != each.identity:
            raise StoreUnavailableError(f"{store.url}/{each.key} changed while it was fetched: try again")
    if damaged:
        url = f"{store.url}/{next(iter(damaged)).key}".rstrip("/")
        raise ObjectDamagedError(f"{url} is not the file that was published there: publish it again")
    shutil.rmtree(incoming / _PARTS)
    for directory in {(incoming / each.name).parent for each in wanted}:
        receiver.flush_directory(directory)


def _make_own(incoming: Path) -> None:
    """Create the folder for incoming files, or reuse the folder of an earlier try, whose files are not checked again.

    Raises:
        PermanentInfraError: another user created it, which is possible in /tmp.
    """
    incoming.mkdir(exist_ok=True)
    status = incoming.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid not in (os.geteuid(), incoming.parent.stat().st_uid):
        raise PermanentInfraError(f"{incoming} was made by another user: remove it, or choose another folder")


def _fetch(
    store: ObjectStore, files: Sequence[WantedFile], incoming: Path, before: Mapping[WantedFile, str]
) -> dict[WantedFile, str]:
    """Download files, several pieces at a time; returns the wrong files with the digests of their content.

    Args:
        before: the result of the previous try.
    """
    damaged = {}
    pieces = [piece for file in files for piece in _pieces_of(file, _part_of(file, incoming))]
    with _in_order(store, pieces) as contents:
        for piece, content in zip(pieces, contents, strict=True):
            part = _part_of(piece.file, incoming)
            with _appending(part, store, piece) as output:
                output.write(content)
            if piece.end < piece.file.size:
                continue
            digest = _hash_durable(part, piece.file)
            if _is_right(piece.file, digest, before.get(piece.file)):
                path = incoming / piece.file.name
                path.parent.mkdir(parents=True, exist_ok=True)
                part.rename(path)
            else:
                damaged[piece.file] = digest
                part.unlink()
    return damaged


def _appending(part: Path, store: ObjectStore, piece: _Piece) -> BinaryIO:
    """Open the file to which a piece is appended. Its permissions are at most those of the source."""
    mode = PRIVATE if part.exists() else store.copy_mode(piece.file.key)
    return os.fdopen(os.open(part, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, mode), "ab")


def _pieces_of(file: WantedFile, part: Path) -> list[_Piece]:
    """Return the missing pieces of a file; for a complete or empty file, one empty piece at its end."""
    there = part.stat().st_size if part.exists() else 0
    if there > file.size:
        part.unlink()
        there = 0
    starts = range(there, file.size, PIECE_BYTES)
    return [_Piece(file, start, min(start + PIECE_BYTES, file.size)) for start in starts] or [
        _Piece(file, file.size, file.size)
    ]


@contextmanager
def _in_order(store: ObjectStore, pieces: Sequence[_Piece]) -> Iterator[Iterator[bytes]]:
    """Yield the contents of pieces in their order, while the next pieces are being downloaded."""
    pool = ThreadPoolExecutor(NUM_STREAMS, thread_name_prefix="download")

    def contents() -> Iterator[bytes]:
        under_way: deque[Future[bytes]] = deque()
        for piece in pieces:
            under_way.append(pool.submit(store.read, piece.file.key, piece.start, piece.end))
            if len(under_way) == NUM_STREAMS:
                yield under_way.popleft().result()
        while under_way:
            yield under_way.popleft().result()

    try:
        yield contents()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _part_of(file: WantedFile, incoming: Path) -> Path:
    return incoming / _PARTS / hashlib.sha256(file.name.encode()).hexdigest()


def _is_right(file: WantedFile, digest: str, before: str | None) -> bool:
    """Return whether the downloaded content has the right digest; `before` is the digest of the previous try."""
    if file.sha256:
        return digest == file.sha256
    # The store's value may only look like an MD5 (object_store.py). The same content twice then counts as right.
    return file.md5 in ("", digest) or digest == before


def _hash_durable(part: Path, file: WantedFile) -> str:
    """Return the digest of the downloaded content, of the kind that is known of the file, after an fsync."""
    digest = hashlib.sha256() if file.sha256 else hashlib.md5(usedforsecurity=False)
    is_known = file.sha256 or file.md5
    with part.open("rb") as content:
        while is_known and (chunk := content.read(_HASH_BYTES)):
            digest.update(chunk)
        os.fsync(content.fileno())
    return digest.hexdigest()


def _check_name(name: str, store: ObjectStore) -> None:
    try:
        receiver.check_name(name)
    except receiver.CopyError as error:
        raise PermanentInfraError(f"{store.url}: {error.message}") from error
    if name.partition("/")[0] == _PARTS:
        raise PermanentInfraError(f"{store.url}: the file name {name!r} is refused: {_PARTS} is for incomplete files")
