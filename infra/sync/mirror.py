"""Mirror a run directory of a node into a directory on this machine, during the job and after it.

    logs, metrics, events, …  new content is appended; readers of the mirror see the files grow
    other files               received in .incoming/, then renamed. Only chunks that differ from an interrupted earlier
                              attempt or an older version are transferred, and each chunk's digest is checked. The
                              program that receives a large new file writes it directly, not through this process
    order                     a checkpoint's manifest after its other files, result.json after all files
                              a new version of a checkpoint replaces the old version when all new files have arrived
    checkpoints               only checkpoints with a manifest. Checkpoints that the job deleted are deleted here too.
                              A checkpoint of a later step than the job's newest is kept: another node wrote it, and
                              this may be the only copy

Except for growing files, readers on this machine see only complete files. A file counts as unchanged if its size and
modification time are the same here and on the node.

A node may be untrusted, so only file names that jobs write are accepted. A file like `json.py` could otherwise be
imported when a stage resumes in the mirrored folder. The number and size of files are limited.

Not here: the node's side (sender.py), uploads to the node (push.py).
"""

import functools
import hashlib
import itertools
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import FileIO
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from rollouts.infra.chunks import CHUNK_BYTES, DIRECT_BYTES, checked_digest
from rollouts.infra.errors import DiskFullError, InfraError, PermanentInfraError, TransientInfraError
from rollouts.infra.foreign_text import shown_line
from rollouts.infra.locks import locked
from rollouts.infra.node_agent import DIGESTS
from rollouts.infra.repeating import repeating
from rollouts.infra.session import Session, read_answer
from rollouts.infra.supervisor.files import parse_object
from rollouts.infra.sync import receiver, sender

LIST_TIMEOUT_S = 60.0
_PULL_INTERVAL_S = 10.0
APPENDED = ("log.txt", "metrics.jsonl", "events.jsonl", "gpu_use.jsonl")
MANIFEST, RESULT = "manifest.json", "result.json"
STEP = re.compile(r"checkpoints/step_(\d+)")
JOB_FILES = re.compile(
    r"(job|result|rows)\.json|log\.txt|(metrics|events|gpu_use)\.jsonl|exit-[0-9]+\.json|finish-([0-9]+|asked)"
    r"|stop-[0-9]+|stop\.json|(engine-[0-9]+|router)\.txt|(samples|credit)/[^/\x00-\x1f]+\.jsonl|checkpoints(/[^/\x00-\x1f]+){2,4}"
)
"""Names of the files in a run directory (docs/run_directory.md)."""
MAX_FILES = 100_000
MAX_TEXT_BYTES = 8 << 30
"""Largest allowed size in bytes of a file outside of checkpoints, for example of a log or a file of samples."""
RESERVED_BYTES, RESERVED_SHARE = 1 << 30, 0.02
"""A mirror leaves RESERVED_BYTES or RESERVED_SHARE of this machine's disk free, the smaller of the two."""
INCOMING = ".incoming"
LOCK = ".mirror.lock"
_MAX_HEAD_BYTES = 64 << 10
_MAX_NUMBER = 1 << 63
"""Upper bound of file sizes and modification times in all file systems."""

_READ_BYTES = 256 << 10
"""Size of the pieces in which chunks are hashed. A piece of this size fits into the CPU's cache."""

# JSON objects have no better type than Any.
JsonObject = dict[str, Any]

logger = logging.getLogger(__name__)


def is_job_file(name: str) -> bool:
    return JOB_FILES.fullmatch(name) is not None


def pull_run(session: Session, source: str, target: Path, *, takes: Callable[[str], bool] = is_job_file) -> int:
    """Fetch new files and new content of the run directory `source` on the node. Returns the number of fetched files.

    Only one process at a time mirrors into a directory. If the directory does not exist on the node, this function
    changes nothing.

    Args:
        takes: returns whether a file of this name is fetched. A warning names the files that are not fetched.

    Raises:
        TransientInfraError: the connection broke, or a file arrived damaged. The next call fetches only the missing
            parts.
        DiskFullError: this machine's disk has no room for the new files. Nothing was fetched, unless a file grew
            meanwhile.
        PermanentInfraError: a file's name or size is refused, or a file on this machine cannot be written.
    """
    try:
        target.mkdir(parents=True, exist_ok=True)
        with locked(target / LOCK):
            there, digest = _list(session, source, takes)
            if there is None:
                return 0
            _remove_deleted_checkpoints(there, target)
            wanted = [name for name in _in_order(there) if _is_new(target / name, *there[name])]
            _check_room(target, {name: there[name][0] for name in wanted})
            held: dict[str, Path] = {}
            damaged = _fetch(session, source, target, {name: there[name] for name in wanted}, digest, held)
            # Retry once: the first attempt may have reused damaged chunks of this machine's older files.
            damaged = _fetch(session, source, target, {name: there[name] for name in damaged}, digest, held)
            if not damaged:
                shutil.rmtree(target / INCOMING, ignore_errors=True)
    except OSError as error:
        raise PermanentInfraError(f"{target} cannot be written: {error.strerror}") from error
    if damaged:
        raise TransientInfraError(f"{len(damaged)} files of {source} arrived damaged, the first is {damaged[0]!r}")
    return len(wanted)


@contextmanager
def mirrored(session: Session, source: str, target: Path, *, interval_s: float = _PULL_INTERVAL_S) -> Iterator[None]:
    """Mirror the run directory `source` at intervals while the block runs. A failed transfer is logged, and the next
    round retries the transfer.

    At the end of the block, this function waits for a running transfer. After an exception, this function does not
    wait.
    """

    def pull() -> None:
        try:
            pull_run(session, source, target)
        except InfraError as error:
            logger.warning("%s was not mirrored: %s", source, error)

    with repeating(pull, interval_s=interval_s, thread_name=f"mirror of {source}"):
        yield


def is_behind(session: Session, source: str, target: Path) -> bool:
    """Return whether this machine has a complete checkpoint of a later step than all complete checkpoints on the
    node."""
    ours = [path.relative_to(target).as_posix() for path in target.glob(f"checkpoints/*/{MANIFEST}")]
    there, _ = _list(session, source, is_job_file)
    return _newest_step(there or ()) < _newest_step(ours)


def _list(session: Session, source: str, takes: Callable[[str], bool]) -> tuple[dict[str, list[int]] | None, str]:
    """Return the size and modification time of each file on the node, and the name of the node's digest algorithm.
    Files of incomplete checkpoints are left out."""
    listed = session.run_program(Path(sender.__file__), ["list", source], timeout_s=LIST_TIMEOUT_S, may_repeat=True)
    answer = read_answer(listed)
    digest = checked_digest(answer)
    files = answer.get("files", "nothing")
    if files is None:
        return None, digest
    if left_out := answer.get("left_out"):
        _warn_of_left_out(source, shown_line(str(left_out)))
    if not isinstance(files, dict):
        raise PermanentInfraError(f"{source} on the node: expected its files, found {str(files)[:80]}")
    for name, found in files.items():
        try:
            receiver.check_name(name)
        except receiver.CopyError as error:
            raise PermanentInfraError(f"{source} on the node: {error.message}") from error
        if any(part.startswith(".") for part in name.split("/")):  # this module uses such names for its own files
            raise PermanentInfraError(f"{source} on the node: the file name {name!r} is refused: it begins with a dot")
        if not _are_size_and_time(found):
            raise PermanentInfraError(f"{source} on the node: {name} cannot have size and time {str(found)[:80]}")
    if len(files) > MAX_FILES:
        raise PermanentInfraError(f"{source} on the node has {len(files)} files, and a job writes {MAX_FILES} at most")
    if strange := [name for name in files if not takes(name)]:
        _warn_of_left_out(source, shown_line(", ".join(map(repr, strange[:3]))))
        files = {name: found for name, found in files.items() if takes(name)}
    for name, (size, _) in files.items():
        if size > MAX_TEXT_BYTES and not name.startswith("checkpoints/"):
            raise PermanentInfraError(f"{source} on the node: {name} has {size} bytes, the limit is {MAX_TEXT_BYTES}")
    whole = {str(PurePosixPath(name).parent) for name in files if PurePosixPath(name).name == MANIFEST}
    return {name: found for name, found in files.items() if _checkpoint_of(name) in (None, *whole)}, digest


@functools.lru_cache
def _warn_of_left_out(source: str, left_out: str) -> None:
    """Warn about files that are not fetched. The cache suppresses the warnings of later listings."""
    logger.warning(
        "%r on the node: %s is not copied: jobs do not write files of that name, or the file is unreadable",
        source,
        left_out,
    )


def _checkpoint_of(name: str) -> str | None:
    parts = PurePosixPath(name).parts
    return "/".join(parts[:2]) if parts[0] == "checkpoints" and len(parts) > 2 else None


def _newest_step(files: Iterable[str]) -> int:
    """Return the step of the newest complete checkpoint among a run directory's files, or -1 if there is none."""
    manifests = (PurePosixPath(name) for name in files if PurePosixPath(name).name == MANIFEST)
    return max((_step_of(str(path.parent)) for path in manifests), default=-1)


def _step_of(checkpoint: str) -> int:
    """Return the step of a checkpoint, given as checkpoints/<name>, or -1 if the name has no step."""
    named = STEP.fullmatch(checkpoint)
    return int(named[1]) if named else -1


def _in_order(names: Mapping[str, object]) -> list[str]:
    """Sort the names. Manifests and result.json come last, because their existence confirms that all other files are
    complete."""
    return sorted(names, key=lambda name: (name == RESULT, PurePosixPath(name).name == MANIFEST, name))


def _is_new(path: Path, size: int, modified_ns: int) -> bool:
    try:
        status = path.lstat()
    except FileNotFoundError:
        return True
    return (status.st_size, status.st_mtime_ns) != (size, modified_ns)


def _check_room(target: Path, sizes: Mapping[str, int]) -> None:
    """Raise DiskFullError unless this machine's disk has room for the files' missing bytes and for the reserve."""
    needed = sum(max(0, size - _size_of(_part_of(target, name))) for name, size in sizes.items())
    disk = shutil.disk_usage(target)
    reserved = min(RESERVED_BYTES, int(disk.total * RESERVED_SHARE)) if needed else 0
    if disk.free < needed + reserved:
        raise DiskFullError(str(target), needed)


def _remove_deleted_checkpoints(there: Mapping[str, object], target: Path) -> None:
    kept = {checkpoint for name in there if (checkpoint := _checkpoint_of(name))}
    if not kept:  # the job has written no checkpoint yet, so keep the earlier ones
        return
    newest = _newest_step(there)
    for path in (target / "checkpoints").glob("[!.]*"):
        if path.is_symlink() or not path.is_dir():  # a user created this path; a link may lead to the user's files
            continue
        checkpoint = f"checkpoints/{path.name}"
        # Jobs never delete their newest checkpoint. A later checkpoint is from another node and may be the only copy.
        if checkpoint not in kept and _step_of(checkpoint) <= newest:
            # Delete the manifest first, so that the rest of the checkpoint never looks complete.
            (path / MANIFEST).unlink(missing_ok=True)
            shutil.rmtree(path, ignore_errors=True)


def _fetch(
    session: Session,
    source: str,
    target: Path,
    names: Mapping[str, Sequence[int]],
    algorithm: str,
    held: dict[str, Path],
) -> list[str]:
    """Fetch files with one call. Returns the names of damaged files.

    Args:
        names: for each file's name its size and modification time, as the node listed them.
        held: temporary paths of complete files that belong to a new version of a checkpoint. The old version of the
            checkpoint stays until all new files have arrived.
    """
    if not names:
        return []
    parts = {name: _Part(_part_of(target, name), begins_as=target / name, algorithm=algorithm) for name in names}
    poured = {name for name, part in parts.items() if part.is_new and names[name][0] >= DIRECT_BYTES}
    if poured and not session.can_pour:
        poured.clear()
    damaged: list[str] = []
    changed: set[Path] = set()
    replaced = {name for name in names if _manifest_of(name) == name and (target / name).exists()}
    with _stream_of(session, source, {name: part for name, part in parts.items() if name not in poured}) as stream:
        for name, part in parts.items():
            if name == RESULT or PurePosixPath(name).name == MANIFEST:
                _flush(changed)
            may_appear = not any(_is_confirmed(each, by=name) for each in damaged)
            if name in poured:
                listed = dict(zip(("name", "size", "modified_ns"), (name, *names[name]), strict=True))
                is_right: bool | None = _pour(session, source, listed, part) and may_appear
            else:
                is_right = _receive_listed(stream, target, name, names[name], part, may_appear=may_appear)
            if is_right is False:
                damaged.append(name)
            elif is_right and not part.is_in_place:
                held[name] = part.path
            if name in held and name in replaced:
                _replace_checkpoint(held, target, name)
            elif name in held and _manifest_of(name) not in replaced:
                _let_appear(held.pop(name), target / name)
            replaced.discard(name)
            changed.add((target / name).parent)
    _flush(changed)
    return damaged


def _receive_listed(
    stream: "_ByteStream", target: Path, name: str, listed: Sequence[int], part: "_Part", *, may_appear: bool
) -> bool | None:
    """Receive the next file of the stream. Returns True or False like `_receive`, or None if the node has lost the
    file.

    Args:
        listed: the file's size and modification time in the node's list.
    """
    head = stream.read_object()
    if head is None or not _is_head_of(name, head):
        raise TransientInfraError(f"{head} came from the node instead of {name}")
    if head["size"] is None:
        return None
    if _manifest_of(name) == name:  # if the manifest has changed, files before it are of the old version
        may_appear &= [head["size"], head.get("modified_ns")] == list(listed)
    if head["size"] > listed[0]:  # the file has grown since the room was checked
        _check_room(target, {name: head["size"]})
    return _receive(stream, head, part, may_appear=may_appear)


@contextmanager
def _stream_of(session: Session, source: str, parts: "Mapping[str, _Part]") -> Iterator["_ByteStream"]:
    if not parts:
        yield _ByteStream(iter(()))
        return
    algorithm = next(iter(parts.values())).algorithm
    asked = [[name, part.size, part.digests] for name, part in parts.items()]
    request = {"chunk_bytes": CHUNK_BYTES, "digest": algorithm, "files": asked}
    with session.pipe_program(Path(sender.__file__), ["send", source], stdin=_line(request)) as chunks:
        yield _ByteStream(chunks)


def _line(content: Mapping[str, object]) -> bytes:
    return json.dumps(content).encode() + b"\n"


def _manifest_of(name: str) -> str:
    """Return the manifest of the checkpoint to which a file belongs, or "" for files outside of checkpoints."""
    checkpoint = _checkpoint_of(name)
    return f"{checkpoint}/{MANIFEST}" if checkpoint else ""


def _replace_checkpoint(held: dict[str, Path], target: Path, manifest: str) -> None:
    """Replace a checkpoint's old version by the files that have arrived, with the manifest last."""
    # Delete the old manifest first, so that a mixture of both versions never looks complete.
    (target / manifest).unlink(missing_ok=True)
    directories = set()
    for name in [each for each in held if _manifest_of(each) == manifest and each != manifest]:
        _let_appear(held.pop(name), target / name)
        directories.add((target / name).parent)
    _flush(directories)
    _let_appear(held.pop(manifest), target / manifest)


def _let_appear(part: Path, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part.rename(path)


def _is_confirmed(name: str, *, by: str) -> bool:
    """Return whether the existence of the file `by` confirms that the file `name` is complete."""
    place = PurePosixPath(by)
    return by == RESULT or (place.name == MANIFEST and PurePosixPath(name).is_relative_to(place.parent))


def _flush(directories: set[Path]) -> None:
    """Make renames in these directories survive a power failure. Called once for many files, because fsync is slow."""
    for directory in directories:
        if directory.is_dir():  # false if the directory's only file was removed or arrived damaged
            receiver.flush_directory(directory)
    directories.clear()


def _is_head_of(name: str, head: Mapping[str, Any]) -> bool:  # Any: JSON
    size, modified_ns = head.get("size", ""), head.get("modified_ns")
    return head.get("name") == name and (size is None or _are_size_and_time([size, modified_ns]))


def _are_size_and_time(found: Any) -> bool:  # Any: JSON
    """Return whether a node's answer is a valid size, and a valid modification time in nanoseconds since 1970."""
    if not isinstance(found, list) or [type(number) for number in found] != [int, int]:
        return False
    size, modified_ns = found
    return bool(0 <= size < _MAX_NUMBER and -_MAX_NUMBER <= modified_ns < _MAX_NUMBER)


def _part_of(target: Path, name: str) -> Path:
    """Return the path at which a file is received: the final path for a growing file, a temporary path for other
    files."""
    if name in APPENDED:
        return target / name
    return target / INCOMING / hashlib.sha256(name.encode()).hexdigest()


def _size_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


class _Part:
    """The part of a file that is already on this machine while the file is fetched."""

    def __init__(self, path: Path, *, begins_as: Path, algorithm: str) -> None:
        """Use the part of an earlier attempt. If an earlier attempt left no part, start a large file as a copy of this
        machine's older version."""
        self.path = path
        self.algorithm = algorithm
        self.is_in_place = path == begins_as
        path.parent.mkdir(parents=True, exist_ok=True)
        self.is_new = not path.exists() and not begins_as.exists()
        if not path.exists() and begins_as.is_file() and _size_of(begins_as) > CHUNK_BYTES:
            shutil.copyfile(begins_as, path)
        self.size = _size_of(path)
        self.digests = receiver.hash_chunks(path, CHUNK_BYTES, algorithm) if self.size else []
        """Digests of the part's chunks. The last chunk may be incomplete."""


def _pour(session: Session, source: str, head: JsonObject, part: _Part) -> bool:
    """Let the receiving program write a new file directly, bypassing this process, and check the file's chunks.

    Returns False if the file is incomplete or a digest differs. The received content stays for the next attempt.
    """
    size = head["size"]
    request = {"chunk_bytes": CHUNK_BYTES, "digest": part.algorithm, **head}
    digests: list[object] = []
    num_right = 0
    is_changed = True
    with part.path.open("w+b", buffering=0) as file:
        try:
            program = Path(sender.__file__)
            with session.pour_program(
                program, ["pour", source], stdin=_line(request), into=file, max_bytes=size
            ) as said:
                # The node sends one object per chunk and one at the end. The limit stops a node that never ends its
                # output.
                for each in itertools.islice(said, -(-size // CHUNK_BYTES) + 2):
                    is_changed = each.get("is_changed", True)
                    digests += [each["digest"]] if "digest" in each else []
                    num_right += _count_right(file, size, digests, num_right, part.algorithm)
        except InfraError as error:
            logger.info("%s could not be received directly: %s", head["name"], error)
            return False
        num_right += _count_right(file, size, digests, num_right, part.algorithm)
        file.truncate(size)
        os.fsync(file.fileno())
    if is_changed or num_right * CHUNK_BYTES < size:
        return False
    os.utime(part.path, ns=(head["modified_ns"], head["modified_ns"]))
    return True


def _count_right(file: FileIO, size: int, digests: Sequence[object], first: int, algorithm: str) -> int:
    """Return how many of the written chunks from number `first` on match their digests, up to the first mismatch.

    Chunks that were written recently are still in the page cache.
    """
    num_written = file.tell()
    number = first
    while number < len(digests) and (end := min(size, (number + 1) * CHUNK_BYTES)) <= num_written:
        if _digest_of(file, number * CHUNK_BYTES, end, algorithm) != digests[number]:
            break
        number += 1
    return number - first


def _digest_of(file: FileIO, start: int, end: int, algorithm: str) -> str:
    digest = DIGESTS[algorithm]()
    while start < end and (piece := os.pread(file.fileno(), min(_READ_BYTES, end - start), start)):
        digest.update(piece)
        start += len(piece)
    return str(digest.hexdigest())


def _receive(stream: "_ByteStream", head: Mapping[str, Any], part: _Part, *, may_appear: bool) -> bool:  # Any: JSON
    """Receive one file. Returns False, and keeps the chunks, if a digest differs or the file must not appear yet."""
    wrong = []
    part.path.touch()
    with part.path.open("r+b") as file:
        for start in range(0, head["size"], CHUNK_BYTES):
            if not _receive_chunk(stream, file, start, min(CHUNK_BYTES, head["size"] - start), part):
                wrong.append(start)
        # Readers see a growing file during the transfer, so cut off wrong content.
        file.truncate(wrong[0] if wrong and part.is_in_place else head["size"])
        file.flush()
        os.fsync(file.fileno())
    tail = stream.read_object() or {}
    # The next transfer fetches content that was appended during this transfer.
    if wrong or (tail.get("is_changed", True) and not part.is_in_place) or not may_appear:
        return False
    os.utime(part.path, ns=(head["modified_ns"], head["modified_ns"]))
    return True


def _receive_chunk(stream: "_ByteStream", file: BinaryIO, start: int, num_bytes: int, part: _Part) -> bool:
    """Receive the missing part of a chunk. Returns whether the chunk's digest matches."""
    num_same = max(0, min(CHUNK_BYTES, part.size - start))
    if num_same and not (stream.read_object() or {}).get("is_same"):
        num_same = 0
    # If a chunk of a growing file differs, the code below truncates the file at the start of this chunk.
    is_here = file.seek(0, os.SEEK_END) >= start + num_same
    if num_same >= num_bytes:
        return is_here and num_same == num_bytes
    file.seek(start)
    digest = DIGESTS[part.algorithm](file.read(num_same))
    if not num_same and part.size > start and part.is_in_place:
        file.truncate()
    for piece in stream.read(num_bytes - num_same):
        file.write(piece)
        digest.update(piece)
    tail = stream.read_object() or {}
    return bool(digest.hexdigest() == tail.get("digest"))


class _ByteStream:
    """Reads JSON lines and raw bytes from a stream that arrives in pieces of any size."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._pending = b""

    def read_object(self) -> dict[str, Any] | None:  # Any: JSON
        """Return the JSON object of the next line, or None if the line is not a JSON object."""
        while b"\n" not in self._pending:
            if len(self._pending) > _MAX_HEAD_BYTES:
                raise TransientInfraError("the node sent a line that is too long")
            self._pending += self._next()
        line, _, self._pending = self._pending.partition(b"\n")
        return parse_object(line)

    def read(self, num_bytes: int) -> Iterator[bytes]:
        """Yield the next `num_bytes` bytes. A negative number yields nothing."""
        while num_bytes > 0:
            piece = self._pending or self._next()
            self._pending = piece[num_bytes:]
            yield piece[:num_bytes]
            num_bytes -= min(num_bytes, len(piece))

    def _next(self) -> bytes:
        try:
            return next(self._chunks)
        except StopIteration as error:
            raise TransientInfraError("the node sent less than announced") from error
