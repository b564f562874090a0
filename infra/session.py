"""Act on one node: run commands, read and write files.

`Session` is the only door to a node; everything in this package that touches one takes a session. `LocalSession` is
the door to this machine. Not here: other machines (ssh_session.py), which node (node.py), long-running programs that
must outlive us (jobs.py).

    with open_session(node) as session:
        session.run(["nvidia-smi"], timeout_s=30)        one command, one record
        with session.stream(["tail", "-f", log]) as lines: ...   killed when the block is left
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
from types import TracebackType
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
"""The largest file that `read_file` returns; what is larger is read by offset or copied."""
MAX_LINE_BYTES = 64 << 20
"""Of a stream of lines; a record of metrics has 4 MiB at most, and no more than six times as many as JSON in JSON."""
MAX_GREETING_BYTES = 64 << 10
"""Shells may print so much ahead of the first word of a program of ours."""
MAX_OUTPUT_BYTES = 64 << 20
"""So much a command on another machine may print that is run to its end; what prints more is streamed."""

_REASON_LINES = 3
"""So many of its last lines say why a program did not begin."""
LOOPBACK = "127.0.0.1"

_READ_BYTES = 256 << 10

logger = logging.getLogger(__name__)


class Session(Protocol):
    """An open connection to one node, closed by leaving its `with` block."""

    @property
    def python(self) -> str:
        """The interpreter on the node that runs our programs there."""

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
            may_repeat: running it twice, even at the same time, does no harm; so it is run once more where the
                connection breaks before the answer.

        Raises:
            CommandFailedError: it ended with another code than 0, and `check` is true.
            CommandTimeoutError: it did not end in time; it was killed.
            PermanentInfraError: it printed more than MAX_OUTPUT_BYTES, on another machine; it was killed.
            RequestCutError: the connection broke before the answer.
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
        """`run` for a Python program of ours (node_programs.py); faster than that where it is far.

        It is cut off from the interpreter's environment (`ISOLATED`), and may be a fork of a process that loaded it.
        """

    def stream(self, argv: Sequence[str], *, stdin: bytes = b"") -> AbstractContextManager[Iterator[bytes]]:
        """Start a command and yield its output line by line; leaving the block kills it.

        A line keeps its newline; only the last one of a broken stream lacks it. The command's standard input stays
        open after `stdin` was sent, so the command can notice by its end that nobody listens any more.

        Raises:
            CommandFailedError: from the iterator, when the command itself ended with another code than 0.
        """

    def pipe(self, argv: Sequence[str], *, stdin: bytes = b"") -> AbstractContextManager[Iterator[bytes]]:
        """`stream` for bytes that are no lines, and for many of them: yields pieces of any size."""

    def pipe_program(
        self, source: Path, arguments: Sequence[str], *, stdin: bytes = b""
    ) -> AbstractContextManager[Iterator[bytes]]:
        """`pipe` of what `run_program` runs."""

    @property
    def can_pour(self) -> bool:
        """Whether there are `pour_program` and `feed_program`, which are worth a login for hundreds of MiB."""

    def pour_program(
        self, source: Path, arguments: Sequence[str], *, stdin: bytes, into: FileIO, max_bytes: int
    ) -> AbstractContextManager[Iterator[dict[str, Any]]]:  # Any: JSON
        """`pipe_program` whose output goes into a file by itself; yields the JSON objects that it says on stderr.

        The first of them, which is not yielded, says that it runs. Only then is `stdin` sent, and does the output go to
        the beginning of `into`: what shells print when they start is cut off. When the iterator has ended, everything
        that came is in the file; whether it is all that was sent is for the caller to know.

        Args:
            max_bytes: about as much comes at most, where the system can see to that.

        Raises:
            InfraError: it could not be started.
        """

    def feed_program(
        self, source: Path, arguments: Sequence[str], *, stdin: FileIO
    ) -> AbstractContextManager[Iterator[bytes]]:
        """`pipe_program` whose input is a file by itself, from its beginning; yields the lines that it says.

        Raises:
            NodeUnreachableError: from the iterator, when the connection broke.
            InfraError: it could not be started.
        """

    def forward(self, port: int, host: str = LOOPBACK) -> AbstractContextManager[int]:
        """A port on this machine's loopback that leads where the node finds host and port, while the block runs.

        Raises:
            PermanentInfraError: nothing can lead there.
        """

    def write_file(self, path: str, content: bytes) -> None:
        """Write a file atomically; its missing parent directories are made."""

    def expect_chunks(self, num_chunks: int) -> None:
        """Make ready, beside what is done meanwhile, what so many chunks need that are written soon; never fails."""

    def write_chunks(
        self, directory: str, chunks: Sequence[Chunk], *, digest: str = SHA256
    ) -> dict[tuple[str, int], str]:
        """Write chunks of files in their places; what else is in them stays, missing directories are made.

        Chunks of one file come one after the other. Returns the digest of each chunk, by the name of its file and its
        number, as it was written, durably.

        Args:
            digest: the name of one that the node's Python has (`node_agent.DIGESTS`).

        Raises:
            NodeUnreachableError: the connection broke; some chunks may be there, whole or in part.
            DiskFullError: there is no room for them.
            TransientInfraError: somebody has moved or removed a file meanwhile.
        """

    def read_file(self, path: str) -> bytes:
        """Return the content of a file.

        Raises:
            FileMissingError: there is no such file.
            PermanentInfraError: it is larger than MAX_READ_BYTES.
        """

    def place_program(self, source: Path) -> str:
        """Make a Python program of ours (node_programs.py) available on the node and return its path there."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class LocalSession:
    """The session of this machine; its commands run in sessions of their own, out of reach of our Ctrl-C."""

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
        assert host == LOOPBACK, f"{host}: this machine needs no way to others"
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing is held between commands."""


@contextlib.contextmanager
def _named_refusal(path: str, count_bytes: Callable[[], int]) -> Iterator[None]:
    """Say in our words why a file cannot be written."""
    try:
        yield
    except OSError as error:
        named = error.filename or path
        raise refusal_to_write(named, error.errno, error.strerror, num_bytes=count_bytes()) from error


def refusal_to_write(path: str, number: int | None, reason: str | None, *, num_bytes: int) -> InfraError:
    """Why a file cannot be written.

    Args:
        number: the system's error number; None where it is none of the system's.
        num_bytes: how much was to be written, as far as it came.
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
    """Kill a command with its children, unless it was already waited for: then its number may be another's."""
    if process.returncode is not None:
        return
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def poured_objects(
    process: subprocess.Popen[bytes], stdin: bytes, into: FileIO, *, max_bytes: int
) -> Iterator[dict[str, Any]]:
    """The JSON objects of `Session.pour_program`, from the process whose standard output is the file.

    Raises:
        TransientInfraError: it has ended, or said a lot of something else, before it said anything.
    """
    assert process.stdin is not None and process.stderr is not None
    if hasattr(resource, "prlimit"):  # Linux has it: nobody here sees how much comes before it lies there
        with contextlib.suppress(ProcessLookupError):
            most = max_bytes + MAX_GREETING_BYTES
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (most, most))
    other: list[bytes] = []
    num_bytes = 0
    for line in read_lines(process.stderr):  # shells and interpreters may say something of their own
        if parse_object(line) is not None:
            break
        other = [*other, line[:MAX_GREETING_BYTES]][-_REASON_LINES:]
        if (num_bytes := num_bytes + len(line)) > MAX_GREETING_BYTES:
            raise TransientInfraError("a program that sends a file says something else without end")
    else:
        reason = b"".join(other).decode(errors="replace").strip() or "without a word"
        raise TransientInfraError(f"a program that sends a file ended before it began: {reason}")
    # The process writes where this file stands: to it, and to us, it is one opened file.
    into.seek(0)
    into.truncate()
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(stdin)
        process.stdin.flush()
    yield from filter(None, map(parse_object, read_lines(process.stderr)))


class Answer(dict[str, Any]):  # Any: JSON
    """What a program of ours says on a machine; what it lacks is said, for the program may be somebody else's."""

    def __missing__(self, name: str) -> NoReturn:
        raise PermanentInfraError(
            f"the machine answered {str(dict(self))[:80]} without {name!r}, as no program of ours"
        )


def read_answer(completed: CompletedCommand) -> Answer:
    """The JSON object that a program of ours printed, as its last line: an interpreter may say something before.

    Raises:
        CommandFailedError: it printed none.
    """
    lines = completed.stdout.splitlines()
    answer = parse_object(lines[-1]) if lines else None
    if answer is None:
        raise CommandFailedError(completed)
    return Answer(answer)


def last_line(completed: CompletedCommand) -> str:
    """What a short program of ours printed, as its last line: an interpreter may say something before."""
    return (completed.stdout.splitlines() or [b""])[-1].decode()


def read_lines(stream: IO[bytes]) -> Iterator[bytes]:
    """The lines of a stream; one that is longer than any of ours comes in pieces."""
    return iter(functools.partial(stream.readline, MAX_LINE_BYTES), b"")


def split_lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """The lines of a stream, each with its newline; what is left when it ends comes last, without one.

    Raises:
        PermanentInfraError: one is longer than any of ours.
    """
    pending = b""
    for chunk in chunks:
        *lines, pending = (pending + chunk).split(b"\n")
        for line in lines:
            yield line + b"\n"
        if len(pending) > MAX_LINE_BYTES:
            raise PermanentInfraError(f"a line on the machine has more than {MAX_LINE_BYTES} bytes: none of ours has")
    if pending:
        yield pending
