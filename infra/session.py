"""Act on one node: run commands, read and write files.

`Session` is the only door to a node; everything in this package that touches one takes a session. `LocalSession` is
the door to this machine. Not here: which node (node.py), long-running programs that must outlive us (jobs.py).

    with open_session(node) as session:
        session.run(["nvidia-smi"], timeout_s=30)        one command, one record
        with session.stream(["tail", "-f", log]) as lines: ...   killed when the block is left
"""

import contextlib
import errno
import logging
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from infra.errors import (
    CommandFailedError,
    CommandTimeoutError,
    CompletedCommand,
    DiskFullError,
    FileMissingError,
    PermanentInfraError,
)

MAX_READ_BYTES = 64 << 20
"""The largest file that `read_file` returns; what is larger is read by offset or copied."""

logger = logging.getLogger(__name__)


class Session(Protocol):
    """An open connection to one node, closed by leaving its `with` block."""

    @property
    def python(self) -> str:
        """The interpreter on the node that runs our programs there."""

    def run(self, argv: Sequence[str], *, stdin: bytes = b"", timeout_s: float, check: bool = True) -> CompletedCommand:
        """Run one command to its end and return its record.

        Raises:
            CommandFailedError: it ended with another code than 0, and `check` is true.
            CommandTimeoutError: it did not end in time; it was killed.
        """

    def stream(self, argv: Sequence[str], *, stdin: bytes = b"") -> AbstractContextManager[Iterator[bytes]]:
        """Start a command and yield its output line by line; leaving the block kills it.

        A line keeps its newline; only the last one of a broken stream lacks it. The command's standard input stays
        open after `stdin` was sent, so the command can notice by its end that nobody listens any more.

        Raises:
            CommandFailedError: from the iterator, when the command itself ended with another code than 0.
        """

    def write_file(self, path: str, content: bytes) -> None:
        """Write a file atomically; its missing parent directories are made."""

    def write_chunks(self, path: str, chunks: Iterable[bytes]) -> None:
        """Write a file of any size atomically from its pieces; its missing parent directories are made.

        Raises:
            DiskFullError: the node has no room; nothing is left of the file.
        """

    def read_file(self, path: str) -> bytes:
        """Return the content of a file.

        Raises:
            FileMissingError: there is no such file.
            PermanentInfraError: it is larger than MAX_READ_BYTES.
        """

    def place_program(self, source: Path) -> str:
        """Make a single-file Python program of ours available on the node and return its path there."""

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

    def run(self, argv: Sequence[str], *, stdin: bytes = b"", timeout_s: float, check: bool = True) -> CompletedCommand:
        with _start_process(argv, stderr=subprocess.PIPE) as process:
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

    @contextlib.contextmanager
    def stream(self, argv: Sequence[str], *, stdin: bytes = b"") -> Iterator[Iterator[bytes]]:
        with tempfile.TemporaryFile() as stderr, _start_process(argv, stderr=stderr.fileno()) as process:
            assert process.stdin is not None and process.stdout is not None
            try:
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.write(stdin)
                    process.stdin.flush()
                yield self._lines(process, argv, stderr.fileno())
            finally:
                _kill_group(process)
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.close()

    def _lines(self, process: subprocess.Popen[bytes], argv: Sequence[str], stderr_fd: int) -> Iterator[bytes]:
        assert process.stdout is not None
        yield from process.stdout
        if process.wait() != 0:
            stderr = os.pread(stderr_fd, 65536, 0)
            raise CommandFailedError(
                CompletedCommand(argv=tuple(argv), exit_code=process.returncode, stdout=b"", stderr=stderr)
            )

    def write_file(self, path: str, content: bytes) -> None:
        self.write_chunks(path, [content])

    def write_chunks(self, path: str, chunks: Iterable[bytes]) -> None:
        target = Path(path)
        written_bytes = 0
        part: Path | None = None
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            file_descriptor, part_name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name[:100]}.")
            part = Path(part_name)
            with os.fdopen(file_descriptor, "wb") as file:
                os.fchmod(file_descriptor, 0o644)
                for chunk in chunks:
                    written_bytes += len(chunk)
                    file.write(chunk)
                file.flush()
                os.fsync(file_descriptor)
            part.rename(target)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise DiskFullError(path, written_bytes) from error
            raise PermanentInfraError(f"{path} cannot be written: {error.strerror}") from error
        finally:
            if part is not None:
                part.unlink(missing_ok=True)
        _flush_directory(target.parent)

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


def _start_process(argv: Sequence[str], *, stderr: int) -> subprocess.Popen[bytes]:
    assert not isinstance(argv, str), "a command is a list of arguments"
    try:
        return subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, start_new_session=True
        )
    except OSError as error:
        raise PermanentInfraError(f"{argv[0]} cannot be run on this machine: {error.strerror}") from error


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a command with its children, unless it was already waited for: then its number may be another's."""
    if process.returncode is not None:
        return
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _flush_directory(path: Path) -> None:
    """Make a rename in this directory survive a power cut."""
    directory = os.open(path, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
