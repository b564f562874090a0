"""Say which files a run directory on a node holds, and send what is asked for of them.

The node's side of mirror.py. Runs as `sender.py VERB DIRECTORY`; standard library only and one file, because it
is sent to nodes by content.

    list DIRECTORY      one JSON object: {name: [size, modified_ns]}, or null where there is no such directory
    send DIRECTORY      (on stdin a line of JSON, {"chunk_bytes", "files": [[name, size, [sha256]], ...]}: how much of
                        each file the asker has, and digests of its chunks, the last of which may be incomplete)
                        for each file a line {"name", "size", "modified_ns"} as it is now, or {"name", "size": null} for
                        one that is gone; then its chunks; then a line {"is_changed"}: whether it was written to
                        meanwhile. A chunk of which the asker has something begins with a line {"is_same"}: whether ours
                        begins like that. Then come the bytes that the asker lacks and, if any, a line {"sha256"}

Left out: names that begin with a dot (locks, and what is being written) or with `damaged`, and `weights/`: nobody reads
those elsewhere. Symbolic links are not followed.
"""

import hashlib
import json
import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

_READ_BYTES = 256 << 10
"""So little that it is still in the processor's cache when it has been hashed."""
_LEFT_OUT = (".", "damaged")


def main(argv: list[str]) -> int:
    """Carry out one verb; see the head of this file."""
    verb, directory = argv[1], Path(argv[2])
    if verb == "list":
        sys.stdout.write(json.dumps(list_files(directory) if directory.is_dir() else None) + "\n")
    elif verb == "send":
        request = json.loads(sys.stdin.buffer.readline())
        for name, size, digests in request["files"]:
            send_file(directory, name, size, digests, request["chunk_bytes"], sys.stdout.buffer)
    else:
        sys.stderr.write(f"{verb} is no verb of this program\n")
        return 2
    return 0


def list_files(directory: Path) -> dict[str, list[int]]:
    """Size and time of change of every file that is sent, by its path below the directory."""
    return {path.relative_to(directory).as_posix(): found for path, found in _walk(directory, is_top=True)}


def _walk(directory: Path, *, is_top: bool = False) -> Iterator[tuple[Path, list[int]]]:
    try:
        entries = sorted(os.scandir(directory), key=lambda entry: entry.name)
    except FileNotFoundError:  # a checkpoint that is being deleted
        return
    for entry in entries:
        if entry.name.startswith(_LEFT_OUT) or (is_top and entry.name == "weights"):
            continue
        if entry.is_dir(follow_symlinks=False):
            yield from _walk(Path(entry.path))
            continue
        try:
            status = entry.stat(follow_symlinks=False)
        except FileNotFoundError:
            continue
        if stat.S_ISREG(status.st_mode):
            yield Path(entry.path), [status.st_size, status.st_mtime_ns]


def send_file(
    directory: Path, name: str, size_there: int, digests: list[str], chunk_bytes: int, output: BinaryIO
) -> None:
    """Write one file's lines and what the asker lacks of it; what is appended meanwhile is not part of it."""
    try:
        descriptor = os.open(directory / name, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        write_line(output, {"name": name, "size": None})
        return
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        write_line(output, {"name": name, "size": status.st_size, "modified_ns": status.st_mtime_ns})
        for start in range(0, status.st_size, chunk_bytes):
            there = digests[start // chunk_bytes] if start < size_there else ""
            num_there = max(0, min(chunk_bytes, size_there - start))
            send_chunk(file, start, min(chunk_bytes, status.st_size - start), num_there, there, output)
        write_line(output, {"is_changed": os.fstat(descriptor).st_mtime_ns != status.st_mtime_ns})
    output.flush()


def send_chunk(file: BinaryIO, start: int, num_bytes: int, num_there: int, digest_there: str, output: BinaryIO) -> None:
    """Write what the asker lacks of a chunk, of which it has `num_there` bytes of this digest."""
    digest = hashlib.sha256()
    num_same = 0
    file.seek(start)
    if digest_there:
        if num_there <= num_bytes:
            for piece in _read(file, num_there):
                digest.update(piece)
        is_same = num_there <= num_bytes and digest.hexdigest() == digest_there
        write_line(output, {"is_same": is_same})
        if is_same:
            num_same = num_there
        else:
            file.seek(start)
            digest = hashlib.sha256()
    if num_same < num_bytes:
        for piece in _read(file, num_bytes - num_same):
            output.write(piece)
            digest.update(piece)
        write_line(output, {"sha256": digest.hexdigest()})


def write_line(output: BinaryIO, content: object) -> None:
    """One JSON object, which ends with its line."""
    output.write(json.dumps(content).encode() + b"\n")


def _read(file: BinaryIO, num_bytes: int) -> Iterator[bytes]:
    """The next bytes of a file; zeros where it became shorter: the stream keeps its order, and the digest fails."""
    while num_bytes > 0:
        chunk = file.read(min(_READ_BYTES, num_bytes)) or bytes(min(_READ_BYTES, num_bytes))
        num_bytes -= len(chunk)
        yield chunk


if __name__ == "__main__":
    sys.exit(main(sys.argv))
