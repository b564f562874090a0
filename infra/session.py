"""Sessions: run commands, and read and write files, on one node.

All code of this package that acts on a node takes a `Session`. `LocalSession` is the session of this machine.

    with open_session(node) as session:
        session.run(["nvidia-smi"], timeout_s=30)        runs one command and returns its record
        with session.stream(["tail", "-f", log]) as lines: ...   the command is killed at the end of the block

Not here: other machines (ssh/ssh_session.py), settings of nodes (node.py), jobs that outlive this process (jobs.py).
"""

import contextlib
import errno
import functools
import logging
import os
import resource
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from io import FileIO
from pathlib import Path
from typing import IO, Any, NoReturn, Protocol, Self

from rollouts.infra import node_agent
from rollouts.infra.chunks import CHUNK_BYTES, SHA256, Chunk
from rollouts.infra.errors import (
    CommandFailedError,
    CommandTimeoutError,
    CompletedCommand,
    DiskFullError,
    FileMissingError,
    InfraError,
    PermanentInfraError,
    TransientInfraError,
)
from rollouts.infra.node_agent import ISOLATED
from rollouts.infra.supervisor.files import parse_object

MAX_READ_BYTES = 64 << 20
"""Largest file that `read_file` reads. Larger files must be copied, or read in parts."""
MAX_LINE_BYTES = 64 << 20
"""Largest length of a line of output, in bytes. Metrics records of at most 4 MiB grow at most sixfold as an escaped
string in JSON."""
MAX_GREETING_BYTES = 64 << 10
"""Number of bytes that login shells may print before a program of the project begins."""
MAX_OUTPUT_BYTES = 64 << 20
"""Largest output of `Session.run` on another machine, in bytes. Use `stream` for more output."""

_REASON_LINES = 3
"""Number of last lines of output in the error for a program that did not start."""
LOOPBACK = "127.0.0.1"

_READ_BYTES = 256 << 10

logger = logging.getLogger(__name__)


class Session(Protocol):
    """An open connection to one node. Leaving the `with` block of a session closes the session."""

    @property
    def python(self) -> str:
        """The interpreter on the node that runs the project's programs."""

    def run(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        timeout_s: float,
        check: bool = True,
        may_repeat: bool = False,
    ) -> CompletedCommand:
        """Run one command to its end and return its record.

        Args:
            may_repeat: whether the command may run twice, even at the same time. If `may_repeat` is true, the session
                runs the command again if the connection breaks before the answer arrives.

        Raises:
            CommandFailedError: the exit code is not 0, and `check` is true.
            CommandTimeoutError: the command did not end in time and was killed.
            PermanentInfraError: the command printed more than MAX_OUTPUT_BYTES on another machine and was killed.
            RequestCutError: the connection broke before the node's answer arrived.
        """

    def run_program(
        self,
        source: Path,
        arguments: Sequence[str],
        *,
        stdin: bytes = b"",
        timeout_s: float,
        check: bool = True,
        may_repeat: bool = False,
    ) -> CompletedCommand:
        """Run one of the project's Python programs (node_programs.py) like `run`, but faster on a distant node.

        The program runs without Python's environment variables (`ISOLATED`), possibly in a fork of a process that has
        loaded it.
        """

    def stream(self, argv: Sequence[str], *, stdin: bytes = b"") -> AbstractContextManager[Iterator[bytes]]:
        """Start a command and yield its output line by line. The command is killed at the end of the block.

        Every line ends with its newline, except the last line of a broken stream. The command's standard input stays
        open after `stdin` was sent. The end of its standard input tells the command that the reader is gone.

        Raises:
            CommandFailedError: raised by the iterator if the command ended with a code other than 0.
        """

    def pipe(self, argv: Sequence[str], *, stdin: bytes = b"") -> AbstractContextManager[Iterator[bytes]]:
        """Start a command like `stream`, but yield its output in pieces of any size."""

    def pipe_program(
        self, source: Path, arguments: Sequence[str], *, stdin: bytes = b""
    ) -> AbstractContextManager[Iterator[bytes]]:
        """Start one of the project's programs like `run_program`, and yield its output like `pipe`."""

    @property
    def can_pour(self) -> bool:
        """Whether `pour_program` and `feed_program` work. Each call of the two methods needs a login, so the methods
        save time only for hundreds of MiB or more."""

    def pour_program(
        self, source: Path, arguments: Sequence[str], *, stdin: bytes, into: FileIO, max_bytes: int
    ) -> AbstractContextManager[Iterator[dict[str, Any]]]:  # Any: JSON
        """Start a program like `pipe_program`, but write its output directly into a file.

        Yields the JSON objects that the program prints on stderr. The first object shows that the program runs, and is
        not yielded. Then `stdin` is sent, and `into` is truncated, because shells may have printed text before. When
        the iterator has ended, all received output is in the file. The caller has to check whether the output is
        complete.

        Args:
            max_bytes: approximate limit of the output, if the system can enforce it.

        Raises:
            InfraError: the program could not be started.
        """

    def feed_program(
        self, source: Path, arguments: Sequence[str], *, stdin: FileIO
    ) -> AbstractContextManager[Iterator[bytes]]:
        """Start a program like `pipe_program`, with a whole file as its input. Yields the lines of the program's
        output.

        Raises:
            NodeUnreachableError: raised by the iterator if the connection broke.
            InfraError: the program could not be started.
        """

    def forward(self, port: int, host: str = LOOPBACK) -> AbstractContextManager[int]:
        """Yield a local port that is forwarded to `host:port`, as seen from the node, while the block runs.

        Raises:
            PermanentInfraError: the node cannot forward ports.
        """

    def write_file(self, path: str, content: bytes) -> None:
        """Write a file atomically. Missing parent directories are created."""

    def expect_chunks(self, num_chunks: int) -> None:
        """Open connections in the background for a later `write_chunks` with this many chunks. Never fails."""

    def write_chunks(
        self, directory: str, chunks: Sequence[Chunk], *, digest: str = SHA256
    ) -> dict[tuple[str, int], str]:
        """Write chunks of files at their offsets, and create missing directories. Other parts of the files stay
        unchanged.

        Chunks of one file must be adjacent. Returns the digest of each written chunk, by file name and chunk number.
        When the call returns, the data is on the disk (fsync).

        Args:
            digest: name of a digest that the node's Python supports (`node_agent.DIGESTS`).

        Raises:
            NodeUnreachableError: the connection broke. Some chunks may be written, wholly or partly.
            DiskFullError: the disk has no room for the chunks.
            TransientInfraError: another upload to the directory has moved or removed a file meanwhile.
        """

    def read_file(self, path: str) -> bytes:
        """Return the content of a file.

        Raises:
            FileMissingError: the file does not exist.
            PermanentInfraError: the file is larger than MAX_READ_BYTES, or cannot be read.
        """

    def place_program(self, source: Path) -> str:
        """Put one of the project's Python programs (node_programs.py) on the node. Returns the program's path on the
        node."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


class LocalSession:
    """The session of this machine. Each command runs in a separate process session, so that Ctrl-C does not reach the
    command."""

    def __init__(self, python: str) -> None:
        self._python = python

    @property
    def python(self) -> str:
        return self._python

    def run(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        timeout_s: float,
        check: bool = True,
        may_repeat: bool = False,
    ) -> CompletedCommand:
        with _start_process(argv) as process:
            try:
                stdout, stderr = process.communicate(stdin, timeout=timeout_s)
            except subprocess.TimeoutExpired as error:
                raise CommandTimeoutError(tuple(argv), timeout_s) from error
            finally:
                _kill_group(process)
        completed = CompletedCommand(argv=tuple(argv), exit_code=process.returncode, stdout=stdout, stderr=stderr)
        if check and completed.exit_code != 0:
            raise CommandFailedError(completed)
        return completed

    def run_program(
        self,
        source: Path,
        arguments: Sequence[str],
        *,
        stdin: bytes = b"",
        timeout_s: float,
        check: bool = True,
        may_repeat: bool = False,
    ) -> CompletedCommand:
        return self.run(
            [self._python, ISOLATED, str(source), *arguments], stdin=stdin, timeout_s=timeout_s, check=check
        )

    @contextlib.contextmanager
    def stream(self, argv: Sequence[str], *, stdin: bytes = b"") -> Iterator[Iterator[bytes]]:
        with self.pipe(argv, stdin=stdin) as chunks:
            yield split_lines(chunks)

    @contextlib.contextmanager
    def pipe(self, argv: Sequence[str], *, stdin: bytes = b"") -> Iterator[Iterator[bytes]]:
        with tempfile.TemporaryFile() as stderr, _start_process(argv, stderr=stderr.fileno()) as process:
            assert process.stdin is not None
            try:
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.write(stdin)
                    process.stdin.flush()
                yield self._output_of(process, argv, stderr.fileno())
            finally:
                _kill_group(process)
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.close()

    def pipe_program(
        self, source: Path, arguments: Sequence[str], *, stdin: bytes = b""
    ) -> AbstractContextManager[Iterator[bytes]]:
        return self.pipe([self._python, ISOLATED, str(source), *arguments], stdin=stdin)

    @property
    def can_pour(self) -> bool:
        return True

    @contextlib.contextmanager
    def pour_program(
        self, source: Path, arguments: Sequence[str], *, stdin: bytes, into: FileIO, max_bytes: int
    ) -> Iterator[Iterator[dict[str, Any]]]:
        argv = [self._python, ISOLATED, str(source), *arguments]
        with _start_process(argv, stdout=into.fileno()) as process:
            try:
                yield poured_objects(process, stdin, into, max_bytes=max_bytes)
            finally:
                _kill_group(process)

    @contextlib.contextmanager
    def feed_program(self, source: Path, arguments: Sequence[str], *, stdin: FileIO) -> Iterator[Iterator[bytes]]:
        argv = [self._python, ISOLATED, str(source), *arguments]
        with _start_process(argv, stdin=stdin.fileno(), stderr=subprocess.DEVNULL) as process:
            assert process.stdout is not None
            try:
                yield read_lines(process.stdout)
            finally:
                _kill_group(process)

    def _output_of(self, process: subprocess.Popen[bytes], argv: Sequence[str], stderr_fd: int) -> Iterator[bytes]:
        assert process.stdout is not None
        yield from iter(functools.partial(os.read, process.stdout.fileno(), _READ_BYTES), b"")
        if process.wait() != 0:
            stderr = os.pread(stderr_fd, 65536, 0)
            raise CommandFailedError(
                CompletedCommand(argv=tuple(argv), exit_code=process.returncode, stdout=b"", stderr=stderr)
            )

    @contextlib.contextmanager
    def forward(self, port: int, host: str = LOOPBACK) -> Iterator[int]:
        assert host == LOOPBACK, f"{host}: a local session forwards only to {LOOPBACK}"
        yield port

    def write_file(self, path: str, content: bytes) -> None:
        with _named_refusal(path, lambda: len(content)):
            node_agent.write_atomically(Path(path), [content])

    def expect_chunks(self, num_chunks: int) -> None:
        pass

    def write_chunks(
        self, directory: str, chunks: Sequence[Chunk], *, digest: str = SHA256
    ) -> dict[tuple[str, int], str]:
        num_bytes = 0

        def pieces() -> Iterator[tuple[str, int, bytes]]:
            nonlocal num_bytes
            for name, number, pieces_of_chunk in chunks:
                offset = number * CHUNK_BYTES
                for piece in pieces_of_chunk:
                    yield name, offset, piece
                    offset += len(piece)
                    num_bytes += len(piece)

        with _named_refusal(directory, lambda: num_bytes):
            return node_agent.write_in_place(Path(directory), pieces(), CHUNK_BYTES, digest)

    def read_file(self, path: str) -> bytes:
        try:
            with Path(path).open("rb") as file:
                content = file.read(MAX_READ_BYTES + 1)
        except FileNotFoundError as error:
            raise FileMissingError(path) from error
        except OSError as error:
            raise PermanentInfraError(f"{path} cannot be read: {error.strerror}") from error
        if len(content) > MAX_READ_BYTES:
            raise PermanentInfraError(f"{path} is larger than {MAX_READ_BYTES} bytes: copy it instead")
        return content

    def place_program(self, source: Path) -> str:
        return str(source)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing: the session has no state between commands."""


@contextlib.contextmanager
def _named_refusal(path: str, count_bytes: Callable[[], int]) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        named = error.filename or path
        raise refusal_to_write(named, error.errno, error.strerror, num_bytes=count_bytes()) from error


def refusal_to_write(path: str, number: int | None, reason: str | None, *, num_bytes: int) -> InfraError:
    """Return the error for a file that cannot be written.

    Args:
        number: the system's error number, or None if the system reported no number.
        num_bytes: number of bytes of the content, for the error about a full disk.
    """
    if number in (errno.ENOSPC, errno.EDQUOT):
        return DiskFullError(path, num_bytes)
    if number == errno.ESTALE:
        return TransientInfraError(f"{path} cannot be written: {reason}")
    return PermanentInfraError(f"{path} cannot be written: {reason}")


def _start_process(
    argv: Sequence[str],
    *,
    stdin: int = subprocess.PIPE,
    stdout: int = subprocess.PIPE,
    stderr: int = subprocess.PIPE,
) -> subprocess.Popen[bytes]:
    assert not isinstance(argv, str), "a command is a list of arguments"
    try:
        return subprocess.Popen(argv, stdin=stdin, stdout=stdout, stderr=stderr, start_new_session=True)
    except OSError as error:
        raise PermanentInfraError(f"{argv[0]} cannot be run on this machine: {error.strerror}") from error


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a command and its children. After `wait`, do nothing, because the process id may belong to another
    process."""
    if process.returncode is not None:
        return
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def poured_objects(
    process: subprocess.Popen[bytes], stdin: bytes, into: FileIO, *, max_bytes: int
) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of `Session.pour_program`. The file `into` is the standard output of `process`.

    Raises:
        TransientInfraError: the process ended, or printed too much other text, before its first object.
    """
    assert process.stdin is not None and process.stderr is not None
    if hasattr(resource, "prlimit"):  # on Linux, the system can limit the file's size
        with contextlib.suppress(ProcessLookupError):
            most = max_bytes + MAX_GREETING_BYTES
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (most, most))
    other: list[bytes] = []
    num_bytes = 0
    for line in read_lines(process.stderr):  # shells and interpreters may print other text first
        if parse_object(line) is not None:
            break
        other = [*other, line[:MAX_GREETING_BYTES]][-_REASON_LINES:]
        if (num_bytes := num_bytes + len(line)) > MAX_GREETING_BYTES:
            raise TransientInfraError("a program that sends a file printed too much other text before it began")
    else:
        reason = b"".join(other).decode(errors="replace").strip() or "it printed nothing"
        raise TransientInfraError(f"a program that sends a file ended before it began: {reason}")
    # The program shares the file's position with this process, so this call also rewinds the program's output.
    into.seek(0)
    into.truncate()
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(stdin)
        process.stdin.flush()
    yield from filter(None, map(parse_object, read_lines(process.stderr)))


class Answer(dict[str, Any]):  # Any: JSON
    """The JSON answer of a program of the project on a node. Access to a missing name raises PermanentInfraError,
    because another program may have printed the object."""

    def __missing__(self, name: str) -> NoReturn:
        raise PermanentInfraError(
            f"the machine answered {str(dict(self))[:80]} without {name!r}: this is not an answer of our program"
        )


def read_answer(completed: CompletedCommand) -> Answer:
    """Return the JSON object in the last line of a program's output. Interpreters may print other lines before this
    line.

    Raises:
        CommandFailedError: the last line is not a JSON object.
    """
    lines = completed.stdout.splitlines()
    answer = parse_object(lines[-1]) if lines else None
    if answer is None:
        raise CommandFailedError(completed)
    return Answer(answer)


def last_line(completed: CompletedCommand) -> str:
    """Return the last line of a program's output. Interpreters may print other lines before this line."""
    return (completed.stdout.splitlines() or [b""])[-1].decode()


def read_lines(stream: IO[bytes]) -> Iterator[bytes]:
    """Yield the lines of a stream. A line longer than MAX_LINE_BYTES is yielded in pieces."""
    return iter(functools.partial(stream.readline, MAX_LINE_BYTES), b"")


def split_lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the lines of a stream with their newlines. Text after the last newline is yielded last, without a newline.

    Raises:
        PermanentInfraError: a line is longer than MAX_LINE_BYTES.
    """
    pending = b""
    for chunk in chunks:
        *lines, pending = (pending + chunk).split(b"\n")
        for line in lines:
            yield line + b"\n"
        if len(pending) > MAX_LINE_BYTES:
            raise PermanentInfraError(f"a line on the machine has more than {MAX_LINE_BYTES} bytes, the limit")
    if pending:
        yield pending
