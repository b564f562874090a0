"""List the files of a run directory on a node, and send the requested parts of them.

This program is the node's side of mirror.py. The program runs as `sender.py VERB DIRECTORY`. The program is one file
and uses only the standard library (and blake3 if installed), because its text is sent to nodes.

    list DIRECTORY      prints one JSON object, {"files": {name: [size, modified_ns]}, "digest": name of the digest,
                        "left_out": [name]}; "files" is null if the directory does not exist
    send DIRECTORY      (on stdin a line of JSON, {"chunk_bytes", "digest", "files": [[name, size, [digest]], ...]}: how
                        much of each file the client has, with the digests of its chunks. The last chunk may be
                        incomplete) For each file, prints a line {"name", "size", "modified_ns"} of the present file,
                        then its chunks, then a line {"is_changed"}: whether the file was modified meanwhile. For a
                        missing file, only prints {"name", "size": null}. If the client has a part of a chunk, the chunk
                        begins with a line {"is_same"}: whether the node's chunk begins with the same bytes. Then come
                        the missing bytes. If there are missing bytes, a line {"digest"} follows
    pour DIRECTORY      (on stdin a line of JSON, {"chunk_bytes", "digest", "name", "size", "modified_ns"}: a file as it
                        was listed) Prints only the file's bytes, which are written directly to a file. On stderr,
                        prints a line {"is_ready"}, then a line {"digest"} for each chunk, then a line {"is_changed"}.
                        For a file that has changed, prints only the lines {"is_ready"} and {"is_changed"}. Stops when
                        stdin ends

Files that are useless on another machine are not sent: files and folders whose names begin with a dot (locks,
incomplete files) or with `damaged`, and `weights/`. Symbolic links are not followed. "left_out" lists files with
unprintable names, and unreadable folders.
"""

import contextlib
import fcntl
import hashlib
import importlib
import json
import os
import select
import stat
import sys
from collections.abc import Callable, Iterator
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO

_READ_BYTES = 256 << 10
"""Size of the pieces in which files are read. A piece of this size is still in the CPU's cache when it is written after
hashing."""
_HANDED_ON_BYTES = 64 << 10
"""Pieces below this size are written by this process instead of sendfile, because `write` needs fewer system calls."""
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
"""Flags to open a file. With O_NONBLOCK, a FIFO that has replaced a listed file does not block."""
_F_SETPIPE_SZ, _PIPE_BYTES = 1031, 1 << 20
_LEFT_OUT = (".", "damaged")
DIGESTS: dict[str, Callable[..., Any]] = {"sha256": hashlib.sha256}
"""Digest algorithms for chunks that this Python supports. The fastest algorithm is last."""
with contextlib.suppress(ImportError):
    # Our environments have blake3, which is ten times as fast as sha256 on processors without SHA instructions.
    DIGESTS["blake3"] = importlib.import_module("blake3").blake3


def main(argv: list[str]) -> int:
    verb, directory = argv[1], Path(argv[2])
    if verb == "list":
        left_out: list[str] = []
        files = list_files(directory, left_out) if directory.is_dir() else None
        answer = {"files": files, "digest": next(reversed(DIGESTS)), "left_out": left_out}
        sys.stdout.write(json.dumps(answer) + "\n")
    elif verb == "send":
        request = json.loads(sys.stdin.buffer.readline())
        sender = Sender(directory, request["chunk_bytes"], request["digest"], sys.stdout.buffer)
        for name, size, digests in request["files"]:
            sender.send_file(name, size, digests)
    elif verb == "pour":
        _widen_stdout()
        _say(is_ready=True)
        request = json.loads(sys.stdin.buffer.readline())
        sender = Sender(directory, request["chunk_bytes"], request["digest"], sys.stdout.buffer)
        sender.pour_file(request["name"], request["size"], request["modified_ns"])
    else:
        sys.stderr.write(f"{verb} is not a verb of this program\n")
        return 2
    return 0


def list_files(directory: Path, left_out: list[str]) -> dict[str, list[int]]:
    """Return size and modification time of every file to send, by relative path. Adds unreadable folders and files with
    unprintable names to `left_out`."""
    files = {}
    for path, found in _walk(directory, left_out, is_top=True):
        name = path.relative_to(directory).as_posix()
        if name.isprintable() and "\\" not in name:  # receiver.py has the same rule
            files[name] = found
        else:
            left_out.append(ascii(name))
    return files


def _walk(directory: Path, left_out: list[str], *, is_top: bool = False) -> Iterator[tuple[Path, list[int]]]:
    try:
        entries = sorted(os.scandir(directory), key=lambda entry: entry.name)
    except FileNotFoundError:  # the job has deleted the folder meanwhile
        return
    except PermissionError:
        left_out.append(ascii(directory.name))
        return
    for entry in entries:
        if entry.name.startswith(_LEFT_OUT) or (is_top and entry.name == "weights"):
            continue
        if entry.is_dir(follow_symlinks=False):
            yield from _walk(Path(entry.path), left_out)
            continue
        try:
            status = entry.stat(follow_symlinks=False)
        except FileNotFoundError:
            continue
        if stat.S_ISREG(status.st_mode):
            yield Path(entry.path), [status.st_size, status.st_mtime_ns]


class Sender:
    """Sends files of a directory to a client that may already have parts of these files."""

    def __init__(self, directory: Path, chunk_bytes: int, algorithm: str, output: BinaryIO) -> None:
        self._directory = directory
        self._chunk_bytes = chunk_bytes
        self._algorithm = algorithm
        self._output = output

    def send_file(self, name: str, size_there: int, digests: list[str]) -> None:
        """Send one file's lines and the bytes that the client lacks. Content that is appended to the file meanwhile is
        not sent."""
        try:
            descriptor = os.open(self._directory / name, _READ)
        except OSError:
            self._write_line({"name": name, "size": None})
            return
        with os.fdopen(descriptor, "rb", buffering=0) as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                self._write_line({"name": name, "size": None})
                return
            self._write_line({"name": name, "size": status.st_size, "modified_ns": status.st_mtime_ns})
            for start in range(0, status.st_size, self._chunk_bytes):
                there = digests[start // self._chunk_bytes] if start < size_there else ""
                num_there = max(0, min(self._chunk_bytes, size_there - start))
                self._send_chunk(file, start, min(self._chunk_bytes, status.st_size - start), num_there, there)
            self._write_line({"is_changed": os.fstat(descriptor).st_mtime_ns != status.st_mtime_ns})
        self._output.flush()

    def pour_file(self, name: str, size: int, modified_ns: int) -> None:
        """Write the bytes of a file if the file still has the listed size and time. Prints the digests of the file's
        chunks on stderr."""
        try:
            descriptor = os.open(self._directory / name, _READ)
        except OSError:
            _say(is_changed=True)
            return
        with os.fdopen(descriptor, "rb", buffering=0) as file:
            if _size_and_time(descriptor) == (size, modified_ns):
                for start in range(0, size, self._chunk_bytes):
                    if _has_stdin_ended():
                        return
                    file.seek(start)
                    digest = DIGESTS[self._algorithm]()
                    self._send_bytes(file, start, min(self._chunk_bytes, size - start), digest)
                    self._output.flush()
                    _say(digest=digest.hexdigest())
            _say(is_changed=_size_and_time(descriptor) != (size, modified_ns))

    def _send_chunk(self, file: FileIO, start: int, num_bytes: int, num_there: int, digest_there: str) -> None:
        """Send the missing bytes of a chunk. The client has the first `num_there` bytes of the chunk, with the
        digest `digest_there`."""
        digest = DIGESTS[self._algorithm]()
        num_same = 0
        file.seek(start)
        if digest_there:
            if num_there <= num_bytes:
                for piece in _read(file, num_there):
                    digest.update(piece)
            is_same = num_there <= num_bytes and digest.hexdigest() == digest_there
            self._write_line({"is_same": is_same})
            if is_same:
                num_same = num_there
            else:
                file.seek(start)
                digest = DIGESTS[self._algorithm]()
        if num_same < num_bytes:
            self._send_bytes(file, start + num_same, num_bytes - num_same, digest)
            self._write_line({"digest": digest.hexdigest()})

    def _send_bytes(self, file: FileIO, start: int, num_bytes: int, digest: Any) -> None:  # Any: of hashlib or blake3
        for piece in _read(file, num_bytes):
            digest.update(piece)
            num_handed_on = self._hand_on(file, start, len(piece)) if len(piece) >= _HANDED_ON_BYTES else 0
            self._output.write(piece[num_handed_on:])
            start += len(piece)

    def _hand_on(self, file: FileIO, start: int, num_bytes: int) -> int:
        """Copy bytes from the page cache to the output with sendfile. Returns the number of copied bytes, or 0 if the
        output does not support sendfile."""
        self._output.flush()
        num_written = 0
        with contextlib.suppress(OSError):
            while num_written < num_bytes:
                num = os.sendfile(self._output.fileno(), file.fileno(), start + num_written, num_bytes - num_written)
                if not num:  # the file was truncated
                    break
                num_written += num
        return num_written

    def _write_line(self, content: object) -> None:
        self._output.write(json.dumps(content).encode() + b"\n")


def _size_and_time(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_size, status.st_mtime_ns


def _widen_stdout() -> None:
    """Enlarge the buffer of the stdout pipe, because both ends often wait with a small buffer (node_agent.py)."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            fcntl.fcntl(1, _F_SETPIPE_SZ, _PIPE_BYTES)


def _has_stdin_ended() -> bool:
    """Return whether the client has closed stdin, because it ended. The process that receives the output may outlive
    the client."""
    return bool(select.select([0], [], [], 0)[0])


def _say(**content: object) -> None:
    sys.stderr.write(json.dumps(content) + "\n")
    sys.stderr.flush()


def _read(file: FileIO, num_bytes: int) -> Iterator[bytes]:
    """Yield the next bytes of a file. If the file was truncated, yield zeros for the missing bytes, so that the stream
    stays valid and the digest differs."""
    while num_bytes > 0:
        chunk = file.read(min(_READ_BYTES, num_bytes)) or bytes(min(_READ_BYTES, num_bytes))
        num_bytes -= len(chunk)
        yield chunk


if __name__ == "__main__":
    sys.exit(main(sys.argv))
