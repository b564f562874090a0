"""A folder of this machine as an object store. Other users of the machine may write into the folder.

    a name ──> its path without links ──> beneath the folder? ──> opened part by part, following no link

A link to the outside of the folder could expose everything that is readable for this user: keys, other runs, private
data. Links to the outside are refused, except in the layout of a hub's cache, where snapshots link to blobs. If another
process replaces a file or folder by a link after the check, the link is not followed either.

The class has the methods of fsspec's drivers that object_store.py calls.
"""

import errno
import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from rollouts.infra.errors import PermanentInfraError, StoreUnavailableError

READABLE, PRIVATE = 0o666, 0o600
"""Permissions of a new file before the process's umask is applied."""
_SNAPSHOT = re.compile(r"(?P<cached>/(?:.*/)?(?:models|datasets)--[^/]+)/snapshots/[^/]+(?:/.*)?")
_PASSED = os.O_DIRECTORY | os.O_NOFOLLOW | getattr(os, "O_PATH", os.O_RDONLY)
"""Flags to open a folder on the way to a file. O_PATH needs no permission to list the folder."""
_MAX_LINKS = 40
_READ_BYTES = 4 << 20

# Any: fsspec's drivers describe objects by dictionaries.
Described = dict[str, Any]


class SharedFolder:
    """The files below a path. Each `key` is this path or a path below it."""

    async_impl = False

    def __init__(self, root: str) -> None:
        self._root = Path(root)

    def find(self, key: str, *, detail: bool) -> dict[str, Described]:
        """Return the files below a folder by their paths, or the file itself, or an empty dict if the path does not
        exist.

        Raises:
            PermanentInfraError: the folder contains something other than files, or a link that leaves the folder.
        """
        assert detail, "drivers are always asked for details"
        try:
            described = self.info(key)
            return {key: described} if described["type"] == "file" else dict(self._files_below(key))
        except FileNotFoundError:
            return {}

    def info(self, key: str) -> Described:
        with self._located(key) as (folder, name):
            return _describe(_checked_status(folder, name, key))

    def copy_mode(self, key: str) -> int:
        """Return the permissions for a downloaded copy. Users who cannot reach the original file through the store's
        folders get no access."""
        real, top = self._real(key), self._real(str(self._root))
        mode = int(self.info(key)["mode"])
        for folder in real.parents:
            if folder == real.parent or folder.is_relative_to(top):
                searched = folder.lstat().st_mode
                mode &= ~stat.S_IRWXG if not searched & stat.S_IXGRP else mode
                mode &= ~stat.S_IRWXO if not searched & stat.S_IXOTH else mode
        return mode & READABLE | PRIVATE

    def cat_file(self, key: str, start: int, end: int) -> bytes:
        """Return the bytes of a file from `start` up to but not including `end`, or up to the file's end if the file is
        shorter."""
        with self._located(key) as (folder, name):
            expected = _checked_status(folder, name, key)
            descriptor = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW, dir_fd=folder)
        with os.fdopen(descriptor, "rb", buffering=0) as file:
            if not os.path.samestat(os.fstat(descriptor), expected):
                raise StoreUnavailableError(f"file://{key} was replaced while it was opened: try again")
            pieces = []
            while start < end and (piece := os.pread(file.fileno(), min(_READ_BYTES, end - start), start)):
                pieces.append(piece)
                start += len(piece)
        return b"".join(pieces)

    def pipe_file(self, key: str, content: bytes) -> None:
        with self._replacing(key, READABLE) as file:
            file.write(content)

    def put_file(self, path: str, key: str) -> None:
        """Write or replace a file with a copy of another file. The copy gets at most the original's permissions."""
        with Path(path).open("rb") as source:
            mode = os.fstat(source.fileno()).st_mode & READABLE | PRIVATE
            with self._replacing(key, mode) as file:
                while piece := source.read(_READ_BYTES):
                    file.write(piece)

    def rm_file(self, key: str) -> None:
        with self._located(key) as (folder, name):
            os.unlink(name, dir_fd=folder)

    def _files_below(self, key: str) -> Iterator[tuple[str, Described]]:
        with self._located(key) as (around, name):
            top = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=around)
        try:
            for at, folders, files, folder in os.fwalk(".", dir_fd=top, onerror=_raise):
                for name in [*folders, *files]:
                    status = os.stat(name, dir_fd=folder, follow_symlinks=False)
                    if stat.S_ISDIR(status.st_mode):
                        continue
                    path = f"{key}/{os.path.normpath(f'{at}/{name}')}"
                    if stat.S_ISLNK(status.st_mode):
                        yield path, self._linked_file(path)
                    else:
                        yield path, _describe(_checked_status(folder, name, path))
        finally:
            os.close(top)

    def _linked_file(self, key: str) -> Described:
        """Describe the file behind a link. Links to folders are refused, because two links could form a cycle."""
        try:
            described = self.info(key)
        except FileNotFoundError as error:
            raise _no_file(key) from error
        if described["type"] != "file":
            raise _no_file(key)
        return described

    @contextmanager
    def _replacing(self, key: str, mode: int) -> Iterator[BinaryIO]:
        """Yield a new file that replaces the file at `key` when the block succeeds. Readers see either the complete old
        file or the complete new file."""
        with self._located(key, is_created=True) as (folder, name):
            partial = f"{name}.{secrets.token_hex(8)}.partial"
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
            try:
                with os.fdopen(os.open(partial, flags, mode, dir_fd=folder), "wb") as file:
                    yield file
                os.replace(partial, name, src_dir_fd=folder, dst_dir_fd=folder)
            finally:
                with suppress(FileNotFoundError):
                    os.unlink(partial, dir_fd=folder)

    @contextmanager
    def _located(self, key: str, *, is_created: bool = False) -> Iterator[tuple[int, str]]:
        """Yield an open descriptor of the file's folder, and the file's name in the folder."""
        real = self._real(key)
        descriptor = os.open("/", _PASSED)
        try:
            for part in real.parts[1:-1]:
                if is_created:
                    with suppress(FileExistsError):
                        os.mkdir(part, dir_fd=descriptor)
                inner = os.open(part, _PASSED, dir_fd=descriptor)
                os.close(descriptor)
                descriptor = inner
            yield descriptor, real.name
        finally:
            os.close(descriptor)

    def _real(self, key: str) -> Path:
        """Return the path of a file or folder after following all links.

        Raises:
            PermanentInfraError: the path leaves the folder, or the root itself is a link that leaves its parent folder.
        """
        is_root = key == str(self._root)
        within = real_path(self._root.parent) if is_root else self._real(str(self._root))
        given = within / (self._root.name if is_root else Path(key).relative_to(self._root))
        real = real_path(given, within=within)
        if not _is_beneath(real, within):
            raise _leaving_link(given, real)
        return real


def real_path(path: Path, *, within: Path | None = None, num_links: int = 0) -> Path:
    """Return the absolute path after following all links. Parts that do not exist stay unchanged.

    Args:
        within: the folder in which the links of all users are followed. Elsewhere, a link to the outside of its own
            folder is followed only if this user or root created the link.

    Raises:
        PermanentInfraError: another user's link leaves its folder.
    """
    if num_links > _MAX_LINKS:
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
    real = Path("/")
    for part in path.parts[1:]:
        at = real.parent if part == ".." else real / part
        status = _status_of(at)
        if status is not None and stat.S_ISLNK(status.st_mode):
            target = real_path(real / at.readlink(), within=within, num_links=num_links + 1)
            stays = _is_beneath(target, real) or (within is not None and _is_beneath(target, within))
            if not stays and status.st_uid not in (0, os.geteuid()):
                raise _leaving_link(at, target)
            at = target
        real = at
    return real


def _status_of(path: Path) -> os.stat_result | None:
    try:
        return path.lstat()
    except FileNotFoundError:
        return None


def _is_beneath(path: Path, folder: Path) -> bool:
    """Return whether the path is in the folder. For a snapshot of the hub's cache, the cache's blobs count as
    inside."""
    snapshot = _SNAPSHOT.fullmatch(str(folder))
    return path.is_relative_to(folder) or (snapshot is not None and path.parent == Path(snapshot["cached"], "blobs"))


def _leaving_link(path: Path, target: Path) -> PermanentInfraError:
    return PermanentInfraError(
        f"{path} is a link to {target}, outside of its folder, and is not followed: put the file itself there, or "
        "give the URL of the link's target"
    )


def _no_file(key: str) -> PermanentInfraError:
    return PermanentInfraError(
        f"file://{key} is neither a file nor a link to a file: remove it, or name something else"
    )


def _checked_status(folder: int, name: str, key: str) -> os.stat_result:
    """Return the status of a file or folder.

    Raises:
        PermanentInfraError: the path is a link, a pipe or a device, or a private file with a second name (a hard link)
            in a folder that other users can write to.
    """
    status, around = os.stat(name, dir_fd=folder, follow_symlinks=False), os.fstat(folder)
    if stat.S_ISDIR(status.st_mode):
        return status
    if not stat.S_ISREG(status.st_mode):
        raise _no_file(key)
    is_private = not status.st_mode & 0o077
    is_others_folder = around.st_uid not in (0, status.st_uid) or around.st_mode & 0o022
    if status.st_nlink > 1 and is_private and is_others_folder:
        raise PermanentInfraError(
            f"file://{key} is private to its owner, has {status.st_nlink} names (hard links), and lies in a folder "
            "that other users can write to: put a copy there"
        )
    return status


def _describe(status: os.stat_result) -> Described:
    kind = "directory" if stat.S_ISDIR(status.st_mode) else "file"
    return {"type": kind, "size": status.st_size, "mtime": status.st_mtime, "mode": stat.S_IMODE(status.st_mode)}


def _raise(error: OSError) -> None:
    raise error
