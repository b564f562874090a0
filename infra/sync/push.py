"""Copy files to a node. The destination keeps its old content until all new files are complete and verified.

    source files ── chunk by chunk, hashed while read ──> .<name>.incoming-<copy>-<attempt>, hashed while written
                                                               ^
    on the node: the old destination, and interrupted copies ── files and chunks with the same digests are reused
                         all checked ──> old directory renamed, new one in its place, old one deleted

The sending program reads a large new file directly, while this process hashes the file. If the node may have parts of a
file, the file is read twice: the first time for the digests that show which parts to send. After a broken connection,
the same call or another process continues the interrupted copy.

Not here: the node's side (receiver.py), the transport of bytes (session.py).
"""

import json
import logging
import math
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from rollouts.infra.chunks import CHUNK_BYTES, DIRECT_BYTES, Chunk, SourceFile, checked_digest
from rollouts.infra.errors import (
    DiskFullError,
    InfraError,
    NodeUnreachableError,
    PermanentInfraError,
    TransientInfraError,
)
from rollouts.infra.node_agent import ISOLATED
from rollouts.infra.secret_file import OF_OTHERS
from rollouts.infra.session import Session, read_answer
from rollouts.infra.supervisor.files import parse_object
from rollouts.infra.sync import receiver

CALL_TIMEOUT_S = 3600.0
"""Time limit of a call in seconds. The longest call hashes the whole directory on the node, at about 1 GB/s."""
BATCH_BYTES = CHUNK_BYTES
"""Files of up to this total size are sent with one call over the present connection. Files of a larger total size are
sent over separate connections."""
_MANY_BYTES = 32 << 20
"""For uploads above this size in bytes, several connections to a distant node save more time than their logins take."""
MAX_VAIN_ATTEMPTS = 4
"""After a broken connection, an upload is continued until this many attempts in a row made no progress."""
FIRST_PAUSE_S = 0.25

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishReport:
    num_files: int
    num_bytes: int
    num_sent_bytes: int
    """Number of bytes that the node had neither at the destination nor from an interrupted copy."""
    was_identical: bool
    """Whether the destination already had the same content, so that nothing was written."""


def publish_directory(session: Session, source: Path, destination: str) -> PublishReport:
    """Copy the files below `source` to `destination` on the node. All files are verified, and appear together.

    Files of the destination that `source` does not have are removed. Empty directories are not copied. Only two
    properties of a file's mode
    are copied: whether the owner may execute it, and whether only the owner may read it.

    Raises:
        DiskFullError: the node has no room. The files received so far were removed.
        NodeUnreachableError: the connection broke repeatedly. The next call sends only the missing parts.
        TransientInfraError: a file changed while it was read or arrived damaged, or a job is running in the
            destination. The next call sends only the missing parts.
        PermanentInfraError: the source is empty, or contains symbolic links, devices or unprintable names.
    """
    root = source.resolve()
    sizes = list_files(root)
    _check_nesting(root, destination)
    return _publish(session, {name: root / name for name in sizes}, sizes, destination)


def publish_files(session: Session, files: Mapping[str, Path], destination: str) -> PublishReport:
    """Copy files from different folders, like `publish_directory`. `files` maps a file's name below `destination` to
    the file's path on this machine."""
    sizes = {name: _checked_size(path, name) for name, path in sorted(files.items())}
    return _publish(session, files, sizes, destination)


def has_files(session: Session, files: Mapping[str, Path], directory: str) -> bool:
    """Return whether a directory of the node has all of these files with the same sizes. Contents are not compared."""
    sizes = {name: _checked_size(path, name) for name, path in files.items()}
    request = json.dumps({"names": list(sizes)}).encode()
    there = _call(session, ["sizes", directory], stdin=request, may_repeat=True)["sizes"]
    return bool(there == sizes)


def publish_filled(
    session: Session, destination: str, num_bytes: int, fill: Callable[[str], Mapping[str, Sequence[Any]]]
) -> None:
    """Create a folder on the node from files that `fill` puts into a temporary folder. All files appear together.

    Args:
        fill: called with the temporary folder. Returns the size and sha256 of each file, with None in place of a digest
            that `fill` has already checked.
    """
    incoming = _incoming_of(destination, secrets.token_hex(8), 0)
    with _held_folder(session, destination, incoming, num_bytes, {}, digest=""):
        try:
            _commit(session, destination, incoming, fill(incoming), {})
        except TransientInfraError:  # the next attempt cannot reuse files that the node fetched itself
            _discard(session, incoming)
            raise


def _incoming_of(destination: str, copy: str, attempt: int) -> str:
    place = PurePosixPath(destination)
    return str(place.with_name(f".{place.name}{receiver.INCOMING_MARK}{copy}-{attempt}"))


@contextmanager
def _held_folder(
    session: Session,
    destination: str,
    incoming: str,
    num_bytes: int,
    reused: Mapping[str, Sequence[Any]],
    *,
    digest: str,
) -> Iterator[dict[str, list[int]]]:
    """Create and lock a temporary folder next to the destination. Yields the numbers of the reused chunks by file.

    If the block fails and a retry may help, the folder stays for the next attempt.
    """
    program = [session.python, ISOLATED, session.place_program(Path(receiver.__file__))]
    arguments = ["prepare", destination, incoming, str(num_bytes)]
    request = json.dumps({"reused": reused, "chunk_bytes": CHUNK_BYTES, "digest": digest}).encode() + b"\n"
    try:
        with session.stream([*program, *arguments], stdin=request) as lines:
            # Skip other lines, because some interpreters print other text first.
            answer = next((found for line in lines if (found := parse_object(line)) is not None), None)
            if answer is None:
                raise TransientInfraError(f"the node prepared nothing for {destination}: copy again")
            yield _checked(answer)["taken"]
    except DiskFullError as error:
        _discard(session, incoming)
        raise DiskFullError(destination, num_bytes) from error
    except PermanentInfraError:
        _discard(session, incoming)
        raise


def _publish(session: Session, files: Mapping[str, Path], sizes: Mapping[str, int], destination: str) -> PublishReport:
    """Copy files. After a broken connection the copy is continued, as long as attempts make progress."""
    place = PurePosixPath(destination)
    if not place.is_absolute() or ".." in place.parts:
        raise PermanentInfraError(f"the destination {destination} is not an absolute path without `..`")
    sources = {name: SourceFile(files[name], size) for name, size in sizes.items()}
    copy = secrets.token_hex(8)
    num_missing: list[float] = []
    """Number of missing bytes at the beginning of each attempt. Infinite if the attempt failed before the missing bytes
    were counted."""
    while True:
        incoming = _incoming_of(destination, copy, len(num_missing))
        num_missing.append(math.inf)
        try:
            was_identical = _make_attempt(session, sources, destination, incoming, num_missing)
            break
        except NodeUnreachableError as error:
            num_vain = len(num_missing) - num_missing.index(min(num_missing))
            if num_vain == MAX_VAIN_ATTEMPTS:
                raise
            logger.warning("the copy to %s was interrupted and continues: %s", destination, error)
            time.sleep(FIRST_PAUSE_S * 2.0**num_vain)
    num_bytes = sum(sizes.values())
    num_sent_bytes = int(next(each for each in num_missing if each < math.inf))
    logger.info("published %s, %d bytes in %d files, %d bytes sent", destination, num_bytes, len(sizes), num_sent_bytes)
    return PublishReport(
        num_files=len(sizes),
        num_bytes=num_bytes,
        num_sent_bytes=num_sent_bytes,
        was_identical=was_identical and len(num_missing) == 1,
    )


def _make_attempt(
    session: Session,
    sources: Mapping[str, SourceFile],
    destination: str,
    incoming: str,
    num_missing: list[float],
) -> bool:
    """Try once to copy the files. Sets the last item of `num_missing` to the bytes to send. Returns True if nothing had
    to be sent."""
    sizes = {name: source.size for name, source in sources.items()}
    if sum(sizes.values()) > _MANY_BYTES:
        session.expect_chunks(sum(source.num_chunks for source in sources.values()))
    wanted = json.dumps({"sizes": sizes, "chunk_bytes": CHUNK_BYTES}).encode()
    there = _call(session, ["describe", destination], stdin=wanted, may_repeat=True)
    digest = checked_digest(there)
    for source in sources.values():
        source.digest_by(digest)
    if there["files"] == sizes and _are_same(sources, there["usable"], destination):
        num_missing[-1] = 0
        return True
    reused = _choose_reused(sources, there["usable"])
    num_reused_bytes = sum(_length_of(sources[name], chunks) for name, (*_, chunks) in reused.items())
    num_new_bytes = sum(sizes.values()) - num_reused_bytes
    with _held_folder(session, destination, incoming, num_new_bytes, reused, digest=digest) as taken:
        missing = _missing_chunks(sources, taken)
        num_missing[-1] = sum(sources[name].length_of(number) for name, each in missing.items() for number in each)
        # Only the first attempt sends files directly: a direct transfer cannot be continued, but single chunks can.
        for name in _fed_names(session, sources, missing) if len(num_missing) == 1 else ():
            _feed(session, name, sources[name], incoming, digest=digest)
            del missing[name]
        whole = {name: sources[name] for name, numbers in missing.items() if len(numbers) == sources[name].num_chunks}
        if sum(source.size for source in whole.values()) > BATCH_BYTES:
            whole = {name: source for name, source in whole.items() if source.size == 0}
        _send_batch(session, whole, incoming, digest=digest)
        rest = {name: missing[name] for name in missing if name not in whole}
        _send_chunks(session, sources, rest, incoming, digest=digest)
        manifest = {name: [size, None] for name, size in sizes.items()}
        modes = {name: _mode_of(source.path) for name, source in sources.items()}
        _commit(session, destination, incoming, manifest, modes)
    return False


def _missing_chunks(sources: Mapping[str, SourceFile], taken: Mapping[str, Sequence[int]]) -> dict[str, list[int]]:
    """Return the numbers of the missing chunks of each incomplete file. A missing empty file has an empty list."""
    missing = {}
    for name, source in sources.items():
        there = frozenset(taken.get(name, ()))
        if name not in taken or len(there) < source.num_chunks:
            missing[name] = [number for number in range(source.num_chunks) if number not in there]
    return missing


def _are_same(sources: Mapping[str, SourceFile], usable: Sequence[Sequence[Any]], destination: str) -> bool:
    there = {name: tuple(digests) for directory, name, _, _, digests in usable if directory == destination}
    return all(there.get(name) == source.digests() for name, source in sources.items())


def _choose_reused(sources: Mapping[str, SourceFile], usable: Sequence[Sequence[Any]]) -> dict[str, list[Any]]:
    """Choose, for each file, the file on the node whose content is reused.

    A file with the same content is preferred, then a file of the same name with equal chunks. Each file of the node is
    used at most once. Empty files are always sent. The returned entries have the format of receiver.take_files.
    """
    sizes = {size for _, _, size, _, _ in usable}
    by_content: dict[tuple[int, tuple[str, ...]], list[Sequence[Any]]] = {}
    for each in usable:
        by_content.setdefault((each[2], tuple(each[4])), []).append(each)
    reused = {}
    for name, source in sources.items():
        if source.size and source.size in sizes and (same := by_content.get((source.size, source.digests()))):
            reused[name] = _reuse(same.pop(0), source)
    by_name: dict[str, list[Sequence[Any]]] = {}
    for each in (each for rest in by_content.values() for each in rest):
        by_name.setdefault(each[1], []).append(each)
    for name, source in sources.items():
        if name not in reused and source.size > CHUNK_BYTES:
            parts = [_reuse(each, source) for each in by_name.get(name, ())]
            best = max(parts, key=lambda part: len(part[-1]), default=None)
            if best and best[-1]:
                reused[name] = best
    return reused


def _reuse(there: Sequence[Any], source: SourceFile) -> list[Any]:
    """Return the entry of `receiver.take_files` that reuses the equal chunks of a file on the node."""
    directory, name, size, modified_ns, digests = there
    known = enumerate(digests[: source.num_chunks])
    chunks = [[number, digest] for number, digest in known if source.digest(number) == digest]
    return [directory, name, size, modified_ns, source.size, chunks]


def _length_of(source: SourceFile, chunks: Sequence[Sequence[Any]]) -> int:
    return sum(source.length_of(number) for number, _ in chunks)


def list_files(root: Path) -> dict[str, int]:
    """Return the size of every file below a directory, by relative path, sorted.

    Raises:
        PermanentInfraError: the directory is empty, or contains something other than plain files with printable names.
        TransientInfraError: a file was removed meanwhile.
    """
    sizes: dict[str, int] = {}
    for directory, directory_names, file_names in os.walk(root, onerror=_raise_unreadable):
        for name in [*directory_names, *file_names]:
            path = Path(directory, name)
            if not stat.S_ISDIR(_status_of(path).st_mode):
                relative = path.relative_to(root).as_posix()
                sizes[relative] = _checked_size(path, relative)
    if not sizes:
        raise PermanentInfraError(f"{root} holds no files: there is nothing to copy")
    return dict(sorted(sizes.items()))


def _raise_unreadable(error: OSError) -> None:
    raise PermanentInfraError(f"{error.filename} cannot be read: {error.strerror}") from error


def _checked_size(path: Path, name: str) -> int:
    """Return the size of a plain file. Raises PermanentInfraError if a file of this name or kind must not be copied."""
    status = _status_of(path)
    if not stat.S_ISREG(status.st_mode):
        raise PermanentInfraError(
            f"{path} is a symbolic link or a device, which is not copied: put the file itself there"
        )
    try:
        receiver.check_name(name)
    except receiver.CopyError as error:
        raise PermanentInfraError(f"{str(path)!r}: {error.message}; rename it") from error
    return status.st_size


def _status_of(path: Path) -> os.stat_result:
    try:
        return path.lstat()
    except OSError as error:
        raise TransientInfraError(f"{path} cannot be read any more: {error.strerror}") from error


def _check_nesting(root: Path, destination: str) -> None:
    place = Path(destination)
    if root in place.parents or place in root.parents:
        raise PermanentInfraError(f"{root} and {destination} lie in one another: choose another destination")


def _send_batch(session: Session, sources: Mapping[str, SourceFile], incoming: str, *, digest: str) -> None:
    """Send small files whole, in one call, because every call takes a round trip.

    Raises:
        TransientInfraError: some files arrived damaged.
    """
    if not sources:
        return
    batch = bytearray()
    for name, source in sources.items():
        batch += json.dumps([name, source.size]).encode() + b"\n" + b"".join(source.read(0))
    written = _call(session, ["accept", incoming, digest], stdin=bytes(batch))["digests"]
    _check_digests(sources, {(name, 0): written.get(name) for name in sources})


def _send_chunks(
    session: Session,
    sources: Mapping[str, SourceFile],
    numbers: Mapping[str, Sequence[int]],
    incoming: str,
    *,
    digest: str,
) -> None:
    """Send single chunks of files. `numbers` has the chunk numbers by file.

    Raises:
        TransientInfraError: some chunks arrived damaged.
    """
    chunks = [Chunk(name, number, sources[name].read(number)) for name in numbers for number in numbers[name]]
    if not chunks:
        return
    written = session.write_chunks(incoming, chunks, digest=digest)
    _check_digests(sources, {(name, number): written.get((name, number)) for name, number, _ in chunks})


def _fed_names(session: Session, sources: Mapping[str, SourceFile], missing: Mapping[str, Sequence[int]]) -> list[str]:
    """Return the large files that the node lacks entirely, or an empty list if the sending program cannot read files
    directly."""
    large = [name for name, numbers in missing.items() if sources[name].size >= DIRECT_BYTES]
    large = [name for name in large if len(missing[name]) == sources[name].num_chunks]
    return large if large and session.can_pour else []


def _feed(session: Session, name: str, source: SourceFile, incoming: str, *, digest: str) -> None:
    """Let the sending program read a file directly, while this process only hashes the file.

    Raises:
        NodeUnreachableError: the connection broke.
        TransientInfraError: the file changed meanwhile, or arrived damaged.
    """
    arguments = ["accept_large", incoming, name, str(source.size), str(CHUNK_BYTES), digest]
    with source.open() as file, session.feed_program(Path(receiver.__file__), arguments, stdin=file) as lines:
        source.digests()  # hash the file during the transfer
        answers = [found for line in lines if (found := parse_object(line)) is not None]
    source.check()
    if not answers:
        raise TransientInfraError(f"{name} was not written: copy again")
    if answers[-1].get("kind") == "unheld":
        raise NodeUnreachableError(incoming, "the connection that holds its lock broke")
    written = dict(enumerate(_checked(answers[-1])["digests"]))
    _check_digests({name: source}, {(name, number): written.get(number) for number in range(source.num_chunks)})


def _check_digests(sources: Mapping[str, SourceFile], written: Mapping[tuple[str, int], str | None]) -> None:
    wrong = sorted({name for (name, number), digest in written.items() if digest != sources[name].digest(number)})
    if wrong:
        raise TransientInfraError(f"{len(wrong)} files arrived damaged, the first is {wrong[0]!r}: copy again")


def is_executable(path: Path) -> bool:
    return bool(_mode_of(path) & stat.S_IXUSR)


def _mode_of(path: Path) -> int:
    try:
        return path.stat().st_mode
    except OSError as error:
        raise TransientInfraError(f"{path} cannot be read any more: {error.strerror}") from error


def _commit(
    session: Session,
    destination: str,
    incoming: str,
    manifest: Mapping[str, Sequence[Any]],
    modes: Mapping[str, int],
) -> None:
    request = {
        "files": manifest,
        "executable": [name for name, mode in modes.items() if mode & stat.S_IXUSR],
        "private": [name for name, mode in modes.items() if not mode & OF_OTHERS],
    }
    _call(session, ["commit", destination, incoming], stdin=json.dumps(request).encode())


def _discard(session: Session, incoming: str) -> None:
    """Remove an incomplete copy of files. If the node is unreachable, the next copy process removes the files."""
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
    if "error" in answer:
        if answer["kind"] == "disk_full":
            raise DiskFullError("", 0)  # `_held_folder` adds the destination and the number of bytes
        kind = TransientInfraError if answer["kind"] in ("damaged", "busy") else PermanentInfraError
        raise kind(answer["error"])
    return answer
