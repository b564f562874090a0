"""Copy a directory to a node so that its destination holds either all of it, verified, or what it held before.

    source files ── read once, hashed while read ──> .<name>.incoming-<random> on the node
                    hashed again by the node, compared ──> old one aside, new one in its place, old one removed

Not here: the node's side (receiver.py), how bytes travel (session.py).
"""

import hashlib
import json
import logging
import os
import secrets
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from infra import receiver
from infra.errors import CommandFailedError, DiskFullError, InfraError, PermanentInfraError, TransientInfraError
from infra.session import Session
from infra.supervisor import parse_object

CALL_TIMEOUT_S = 3600.0
"""The node hashes the whole directory within one call: about 1 GB/s."""
_READ_BYTES = 4 << 20

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishReport:
    """What a copy came to."""

    files: Mapping[str, str]
    """sha256 of every file, by its path below the directory."""
    num_bytes: int
    was_identical: bool
    """True when the destination held exactly this already, and nothing was written."""


def publish_directory(session: Session, source: Path, destination: str) -> PublishReport:
    """Copy the files below `source` to `destination` on the node, verified and all at once.

    Empty directories are not copied. Whatever else lies in `destination` is replaced.

    Raises:
        DiskFullError: the node has no room; nothing is left of the copy.
        TransientInfraError: a file changed while it was read, or arrived damaged.
        PermanentInfraError: the source holds symbolic links, devices or unprintable names, or is empty.
    """
    root = source.resolve()
    sizes = list_files(root)
    _check_nesting(root, destination)
    num_bytes = sum(sizes.values())
    if same := _digests_if_identical(session, root, destination, sizes):
        logger.info("%s holds %s already", destination, source)
        return PublishReport(files=same, num_bytes=num_bytes, was_identical=True)
    place = PurePosixPath(destination)
    incoming = str(place.with_name(f".{place.name}{receiver.INCOMING_MARK}{secrets.token_hex(8)}"))
    try:
        _call(session, ["prepare", destination, incoming, str(num_bytes)])
        digests = {name: _copy_file(session, root / name, size, f"{incoming}/{name}") for name, size in sizes.items()}
        manifest = {name: [sizes[name], digest] for name, digest in digests.items()}
        _call(session, ["commit", destination, incoming], stdin=json.dumps(manifest).encode())
    except DiskFullError as error:
        raise DiskFullError(destination, num_bytes) from error
    finally:
        _discard(session, incoming)
    logger.info("published %s as %s, %d bytes in %d files", source, destination, num_bytes, len(sizes))
    return PublishReport(files=digests, num_bytes=num_bytes, was_identical=False)


def list_files(root: Path) -> dict[str, int]:
    """Size of every file below a directory, by its relative path, sorted.

    Raises:
        PermanentInfraError: there is none, or something other than plain files with printable names.
    """
    sizes: dict[str, int] = {}
    for directory, directory_names, file_names in os.walk(root, onerror=_raise_unreadable):
        for name in [*directory_names, *file_names]:
            path = Path(directory, name)
            status = path.lstat()
            if stat.S_ISDIR(status.st_mode):
                continue
            if not stat.S_ISREG(status.st_mode):
                raise PermanentInfraError(
                    f"{path} is a symbolic link or a device, which is not copied: put the file itself there"
                )
            relative = path.relative_to(root).as_posix()
            try:
                receiver.check_name(relative)
            except receiver.CopyError as error:
                raise PermanentInfraError(f"{root}: {error.message}") from error
            sizes[relative] = status.st_size
    if not sizes:
        raise PermanentInfraError(f"{root} holds no files: there is nothing to copy")
    return dict(sorted(sizes.items()))


def _raise_unreadable(error: OSError) -> None:
    raise PermanentInfraError(f"{error.filename} cannot be read: {error.strerror}") from error


def _check_nesting(root: Path, destination: str) -> None:
    place = PurePosixPath(destination)
    if not place.is_absolute() or ".." in place.parts:
        raise PermanentInfraError(f"the destination {destination} is not an absolute path without `..`")
    if root in Path(place).parents or Path(place) in root.parents:
        raise PermanentInfraError(f"{root} and {destination} lie in one another: choose another destination")


def _digests_if_identical(
    session: Session, root: Path, destination: str, sizes: Mapping[str, int]
) -> dict[str, str] | None:
    """The digests of the source when the destination has the same; reads the source only if all sizes agree."""
    there = _call(session, ["describe", destination])["files"]
    if there is None or {name: size for name, (size, _) in there.items()} != sizes:
        return None
    digests = {name: receiver.hash_file(root / name) for name in sizes}
    return digests if all(there[name][1] == digest for name, digest in digests.items()) else None


def _copy_file(session: Session, source: Path, size: int, destination: str) -> str:
    """Send one file and return the digest of what was read.

    Raises:
        TransientInfraError: the file changed since it was listed.
    """
    digest = hashlib.sha256()
    num_bytes = 0

    def read_chunks() -> Iterator[bytes]:
        nonlocal num_bytes
        try:
            # O_NOFOLLOW: a link that took the file's place since it was listed is not followed.
            descriptor = os.open(source, os.O_RDONLY | os.O_NOFOLLOW)
            with os.fdopen(descriptor, "rb") as file:
                before = os.fstat(descriptor)
                while chunk := file.read(_READ_BYTES):
                    digest.update(chunk)
                    num_bytes += len(chunk)
                    yield chunk
                has_changed = os.fstat(descriptor).st_mtime_ns != before.st_mtime_ns
        except OSError as error:
            raise TransientInfraError(f"{source} cannot be read any more: {error.strerror}") from error
        if has_changed or num_bytes != size:
            raise TransientInfraError(f"{source} changed while it was copied: copy it once it is complete")

    session.write_chunks(destination, read_chunks())
    return digest.hexdigest()


def _discard(session: Session, incoming: str) -> None:
    """Remove what is left of a copy (nothing, after a success); a lost node does it itself, a day later."""
    try:
        _call(session, ["discard", incoming])
    except InfraError as error:
        logger.warning("%s was left behind: %s", incoming, error)


# Any: the answers are JSON objects.
def _call(session: Session, arguments: Sequence[str], *, stdin: bytes = b"") -> dict[str, Any]:
    program = session.place_program(Path(receiver.__file__))
    argv = [session.python, "-I", program, *arguments]
    completed = session.run(argv, stdin=stdin, timeout_s=CALL_TIMEOUT_S, check=False)
    lines = completed.stdout.splitlines()
    answer = parse_object(lines[-1]) if lines else None
    if answer is None:
        raise CommandFailedError(completed)
    if "error" in answer:
        if answer["kind"] == "disk_full":
            raise DiskFullError(arguments[1], 0)
        kind = TransientInfraError if answer["kind"] == "damaged" else PermanentInfraError
        raise kind(answer["error"])
    return answer
