"""Answer the requests of an SSHSession on the node: run a command, write files, read a file.

This program is the node's side of ssh/ssh_session.py. The client sends this program's text to `python -c` before the
first request. Nothing has to be installed, and both sides always have the same version. The program uses only the
standard library and old syntax.

    client ── request, then data frames, then "end of input" ──> agent ──> the command's standard input
    client <── nonce, then stdout, stderr and "alive" frames, then one "done" frame ── agent

A frame has one byte for its kind, four bytes for its length, and the content. The client skips everything before the
nonce. The command line contains the reversed nonce, because a login shell may echo the command line.

If the input ends without an "end of input" frame, the connection is broken. The agent then kills the command. A file
that `write_file` was writing keeps its old content. Files that are written in chunks keep the received chunks.

An agent answers many requests, one after another. Each request runs in a fork of the agent. A fork is faster than a new
agent, because a new agent needs an SSH channel and a start of Python.

Not here: detached jobs (supervisor/), directories (sync/receiver.py).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import importlib
import io
import itertools
import json
import operator
import os
import select
import signal
import stat
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
import traceback
import types
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, BinaryIO, Protocol

FRAME_HEAD = struct.Struct(">cI")
REQUEST, DATA, END_OF_INPUT = b"R", b"D", b"E"
NAME = b"N"
"""Kind of a frame with the name of the file to which the pieces in the following data frames belong."""
STDOUT, STDERR, DONE = b"o", b"e", b"x"
ALIVE = b"."
"""Kind of an empty frame that is sent regularly during a command, because sshd's ChannelTimeout closes silent
channels."""
_ALIVE_INTERVAL_S = 5.0
READ_BYTES = 1 << 20
_PIPE_BYTES = 1 << 20
"""Size of a pipe's buffer. With Linux's default of 64 KiB, the processes at the two ends of a pipe often wait for each
other."""
OFFSET_BYTES = 8
"""Number of bytes of the file offset at the beginning of every piece of a chunk."""
_SPLICED_BYTES = 64 << 10
"""Output below this size is copied instead of spliced, because copying needs fewer system calls."""
_INPUT_END_S = 0.2
"""Seconds to wait for the end of a request's input after the answer is known. After this time, the agent tells the
client to use another agent."""
ISOLATED = "-IXutf8"
"""Python's options for the project's programs on nodes: ignore Python's variables, and use UTF-8 in any locale."""
_F_SETPIPE_SZ = 1031
DIGESTS: dict[str, Callable[..., Any]] = {"sha256": hashlib.sha256}
"""Digest algorithms for chunks that this Python supports. The fastest algorithm is last."""
with contextlib.suppress(ImportError):
    # Our environments have blake3, which is ten times as fast as sha256 on processors without SHA instructions.
    DIGESTS["blake3"] = importlib.import_module("blake3").blake3

if TYPE_CHECKING:  # old interpreters do not support `dict[str, Any]`
    JsonObject = dict[str, Any]  # Any: JSON


class _BrokenInputError(Exception):
    """The connection to the client broke before the end of the input."""


def main(nonce: str) -> None:
    """Answer the requests on standard input, one after another. Never returns."""
    for descriptor in (0, 1):
        widen_pipe(descriptor)
    sys.stdout.buffer.write(nonce[::-1].encode())
    sys.stdout.buffer.flush()
    # Use a buffer of one byte, which never reads ahead: the following bytes may belong to a fork of this process.
    stream = io.BufferedReader(io.FileIO(0, closefd=False), 1)
    programs: dict[str, types.ModuleType | str] = {}
    try:
        while True:
            kind, content = _read_frame(stream)
            assert kind == REQUEST, kind
            request = json.loads(content.decode())
            for name, text in request.get("programs", {}).items():
                programs[name] = _load_program(name, text)
            child = os.fork()
            if child == 0:
                os._exit(_answer_request(request, stream, programs))
            if os.waitpid(child, 0)[1] != 0:  # unread input is left, so the next request has no known start
                break
    except _BrokenInputError:
        pass
    os._exit(0)


def _answer_request(request: JsonObject, stream: BinaryIO, programs: dict[str, types.ModuleType | str]) -> int:
    """Answer one request. Returns 0 if the request's whole input was read, so that this agent can read the next
    request."""
    frames = _FrameWriter(sys.stdout.buffer)
    client = Client(stream)
    verbs: dict[str, Callable[[], JsonObject]] = {
        "load": lambda: load(client),
        "run": lambda: run_command(request, client, frames, programs),
        "write": lambda: write_file(request, client),
        "write_chunks": lambda: write_chunks(request, client.frames()),
        "read": lambda: read_file(request, client, frames),
    }
    try:
        answer = verbs[request["verb"]]()
        is_reusable = client.has_ended_input()
        frames.write(DONE, json.dumps({**answer, "is_reusable": is_reusable}).encode())
    except (_BrokenInputError, BrokenPipeError):
        return 1
    return 0 if is_reusable else 1


def _read_frame(stream: BinaryIO) -> tuple[bytes, bytes]:
    """Return the kind and the content of the next frame.

    Raises:
        _BrokenInputError: the stream ends within the frame.
    """
    head = stream.read(FRAME_HEAD.size)
    if len(head) < FRAME_HEAD.size:
        raise _BrokenInputError
    kind, length = FRAME_HEAD.unpack(head)
    content = stream.read(length)
    if len(content) < length:
        raise _BrokenInputError
    return kind, content


class Client:
    """The input of one request."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._is_over = threading.Event()

    def frames(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield the kind and the content of each frame up to the end of input.

        Raises:
            _BrokenInputError: the connection broke before the end of input.
        """
        while True:
            kind, content = _read_frame(self._stream)
            if kind == END_OF_INPUT:
                self._is_over.set()
                return
            yield kind, content

    def chunks(self) -> Iterator[bytes]:
        """Yield the content of the data frames. Raises the errors of `frames`."""
        return (content for _, content in self.frames())

    def skip_input(self) -> None:
        """Read and drop input that the request does not use.

        Raises:
            _BrokenInputError: the connection broke within the input.
        """
        for _ in self.chunks():
            pass

    def has_ended_input(self) -> bool:
        return self._is_over.wait(_INPUT_END_S)

    def wait_until_gone(self) -> None:
        """Return when the connection has ended or the next request has arrived."""
        watch = select.poll()
        watch.register(self._stream.fileno(), select.POLLIN)
        watch.poll()


class _FrameWriter:
    """Writes whole frames to a stream. Several threads may use one writer."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._can_splice = stat.S_ISFIFO(os.fstat(stream.fileno()).st_mode)
        self._lock = threading.Lock()

    def write(self, kind: bytes, content: bytes) -> None:
        with self._lock:
            self._stream.write(FRAME_HEAD.pack(kind, len(content)))
            self._stream.write(content)
            self._stream.flush()

    def splice(self, kind: bytes, source: int, num_bytes: int) -> bool:
        """Send the waiting bytes of a pipe as one frame by `splice`, which does not copy the bytes. Returns False if
        the system cannot splice."""
        if not hasattr(os, "splice") or not self._can_splice:
            return False
        with self._lock:
            self._stream.write(FRAME_HEAD.pack(kind, num_bytes))
            self._stream.flush()
            while num_bytes:
                num_bytes -= os.splice(source, self._stream.fileno(), num_bytes)
        return True


def widen_pipe(descriptor: int) -> None:
    """Enlarge the buffer of a pipe, if the descriptor is a pipe and the system supports it."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            fcntl.fcntl(descriptor, _F_SETPIPE_SZ, _PIPE_BYTES)


# ── commands ──


class Process(Protocol):
    """A running command: a subprocess.Popen, or a fork of this process."""

    pid: int
    stdin: IO[bytes] | None
    stdout: IO[bytes] | None
    stderr: IO[bytes] | None

    def poll(self) -> int | None: ...

    def wait(self) -> int: ...


class _ForkedProcess:
    """One of the project's programs, running in a fork of this process and in a new process session."""

    def __init__(self, program: types.ModuleType, argv: list[str]) -> None:
        (stdin, our_stdin), (our_stdout, stdout), (our_stderr, stderr) = os.pipe(), os.pipe(), os.pipe()
        self._lock = threading.Lock()
        self._exit_code: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            os.setsid()
            for number, descriptor in enumerate((stdin, stdout, stderr)):
                os.dup2(descriptor, number)
            os.closerange(3, max(our_stdin, our_stdout, our_stderr, stdin, stdout, stderr) + 1)
            run_program(program, argv)
        for descriptor in (stdin, stdout, stderr):
            os.close(descriptor)
        self.stdin: IO[bytes] | None = os.fdopen(our_stdin, "wb")
        self.stdout: IO[bytes] | None = os.fdopen(our_stdout, "rb")
        self.stderr: IO[bytes] | None = os.fdopen(our_stderr, "rb")

    def poll(self) -> int | None:
        """Return the exit code, or None while the process runs, or while another thread waits for the process."""
        return self._reap(os.WNOHANG) if self._lock.acquire(blocking=False) else None

    def wait(self) -> int:
        """Wait for the process to end. Returns the exit code, which is negative if a signal ended the process."""
        self._lock.acquire()
        exit_code = self._reap(0)
        assert exit_code is not None
        return exit_code

    def _reap(self, options: int) -> int | None:
        try:
            if self._exit_code is None:
                pid, status = os.waitpid(self.pid, options)
                if pid:
                    self._exit_code = os.waitstatus_to_exitcode(status)
            return self._exit_code
        finally:
            self._lock.release()


def load(client: Client) -> JsonObject:
    """Answer a request that only loads programs. `main` has already loaded the programs."""
    client.skip_input()
    return {}


def _load_program(name: str, text: str) -> types.ModuleType | str:
    """Load one of the project's programs for many calls. If loading fails, return the program's text, because a run of
    the text prints the error."""
    module = types.ModuleType(name)
    sys.modules[name] = module
    try:
        exec(compile(text, name, "exec"), module.__dict__)
    except (SyntaxError, ImportError, AttributeError, TypeError, ValueError, OSError):
        return text
    return module


def run_program(program: types.ModuleType, argv: list[str]) -> None:
    """Run a loaded program like `python program.py ...`. Never returns."""
    sys.argv = argv
    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(n, mode, closefd=False) for n, mode in enumerate("rww"))
    exit_code = None
    try:
        exit_code = program.main(argv) or 0
        sys.stdout.flush()
    finally:  # end the fork here, because it must not continue as a second agent
        if exit_code is None:
            traceback.print_exc()
        sys.stderr.flush()
        os._exit(1 if exit_code is None else exit_code)


def _start_process(request: JsonObject, programs: dict[str, types.ModuleType | str]) -> Process:
    if request.get("program") is None:
        command = request["argv"]
    else:
        program = programs[request["program"]]
        if isinstance(program, types.ModuleType):
            return _ForkedProcess(program, [request["program"], *request["arguments"]])
        command = [sys.executable, ISOLATED, "-c", program, *request["arguments"]]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)


def run_command(
    request: JsonObject, client: Client, frames: _FrameWriter, programs: dict[str, types.ModuleType | str]
) -> JsonObject:
    """Run a command to its end and send its output in frames. Kill the command when the connection breaks or the time
    limit is over."""
    try:
        process = _start_process(request, programs)
    except (OSError, ValueError) as error:  # ValueError: an argument has a zero byte
        client.skip_input()
        return {"problem": getattr(error, "strerror", None) or str(error)}
    assert process.stdout is not None and process.stderr is not None
    widen_pipe(process.stdout.fileno())

    def expire() -> None:
        _kill_group(process)
        with contextlib.suppress(BrokenPipeError):
            frames.write(DONE, json.dumps({"timed_out": True}).encode())
        os._exit(1)

    if request["timeout_s"] is not None:
        limit = threading.Timer(request["timeout_s"], expire)
        limit.daemon = True
        limit.start()
    threading.Thread(target=_feed_command, args=(process, client, request["keep_open"]), daemon=True).start()
    threading.Thread(target=show_life, args=(frames,), daemon=True).start()
    errors = threading.Thread(target=_copy_output, args=(process, process.stderr, STDERR, frames), daemon=True)
    errors.start()
    _copy_output(process, process.stdout, STDOUT, frames)
    errors.join()
    return {"exit_code": process.wait()}


def _feed_command(process: Process, client: Client, keep_open: bool) -> None:
    """Pass the client's input to the command. Kill the command when the connection breaks."""
    assert process.stdin is not None
    # Drop input that the command does not read, because a command may ignore its input.
    try:
        for content in client.chunks():
            with contextlib.suppress(BrokenPipeError, ValueError):
                process.stdin.write(content)
                process.stdin.flush()
    except _BrokenInputError:
        _kill_group(process)
        return
    if not keep_open:
        with contextlib.suppress(BrokenPipeError, ValueError):
            process.stdin.close()
    client.wait_until_gone()
    _kill_group(process)


def show_life(frames: _FrameWriter) -> None:
    """Send an empty frame at intervals until this process ends or the client is gone."""
    with contextlib.suppress(OSError):
        while True:
            time.sleep(_ALIVE_INTERVAL_S)
            frames.write(ALIVE, b"")


def _copy_output(process: Process, stream: IO[bytes], kind: bytes, frames: _FrameWriter) -> None:
    """Send the command's output in frames. Kill the command when the client is gone."""
    source = stream.fileno()
    try:
        while (num_waiting := _wait_for_output(source)) > 0:
            if num_waiting < _SPLICED_BYTES or not frames.splice(kind, source, num_waiting):
                frames.write(kind, os.read(source, READ_BYTES))
    except BrokenPipeError:
        _kill_group(process)


def _wait_for_output(descriptor: int) -> int:
    """Wait for output in a pipe. Returns the number of readable bytes, or 0 at the end of the output."""
    watch = select.poll()
    watch.register(descriptor, select.POLLIN)
    watch.poll()
    return int.from_bytes(fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4)), sys.byteorder)


def _kill_group(process: Process) -> None:
    """Kill a command and its children. After `wait`, do nothing, because the process id may belong to another
    process."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)


# ── files ──


def write_file(request: JsonObject, client: Client) -> JsonObject:
    try:
        write_atomically(Path(request["path"]), client.chunks())
    except OSError as error:
        return {"errno": error.errno, "problem": error.strerror}
    except ValueError as error:  # the path has a zero byte
        return {"errno": None, "problem": str(error)}
    return {}


def write_chunks(request: JsonObject, frames: Iterable[tuple[bytes, bytes]]) -> JsonObject:
    """Write chunks of files. The answer has the digest of each chunk, with the chunk's file and number."""
    pieces = _read_pieces(frames)
    try:
        digests = write_in_place(Path(request["directory"]), pieces, request["chunk_bytes"], request["digest"])
        return {"digests": [[*chunk, digest] for chunk, digest in digests.items()]}
    except OSError as error:
        return {"errno": error.errno, "problem": error.strerror, "path": error.filename}
    except ValueError as error:  # the path has a zero byte
        return {"errno": None, "problem": str(error), "path": request["directory"]}


def _read_pieces(frames: Iterable[tuple[bytes, bytes]]) -> Iterator[tuple[str, int, memoryview]]:
    name = ""
    for kind, content in frames:
        if kind == NAME:
            name = content.decode()
        else:
            yield name, int.from_bytes(content[:OFFSET_BYTES], "big"), memoryview(content)[OFFSET_BYTES:]


def write_in_place(
    directory: Path, pieces: Iterable[tuple[str, int, bytes | memoryview]], chunk_bytes: int, algorithm: str
) -> dict[tuple[str, int], str]:
    """Write pieces at their offsets, with fsync. Returns the digest of each chunk by file name and chunk number.

    The pieces of a chunk must come in order. Other processes may write to other parts of the same files at the same
    time.

    Raises:
        OSError: a file cannot be written. The error has the file's path. Its number is ESTALE if another copy process
            has moved (sync/receiver.py) or removed the file.
    """
    digests: dict[tuple[str, int], Any] = {}  # Any: of hashlib or blake3
    for name, pieces_of_file in itertools.groupby(pieces, key=operator.itemgetter(0)):
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(str(path), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        try:
            for _, offset, piece in pieces_of_file:
                _write_if_ours(descriptor, path, offset, memoryview(piece))
                chunk = name, offset // chunk_bytes
                if chunk not in digests:
                    digests[chunk] = DIGESTS[algorithm]()
                digests[chunk].update(piece)
            os.fsync(descriptor)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from error
        finally:
            os.close(descriptor)
    return {chunk: digest.hexdigest() for chunk, digest in digests.items()}


def _write_if_ours(descriptor: int, path: Path, offset: int, piece: memoryview) -> None:
    """Write a piece if the path still leads to the open file.

    After a broken connection, data may still arrive when another copy process has already taken over the file. The
    other process holds the file's lock exclusively during the takeover.
    """
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    try:
        try:
            is_ours = os.path.samestat(os.fstat(descriptor), path.stat())
        except FileNotFoundError:
            is_ours = False
        if not is_ours:
            raise OSError(errno.ESTALE, "another copy has taken it over")
        while piece:
            num_written = os.pwrite(descriptor, piece, offset)
            offset, piece = offset + num_written, piece[num_written:]
    finally:
        fcntl.flock(descriptor, fcntl.LOCK_UN)


def write_atomically(target: Path, chunks: Iterable[bytes]) -> None:
    """Write a file from pieces of its content, atomically and with fsync."""
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
    """Make renames in a directory survive a power failure."""
    directory = os.open(str(path), os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def read_file(request: JsonObject, client: Client, frames: _FrameWriter) -> JsonObject:
    client.skip_input()
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
