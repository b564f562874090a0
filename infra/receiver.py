"""Take in a copied directory on a node: make room for it, verify it, and let it appear as a whole.

The node's side of sync.py. Runs as `python3 -I receiver.py VERB ...`; standard library only and one file, because it
is sent to nodes by content. Each verb prints one JSON object; `{"error": sentence}` with exit code 1 when it refuses.

    describe DESTINATION                    (sizes on stdin) what lies there now, and what could be used again, with the
                                            digests of files of these sizes: {"files": {name: [size, sha256 or null]}
                                            or null, "usable": [[path, size, mtime_ns, sha256]]}
    prepare DESTINATION INCOMING BYTES      (a line {name: [path, size, mtime_ns]} on stdin) make the directory INCOMING
                                            beside it, link those files into it, and see whether the disk has room:
                                            {"taken": [name]}. Goes on until stdin ends: so long INCOMING is locked
    accept INCOMING                         (files on stdin) write small files, many with one call: {"digests": ...}
    commit DESTINATION INCOMING             (manifest on stdin) compare what has arrived, then swap it in; a digest of
                                            null was compared when the file was written, and is not taken again
    discard INCOMING                        remove what has arrived

An INCOMING that nobody holds a lock on is of a copy that broke off. The next copy to the same destination takes from it
what is whole and right, and removes the rest; one to another destination beside it removes it after a day.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import stat
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Literal

INCOMING_MARK = ".incoming-"
STALE_AFTER_S = 86400.0
"""What a copy that broke off has left, and nobody has gone on with, is removed after this time."""
_SPARE_BYTES = 16 << 20
_READ_BYTES = 4 << 20


class CopyError(Exception):
    """A verb cannot be carried out; `kind` sorts the reasons for the caller."""

    def __init__(self, message: str, kind: Literal["refused", "disk_full", "damaged"] = "refused") -> None:
        super().__init__(message, kind)
        self.message = message
        self.kind = kind


def main(argv: list[str]) -> int:
    """Carry out one verb; see the head of this file."""
    verb, parameters = argv[1], argv[2:]
    # Any: JSON
    answer: dict[str, Any] = {}
    try:
        if verb == "describe":
            answer = describe_destination(Path(parameters[0]), frozenset(json.loads(sys.stdin.buffer.read())))
        elif verb == "prepare":
            hold_directory(Path(parameters[0]), Path(parameters[1]), int(parameters[2]))
        elif verb == "accept":
            answer = {"digests": accept_files(Path(parameters[0]), sys.stdin.buffer)}
        elif verb == "commit":
            manifest = json.loads(sys.stdin.buffer.read())
            commit_directory(Path(parameters[0]), Path(parameters[1]), manifest)
        elif verb == "discard":
            discard_directory(Path(parameters[0]))
        else:
            raise CopyError(f"{verb} is no verb of this program")
    except CopyError as error:
        answer = {"error": error.message, "kind": error.kind}
    except OSError as error:
        answer = {"error": f"{error.filename}: {error.strerror}", "kind": "refused"}
    sys.stdout.write(json.dumps(answer) + "\n")
    return 1 if "error" in answer else 0


def describe_destination(destination: Path, sizes: "frozenset[int]") -> dict[str, Any]:
    """What lies at a destination, and in the directories of copies to it; hashes the files of these sizes.

    No file is usable under two paths, because two names of one file are changed together.
    """
    files: dict[str, list[Any]] | None = None
    usable: dict[tuple[int, int], list[Any]] = {}
    for directory in [destination, *_incoming_of(destination)]:
        if not directory.is_dir():
            continue
        found: dict[str, list[Any]] = {}
        try:
            for path in _walk(directory):
                status = path.lstat()
                is_wanted = stat.S_ISREG(status.st_mode) and status.st_size in sizes
                digest = hash_file(path) if is_wanted else None
                found[path.relative_to(directory).as_posix()] = [status.st_size, digest]
                if is_wanted:
                    entry = [str(path), status.st_size, status.st_mtime_ns, digest]
                    usable.setdefault((status.st_dev, status.st_ino), entry)
        except FileNotFoundError:  # another copy has removed it meanwhile
            continue
        if directory == destination:
            files = found
    return {"files": files, "usable": list(usable.values())}


def describe_directory(directory: Path, *, without_digest: "frozenset[str]") -> dict[str, list[Any]] | None:
    """Size and digest of every file below a directory; None when there is none or it holds more than plain files."""
    if not directory.exists():
        return None
    files: dict[str, list[Any]] = {}
    for path in _walk(directory):
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode):
            return None
        name = path.relative_to(directory).as_posix()
        files[name] = [status.st_size, None if name in without_digest else hash_file(path)]
    return files


def hash_file(path: Path) -> str:
    """The sha256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_READ_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def hold_directory(destination: Path, incoming: Path, needed_bytes: int) -> None:
    """Make the directory that takes in the files, say what is in it, and keep it from being removed by others."""
    reused = json.loads(sys.stdin.buffer.readline())
    descriptor = prepare_directory(destination, incoming)
    try:
        taken = _link_files(reused, incoming)
        _remove_abandoned(destination)
        free_bytes = shutil.disk_usage(destination.parent).free
        if free_bytes < needed_bytes + min(_SPARE_BYTES, needed_bytes // 8):
            raise CopyError(f"{destination} needs {needed_bytes} bytes, {free_bytes} are free", kind="disk_full")
        sys.stdout.write(json.dumps({"taken": taken}) + "\n")
        sys.stdout.flush()
        sys.stdin.buffer.read()  # ends with whoever copies
    finally:
        os.close(descriptor)


def prepare_directory(destination: Path, incoming: Path) -> int:
    """Make a directory beside the destination, so that it can be renamed, and lock it; returns what holds the lock."""
    if destination.is_symlink():
        raise CopyError(f"{destination} is a symbolic link: give the path that it points to")
    if destination.exists() and not destination.is_dir():
        raise CopyError(f"{destination} is a file: give another destination")
    destination.parent.mkdir(parents=True, exist_ok=True)
    with _locked_directory(destination.parent):  # else it could be removed before it is locked
        incoming.mkdir(exist_ok=True)  # by the same call, whose answer was lost
        descriptor = os.open(incoming, os.O_RDONLY)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    return descriptor


def _link_files(reused: dict[str, list[Any]], incoming: Path) -> list[str]:
    """Let files of other directories be in this one, too; returns the names of those that are as they were described.

    What cannot be linked is left out, to be sent.
    """
    taken = []
    for name, (source, size, modified_ns) in reused.items():
        check_name(name)
        path = incoming / name
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(source, path, follow_symlinks=False)
        except OSError:
            continue
        status = path.lstat()
        if stat.S_ISREG(status.st_mode) and (status.st_size, status.st_mtime_ns) == (size, modified_ns):
            taken.append(name)
        else:
            path.unlink()
    return taken


def accept_files(incoming: Path, stream: BinaryIO) -> dict[str, str]:
    """Write the files of a batch: for each a line of JSON, [name, size], and then its content; returns their sha256."""
    digests: dict[str, str] = {}
    while head := stream.readline():
        name, size = json.loads(head)
        check_name(name)
        content = stream.read(size)
        if len(content) < size:
            raise CopyError(f"the batch ends within {name!r}: copy again", kind="damaged")
        path = incoming / name
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with path.open("xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise CopyError(f"{path}: {error.strerror}", kind="disk_full") from error
            raise
        digests[name] = hashlib.sha256(content).hexdigest()
    return digests


def commit_directory(destination: Path, incoming: Path, manifest: dict[str, list[Any]]) -> None:
    """Verify every file against the manifest, then put the new directory in the place of the old one."""
    for name in manifest:
        check_name(name)
    compared = frozenset(name for name, (_, digest) in manifest.items() if digest is None)
    arrived = describe_directory(incoming, without_digest=compared) or {}
    wrong = sorted(name for name in manifest.keys() | arrived.keys() if arrived.get(name) != manifest.get(name))
    if wrong:
        raise CopyError(f"{len(wrong)} files arrived damaged, the first is {wrong[0]!r}: copy again", kind="damaged")
    for directory in {path.parent for path in _walk(incoming)} | {incoming}:
        flush_directory(directory)
    set_aside = incoming.with_name(incoming.name + "-replaced")
    with _locked_directory(destination.parent):
        if destination.exists():
            destination.rename(set_aside)
        try:
            incoming.rename(destination)
        except OSError:
            if set_aside.exists():
                set_aside.rename(destination)
            raise
        flush_directory(destination.parent)
    shutil.rmtree(set_aside, ignore_errors=True)
    _remove_abandoned(destination)


def discard_directory(incoming: Path) -> None:
    """Remove what has arrived; refuses any directory that is not one of ours."""
    if INCOMING_MARK not in incoming.name:
        raise CopyError(f"{incoming} is no incoming copy")
    shutil.rmtree(incoming, ignore_errors=True)


def check_name(name: str) -> None:
    """Return if a file name of a manifest stays below its directory and is harmless to print."""
    parts = name.split("/")
    if not name or any(part in ("", ".", "..") for part in parts) or not name.isprintable() or "\\" in name:
        raise CopyError(f"the file name {name!r} is refused: it leaves its directory or is not printable")


def flush_directory(directory: Path) -> None:
    """Make renames and new files of a directory survive a power cut."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _locked_directory(directory: Path) -> Iterator[None]:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _walk(directory: Path) -> Iterator[Path]:
    """Everything below a directory that is not itself a directory; symbolic links are not followed."""
    for path in sorted(directory.iterdir()):
        if path.is_dir() and not path.is_symlink():
            yield from _walk(path)
        else:
            yield path


def _incoming_of(destination: Path) -> list[Path]:
    """The directories of copies to a destination, of those that are under way and of those that broke off."""
    if not destination.parent.is_dir():
        return []
    return [path for path in destination.parent.iterdir() if _is_incoming_of(destination, path)]


def _is_incoming_of(destination: Path, path: Path) -> bool:
    return path.name.startswith(f".{destination.name}{INCOMING_MARK}")


def _remove_abandoned(destination: Path) -> None:
    """Remove what copies that broke off have left: those to this destination, and old ones to others beside it."""
    with _locked_directory(destination.parent):
        for path in destination.parent.iterdir():
            if not path.name.startswith(".") or INCOMING_MARK not in path.name:
                continue
            with contextlib.suppress(OSError):  # somebody else's, or gone
                is_old = time.time() - path.stat().st_mtime > STALE_AFTER_S
                is_download = path.with_name(f"{path.name}.lock").exists()  # which has its lock there (download.py)
                if _is_incoming_of(destination, path) or (is_old and not is_download):
                    _remove_unlocked(path)


def _remove_unlocked(directory: Path) -> None:
    """Remove a directory, unless somebody holds a lock on it."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(directory, ignore_errors=True)
    finally:
        os.close(descriptor)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
