"""Copy files to a node so that their destination holds either all of them, verified, or what it held before.

    source files ── read once, hashed while read ──> .<name>.incoming-<random> on the node, hashed while written
                                                          ^
    on the node: the old one, and what a copy that broke off has left ── files of the same digest are linked
                    compared ──> old one aside, new one in its place, old one removed

A source file is read twice only where a file of its size is there: whether it is the same one is told by its digest.
Not here: the node's side (receiver.py), how bytes travel (session.py).
"""

import hashlib
import json
import logging
import os
import secrets
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from infra import receiver
from infra.errors import DiskFullError, InfraError, PermanentInfraError, TransientInfraError
from infra.session import Session, read_answer
from infra.supervisor import parse_object

CALL_TIMEOUT_S = 3600.0
"""The node hashes the whole directory within one call: about 1 GB/s."""
SMALL_FILE_BYTES = 256 << 10
BATCH_BYTES = 8 << 20
"""Files up to the first size travel together, about as many bytes as the second at a time."""
_READ_BYTES = 256 << 10
"""So little that it is still in the processor's cache when it has been hashed."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishReport:
    """What a copy came to."""

    files: Mapping[str, str]
    """sha256 of every file, by its path below the directory."""
    num_bytes: int
    num_sent_bytes: int
    """What was neither at the destination nor left there by a copy that broke off."""
    was_identical: bool
    """True when the destination held exactly this already, and nothing was written."""


def publish_directory(session: Session, source: Path, destination: str) -> PublishReport:
    """Copy the files below `source` to `destination` on the node, verified and all at once.

    Empty directories are not copied. Whatever else lies in `destination` is replaced.

    Raises:
        DiskFullError: the node has no room; nothing is left of the copy.
        TransientInfraError: the connection broke, a file changed while it was read, or arrived damaged; the next call
            sends what has not arrived whole.
        PermanentInfraError: the source holds symbolic links, devices or unprintable names, or is empty.
    """
    root = source.resolve()
    sizes = list_files(root)
    _check_nesting(root, destination)
    return _publish(session, {name: root / name for name in sizes}, sizes, destination)


def publish_files(session: Session, files: Mapping[str, Path], destination: str) -> PublishReport:
    """`publish_directory` for files from different places, by the names that they get below `destination`."""
    for name, path in files.items():
        _check_file(path, name)
    return _publish(session, files, {name: path.stat().st_size for name, path in sorted(files.items())}, destination)


def publish_filled(
    session: Session, destination: str, num_bytes: int, fill: Callable[[str], Mapping[str, Sequence[Any]]]
) -> None:
    """Let a folder appear on the node with the files that somebody puts into a folder beside it, or nothing of them.

    Args:
        fill: gets that folder; returns size and sha256 of each file, None in place of a digest that was compared.
    """
    with _incoming_folder(session, destination, num_bytes, {}) as (incoming, _):
        try:
            _commit(session, destination, incoming, fill(incoming))
        except TransientInfraError:  # what the node fetched itself is not gone on with
            _discard(session, incoming)
            raise


@contextmanager
def _incoming_folder(
    session: Session, destination: str, num_bytes: int, reused: Mapping[str, Sequence[Any]]
) -> Iterator[tuple[str, frozenset[str]]]:
    """A folder beside the destination, with the names of the files that are there from the beginning.

    It is locked while the block runs. When that fails and a retry may help, the folder stays, for the next copy.
    """
    place = PurePosixPath(destination)
    incoming = str(place.with_name(f".{place.name}{receiver.INCOMING_MARK}{secrets.token_hex(8)}"))
    program = [session.python, "-I", session.place_program(Path(receiver.__file__))]
    arguments = ["prepare", destination, incoming, str(num_bytes)]
    try:
        with session.stream([*program, *arguments], stdin=json.dumps(reused).encode() + b"\n") as lines:
            # An interpreter may say something before.
            answer = next((found for line in lines if (found := parse_object(line)) is not None), None)
            if answer is None:
                raise TransientInfraError(f"the node prepared nothing for {destination}: copy again")
            yield incoming, frozenset(_checked(answer)["taken"])
    except DiskFullError as error:
        _discard(session, incoming)
        raise DiskFullError(destination, num_bytes) from error
    except PermanentInfraError:
        _discard(session, incoming)
        raise


def _publish(session: Session, files: Mapping[str, Path], sizes: Mapping[str, int], destination: str) -> PublishReport:
    place = PurePosixPath(destination)
    if not place.is_absolute() or ".." in place.parts:
        raise PermanentInfraError(f"the destination {destination} is not an absolute path without `..`")
    num_bytes = sum(sizes.values())
    wanted = json.dumps(sorted(set(sizes.values()))).encode()
    there = _call(session, ["describe", destination], stdin=wanted, may_repeat=True)
    there_sizes = {size for _, size, _, _ in there["usable"]}
    digests = {name: _hash_unchanged(files[name], size) for name, size in sizes.items() if size in there_sizes}
    if there["files"] == {name: [size, digests.get(name, "")] for name, size in sizes.items()}:
        logger.info("%s is there already", destination)
        return PublishReport(files=digests, num_bytes=num_bytes, num_sent_bytes=0, was_identical=True)
    reused = _choose_reused(there["usable"], {name: (sizes[name], digest) for name, digest in digests.items()})
    num_missing_bytes = num_bytes - sum(sizes[name] for name in reused)
    with _incoming_folder(session, destination, num_missing_bytes, reused) as (incoming, taken):
        missing = {name: size for name, size in sizes.items() if name not in taken}
        read, written = _copy_small_files(session, files, missing, incoming)
        for name in missing.keys() - read.keys():
            read[name], written[name] = _copy_file(session, files[name], sizes[name], f"{incoming}/{name}")
        _check_arrived(read, written)
        compared = dict.fromkeys(taken) | {name: None if written[name] else digest for name, digest in read.items()}
        _commit(session, destination, incoming, {name: [sizes[name], digest] for name, digest in compared.items()})
    num_sent_bytes = sum(missing.values())
    logger.info("published %s, %d bytes in %d files, %d bytes sent", destination, num_bytes, len(sizes), num_sent_bytes)
    return PublishReport(files=digests | read, num_bytes=num_bytes, num_sent_bytes=num_sent_bytes, was_identical=False)


def _choose_reused(
    usable: Sequence[Sequence[Any]], wanted: Mapping[str, tuple[int, str]]
) -> dict[str, tuple[str, int, int]]:
    """Which file on the node each name becomes a link to; none is taken twice, and empty ones are sent."""
    found: dict[tuple[int, str], list[tuple[str, int, int]]] = {}
    for path, size, modified_ns, sha256 in usable:
        found.setdefault((size, sha256), []).append((path, size, modified_ns))
    return {name: found[key].pop() for name, key in wanted.items() if key[0] and found.get(key)}


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
            relative = path.relative_to(root).as_posix()
            _check_file(path, relative)
            sizes[relative] = status.st_size
    if not sizes:
        raise PermanentInfraError(f"{root} holds no files: there is nothing to copy")
    return dict(sorted(sizes.items()))


def _raise_unreadable(error: OSError) -> None:
    raise PermanentInfraError(f"{error.filename} cannot be read: {error.strerror}") from error


def _check_file(path: Path, name: str) -> None:
    """Return if it is a plain file that may be copied under this name."""
    if not stat.S_ISREG(path.lstat().st_mode):
        raise PermanentInfraError(
            f"{path} is a symbolic link or a device, which is not copied: put the file itself there"
        )
    try:
        receiver.check_name(name)
    except receiver.CopyError as error:
        raise PermanentInfraError(f"{path}: {error.message}") from error


def _check_nesting(root: Path, destination: str) -> None:
    place = Path(destination)
    if root in place.parents or place in root.parents:
        raise PermanentInfraError(f"{root} and {destination} lie in one another: choose another destination")


def _hash_unchanged(source: Path, size: int) -> str:
    digest = hashlib.sha256()
    for chunk in _read_unchanged(source, size):
        digest.update(chunk)
    return digest.hexdigest()


def _copy_small_files(
    session: Session, files: Mapping[str, Path], sizes: Mapping[str, int], incoming: str
) -> tuple[dict[str, str], dict[str, str | None]]:
    """Send the small files, many with one call, because a call takes a round trip.

    Returns the digests of what was read, and of what the node has written.
    """
    digests: dict[str, str] = {}
    written: dict[str, str | None] = {}
    batch = bytearray()

    def send_batch() -> None:
        written.update(_call(session, ["accept", incoming], stdin=bytes(batch))["digests"])
        batch.clear()

    for name, size in sizes.items():
        if size > SMALL_FILE_BYTES:
            continue
        content = b"".join(_read_unchanged(files[name], size))
        digests[name] = hashlib.sha256(content).hexdigest()
        batch += json.dumps([name, size]).encode() + b"\n" + content
        if len(batch) > BATCH_BYTES:
            send_batch()
    if batch:
        send_batch()
    return digests, written


def _copy_file(session: Session, source: Path, size: int, destination: str) -> tuple[str, str | None]:
    """Send one file; returns the digests of what was read, and of what the node has written, where it knows."""
    digest = hashlib.sha256()

    def hashed_chunks() -> Iterator[bytes]:
        for chunk in _read_unchanged(source, size):
            digest.update(chunk)
            yield chunk

    written = session.write_chunks(destination, hashed_chunks())
    return digest.hexdigest(), written


def _check_arrived(digests: Mapping[str, str], written: Mapping[str, str | None]) -> None:
    wrong = sorted(name for name, digest in digests.items() if written[name] not in (digest, None))
    if wrong:
        raise TransientInfraError(f"{len(wrong)} files arrived damaged, the first is {wrong[0]!r}: copy again")


def _read_unchanged(source: Path, size: int) -> Iterator[bytes]:
    """The content of a file of this size.

    Raises:
        TransientInfraError: the file changed since it was listed.
    """
    num_bytes = 0
    try:
        # O_NOFOLLOW: a link that took the file's place since it was listed is not followed.
        descriptor = os.open(source, os.O_RDONLY | os.O_NOFOLLOW)
        with os.fdopen(descriptor, "rb") as file:
            before = os.fstat(descriptor)
            while chunk := file.read(_READ_BYTES):
                num_bytes += len(chunk)
                yield chunk
            has_changed = os.fstat(descriptor).st_mtime_ns != before.st_mtime_ns
    except OSError as error:
        raise TransientInfraError(f"{source} cannot be read any more: {error.strerror}") from error
    if has_changed or num_bytes != size:
        raise TransientInfraError(f"{source} changed while it was copied: copy it once it is complete")


def _commit(session: Session, destination: str, incoming: str, manifest: Mapping[str, Sequence[Any]]) -> None:
    _call(session, ["commit", destination, incoming], stdin=json.dumps(manifest).encode())


def _discard(session: Session, incoming: str) -> None:
    """Remove what is left of a copy; on a lost node the next copy does it."""
    try:
        _call(session, ["discard", incoming], may_repeat=True)
    except InfraError as error:
        logger.warning("%s was left behind: %s", incoming, error)


# Any: the answers are JSON objects.
def _call(
    session: Session, arguments: Sequence[str], *, stdin: bytes = b"", may_repeat: bool = False
) -> dict[str, Any]:
    completed = session.run_program(
        Path(receiver.__file__),
        arguments,
        stdin=stdin,
        timeout_s=CALL_TIMEOUT_S,
        check=False,
        may_repeat=may_repeat,
    )
    return _checked(read_answer(completed))


def _checked(answer: dict[str, Any]) -> dict[str, Any]:
    """An answer that is no refusal."""
    if "error" in answer:
        if answer["kind"] == "disk_full":
            raise DiskFullError("", 0)  # whoever knows how much was to be written says so
        kind = TransientInfraError if answer["kind"] == "damaged" else PermanentInfraError
        raise kind(answer["error"])
    return answer
