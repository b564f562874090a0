"""Say which files a run directory on a node holds, and send what is asked for of them.

The node's side of mirror.py. Runs as `python3 -I sender.py VERB DIRECTORY`; standard library only and one file, because
it is sent to nodes by content.

    list DIRECTORY      one JSON object: {name: [size, modified_ns]}, or null where there is no such directory
    send DIRECTORY      (on stdin a line of JSON: [[name, offset], ...]) for each file a line of JSON,
                        {"name", "size", "modified_ns"} as it is now, then its bytes from the offset on, then a line
                        {"sha256", "is_changed"}: of the whole, and whether it was written to meanwhile;
                        {"name", "size": null} for a file that is gone

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
        for name, offset in json.loads(sys.stdin.buffer.readline()):
            send_file(directory, name, offset, sys.stdout.buffer)
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


def send_file(directory: Path, name: str, offset: int, output: BinaryIO) -> None:
    """Write one file's line and content; what is appended meanwhile is not part of it."""
    try:
        descriptor = os.open(directory / name, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        output.write(json.dumps({"name": name, "size": None}).encode() + b"\n")
        return
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        head = {"name": name, "size": status.st_size, "modified_ns": status.st_mtime_ns}
        output.write(json.dumps(head).encode() + b"\n")
        digest = hashlib.sha256()
        for chunk in _read(file, min(offset, status.st_size)):
            digest.update(chunk)
        for chunk in _read(file, status.st_size - offset):
            output.write(chunk)
            digest.update(chunk)
        is_changed = os.fstat(descriptor).st_mtime_ns != status.st_mtime_ns
        output.write(json.dumps({"sha256": digest.hexdigest(), "is_changed": is_changed}).encode() + b"\n")
    output.flush()


def _read(file: BinaryIO, num_bytes: int) -> Iterator[bytes]:
    """The next bytes of a file; zeros where it became shorter: the stream keeps its order, and the digest fails."""
    while num_bytes > 0:
        chunk = file.read(min(_READ_BYTES, num_bytes)) or bytes(min(_READ_BYTES, num_bytes))
        num_bytes -= len(chunk)
        yield chunk


if __name__ == "__main__":
    sys.exit(main(sys.argv))
