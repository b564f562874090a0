"""Take in a copied directory on a node: make room for it, verify it, and let it appear as a whole.

The node's side of sync.py. Runs as `python3 -I receiver.py VERB ...`; standard library only and one file, because it
is sent to nodes by content. Each verb prints one JSON object; `{"error": sentence}` with exit code 1 when it refuses.

    describe DESTINATION                    what lies there now: {"files": {name: [size, sha256]}}, or null
    prepare DESTINATION INCOMING BYTES      make the empty directory INCOMING beside it, if the disk has room
    accept INCOMING                         (files on stdin) write small files, many with one call: {"digests": ...}
    commit DESTINATION INCOMING             (manifest on stdin) compare what has arrived, then swap it in; a digest of
                                            null was compared when the file was written, and is not taken again
    discard INCOMING                        remove what has arrived
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
"""What a copy that was cut off has left beside a destination is removed after this time."""
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
            answer = {"files": describe_directory(Path(parameters[0]))}
        elif verb == "prepare":
            prepare_directory(Path(parameters[0]), Path(parameters[1]), int(parameters[2]))
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


def describe_directory(
    directory: Path, *, without_digest: "frozenset[str]" = frozenset()
) -> dict[str, list[Any]] | None:
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


def prepare_directory(destination: Path, incoming: Path, needed_bytes: int) -> None:
    """Make the directory that takes in the files, beside the destination, so that it can be renamed."""
    if destination.is_symlink():
        raise CopyError(f"{destination} is a symbolic link: give the path that it points to")
    if destination.exists() and not destination.is_dir():
        raise CopyError(f"{destination} is a file: give another destination")
    destination.parent.mkdir(parents=True, exist_ok=True)
    _remove_stale(destination)
    free_bytes = shutil.disk_usage(destination.parent).free
    if free_bytes < needed_bytes + min(_SPARE_BYTES, needed_bytes // 8):
        raise CopyError(f"{destination} needs {needed_bytes} bytes, {free_bytes} are free", kind="disk_full")
    incoming.mkdir(exist_ok=True)  # by the same call, whose answer was lost


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


def _remove_stale(destination: Path) -> None:
    for path in destination.parent.iterdir():
        is_ours = path.name.startswith(f".{destination.name}{INCOMING_MARK}")
        if is_ours and time.time() - path.stat().st_mtime > STALE_AFTER_S:
            shutil.rmtree(path, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
