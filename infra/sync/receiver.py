"""Receive copied files on a node: check the disk's room, verify the files, and make all files appear together.

This program is the node's side of push.py. The program runs as `receiver.py VERB ...`. The program is one file and uses
only the standard library (and blake3 if installed), because its text is sent to nodes. Each verb prints one JSON
object. If a verb fails, the program prints `{"error": sentence}` and exits with code 1.

    describe DESTINATION                    (on stdin {"sizes": {name: size}, "chunk_bytes"} of the new files)
                                            describe the destination and all reusable files with digests of their
                                            chunks: {"files": {name: size} or null, "digest": the name of the digest,
                                            "usable": [[directory, name, size, mtime_ns, [digest]]]}
    sizes DIRECTORY                         (on stdin {"names": [name]}) the sizes of those files that exist
    prepare DESTINATION INCOMING BYTES      (a line {"reused", "chunk_bytes", "digest"} on stdin, see take_files) create
                                            the directory INCOMING next to DESTINATION, put the reused files and chunks
                                            into it, and check the disk's room: {"taken": {name: [chunk number]}}. Runs
                                            until stdin ends, and keeps INCOMING locked until then
    accept INCOMING DIGEST                  (files on stdin) write many small files with one call: {"digests": ...}
    accept_large INCOMING NAME SIZE CHUNK_BYTES DIGEST
                                            (only a file on stdin) write one large file, and print the digests of its
                                            chunks: {"digests": [...]}. Stops when INCOMING is no longer locked
    commit DESTINATION INCOMING             (on stdin {"files": {name: [size, sha256]}, "executable": [name],
                                            "private": [name]}) verify the received files, set the modes of executable
                                            and private files, and rename INCOMING to DESTINATION. If a digest is null,
                                            the file was verified while it was written. The directory of a running job
                                            is not replaced
    discard INCOMING                        remove the received files

The chunks of large files arrive in any order and are written to their files in INCOMING (node_agent.py). If INCOMING is
not locked, its copy process was interrupted. The next copy to the same destination takes the correct parts of INCOMING
and removes the rest. A copy to another destination in the same folder removes an unlocked INCOMING after a day.

The name of INCOMING is .<name of DESTINATION>.incoming-<copy>-<attempt>. An earlier attempt of the same copy counts as
interrupted, even if the node has not noticed yet that the attempt's connection is gone.
"""

import contextlib
import errno
import fcntl
import hashlib
import importlib
import json
import os
import select
import shutil
import stat
import sys
import time
from collections.abc import Callable, Iterator
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO, Literal

INCOMING_MARK = ".incoming-"
_STALE_AFTER_S = 86400.0
"""Seconds after which the leftovers of interrupted copies to other destinations are removed."""
_SPARE_BYTES = 16 << 20
_READ_BYTES = 4 << 20
_F_SETPIPE_SZ, _PIPE_BYTES = 1031, 1 << 20
_PIECE_BYTES = 256 << 10
"""Size of the pieces in which files are written. A piece of this size is still in the CPU's cache when it is hashed
after writing."""
DIGESTS: dict[str, Callable[..., Any]] = {"sha256": hashlib.sha256}
"""Digest algorithms for chunks that this Python supports. The fastest algorithm is last."""
with contextlib.suppress(ImportError):
    # Our environments have blake3, which is ten times as fast as sha256 on processors without SHA instructions.
    DIGESTS["blake3"] = importlib.import_module("blake3").blake3


ErrorKind = Literal["refused", "disk_full", "damaged", "busy", "unheld"]
"""`busy`: another process works in the directory. `unheld`: the connection that holds the copy's lock broke."""


class CopyError(Exception):
    """A verb failed. `kind` is a code for the reason."""

    def __init__(self, message: str, kind: ErrorKind = "refused") -> None:
        super().__init__(message, kind)
        self.message = message
        self.kind = kind


def main(argv: list[str]) -> int:
    verb, parameters = argv[1], argv[2:]
    # Any: JSON
    answer: dict[str, Any] = {}
    try:
        if verb == "describe":
            request = json.loads(sys.stdin.buffer.read())
            answer = _describe_destination(Path(parameters[0]), request["sizes"], request["chunk_bytes"])
        elif verb == "sizes":
            answer = {"sizes": _find_sizes(Path(parameters[0]), json.loads(sys.stdin.buffer.read())["names"])}
        elif verb == "prepare":
            _hold_directory(Path(parameters[0]), Path(parameters[1]), int(parameters[2]))
        elif verb == "accept":
            answer = {"digests": _accept_files(Path(parameters[0]), sys.stdin.buffer, parameters[1])}
        elif verb == "accept_large":
            directory, name, size, chunk_bytes, algorithm = parameters
            answer = {"digests": _accept_large_file(Path(directory), name, int(size), int(chunk_bytes), algorithm)}
        elif verb == "commit":
            request = json.loads(sys.stdin.buffer.read())
            destination, incoming = map(Path, parameters)
            _commit_directory(
                destination,
                incoming,
                request["files"],
                executable=request["executable"],
                private=request["private"],
            )
        elif verb == "discard":
            _discard_directory(Path(parameters[0]))
        else:
            raise CopyError(f"{verb} is not a verb of this program")
    except CopyError as error:
        answer = {"error": error.message, "kind": error.kind}
    except OSError as error:
        answer = {"error": f"{error.filename}: {error.strerror}", "kind": "refused"}
    sys.stdout.write(json.dumps(answer) + "\n")
    return 1 if "error" in answer else 0


def _describe_destination(destination: Path, sizes: dict[str, int], chunk_bytes: int) -> dict[str, Any]:
    """Describe a destination and the leftovers of interrupted copies to it. Files that may be reused are hashed.

    A file with several names (hard links) is listed once. If both names were reused, a change through one name would
    also change the file of the other name.
    """
    algorithm = next(reversed(DIGESTS))
    files: dict[str, int] | None = None
    usable: dict[tuple[int, int], list[Any]] = {}
    wanted_sizes = frozenset(sizes.values())
    for directory in [destination, *_incoming_of(destination)]:
        if not directory.is_dir():
            continue
        found: dict[str, int] = {}
        try:
            for path in _walk(directory):
                status = path.lstat()
                name = path.relative_to(directory).as_posix()
                found[name] = status.st_size
                is_wanted = status.st_size in wanted_sizes or sizes.get(name, 0) > chunk_bytes
                if is_wanted and stat.S_ISREG(status.st_mode) and (status.st_dev, status.st_ino) not in usable:
                    digests = hash_chunks(path, chunk_bytes, algorithm)
                    entry = [str(directory), name, status.st_size, status.st_mtime_ns, digests]
                    usable[status.st_dev, status.st_ino] = entry
        except FileNotFoundError:  # another copy has removed the directory meanwhile
            continue
        if directory == destination:
            files = found
    return {"files": files, "digest": algorithm, "usable": list(usable.values())}


def _find_sizes(directory: Path, names: list[str]) -> dict[str, int]:
    paths = {name: directory / name for name in names}
    return {name: path.stat().st_size for name, path in paths.items() if path.is_file()}


def _describe_directory(directory: Path, *, without_digest: frozenset[str]) -> dict[str, list[Any]] | None:
    """Return size and digest of every file below a directory, or None if the directory is missing or contains something
    other than files."""
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
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_READ_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def hash_chunks(path: Path, chunk_bytes: int, algorithm: str) -> list[str]:
    digests = []
    with path.open("rb") as file:
        while first := file.read(min(_READ_BYTES, chunk_bytes)):
            digest = DIGESTS[algorithm](first)
            num_missing_bytes = chunk_bytes - len(first)
            while num_missing_bytes and (more := file.read(min(_READ_BYTES, num_missing_bytes))):
                digest.update(more)
                num_missing_bytes -= len(more)
            digests.append(digest.hexdigest())
    return digests


def _hold_directory(destination: Path, incoming: Path, needed_bytes: int) -> None:
    """Create the directory for received files, print the reused chunks, and hold the directory's lock until stdin
    ends."""
    request = json.loads(sys.stdin.buffer.readline())
    reused, chunk_bytes, algorithm = request["reused"], request["chunk_bytes"], request["digest"]
    descriptor = _prepare_directory(destination, incoming)
    try:
        taken, copied = take_files(reused, destination, incoming, chunk_bytes, algorithm)
        _remove_abandoned(destination, incoming)
        needed_bytes += sum(chunk_bytes * len(chunks) for _, chunks in copied.values())
        free_bytes = shutil.disk_usage(destination.parent).free
        if free_bytes < needed_bytes + min(_SPARE_BYTES, needed_bytes // 8):
            raise CopyError(f"{destination} needs {needed_bytes} bytes, {free_bytes} are free", kind="disk_full")
        for name, (source, chunks) in copied.items():
            taken[name] = _copy_chunks(source, incoming / name, chunks, chunk_bytes, algorithm)
        sys.stdout.write(json.dumps({"taken": taken}) + "\n")
        sys.stdout.flush()
        sys.stdin.buffer.read()  # returns when the client ends the input or is gone
    finally:
        os.close(descriptor)


def _prepare_directory(destination: Path, incoming: Path) -> int:
    """Create and lock a directory next to the destination, so that it can be renamed. Returns the lock's descriptor."""
    if destination.is_symlink():
        raise CopyError(f"{destination} is a symbolic link: give the path that it points to")
    if destination.exists() and not destination.is_dir():
        raise CopyError(f"{destination} is a file: give another destination")
    destination.parent.mkdir(parents=True, exist_ok=True)
    with _locked_directory(destination.parent):  # keeps other copies from removing the directory before the flock
        # The directory is private, because private files arrive in it. The directory exists if the answer to an earlier
        # call was lost.
        incoming.mkdir(stat.S_IRWXU, exist_ok=True)
        descriptor = os.open(incoming, os.O_RDONLY)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    return descriptor


def take_files(
    reused: dict[str, list[Any]], destination: Path, incoming: Path, chunk_bytes: int, algorithm: str
) -> tuple[dict[str, list[int]], dict[str, tuple[Path, list[Any]]]]:
    """Put reusable content of other directories into `incoming`. If a file's size or time has changed, its chunks are
    checked by digest.

    A whole file of the destination is linked. A file of an interrupted copy is moved, even if it is incomplete, because
    the missing chunks can be written into it. The correct chunks of all other files are copied, because other programs
    may still use these files.

    Args:
        reused: maps a file's new name to [directory, name, size, mtime_ns, wanted size, [[chunk number, digest]]].

    Returns the reused chunks, and the chunks to copy with their source files.
    """
    left = _set_aside_left(destination, incoming)
    taken: dict[str, list[int]] = {}
    copied: dict[str, tuple[Path, list[Any]]] = {}
    for name, (directory, there, *described, wanted_size, chunks) in reused.items():
        check_name(name)
        path, places = incoming / name, [left.get(directory, Path(directory)) / there]
        if _is_incoming_of(destination, Path(directory)):
            # A late call of an earlier attempt may have moved the file after it was described.
            places += [place / name for place in left.values()]
        source = next((each for each in places if each.is_file()), places[0])
        is_left = any(source.is_relative_to(place) for place in left.values())
        is_whole = described[0] == wanted_size and len(chunks) == -(-wanted_size // chunk_bytes)
        path.parent.mkdir(parents=True, exist_ok=True)
        is_taken = is_same = False
        with contextlib.suppress(OSError):  # the file system has no links, or the file is gone
            is_same = _is_as_described(source.lstat(), described)
            if is_left and ((is_whole and is_same) or source.lstat().st_nlink == 1):
                is_same = _move_file(source, path, described, wanted_size)
                is_taken = True
            elif is_whole and directory == str(destination):
                is_taken = is_same = _link_file(source, path, described)
        if not is_taken:
            copied[name] = source, chunks
        elif is_same:
            taken[name] = [number for number, _ in chunks]
        else:
            taken[name] = _keep_right_chunks(path, chunks, chunk_bytes, algorithm)
    return taken, copied


def _set_aside_left(destination: Path, incoming: Path) -> dict[str, Path]:
    """Rename the directories of interrupted copies, so that late calls do not find them. Returns a dict from the old to
    the new paths."""
    places = {}
    with _locked_directory(destination.parent):
        for path in _incoming_of(destination):
            if path != incoming and _is_left(path, incoming):
                place = path if path.name.endswith("-left") else path.with_name(f"{path.name}-left")
                with contextlib.suppress(OSError):  # a late call has created the directory again after a rename
                    path.rename(place)
                    places[str(path)] = place
    return places


def _link_file(source: Path, path: Path, described: list[int]) -> bool:
    """Link a file to another name. Returns False, and removes the link, if size or time differ from the description."""
    os.link(source, path, follow_symlinks=False)
    if _is_as_described(path.lstat(), described):
        return True
    path.unlink()
    return False


def _move_file(source: Path, path: Path, described: list[int], wanted_size: int) -> bool:
    """Move a file, which may be incomplete. Returns whether its size and time are still as described."""
    descriptor = os.open(source, os.O_RDWR | os.O_NOFOLLOW)
    try:
        # node_agent.py may still be writing into this file. It takes the same lock and stops if the file was moved.
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        status = os.fstat(descriptor)
        source.rename(path)
        if status.st_size > wanted_size:
            os.ftruncate(descriptor, wanted_size)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return _is_as_described(status, described)


def _is_as_described(status: os.stat_result, described: list[int]) -> bool:
    return stat.S_ISREG(status.st_mode) and [status.st_size, status.st_mtime_ns] == described


def _keep_right_chunks(path: Path, chunks: list[Any], chunk_bytes: int, algorithm: str) -> list[int]:
    """Return the numbers of the chunks whose digests are right. If no chunk is right, remove the file."""
    with path.open("rb") as file:
        right = [number for number, known in chunks if _read_right(file, number, known, chunk_bytes, algorithm)]
    if not right:
        path.unlink()
    return right


def _read_right(file: BinaryIO, number: int, known: str, chunk_bytes: int, algorithm: str) -> bytes:
    """Return the content of a chunk, or b"" if the content's digest differs from `known`."""
    file.seek(number * chunk_bytes)
    content = file.read(chunk_bytes)
    return content if DIGESTS[algorithm](content).hexdigest() == known else b""


def _copy_chunks(source: Path, path: Path, chunks: list[Any], chunk_bytes: int, algorithm: str) -> list[int]:
    """Copy the chunks whose digests are right. Returns the numbers of these chunks."""
    copied: list[int] = []
    try:
        with source.open("rb") as reading, path.open("xb") as writing:
            for number, known in chunks:
                if content := _read_right(reading, number, known, chunk_bytes, algorithm):
                    writing.seek(number * chunk_bytes)
                    writing.write(content)
                    copied.append(number)
            writing.flush()
            os.fsync(writing.fileno())
    except FileNotFoundError:  # the source has been removed meanwhile
        return []
    except OSError as error:
        raise _as_copy_error(error, path) from error
    if not copied:
        path.unlink()
    return copied


def _as_copy_error(error: OSError, path: Path) -> CopyError:
    kind: ErrorKind = "disk_full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "refused"
    return CopyError(f"{path}: {error.strerror}", kind=kind)


def _accept_files(incoming: Path, stream: BinaryIO, algorithm: str) -> dict[str, str]:
    """Write the files of a batch: for each file, a JSON line [name, size] and the content. Returns the files'
    digests."""
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
            raise _as_copy_error(error, path) from error
        digests[name] = DIGESTS[algorithm](content).hexdigest()
    return digests


def _accept_large_file(incoming: Path, name: str, size: int, chunk_bytes: int, algorithm: str) -> list[str]:
    """Write standard input to a new file, with fsync. Returns the digests of the chunks, which are read back from the
    file.

    Stops when `incoming` is no longer locked, because the sending program may outlive its client.
    """
    path = incoming / name
    path.parent.mkdir(parents=True, exist_ok=True)
    digests = []
    _widen_stdin()
    try:
        with path.open("x+b", buffering=0) as file:
            for start in range(0, size, chunk_bytes):
                _check_held(incoming)
                digest = DIGESTS[algorithm]()
                end = min(size, start + chunk_bytes)
                while start < end:
                    num_written = _write_from_stdin(file, path, start, min(_PIECE_BYTES, end - start))
                    if not num_written:
                        raise CopyError(f"{path} ends early: copy again", kind="damaged")
                    # Read the bytes back from the page cache, which is cheaper than passing them through this process.
                    digest.update(os.pread(file.fileno(), num_written, start))
                    start += num_written
                digests.append(digest.hexdigest())
            os.fsync(file.fileno())
    except OSError as error:
        raise _as_copy_error(error, path) from error
    return digests


def _check_held(incoming: Path) -> None:
    """Raise CopyError unless the copy's directory is locked. The lock shows that the copy is still running."""
    descriptor = os.open(incoming, os.O_RDONLY)
    try:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            raise CopyError(f"the client of the copy to {incoming} is gone: copy again", kind="unheld")
    finally:
        os.close(descriptor)


def _widen_stdin() -> None:
    """Enlarge the pipe's buffer if the system can, so that each read returns more (node_agent.py)."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            fcntl.fcntl(0, _F_SETPIPE_SZ, _PIPE_BYTES)


def _write_from_stdin(file: FileIO, path: Path, start: int, num_bytes: int) -> int:
    """Write available input at an offset of an open file. Returns the number of written bytes.

    After a broken connection, data may still arrive when another copy has already taken over the file. The other copy
    holds the file's lock exclusively during the takeover. The data is written only if `path` still names this file.
    """
    select.select([0], [], [])  # wait for input before taking the lock
    fcntl.flock(file, fcntl.LOCK_SH)
    try:
        if not _is_at(path, file):
            raise CopyError(f"{path} has been taken over by another copy: copy again", kind="busy")
        if hasattr(os, "splice"):
            with contextlib.suppress(OSError):  # stdin is not a pipe, or the file system does not support splice
                return os.splice(0, file.fileno(), num_bytes, offset_dst=start)
        content = os.read(0, num_bytes)
        num_written = 0
        while num_written < len(content):
            num_written += os.pwrite(file.fileno(), content[num_written:], start + num_written)
        return num_written
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)


def _is_at(path: Path, file: FileIO) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))  # noqa: PTH116 - a piece takes microseconds
    except FileNotFoundError:
        return False


def _commit_directory(
    destination: Path, incoming: Path, manifest: dict[str, list[Any]], *, executable: list[str], private: list[str]
) -> None:
    """Verify every file against the manifest, then replace the old directory by the new one."""
    for name in manifest:
        check_name(name)
    compared = frozenset(name for name, (_, digest) in manifest.items() if digest is None)
    arrived = _describe_directory(incoming, without_digest=compared) or {}
    wrong = sorted(name for name in manifest.keys() | arrived.keys() if arrived.get(name) != manifest.get(name))
    if wrong:
        raise CopyError(f"{len(wrong)} files arrived damaged, the first is {wrong[0]!r}: copy again", kind="damaged")
    for name in executable:
        (incoming / name).chmod((incoming / name).stat().st_mode | stat.S_IXUSR)
    for name in private:
        (incoming / name).chmod((incoming / name).stat().st_mode & stat.S_IRWXU)
    incoming.chmod(_usual_mode())
    for directory in {path.parent for path in _walk(incoming)} | {incoming}:
        flush_directory(directory)
    set_aside = incoming.with_name(incoming.name + "-replaced")
    with _locked_directory(destination.parent), _without_a_job(destination, incoming):
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
    _remove_abandoned(destination, incoming)


@contextlib.contextmanager
def _without_a_job(destination: Path, incoming: Path) -> Iterator[None]:
    """Keep jobs from running or starting in the directory during the block. supervisor/ describes the locks."""
    with contextlib.ExitStack() as stack:
        # Take `lock` shared, because processes that only check whether the job is running hold it shared too.
        for name, kind in (("start.lock", fcntl.LOCK_EX), ("lock", fcntl.LOCK_SH)):
            try:
                descriptor = os.open(destination / ".job" / name, os.O_RDONLY)
            except OSError:  # the destination is not the directory of a job
                continue
            stack.callback(os.close, descriptor)
            try:
                fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
            except BlockingIOError:
                _discard_directory(incoming)
                raise CopyError(f"a job runs in {destination}, so it is not replaced: try again", kind="busy") from None
        yield


def _usual_mode() -> int:
    mask = os.umask(0o077)  # reading the mask requires setting it
    os.umask(mask)
    return 0o777 & ~mask


def _discard_directory(incoming: Path) -> None:
    """Remove the directory of received files. Raises CopyError for any other directory."""
    if INCOMING_MARK not in incoming.name:
        raise CopyError(f"{incoming} is not the directory of an incoming copy")
    shutil.rmtree(incoming, ignore_errors=True)


def check_name(name: str) -> None:
    """Raise CopyError unless a file name is printable and stays below its directory."""
    parts = name.split("/")
    if not name or any(part in ("", ".", "..") for part in parts) or not name.isprintable() or "\\" in name:
        raise CopyError(f"the file name {name!r} is refused: it leaves its directory or is not printable")


def flush_directory(directory: Path) -> None:
    """Make renames and new files in a directory survive a power failure."""
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
    """Yield every path below a directory that is not a directory. Symbolic links are not followed."""
    for path in sorted(directory.iterdir()):
        if path.is_dir() and not path.is_symlink():
            yield from _walk(path)
        else:
            yield path


def _incoming_of(destination: Path) -> list[Path]:
    if not destination.parent.is_dir():
        return []
    return [path for path in destination.parent.iterdir() if _is_incoming_of(destination, path)]


def _is_incoming_of(destination: Path, path: Path) -> bool:
    return path.name.startswith(f".{destination.name}{INCOMING_MARK}")


def _remove_abandoned(destination: Path, incoming: Path) -> None:
    """Remove interrupted copies to this destination, and old interrupted copies to other destinations in the same
    folder."""
    with _locked_directory(destination.parent):
        for path in destination.parent.iterdir():
            if not path.name.startswith(".") or INCOMING_MARK not in path.name or path == incoming:
                continue
            with contextlib.suppress(OSError):  # the directory belongs to another user, or is gone
                is_old = time.time() - path.stat().st_mtime > _STALE_AFTER_S
                is_download = path.with_name(f"{path.name}.lock").exists()  # downloads lock this file (download.py)
                is_due = _is_incoming_of(destination, path) or (is_old and not is_download)
                if is_due and _is_left(path, incoming):
                    shutil.rmtree(path, ignore_errors=True)


def _is_left(directory: Path, incoming: Path) -> bool:
    """Return whether a copy was interrupted: its directory is unlocked, or belongs to an earlier attempt of this
    copy."""
    copy, _, attempt = incoming.name.rpartition("-")
    if directory.name.startswith(f"{copy}-"):
        other, _, _ = directory.name[len(copy) + 1 :].partition("-")
        if int(other) < int(attempt):  # a late call of an earlier attempt must not take over a later attempt
            return True
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv))
