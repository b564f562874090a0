"""Download a folder or file from an object store. The target appears only when all files are complete and verified.

    a publication, a folder or one object ──> files with sizes and digests        (find_wanted)
    several pieces in parallel, in order  ──> .<name>.incoming-<digest>/          complete files
                                              .<name>.incoming-<digest>/.parts/   incomplete files
    all files verified                    ──> <name>                              renamed

The next call continues an interrupted download. A file is verified by its sha256 in a manifest. A file without a sha256
is verified by the store's MD5, if the store has an MD5 of the whole file. The file's size is always verified. A
download fails if an object changed during the download.

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
"""Number of pieces that are downloaded in parallel."""
_INCOMING = ".incoming-"
_PARTS = ".parts"
_HASH_BYTES = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedFile:
    name: str
    """The file's path below the folder."""
    key: str
    size: int
    sha256: str = ""
    """The file's digest in a manifest, or "" if no manifest lists the file."""
    md5: str = ""
    """The store's MD5 of the whole file, in hex, or "" if a manifest lists the file, or if the store has no MD5."""
    identity: str = ""
    """The store's identifier of the content, or "" if a manifest lists the file. The identifier need not be a digest,
    because it is only compared with the store's identifier after the download.
    """


@dataclass(frozen=True, slots=True)
class _Piece:
    file: WantedFile
    start: int
    end: int


def find_wanted(store: ObjectStore) -> list[WantedFile]:
    """Return the files at a URL: the checkpoint of a publication, all objects below the URL, or the object itself.

    Raises:
        ObjectMissingError: the store has no object at the URL.
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
        elif not listed or key == MANIFEST:  # files that the manifest does not list are skipped
            md5 = "" if "-" in there.md5 else there.md5
            wanted.append(WantedFile(name=name, key=key, size=there.size, identity=there.identity, md5=md5))
    return wanted


def _list_with_itself(store: ObjectStore) -> dict[str, StoredObject]:
    """List all objects below a URL, and the object at the URL itself, which drivers may omit."""
    objects = store.list()
    if objects and "" not in objects and (itself := store.find("")) is not None:
        return {"": itself, **objects}
    return objects


def _without_markers(store: ObjectStore, objects: Mapping[str, StoredObject]) -> dict[str, StoredObject]:
    """Return the objects without the empty objects that some tools create as markers of folders.

    Raises:
        PermanentInfraError: a non-empty object has the name of a folder. A disk cannot store both.
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
    """Return the names of all folders that contain an object, beginning with "", or an empty list for the object at the
    URL itself."""
    parts = key.split("/")[:-1]
    return ["/".join(parts[:depth]) for depth in range(len(parts) + 1)] if key else []


def digest_of(wanted: Sequence[WantedFile]) -> str:
    """Return a digest that changes when any of the files changes."""
    parts = [[each.name, each.size, each.sha256 or each.identity] for each in wanted]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def download(store: ObjectStore, wanted: Sequence[WantedFile], target: Path) -> None:
    """Create `target` from the downloaded files: one file if the URL names an object, or else a folder.

    An existing target stays unchanged. If several processes need the same files, one process downloads the files and
    the other processes wait. Interrupted downloads of other content for this target are removed.

    Raises:
        StoreUnavailableError: the connection broke, or an object changed meanwhile. The next call continues the
            download.
        ObjectDamagedError: an object differs from its manifest.
        DiskFullError: this machine's disk has not enough room.
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
                )  # a shared lock, so that concurrent checks do not disturb each other
            except BlockingIOError:
                return True
            finally:
                os.close(descriptor)
    return False


def _remove_left(folder: Path, prefix: str) -> None:
    """Remove interrupted downloads of an older version of the object, unless a process is still downloading it."""
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
    damaged = _fetch(store, list(damaged), incoming, damaged)  # retry: an earlier download may have left a bad part
    compared = [each for each in list(damaged) or wanted if each.identity]
    there = store.list() if compared else {}  # one listing replaces a request per object
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
    """Create the folder for incoming files, or reuse the folder of an earlier attempt.

    The complete files of an earlier attempt are not verified again, so the folder must belong to this user.

    Raises:
        PermanentInfraError: another user created the folder. In /tmp, any user can create such a folder.
    """
    incoming.mkdir(exist_ok=True)
    status = incoming.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid not in (os.geteuid(), incoming.parent.stat().st_uid):
        raise PermanentInfraError(f"{incoming} was made by another user: remove it, or choose another folder")


def _fetch(
    store: ObjectStore, files: Sequence[WantedFile], incoming: Path, before: Mapping[WantedFile, str]
) -> dict[WantedFile, str]:
    """Download files, several pieces in parallel. Returns the damaged files with the digests of their content.

    Args:
        before: the result of the previous attempt.
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
    """Open the file to which a piece is appended. A new file gets at most the permissions of the source."""
    mode = PRIVATE if part.exists() else store.copy_mode(piece.file.key)
    return os.fdopen(os.open(part, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, mode), "ab")


def _pieces_of(file: WantedFile, part: Path) -> list[_Piece]:
    """Return the missing pieces of a file. If no piece is missing, return one empty piece at the file's end."""
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
    """Yield the contents of pieces in order, while the next pieces are downloaded in parallel."""
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
    """Return whether the digest of the downloaded content is right. `before` is the digest of the previous attempt."""
    if file.sha256:
        return digest == file.sha256
    # The store's value may look like an MD5 without being an MD5 (object_store.py). Content that two downloads agree on
    # counts as right.
    return file.md5 in ("", digest) or digest == before


def _hash_durable(part: Path, file: WantedFile) -> str:
    """Sync the downloaded content to disk. Returns the content's sha256 if `file` has a sha256, or else the MD5."""
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
