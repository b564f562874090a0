"""The session of a machine that is reached over SSH.

Not here: agents and connections (agents.py), the node's side of a request (node_agent.py).
"""

import contextlib
import errno
import hashlib
import logging
import shlex
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from io import FileIO
from pathlib import Path
from typing import Self

from rollouts.infra.chunks import SHA256, Chunk
from rollouts.infra.errors import (
    CommandFailedError,
    CommandTimeoutError,
    CompletedCommand,
    FileMissingError,
    InfraError,
    NodeUnreachableError,
    PermanentInfraError,
    TransientInfraError,
)
from rollouts.infra.node import SSHAccess
from rollouts.infra.node_agent import ISOLATED, STDERR, STDOUT
from rollouts.infra.node_programs import read_program
from rollouts.infra.session import (
    LOOPBACK,
    MAX_OUTPUT_BYTES,
    MAX_READ_BYTES,
    poured_objects,
    read_lines,
    refusal_to_write,
    split_lines,
)
from rollouts.infra.ssh import openssh
from rollouts.infra.ssh.agent_call import AgentCall, JsonObject, ParallelWrite
from rollouts.infra.ssh.agents import ANSWER_MARGIN_S, PIECES, Agents, Purpose
from rollouts.infra.ssh.connection import SSHChannel
from rollouts.infra.ssh.host_keys import HostKeyEvidence

_MAX_STDERR_BYTES = 64 << 10
_INLINE_BYTES = 256 << 10
"""Input up to this size fits into the channel's window. Sending the input therefore never waits until output is
read."""


class SSHSession:
    """A session on a machine that is reached over SSH. Several threads may use one session."""

    def __init__(
        self,
        access: SSHAccess,
        *,
        python: str,
        programs_dir: str,
        find_access: Callable[[], SSHAccess] | None = None,
    ) -> None:
        """The session connects at the first request, not now.

        Args:
            programs_dir: absolute directory on the node for the project's programs. The programs' file names contain a
                digest.
            find_access: called before every connection attempt, for a node whose address may change.
        """
        self.agents = Agents(access, python=python, find_access=find_access)
        self._python = python
        self._programs_dir = programs_dir
        self._placed: set[str] = set()

    @property
    def python(self) -> str:
        return self._python

    @property
    def host_key_evidence(self) -> HostKeyEvidence:
        """Why the host's key was accepted, such as an entry of known_hosts. Opens a connection if there is none."""
        return self.agents.connection("control").host_key_evidence

    def run(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        timeout_s: float,
        check: bool = True,
        may_repeat: bool = False,
    ) -> CompletedCommand:
        request = _run_request(argv, timeout_s=timeout_s, keep_open=False)
        completed = self._run(request, argv, stdin=stdin, timeout_s=timeout_s, may_repeat=may_repeat)
        return _checked(completed) if check else completed

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
        request, argv = self._program_request(source, arguments, timeout_s=timeout_s, keep_open=False)
        completed = self._run(request, argv, stdin=stdin, timeout_s=timeout_s, may_repeat=may_repeat)
        return _checked(completed) if check else completed

    def _program_request(
        self, source: Path, arguments: Sequence[str], *, timeout_s: float | None, keep_open: bool
    ) -> tuple[JsonObject, list[str]]:
        """Return the request to run one of the project's programs, and the equivalent command line."""
        text = read_program(source)
        program = _program_name(source, text)
        self.agents.programs[program] = text
        call: JsonObject = {"verb": "run", "program": program, "arguments": list(arguments)}
        limits = {"timeout_s": timeout_s, "keep_open": keep_open}
        return {**call, **limits}, [self._python, ISOLATED, source.name, *arguments]

    def _run(
        self, request: JsonObject, argv: Sequence[str], *, stdin: bytes, timeout_s: float, may_repeat: bool
    ) -> CompletedCommand:
        def run_once() -> CompletedCommand:
            output: dict[bytes, list[bytes]] = {STDOUT: [], STDERR: []}
            num_bytes = 0
            with self.agents.ask("control", request, timeout_s=timeout_s + ANSWER_MARGIN_S) as call:
                call.send_input([stdin], in_background=len(stdin) > _INLINE_BYTES)
                for kind, content in call.frames():
                    num_bytes += len(content)
                    if num_bytes > MAX_OUTPUT_BYTES:
                        said = f"{argv[0]} on {self.agents.address} prints more than {MAX_OUTPUT_BYTES} bytes"
                        raise PermanentInfraError(f"{said}: it was ended")
                    output[kind].append(content)
            if call.answer.get("timed_out"):
                raise CommandTimeoutError(tuple(argv), timeout_s)
            return CompletedCommand(
                argv=tuple(argv),
                exit_code=self._exit_code(argv, call.answer),
                stdout=b"".join(output[STDOUT]),
                stderr=b"".join(output[STDERR]),
            )

        return self.agents.repeated_if_cut(run_once) if may_repeat else run_once()

    @contextlib.contextmanager
    def stream(self, argv: Sequence[str], *, stdin: bytes = b"") -> Iterator[Iterator[bytes]]:
        request = _run_request(argv, timeout_s=None, keep_open=True)
        with self._output_of(request, argv, stdin, "control") as chunks:
            yield split_lines(chunks)

    @contextlib.contextmanager
    def pipe(self, argv: Sequence[str], *, stdin: bytes = b"") -> Iterator[Iterator[bytes]]:
        request = _run_request(argv, timeout_s=None, keep_open=True)
        with self._output_of(request, argv, stdin, "bulk") as chunks:
            yield chunks

    @contextlib.contextmanager
    def pipe_program(self, source: Path, arguments: Sequence[str], *, stdin: bytes = b"") -> Iterator[Iterator[bytes]]:
        request, argv = self._program_request(source, arguments, timeout_s=None, keep_open=True)
        with self._output_of(request, argv, stdin, "bulk") as chunks:
            yield chunks

    @property
    def can_pour(self) -> bool:
        return self.agents.openssh("bulk") is not None

    @contextlib.contextmanager
    def pour_program(
        self, source: Path, arguments: Sequence[str], *, stdin: bytes, into: FileIO, max_bytes: int
    ) -> Iterator[Iterator[JsonObject]]:
        # Run the program without an agent, because OpenSSH's client writes the program's output directly into the file.
        with self._program_beside(
            source, arguments, stdin=subprocess.PIPE, stdout=into, stderr=subprocess.PIPE
        ) as process:
            yield poured_objects(process, stdin, into, max_bytes=max_bytes)

    @contextlib.contextmanager
    def feed_program(self, source: Path, arguments: Sequence[str], *, stdin: FileIO) -> Iterator[Iterator[bytes]]:
        with self._program_beside(
            source, arguments, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        ) as process:
            yield self._lines_of(process)

    def _lines_of(self, process: subprocess.Popen[bytes]) -> Iterator[bytes]:
        assert process.stdout is not None
        yield from read_lines(process.stdout)
        if process.wait() == openssh.NOBODY_ANSWERS:
            raise NodeUnreachableError(self.agents.address, "the connection broke")

    def _program_beside(
        self,
        source: Path,
        arguments: Sequence[str],
        *,
        stdin: int | FileIO,
        stdout: int | FileIO,
        stderr: int,
    ) -> AbstractContextManager[subprocess.Popen[bytes]]:
        """Run one of the project's programs through OpenSSH's client, without an agent."""
        if (client := self.agents.openssh("bulk")) is None:  # the client became unusable after `can_pour` was read
            raise TransientInfraError(f"OpenSSH's client cannot copy files to and from {self.agents.address}")
        command = shlex.join([self._python, ISOLATED, self.place_program(source), *arguments])
        return client.running(f"exec {command}", stdin=stdin, stdout=stdout, stderr=stderr)

    def write_file(self, path: str, content: bytes) -> None:
        self.agents.repeated_if_cut(lambda: self._write(path, content))

    def expect_chunks(self, num_chunks: int) -> None:
        threading.Thread(target=self._log_in_ahead, args=(num_chunks,), daemon=True).start()

    def _log_in_ahead(self, num_chunks: int) -> None:
        with contextlib.suppress(InfraError):  # the request that uses the connection will report the problem
            if self.agents.connection("control").is_far:
                for purpose in PIECES[:num_chunks]:
                    self.agents.make_ready(purpose)

    def write_chunks(
        self, directory: str, chunks: Sequence[Chunk], *, digest: str = SHA256
    ) -> dict[tuple[str, int], str]:
        # Send chunks to a distant node over several connections, because the window limits each connection's speed.
        purposes: Sequence[Purpose] = PIECES if self.agents.connection("control").is_far else ("bulk",)
        writing = ParallelWrite(
            lambda number, request: self.agents.ask(purposes[number], request),
            directory,
            chunks,
            digest=digest,
            max_senders=len(purposes),
        )
        try:
            digests = writing.run()
        except NodeUnreachableError:
            self.agents.forget(purposes)
            raise
        if writing.problem is not None:
            raise _refusal(writing.problem, writing.problem["path"], writing.num_sent_bytes)
        return digests

    def read_file(self, path: str) -> bytes:
        return self.agents.repeated_if_cut(lambda: self._read(path))

    def _read(self, path: str) -> bytes:
        with self.agents.ask("control", {"verb": "read", "path": path, "max_bytes": MAX_READ_BYTES + 1}) as call:
            call.send_input(())
            content = bytearray()
            for _, chunk in call.frames():
                content += chunk
                if len(content) > MAX_READ_BYTES + 1:  # the node sent more bytes than were requested
                    raise _too_large(path)
        if "problem" in call.answer:
            if call.answer["errno"] == errno.ENOENT:
                raise FileMissingError(path)
            raise PermanentInfraError(f"{path} cannot be read: {call.answer['problem']}")
        if len(content) > MAX_READ_BYTES:
            raise _too_large(path)
        return bytes(content)

    def place_program(self, source: Path) -> str:
        text = read_program(source)
        path = f"{self._programs_dir}/{_program_name(source, text)}.py"
        if path not in self._placed:
            self.write_file(path, text.encode())
            self._placed.add(path)
        return path

    @contextlib.contextmanager
    def forward(self, port: int, host: str = LOOPBACK) -> Iterator[int]:
        with forwarded_port(lambda: self.agents.connection("control").open_tunnel(port, host)) as local_port:
            yield local_port

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.agents.close()

    @contextlib.contextmanager
    def _output_of(
        self, request: JsonObject, argv: Sequence[str], stdin: bytes, purpose: Purpose
    ) -> Iterator[Iterator[bytes]]:
        with self.agents.ask(purpose, request) as call:
            if purpose == "control":  # prepare another agent, because a followed log occupies this one
                self.agents.make_ready("control")
            call.send_input([stdin], in_background=len(stdin) > _INLINE_BYTES)
            yield self._stdout_of(call, argv)

    def _stdout_of(self, call: AgentCall, argv: Sequence[str]) -> Iterator[bytes]:
        stderr = b""
        for kind, content in call.frames():
            if kind == STDOUT:
                yield content
            else:
                stderr = (stderr + content)[:_MAX_STDERR_BYTES]
        if exit_code := self._exit_code(argv, call.answer):
            raise CommandFailedError(CompletedCommand(argv=tuple(argv), exit_code=exit_code, stdout=b"", stderr=stderr))

    def _exit_code(self, argv: Sequence[str], answer: JsonObject) -> int:
        if "problem" in answer:
            raise PermanentInfraError(f"{argv[0]} cannot be run on {self.agents.address}: {answer['problem']}")
        if not isinstance(exit_code := answer["exit_code"], int):
            raise PermanentInfraError(f"{self.agents.address} sent {str(exit_code)[:80]!r} as an exit code")
        return exit_code

    def _write(self, path: str, content: bytes) -> None:
        with self.agents.ask("control", {"verb": "write", "path": path}) as call:
            call.send_input([content])
            call.wait()
        if "problem" in call.answer:
            raise _refusal(call.answer, path, len(content))


def _too_large(path: str) -> PermanentInfraError:
    return PermanentInfraError(f"{path} is larger than {MAX_READ_BYTES} bytes: copy it instead")


def _checked(completed: CompletedCommand) -> CompletedCommand:
    if completed.exit_code != 0:
        raise CommandFailedError(completed)
    return completed


def _program_name(source: Path, text: str) -> str:
    return f"{source.stem}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _refusal(answer: JsonObject, path: str, num_bytes: int) -> InfraError:
    return refusal_to_write(path, answer["errno"], answer["problem"], num_bytes=num_bytes)


def _run_request(argv: Sequence[str], *, timeout_s: float | None, keep_open: bool) -> JsonObject:
    assert not isinstance(argv, str), "a command is a list of arguments"
    return {"verb": "run", "argv": list(argv), "timeout_s": timeout_s, "keep_open": keep_open}


# ── forwarded ports ──


_PIECE_BYTES = 64 << 10
_PASSING = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.ECONNABORTED)
"""Temporary errors of `accept`, for example too many open files."""
_PAUSE_S = 0.5

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def forwarded_port(open_channel: Callable[[], SSHChannel]) -> Iterator[int]:
    """Yield a local port whose connections are forwarded to the node. A connection that cannot be forwarded is closed.

    Raises:
        PermanentInfraError: the node forwards no connections to this port.
    """
    early: list[SSHChannel] = []
    with contextlib.suppress(TransientInfraError):  # the node's program may not listen on the port yet
        early.append(open_channel())  # keep this channel for the first connection, because some servers accept only one

    def next_channel() -> SSHChannel:
        with contextlib.suppress(IndexError):
            if not (channel := early.pop()).has_ended:
                return channel
            channel.close()
        return open_channel()

    with socket.create_server((LOOPBACK, 0)) as server:
        threading.Thread(target=_accept, args=(server, next_channel), daemon=True).start()
        try:
            yield server.getsockname()[1]
        finally:
            with contextlib.suppress(OSError):
                server.shutdown(socket.SHUT_RDWR)  # wakes up the thread in `accept`, which close() alone does not
            for unused in early:
                unused.close()


def _accept(server: socket.socket, open_channel: Callable[[], SSHChannel]) -> None:
    while True:
        try:
            client, _ = server.accept()
        except OSError as error:
            if error.errno not in _PASSING:  # the block ended
                return
            logger.warning("a connection to a port of a node waits: %s", error.strerror)
            time.sleep(_PAUSE_S)
            continue
        threading.Thread(target=_pass_on, args=(client, open_channel), daemon=True).start()


def _pass_on(client: socket.socket, open_channel: Callable[[], SSHChannel]) -> None:
    with client:
        try:
            channel = open_channel()
        except InfraError as error:
            logger.debug("a connection was not passed on: %s", error)
            return
        threading.Thread(target=_send, args=(client, channel), daemon=True).start()
        try:
            with contextlib.suppress(OSError):
                while piece := channel.receive(_PIECE_BYTES):
                    client.sendall(piece)
                client.shutdown(socket.SHUT_RDWR)
        finally:
            channel.close()


def _send(client: socket.socket, channel: SSHChannel) -> None:
    with contextlib.suppress(OSError, NodeUnreachableError):
        while piece := client.recv(_PIECE_BYTES):
            channel.send(piece)
    channel.end_input()
