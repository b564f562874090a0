"""The session of a machine that is reached over SSH.

Not here: connections and logins (ssh.py), the node's side of each request (node_agent.py).

Every request is one channel and one process on the node, the agent, whose text travels ahead of the request. So nothing
depends on the node's login shell but that it can start Python, and arguments are never interpreted. What matters
quickly (commands, jobs, logs) and what is large (files) use connections of their own, opened when first needed and
again when they have broken. A request that broke off is repeated only if nothing of it was sent.
"""

import contextlib
import errno
import hashlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Literal, Self, get_args

from infra.agent_call import AgentCall, JsonObject
from infra.errors import (
    CommandFailedError,
    CommandTimeoutError,
    CompletedCommand,
    DiskFullError,
    FileMissingError,
    PermanentInfraError,
    TransientInfraError,
)
from infra.host_keys import HostKeyEvidence
from infra.node import SSHAccess
from infra.node_agent import STDERR, STDOUT
from infra.parallel_write import ParallelWrite
from infra.session import MAX_READ_BYTES, split_lines
from infra.ssh import SSHConnection, connect
from infra.tunnel import forwarded_port

Purpose = Literal["control", "bulk", "bulk 1", "bulk 2", "bulk 3"]
PURPOSES: tuple[Purpose, ...] = get_args(Purpose)
BULK: tuple[Purpose, ...] = ("bulk", "bulk 1", "bulk 2", "bulk 3")
"""Those after the first are for large files to a distant node."""

OPEN_ATTEMPTS = 4
"""So often a request is begun; what was sent of it is never sent again."""
ANSWER_MARGIN_S = 30.0
"""An answer may come this much later than the command's own time limit."""
_MAX_STDERR_BYTES = 64 << 10
_INLINE_BYTES = 256 << 10
"""Input up to this size fits into the channel's window, so that sending it cannot wait for the output to be read."""

logger = logging.getLogger(__name__)


class SSHSession:
    """A session on a machine that is reached over SSH; may be used by several threads."""

    def __init__(
        self,
        access: SSHAccess,
        *,
        python: str,
        programs_dir: str,
        find_access: Callable[[], SSHAccess] | None = None,
    ) -> None:
        """Nothing is connected before the first request.

        Args:
            programs_dir: absolute directory on the node for programs of ours, named by their content.
            find_access: asked before every connection where the node's address may change.
        """
        self._access = access
        self._find_access = find_access
        self._python = python
        self._programs_dir = programs_dir
        self._connections: dict[Purpose, SSHConnection] = {}
        self._placed: set[str] = set()
        self._is_closed = False
        self._lock = threading.Lock()
        self._connecting = {purpose: threading.Lock() for purpose in PURPOSES}

    @property
    def python(self) -> str:
        return self._python

    @property
    def host_key_evidence(self) -> HostKeyEvidence:
        """Why the host's key was believed; connects if need be."""
        return self._connection("control").host_key_evidence

    def run(self, argv: Sequence[str], *, stdin: bytes = b"", timeout_s: float, check: bool = True) -> CompletedCommand:
        output: dict[bytes, list[bytes]] = {STDOUT: [], STDERR: []}
        request = _run_request(argv, timeout_s=timeout_s, keep_open=False)
        with self._ask("control", request, timeout_s=timeout_s + ANSWER_MARGIN_S) as call:
            call.send_input([stdin], in_background=len(stdin) > _INLINE_BYTES)
            for kind, content in call.frames():
                output[kind].append(content)
        if call.answer.get("timed_out"):
            raise CommandTimeoutError(tuple(argv), timeout_s)
        completed = CompletedCommand(
            argv=tuple(argv),
            exit_code=self._exit_code(argv, call.answer),
            stdout=b"".join(output[STDOUT]),
            stderr=b"".join(output[STDERR]),
        )
        if check and completed.exit_code != 0:
            raise CommandFailedError(completed)
        return completed

    @contextlib.contextmanager
    def stream(self, argv: Sequence[str], *, stdin: bytes = b"") -> Iterator[Iterator[bytes]]:
        with self._output_of(argv, stdin, "control") as chunks:
            yield split_lines(chunks)

    @contextlib.contextmanager
    def pipe(self, argv: Sequence[str], *, stdin: bytes = b"") -> Iterator[Iterator[bytes]]:
        with self._output_of(argv, stdin, "bulk") as chunks:
            yield chunks

    def write_file(self, path: str, content: bytes) -> None:
        self._write(path, [content], "control")

    def write_chunks(self, path: str, chunks: Iterable[bytes]) -> None:
        if not self._connection("bulk").is_far:
            self._write(path, chunks, "bulk")
            return
        writing = ParallelWrite(lambda number, request: self._ask(BULK[number], request), path)
        _raise_if_refused(writing.run(chunks), path, writing.num_sent_bytes)

    def read_file(self, path: str) -> bytes:
        with self._ask("control", {"verb": "read", "path": path, "max_bytes": MAX_READ_BYTES + 1}) as call:
            content = b"".join(chunk for _, chunk in call.frames())
        if "problem" in call.answer:
            if call.answer["errno"] == errno.ENOENT:
                raise FileMissingError(path)
            raise PermanentInfraError(f"{path} cannot be read: {call.answer['problem']}")
        if len(content) > MAX_READ_BYTES:
            raise PermanentInfraError(f"{path} is larger than {MAX_READ_BYTES} bytes: copy it instead")
        return content

    def place_program(self, source: Path) -> str:
        text = source.read_bytes()
        path = f"{self._programs_dir}/{source.stem}-{hashlib.sha256(text).hexdigest()[:16]}.py"
        if path not in self._placed:
            self.write_file(path, text)
            self._placed.add(path)
        return path

    @contextlib.contextmanager
    def forward(self, port: int) -> Iterator[int]:
        with forwarded_port(lambda: self._connection("control").open_tunnel(port)) as local_port:
            yield local_port

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._is_closed = True  # a thread that still uses it must not connect again
            for connection in self._connections.values():
                connection.close()
            self._connections.clear()

    # ── one request ──

    def _ask(self, purpose: Purpose, request: JsonObject, *, timeout_s: float | None = None) -> AgentCall:
        """A request under way, over a new connection where the old one has broken."""
        for attempt in range(1, OPEN_ATTEMPTS + 1):
            try:
                return AgentCall(self._connection(purpose), self._python, request, timeout_s=timeout_s)
            except TransientInfraError as error:
                if attempt == OPEN_ATTEMPTS:
                    raise
                logger.info("attempt %d to reach %s failed: %s", attempt, self._access.address, error)
                time.sleep(0.25 * 2.0**attempt)
        raise AssertionError("the last attempt returns or raises")

    def _connection(self, purpose: Purpose) -> SSHConnection:
        with self._connecting[purpose]:
            with self._lock:
                self._check_open()
                connection = self._connections.get(purpose)
            if connection is not None and connection.is_alive:
                return connection
            if connection is not None:
                connection.close()
            if self._find_access is not None:
                self._access = self._find_access()
            connection = connect(self._access)
            with self._lock:
                self._connections[purpose] = connection
                if self._is_closed:
                    connection.close()
                self._check_open()
            return connection

    def _check_open(self) -> None:
        if self._is_closed:
            raise PermanentInfraError(f"the session on {self._access.address} is closed")

    @contextlib.contextmanager
    def _output_of(self, argv: Sequence[str], stdin: bytes, purpose: Purpose) -> Iterator[Iterator[bytes]]:
        with self._ask(purpose, _run_request(argv, timeout_s=None, keep_open=True)) as call:
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
            raise PermanentInfraError(f"{argv[0]} cannot be run on {self._access.address}: {answer['problem']}")
        return int(answer["exit_code"])

    def _write(self, path: str, chunks: Iterable[bytes], purpose: Purpose) -> None:
        with self._ask(purpose, {"verb": "write", "path": path}) as call:
            call.send_input(chunks)
            list(call.frames())
        _raise_if_refused(call.answer, path, call.num_sent_bytes)


def _raise_if_refused(answer: JsonObject, path: str, num_sent_bytes: int) -> None:
    if "problem" not in answer:
        return
    if answer["errno"] in (errno.ENOSPC, errno.EDQUOT):
        raise DiskFullError(path, num_sent_bytes)
    raise PermanentInfraError(f"{path} cannot be written: {answer['problem']}")


def _run_request(argv: Sequence[str], *, timeout_s: float | None, keep_open: bool) -> JsonObject:
    assert not isinstance(argv, str), "a command is a list of arguments"
    return {"verb": "run", "argv": list(argv), "timeout_s": timeout_s, "keep_open": keep_open}
