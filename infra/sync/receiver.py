"""Take in a copied directory on a node: make room for it, verify it, and let it appear as a whole.

The node's side of push.py. Runs as `receiver.py VERB ...`; standard library only (with blake3 where that is installed)
and one file, because it is sent to nodes by content. Each verb prints one JSON object; `{"error": sentence}` with exit
code 1 when it refuses.

    describe DESTINATION                    (on stdin {"sizes": {name: size}, "chunk_bytes"} of what shall be there)
                                            what lies there now, and what could be used again, with digests of its
                                            chunks: {"files": {name: size} or null, "digest": the name of the digest,
                                            "usable": [[directory, name, size, mtime_ns, [digest]]]}
    sizes DIRECTORY                         (on stdin {"names": [name]}) the sizes of those files that are below it
    prepare DESTINATION INCOMING BYTES      (a line {"reused", "chunk_bytes", "digest"} on stdin, see take_files) make
                                            the directory INCOMING beside it, take those files and chunks into it, and
                                            see whether the disk has room: {"taken": {name: [chunk number]}}. Goes on
                                            until stdin ends: so long INCOMING is locked
    accept INCOMING DIGEST                  (files on stdin) write small files, many with one call: {"digests": ...}
    accept_large INCOMING NAME SIZE CHUNK_BYTES DIGEST
                                            (a file on stdin, and nothing else) write one large file: {"digests": [...]}
                                            of its chunks; as long as INCOMING is locked
    commit DESTINATION INCOMING             (on stdin {"files": {name: [size, sha256]}, "executable": [name],
                                            "private": [name]}) compare what has arrived, let the owner execute those,
                                            and nobody else read these, then swap it in; a digest of null was compared
                                            when the file was written, and is not taken again. The directory of a job
                                            that runs is not replaced
    discard INCOMING                        remove what has arrived

Large files grow in INCOMING, their chunks in any order (node_agent.py). One that nobody holds a lock on is of a copy
that broke off. The next copy to the same destination takes from it what is right, and removes the rest; one to another
destination beside it removes it after a day. It is called .<name of DESTINATION>.incoming-<copy>-<attempt>: what an
earlier attempt of a copy left counts as left even when the node has not noticed yet that its connection is gone.
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
STALE_AFTER_S = 86400.0
"""What a copy that broke off has left, and nobody has gone on with, is removed after this time."""
_SPARE_BYTES = 16 << 20
_READ_BYTES = 4 << 20
_F_SETPIPE_SZ, _PIPE_BYTES = 1031, 1 << 20
_PIECE_BYTES = 256 << 10
"""So little that it is still in the processor's cache when it is hashed."""
DIGESTS: dict[str, Callable[..., Any]] = {"sha256": hashlib.sha256}
"""Digests of chunks that this Python supports, the fastest last."""
with contextlib.suppress(ImportError):
    # Installed in our environments. Ten times as fast as sha256 on a processor without SHA instructions.
    DIGESTS["blake3"] = importlib.import_module("blake3").blake3


ErrorKind = Literal["refused", "disk_full", "damaged", "busy", "unheld"]
"""`busy`: somebody else is at work there; `unheld`: the connection of the copy that this belongs to broke."""


class CopyError(Exception):
    """A verb cannot be carried out; `kind` sorts the reasons for the caller."""

    def __init__(self, message: str, kind: ErrorKind = "refused") -> None:
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
            request = json.loads(sys.stdin.buffer.read())
            answer = describe_destination(Path(parameters[0]), request["sizes"], request["chunk_bytes"])
        elif verb == "sizes":
            answer = {"sizes": find_sizes(Path(parameters[0]), json.loads(sys.stdin.buffer.read())["names"])}
        elif verb == "prepare":
            hold_directory(Path(parameters[0]), Path(parameters[1]), int(parameters[2]))
        elif verb == "accept":
            answer = {"digests": accept_files(Path(parameters[0]), sys.stdin.buffer, parameters[1])}
        elif verb == "accept_large":
            directory, name, size, chunk_bytes, algorithm = parameters
            answer = {"digests": accept_large_file(Path(directory), name, int(size), int(chunk_bytes), algorithm)}
        elif verb == "commit":
            request = json.loads(sys.stdin.buffer.read())
            destination, incoming = map(Path, parameters)
            commit_directory(
                destination,
                incoming,
                request["files"],
                executable=request["executable"],
                private=request["private"],
            )
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


def describe_destination(destination: Path, sizes: dict[str, int], chunk_bytes: int) -> dict[str, Any]:
    """What lies at a destination, and in the directories of copies to it; hashes what may be a file or a part of one.

    No file is usable under two paths, because two names of one file are changed together.
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
        except FileNotFoundError:  # another copy has removed it meanwhile
            continue
        if directory == destination:
            files = found
    return {"files": files, "digest": algorithm, "usable": list(usable.values())}


def find_sizes(directory: Path, names: list[str]) -> dict[str, int]:
    """The sizes of the files that there are, of some below a directory."""
    paths = {name: directory / name for name in names}
    return {name: path.stat().st_size for name, path in paths.items() if path.is_file()}


def describe_directory(directory: Path, *, without_digest: frozenset[str]) -> dict[str, list[Any]] | None:
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


def hash_chunks(path: Path, chunk_bytes: int, algorithm: str) -> list[str]:
    """The digest of each chunk of a file."""
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


def hold_directory(destination: Path, incoming: Path, needed_bytes: int) -> None:
    """Make the directory that takes in the files, say what is in it, and keep it from being removed by others."""
    request = json.loads(sys.stdin.buffer.readline())
    reused, chunk_bytes, algorithm = request["reused"], request["chunk_bytes"], request["digest"]
    descriptor = prepare_directory(destination, incoming)
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
        # For the owner alone: private files arrive in it. It may exist, made by the same call, whose answer was lost.
        incoming.mkdir(stat.S_IRWXU, exist_ok=True)
        descriptor = os.open(incoming, os.O_RDONLY)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    return descriptor


def take_files(
    reused: dict[str, list[Any]], destination: Path, incoming: Path, chunk_bytes: int, algorithm: str
) -> tuple[dict[str, list[int]], dict[str, tuple[Path, list[Any]]]]:
    """Let files of other directories be in this one, too, as far as they are as they were described.

    A whole file of the destination is linked. One that a copy has left is moved, also when it is only a part: the rest
    can be written into it. Of any other the right chunks have to be copied: somebody may use it, or write into it.

    Args:
        reused: by the name that it gets, [directory, name, size, mtime_ns, wanted size, [[chunk number, digest]]].

    Returns the chunks that are there, and those that are to be copied, with the file that may have them.
    """
    left = _set_aside_left(destination, incoming)
    taken: dict[str, list[int]] = {}
    copied: dict[str, tuple[Path, list[Any]]] = {}
    for name, (directory, there, *described, wanted_size, chunks) in reused.items():
        check_name(name)
        path, places = incoming / name, [left.get(directory, Path(directory)) / there]
        if _is_incoming_of(destination, Path(directory)):
            # A late call of an earlier attempt may have taken it since it was described.
            places += [place / name for place in left.values()]
        source = next((each for each in places if each.is_file()), places[0])
        is_left = any(source.is_relative_to(place) for place in left.values())
        is_whole = described[0] == wanted_size and len(chunks) == -(-wanted_size // chunk_bytes)
        path.parent.mkdir(parents=True, exist_ok=True)
        is_taken = is_same = False
        with contextlib.suppress(OSError):  # the system cannot link, or it is gone
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
    """Rename what copies have left, so that late calls of theirs find nothing; returns the new paths, by the old."""
    places = {}
    with _locked_directory(destination.parent):
        for path in _incoming_of(destination):
            if path != incoming and _is_left(path, incoming):
                place = path if path.name.endswith("-left") else path.with_name(f"{path.name}-left")
                with contextlib.suppress(OSError):  # a late call made it anew, and it was set aside before
                    path.rename(place)
                    places[str(path)] = place
    return places


def _link_file(source: Path, path: Path, described: list[int]) -> bool:
    """Let a file have another name; false, and nothing done, when it is not as it was described, by size and time."""
    os.link(source, path, follow_symlinks=False)
    if _is_as_described(path.lstat(), described):
        return True
    path.unlink()
    return False


def _move_file(source: Path, path: Path, described: list[int], wanted_size: int) -> bool:
    """Take over a file that may be incomplete; false when it is not as it was described: more of it has come since."""
    descriptor = os.open(source, os.O_RDWR | os.O_NOFOLLOW)
    try:
        # Who wrote to it may not know yet that it is theirs no more: they look under this lock (node_agent.py).
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
    """The numbers of those chunks of a file that are what they were described to be; without any it is removed."""
    with path.open("rb") as file:
        right = [number for number, known in chunks if _read_right(file, number, known, chunk_bytes, algorithm)]
    if not right:
        path.unlink()
    return right


def _read_right(file: BinaryIO, number: int, known: str, chunk_bytes: int, algorithm: str) -> bytes:
    """The content of a chunk; empty when its digest is another."""
    file.seek(number * chunk_bytes)
    content = file.read(chunk_bytes)
    return content if DIGESTS[algorithm](content).hexdigest() == known else b""


def _copy_chunks(source: Path, path: Path, chunks: list[Any], chunk_bytes: int, algorithm: str) -> list[int]:
    """Copy those chunks of a file that are right; returns their numbers."""
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
    except FileNotFoundError:  # removed meanwhile
        return []
    except OSError as error:
        raise _as_copy_error(error, path) from error
    if not copied:
        path.unlink()
    return copied


def _as_copy_error(error: OSError, path: Path) -> CopyError:
    kind: ErrorKind = "disk_full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "refused"
    return CopyError(f"{path}: {error.strerror}", kind=kind)


def accept_files(incoming: Path, stream: BinaryIO, algorithm: str) -> dict[str, str]:
    """Write the files of a batch: for each a line of JSON, [name, size], and its content; returns their digests."""
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


def accept_large_file(incoming: Path, name: str, size: int, chunk_bytes: int, algorithm: str) -> list[str]:
    """Write standard input to a new file, durably; returns the digests of its chunks, as they can be read there.

    Ends when nobody holds the lock on `incoming` any more: what sends the file may outlive who copies.
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
                    # It is read again while it is in the processor's cache: a copy less than to hash it on its way.
                    digest.update(os.pread(file.fileno(), num_written, start))
                    start += num_written
                digests.append(digest.hexdigest())
            os.fsync(file.fileno())
    except OSError as error:
        raise _as_copy_error(error, path) from error
    return digests


def _check_held(incoming: Path) -> None:
    """Return if the copy that this directory belongs to is under way."""
    descriptor = os.open(incoming, os.O_RDONLY)
    try:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            raise CopyError(f"nobody waits any more for what comes to {incoming}: copy again", kind="unheld")
    finally:
        os.close(descriptor)


def _widen_stdin() -> None:
    """Let more lie in the pipe, where the system can, so that pieces are larger (node_agent.py)."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            fcntl.fcntl(0, _F_SETPIPE_SZ, _PIPE_BYTES)


def _write_from_stdin(file: FileIO, path: Path, start: int, num_bytes: int) -> int:
    """Write what comes, as far as it is there, at a place in a file that still lies where it was opened.

    What is still on its way from a broken connection may arrive when the file is another copy's already, which holds
    this lock while it takes the file over.
    """
    select.select([0], [], [])  # not with the lock held
    fcntl.flock(file, fcntl.LOCK_SH)
    try:
        if not _is_at(path, file):
            raise CopyError(f"{path} has been taken over by another copy: copy again", kind="busy")
        if hasattr(os, "splice"):
            with contextlib.suppress(OSError):  # no pipe, or a file system that cannot
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


def commit_directory(
    destination: Path, incoming: Path, manifest: dict[str, list[Any]], *, executable: list[str], private: list[str]
) -> None:
    """Verify every file against the manifest, then put the new directory in the place of the old one."""
    for name in manifest:
        check_name(name)
    compared = frozenset(name for name, (_, digest) in manifest.items() if digest is None)
    arrived = describe_directory(incoming, without_digest=compared) or {}
    wrong = sorted(name for name in manifest.keys() | arrived.keys() if arrived.get(name) != manifest.get(name))
    if wrong:
        raise CopyError(f"{len(wrong)} files arrived damaged, the first is {wrong[0]!r}: copy again", kind="damaged")
    for name in executable:
        (incoming / name).chmod((incoming / name).stat().st_mode | stat.S_IXUSR)
    for name in private:
        (incoming / name).chmod((incoming / name).stat().st_mode & stat.S_IRWXU)
    incoming.chmod(usual_mode())
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
    """No job runs in the directory, nor is one started there, until the block is left; supervisor/ has the locks."""
    with contextlib.ExitStack() as stack:
        # The second one is shared with whoever only looks whether the job runs.
        for name, kind in (("start.lock", fcntl.LOCK_EX), ("lock", fcntl.LOCK_SH)):
            try:
                descriptor = os.open(destination / ".job" / name, os.O_RDONLY)
            except OSError:  # no directory of a job
                continue
            stack.callback(os.close, descriptor)
            try:
                fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
            except BlockingIOError:
                discard_directory(incoming)
                raise CopyError(f"a job runs in {destination}, which is left to it: try again", kind="busy") from None
        yield


def usual_mode() -> int:
    """The mode of a folder that this user makes."""
    mask = os.umask(0o077)  # there is no way to read it but to set it; this program has one thread
    os.umask(mask)
    return 0o777 & ~mask


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


def _remove_abandoned(destination: Path, incoming: Path) -> None:
    """Remove what copies that broke off have left: those to this destination, and old ones to others beside it."""
    with _locked_directory(destination.parent):
        for path in destination.parent.iterdir():
            if not path.name.startswith(".") or INCOMING_MARK not in path.name or path == incoming:
                continue
            with contextlib.suppress(OSError):  # somebody else's, or gone
                is_old = time.time() - path.stat().st_mtime > STALE_AFTER_S
                is_download = path.with_name(f"{path.name}.lock").exists()  # which has its lock there (download.py)
                is_due = _is_incoming_of(destination, path) or (is_old and not is_download)
                if is_due and _is_left(path, incoming):
                    shutil.rmtree(path, ignore_errors=True)


def _is_left(directory: Path, incoming: Path) -> bool:
    """True when nobody holds a lock on it, or it is of an earlier attempt of the copy that makes this one."""
    copy, _, attempt = incoming.name.rpartition("-")
    if directory.name.startswith(f"{copy}-"):
        other, _, _ = directory.name[len(copy) + 1 :].partition("-")
        if int(other) < int(attempt):  # a late call must not take a later one's
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
