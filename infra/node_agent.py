"""Carry out one request of an SSHSession on the node: run a command, write a file, read a file.

The node's side of ssh_session.py. The client sends this text to `python -I -c` ahead of the request, so nothing has to
be installed and no two versions can meet; standard library only, and old syntax. Not here: detached jobs
(supervisor.py), directories (receiver.py).

    client ── request, then data frames, then "end of input" ──> agent ──> the command's standard input
    client <── nonce, then stdout and stderr frames, then one "done" frame ── agent

A frame is one byte of kind, four of length, the content. What shells print ahead of the nonce is skipped. An input that
ends without "end of input" is a broken connection: the command is killed, a half-written file is removed.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, BinaryIO

FRAME_HEAD = struct.Struct(">cI")
REQUEST, DATA, END_OF_INPUT = b"R", b"D", b"E"
STDOUT, STDERR, DONE = b"o", b"e", b"x"
READ_BYTES = 256 << 10
OFFSET_BYTES = 8
"""Each piece of a file that comes in pieces begins with where it goes."""

if TYPE_CHECKING:  # old interpreters do not know this notation
    JsonObject = dict[str, Any]  # Any: JSON


class BrokenInputError(Exception):
    """The client is gone."""


def main(nonce: str) -> None:
    """Answer the one request on standard input; does not return."""
    frames = FrameWriter(sys.stdout.buffer)
    try:
        sys.stdout.buffer.write(nonce.encode())
        kind, content = read_frame(sys.stdin.buffer)
        assert kind == REQUEST, kind
        request = json.loads(content.decode())
        verbs: dict[str, Callable[[JsonObject, FrameWriter], JsonObject]] = {
            "run": run_command,
            "write": write_file,
            "write_pieces": write_pieces,
            "move": move_file,
            "remove": remove_file,
            "read": read_file,
        }
        answer = verbs[request["verb"]](request, frames)
        frames.write(DONE, json.dumps(answer).encode())
    except (BrokenInputError, BrokenPipeError):
        pass
    # Without waiting for threads that read from a client who has nothing more to say.
    os._exit(0)


def read_frame(stream: BinaryIO) -> tuple[bytes, bytes]:
    """Kind and content of the next frame.

    Raises:
        BrokenInputError: the stream ends before the frame does.
    """
    head = stream.read(FRAME_HEAD.size)
    if len(head) < FRAME_HEAD.size:
        raise BrokenInputError
    kind, length = FRAME_HEAD.unpack(head)
    content = stream.read(length)
    if len(content) < length:
        raise BrokenInputError
    return kind, content


class FrameWriter:
    """Writes whole frames, from any thread."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._lock = threading.Lock()

    def write(self, kind: bytes, content: bytes) -> None:
        """Send one frame at once."""
        with self._lock:
            self._stream.write(FRAME_HEAD.pack(kind, len(content)) + content)
            self._stream.flush()


# ── commands ──


def run_command(request: JsonObject, frames: FrameWriter) -> JsonObject:
    """Run a command to its end, its output in frames; it dies with the connection and at its time limit."""
    try:
        process = subprocess.Popen(
            request["argv"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except (OSError, ValueError) as error:  # ValueError: a zero byte in an argument
        return {"problem": getattr(error, "strerror", None) or str(error)}
    assert process.stdout is not None and process.stderr is not None

    def expire() -> None:
        kill_group(process)
        with contextlib.suppress(BrokenPipeError):
            frames.write(DONE, json.dumps({"timed_out": True}).encode())
        os._exit(0)

    if request["timeout_s"] is not None:
        limit = threading.Timer(request["timeout_s"], expire)
        limit.daemon = True
        limit.start()
    threading.Thread(target=feed_command, args=(process, request["keep_open"]), daemon=True).start()
    errors = threading.Thread(target=copy_output, args=(process, process.stderr, STDERR, frames), daemon=True)
    errors.start()
    copy_output(process, process.stdout, STDOUT, frames)
    errors.join()
    return {"exit_code": process.wait()}


def feed_command(process: subprocess.Popen[bytes], keep_open: bool) -> None:
    """Pass the client's input on; kill the command when the connection breaks."""
    assert process.stdin is not None
    while True:
        try:
            kind, content = read_frame(sys.stdin.buffer)
        except BrokenInputError:
            kill_group(process)
            return
        # A command need not read its input: what it leaves is dropped.
        with contextlib.suppress(BrokenPipeError, ValueError):
            if kind == DATA:
                process.stdin.write(content)
                process.stdin.flush()
            elif not keep_open:
                process.stdin.close()


def copy_output(process: subprocess.Popen[bytes], stream: IO[bytes], kind: bytes, frames: FrameWriter) -> None:
    """Send what the command writes; kill it when nobody takes it."""
    try:
        for chunk in iter(lambda: os.read(stream.fileno(), READ_BYTES), b""):
            frames.write(kind, chunk)
    except BrokenPipeError:
        kill_group(process)


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a command with its children, unless it was already waited for: then its number may be another's."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)


# ── files ──


def write_file(request: JsonObject, frames: FrameWriter) -> JsonObject:
    """Write a file atomically from the data frames."""
    try:
        write_atomically(Path(request["path"]), incoming_chunks(sys.stdin.buffer))
    except OSError as error:
        return {"errno": error.errno, "problem": error.strerror}
    except ValueError as error:  # a zero byte in the path
        return {"errno": None, "problem": str(error)}
    return {}


def write_pieces(request: JsonObject, frames: FrameWriter) -> JsonObject:
    """Write pieces of a file that others write to at the same time; durable when answered."""
    path = Path(request["path"])
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(str(path), os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        try:
            for piece in incoming_chunks(sys.stdin.buffer):
                place, rest = int.from_bytes(piece[:OFFSET_BYTES], "big"), memoryview(piece)[OFFSET_BYTES:]
                while rest:
                    num_written = os.pwrite(descriptor, rest, place)
                    place, rest = place + num_written, rest[num_written:]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        return {"errno": error.errno, "problem": error.strerror}
    except ValueError as error:  # a zero byte in the path
        return {"errno": None, "problem": str(error)}
    return {}


def move_file(request: JsonObject, frames: FrameWriter) -> JsonObject:
    """Put a file in its place."""
    try:
        Path(request["path"]).rename(request["to"])
        flush_directory(Path(request["to"]).parent)
    except OSError as error:
        return {"errno": error.errno, "problem": error.strerror}
    return {}


def remove_file(request: JsonObject, frames: FrameWriter) -> JsonObject:
    """Remove a file, if it is there."""
    with contextlib.suppress(OSError, ValueError):
        Path(request["path"]).unlink()
    return {}


def incoming_chunks(stream: BinaryIO) -> Iterator[bytes]:
    """The content of the data frames up to the end of input.

    Raises:
        BrokenInputError: the connection ends before that.
    """
    while True:
        kind, content = read_frame(stream)
        if kind == END_OF_INPUT:
            return
        yield content


def write_atomically(target: Path, chunks: Iterable[bytes]) -> None:
    """Write a file from its pieces so that it is there whole, and durably, or not at all."""
    target.parent.mkdir(parents=True, exist_ok=True)
    descriptor, part_name = tempfile.mkstemp(dir=str(target.parent), prefix="." + target.name[:50] + ".")
    part = Path(part_name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(descriptor, 0o644)
            for chunk in chunks:
                file.write(chunk)
            file.flush()
            os.fsync(descriptor)
        part.rename(target)
    finally:
        with contextlib.suppress(FileNotFoundError):
            part.unlink()
    flush_directory(target.parent)


def flush_directory(path: Path) -> None:
    """Make renames in a directory survive a power cut."""
    directory = os.open(str(path), os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def read_file(request: JsonObject, frames: FrameWriter) -> JsonObject:
    """Send a file, up to `max_bytes` of it."""
    num_bytes = 0
    try:
        with Path(request["path"]).open("rb") as file:
            while num_bytes < request["max_bytes"]:
                chunk = file.read(min(READ_BYTES, request["max_bytes"] - num_bytes))
                if not chunk:
                    break
                num_bytes += len(chunk)
                frames.write(STDOUT, chunk)
    except OSError as error:
        return {"errno": error.errno, "problem": error.strerror}
    except ValueError as error:
        return {"errno": None, "problem": str(error)}
    return {}


if __name__ == "__main__":
    main(sys.argv[2])
