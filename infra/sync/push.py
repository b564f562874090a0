"""Copy files to a node so that their destination holds either all of them, verified, or what it held before.

    source files ── chunk by chunk, hashed while read ──> .<name>.incoming-<copy>-<attempt>, hashed while written
                                                               ^
    on the node: the old one, and what a copy that broke off has left ── files and chunks of the same digests are taken
                         compared ──> old one aside, new one in its place, old one removed

A large file of which nothing is there is read by the program that sends it, and hashed here beside that.
A source file is read twice only as far as something is there that it may be: its chunks' digests tell. A copy whose
connection breaks is the next copy's beginning, be it made by the same call or another process.
Not here: the node's side (receiver.py), how bytes travel (session.py).
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
"""The node hashes the whole directory within one call: about 1 GB/s."""
BATCH_BYTES = CHUNK_BYTES
"""So much goes with one call, over the connection that is there; more has connections of its own."""
MANY_BYTES = 32 << 20
"""One connection to a distant node takes about as long for them as it takes to log in several times."""
MAX_VAIN_ATTEMPTS = 4
"""A copy whose connection breaks is gone on with until so many attempts in a row have brought nothing."""
FIRST_PAUSE_S = 0.25

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishReport:
    """What a copy came to."""

    num_files: int
    num_bytes: int
    num_sent_bytes: int
    """What was neither at the destination nor left there by a copy that broke off."""
    was_identical: bool
    """True when the destination held exactly this already, and nothing was written."""


def publish_directory(session: Session, source: Path, destination: str) -> PublishReport:
    """Copy the files below `source` to `destination` on the node, verified and all at once.

    Empty directories are not copied. Of modes only two things are: the owner may execute a file, and only the owner may
    read it. Whatever else lies in `destination` is replaced.

    Raises:
        DiskFullError: the node has no room; nothing is left of the copy.
        NodeUnreachableError: the connection broke again and again; the next call sends what has not arrived.
        TransientInfraError: a file changed while it was read, or arrived damaged; the same. Or a job runs at the
            destination.
        PermanentInfraError: the source holds symbolic links, devices or unprintable names, or is empty.
    """
    root = source.resolve()
    sizes = list_files(root)
    _check_nesting(root, destination)
    return _publish(session, {name: root / name for name in sizes}, sizes, destination)


def publish_files(session: Session, files: Mapping[str, Path], destination: str) -> PublishReport:
    """`publish_directory` for files from different places, by the names that they get below `destination`."""
    sizes = {name: _checked_size(path, name) for name, path in sorted(files.items())}
    return _publish(session, files, sizes, destination)


def has_files(session: Session, files: Mapping[str, Path], directory: str) -> bool:
    """Whether all of the files are below a directory of the node, by their sizes: none is read."""
    sizes = {name: _checked_size(path, name) for name, path in files.items()}
    request = json.dumps({"names": list(sizes)}).encode()
    there = _call(session, ["sizes", directory], stdin=request, may_repeat=True)["sizes"]
    return bool(there == sizes)


def publish_filled(
    session: Session, destination: str, num_bytes: int, fill: Callable[[str], Mapping[str, Sequence[Any]]]
) -> None:
    """Let a folder appear on the node with the files that somebody puts into a folder beside it, or nothing of them.

    Args:
        fill: gets that folder; returns size and sha256 of each file, None in place of a digest that was compared.
    """
    incoming = _incoming_of(destination, secrets.token_hex(8), 0)
    with _held_folder(session, destination, incoming, num_bytes, {}, digest=""):
        try:
            _commit(session, destination, incoming, fill(incoming), {})
        except TransientInfraError:  # what the node fetched itself is not gone on with
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
    """A folder beside the destination, with the chunks of files that are there from the beginning.

    It is locked while the block runs. When that fails and a retry may help, the folder stays, for the next copy.
    """
    program = [session.python, ISOLATED, session.place_program(Path(receiver.__file__))]
    arguments = ["prepare", destination, incoming, str(num_bytes)]
    request = json.dumps({"reused": reused, "chunk_bytes": CHUNK_BYTES, "digest": digest}).encode() + b"\n"
    try:
        with session.stream([*program, *arguments], stdin=request) as lines:
            # An interpreter may say something before.
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
    """Copy files, and go on with the copy where the connection breaks, as long as that brings something."""
    place = PurePosixPath(destination)
    if not place.is_absolute() or ".." in place.parts:
        raise PermanentInfraError(f"the destination {destination} is not an absolute path without `..`")
    sources = {name: SourceFile(files[name], size) for name, size in sizes.items()}
    copy = secrets.token_hex(8)
    num_missing: list[float] = []
    """Bytes that were not there when each attempt began to send; infinite if it did not come so far."""
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
            logger.warning("the copy to %s broke off, and is gone on with: %s", destination, error)
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
    """Copy files; notes as the last of `num_missing` how many bytes are sent; true when all was there already."""
    sizes = {name: source.size for name, source in sources.items()}
    if sum(sizes.values()) > MANY_BYTES:
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
        # What did not come so is gone on with by chunks.
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
    """The numbers of the chunks to be sent, by the files that are not whole; none of an empty one."""
    missing = {}
    for name, source in sources.items():
        there = frozenset(taken.get(name, ()))
        if name not in taken or len(there) < source.num_chunks:
            missing[name] = [number for number in range(source.num_chunks) if number not in there]
    return missing


def _are_same(sources: Mapping[str, SourceFile], usable: Sequence[Sequence[Any]], destination: str) -> bool:
    """Whether each file lies at the destination."""
    there = {name: tuple(digests) for directory, name, _, _, digests in usable if directory == destination}
    return all(there.get(name) == source.digests() for name, source in sources.items())


def _choose_reused(sources: Mapping[str, SourceFile], usable: Sequence[Sequence[Any]]) -> dict[str, list[Any]]:
    """What each file begins as: one of the same content, or one of its name that has chunks of it.

    None is taken twice, and empty ones are sent. The entries are those of receiver.take_files.
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
    """A file of the node with the chunks that it has of ours."""
    directory, name, size, modified_ns, digests = there
    known = enumerate(digests[: source.num_chunks])
    chunks = [[number, digest] for number, digest in known if source.digest(number) == digest]
    return [directory, name, size, modified_ns, source.size, chunks]


def _length_of(source: SourceFile, chunks: Sequence[Sequence[Any]]) -> int:
    return sum(source.length_of(number) for number, _ in chunks)


def list_files(root: Path) -> dict[str, int]:
    """Size of every file below a directory, by its relative path, sorted.

    Raises:
        PermanentInfraError: there is none, or something other than plain files with printable names.
        TransientInfraError: one is removed meanwhile.
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
    """The size of a plain file that may be copied under this name."""
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
    """Send whole files with one call, because a call takes a round trip.

    Raises:
        TransientInfraError: some arrived damaged.
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
    """Send chunks of files, by their numbers.

    Raises:
        TransientInfraError: some arrived damaged.
    """
    chunks = [Chunk(name, number, sources[name].read(number)) for name in numbers for number in numbers[name]]
    if not chunks:
        return
    written = session.write_chunks(incoming, chunks, digest=digest)
    _check_digests(sources, {(name, number): written.get((name, number)) for name, number, _ in chunks})


def _fed_names(session: Session, sources: Mapping[str, SourceFile], missing: Mapping[str, Sequence[int]]) -> list[str]:
    """The large files of which nothing is there, where whoever sends them can read them."""
    large = [name for name, numbers in missing.items() if sources[name].size >= DIRECT_BYTES]
    large = [name for name in large if len(missing[name]) == sources[name].num_chunks]
    return large if large and session.can_pour else []


def _feed(session: Session, name: str, source: SourceFile, incoming: str, *, digest: str) -> None:
    """Have a file read by whoever sends it, beside us: a copy less, of every byte.

    Raises:
        NodeUnreachableError: the connection broke.
        TransientInfraError: it changed meanwhile, or arrived damaged.
    """
    arguments = ["accept_large", incoming, name, str(source.size), str(CHUNK_BYTES), digest]
    with source.open() as file, session.feed_program(Path(receiver.__file__), arguments, stdin=file) as lines:
        source.digests()  # beside that
        answers = [found for line in lines if (found := parse_object(line)) is not None]
    source.check()
    if not answers:
        raise TransientInfraError(f"{name} was not written: copy again")
    if answers[-1].get("kind") == "unheld":
        raise NodeUnreachableError(incoming, "the connection that holds it broke")
    written = dict(enumerate(_checked(answers[-1])["digests"]))
    _check_digests({name: source}, {(name, number): written.get(number) for number in range(source.num_chunks)})


def _check_digests(sources: Mapping[str, SourceFile], written: Mapping[tuple[str, int], str | None]) -> None:
    """Return if all chunks were written as they are here."""
    wrong = sorted({name for (name, number), digest in written.items() if digest != sources[name].digest(number)})
    if wrong:
        raise TransientInfraError(f"{len(wrong)} files arrived damaged, the first is {wrong[0]!r}: copy again")


def is_executable(path: Path) -> bool:
    """Whether the owner of a file may execute it."""
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
        kind = TransientInfraError if answer["kind"] in ("damaged", "busy") else PermanentInfraError
        raise kind(answer["error"])
    return answer
