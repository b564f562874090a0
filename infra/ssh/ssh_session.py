"""The session of a machine that is reached over SSH.

Not here: connections and logins (connection.py), the node's side of each request (node_agent.py).

Every request is answered by a process on the node, the agent, whose text travels ahead of its first request. So nothing
depends on the node's login shell but that it can start Python, and arguments are never interpreted. An agent answers
one request at a time and waits for the next, so that a request costs one round trip; those that come at the same time
take another agent, on a channel of its own. What matters quickly (commands, jobs, logs) and what is large (files) use
connections of their own, opened when first needed and again when they have broken; of the first kind a second one where
the server allows a connection fewer channels than are needed at once. Often only a request that is not answered shows
that one has broken; it is made once more, of another agent, where it does no harm to carry it out twice.
"""

import contextlib
import errno
import functools
import hashlib
import itertools
import logging
import shlex
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Literal, Self, TypeVar, get_args

from infra.chunks import SHA256, Chunk
from infra.errors import (
    CommandFailedError,
    CommandTimeoutError,
    CompletedCommand,
    FileMissingError,
    InfraError,
    NodeUnreachableError,
    PermanentInfraError,
    RequestCutError,
    TransientInfraError,
)
from infra.node import SSHAccess
from infra.node_agent import ISOLATED, STDERR, STDOUT
from infra.node_programs import read_program
from infra.session import (
    LOOPBACK,
    MAX_OUTPUT_BYTES,
    MAX_READ_BYTES,
    poured_objects,
    read_lines,
    refusal_to_write,
    split_lines,
)
from infra.ssh import openssh
from infra.ssh.agent_call import Agent, AgentCall, JsonObject
from infra.ssh.connection import SSHConnection, connect
from infra.ssh.host_keys import HostKeyEvidence
from infra.ssh.openssh import OpenSSH
from infra.ssh.parallel_write import MAX_SENDERS, ParallelWrite
from infra.ssh.tunnel import forwarded_port

AnswerT = TypeVar("AnswerT")
Purpose = Literal["control", "beside", "bulk", "pieces 0", "pieces 1", "pieces 2", "pieces 3", "pieces 4", "pieces 5"]
PURPOSES: tuple[Purpose, ...] = get_args(Purpose)
PIECES = PURPOSES[3:]
assert len(PIECES) == MAX_SENDERS
"""For large files to a distant node."""

OPEN_ATTEMPTS = 4
"""So often a request is begun."""
ANSWER_MARGIN_S = 30.0
"""An answer may come this much later than the command's own time limit."""
MAX_IDLE_AGENTS = 2
"""So many wait for requests, on each connection: servers allow some ten channels."""
MAX_IDLE_S = 60.0
"""An agent that has waited longer is not asked: its connection may have broken unnoticed."""
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
        self._idle_agents: dict[Purpose, list[tuple[float, Agent]]] = {purpose: [] for purpose in PURPOSES}
        """With the time since when each waits."""
        self._placed: set[str] = set()
        self._programs: dict[str, str] = {}
        """The texts of those that agents have been asked to run."""
        self._openssh_client: tuple[OpenSSH, SSHConnection] | None = None
        """With the connection whose host key it demands."""
        self._may_use_openssh = True
        self._is_closed = False
        self._lock = threading.Lock()
        self._connecting = {purpose: threading.Lock() for purpose in PURPOSES}
        self._preparing = {purpose: threading.Lock() for purpose in PURPOSES}
        """Held while an agent is made ready before it is needed."""

    @property
    def python(self) -> str:
        return self._python

    @property
    def host_key_evidence(self) -> HostKeyEvidence:
        """Why the host's key was believed; connects if need be."""
        return self._connection("control").host_key_evidence

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
        """The request to run a program of ours, and the command that it stands for."""
        text = read_program(source)
        program = _program_name(source, text)
        self._programs[program] = text
        call: JsonObject = {"verb": "run", "program": program, "arguments": list(arguments)}
        limits = {"timeout_s": timeout_s, "keep_open": keep_open}
        return {**call, **limits}, [self._python, ISOLATED, source.name, *arguments]

    def _run(
        self, request: JsonObject, argv: Sequence[str], *, stdin: bytes, timeout_s: float, may_repeat: bool
    ) -> CompletedCommand:
        def run_once() -> CompletedCommand:
            output: dict[bytes, list[bytes]] = {STDOUT: [], STDERR: []}
            num_bytes = 0
            with self._ask("control", request, timeout_s=timeout_s + ANSWER_MARGIN_S) as call:
                call.send_input([stdin], in_background=len(stdin) > _INLINE_BYTES)
                for kind, content in call.frames():
                    num_bytes += len(content)
                    if num_bytes > MAX_OUTPUT_BYTES:
                        said = f"{argv[0]} on {self._access.address} prints more than {MAX_OUTPUT_BYTES} bytes"
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

        return self._repeated_if_cut(run_once) if may_repeat else run_once()

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
        return self._openssh("bulk") is not None

    @contextlib.contextmanager
    def pour_program(
        self, source: Path, arguments: Sequence[str], *, stdin: bytes, into: FileIO, max_bytes: int
    ) -> Iterator[Iterator[JsonObject]]:
        # No agent: the client writes everything that its command says into the file.
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
            raise NodeUnreachableError(self._access.address, "the connection broke")

    def _program_beside(
        self,
        source: Path,
        arguments: Sequence[str],
        *,
        stdin: int | FileIO,
        stdout: int | FileIO,
        stderr: int,
    ) -> AbstractContextManager[subprocess.Popen[bytes]]:
        """The client that runs a program of ours without an agent."""
        if (client := self._openssh("bulk")) is None:  # any more
            raise TransientInfraError(f"no client on this machine takes files to and from {self._access.address}")
        command = shlex.join([self._python, ISOLATED, self.place_program(source), *arguments])
        return client.running(f"exec {command}", stdin=stdin, stdout=stdout, stderr=stderr)

    def write_file(self, path: str, content: bytes) -> None:
        self._repeated_if_cut(lambda: self._write(path, content))

    def expect_chunks(self, num_chunks: int) -> None:
        threading.Thread(target=self._log_in_ahead, args=(num_chunks,), daemon=True).start()

    def _log_in_ahead(self, num_chunks: int) -> None:
        with contextlib.suppress(InfraError):  # who needs the connection says what is wrong with it
            if self._connection("control").is_far:
                for purpose in PIECES[:num_chunks]:
                    self._make_agent_ready(purpose)

    def write_chunks(
        self, directory: str, chunks: Sequence[Chunk], *, digest: str = SHA256
    ) -> dict[tuple[str, int], str]:
        # What a distant node is sent is limited by the window of each connection.
        purposes: Sequence[Purpose] = PIECES if self._connection("control").is_far else ("bulk",)
        writing = ParallelWrite(
            lambda number, request: self._ask(purposes[number], request),
            directory,
            chunks,
            digest=digest,
            max_senders=len(purposes),
        )
        try:
            digests = writing.run()
        except NodeUnreachableError:
            self._forget_connections(purposes)
            raise
        if writing.problem is not None:
            raise _refusal(writing.problem, writing.problem["path"], writing.num_sent_bytes)
        return digests

    def read_file(self, path: str) -> bytes:
        return self._repeated_if_cut(lambda: self._read(path))

    def _read(self, path: str) -> bytes:
        with self._ask("control", {"verb": "read", "path": path, "max_bytes": MAX_READ_BYTES + 1}) as call:
            call.send_input(())
            content = bytearray()
            for _, chunk in call.frames():
                content += chunk
                if len(content) > MAX_READ_BYTES + 1:  # it was asked for no more
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
        with forwarded_port(lambda: self._connection("control").open_tunnel(port, host)) as local_port:
            yield local_port

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._is_closed = True  # a thread that still uses it must not connect again
            for _, agent in itertools.chain(*self._idle_agents.values()):
                agent.end_input()  # all say goodbye at the same time
            for purpose in PURPOSES:
                self._end_idle_agents(purpose)
            if self._openssh_client is not None:
                self._openssh_client[0].close()
            for connection in self._connections.values():
                connection.close()
            self._connections.clear()

    # ── one request ──

    def _ask(self, purpose: Purpose, request: JsonObject, *, timeout_s: float | None = None) -> AgentCall:
        """A request under way, over a new connection where the old one has broken."""
        for attempt in range(1, OPEN_ATTEMPTS + 1):
            try:
                agent = self._idle_agent(purpose) or self._new_agent(purpose)
                return self._begin(purpose, agent, request, timeout_s=timeout_s)
            except TransientInfraError as error:
                if attempt == OPEN_ATTEMPTS:
                    raise
                logger.info("attempt %d to reach %s failed: %s", attempt, self._access.address, error)
                time.sleep(0.25 * 2.0**attempt)
        raise AssertionError("the last attempt returns or raises")

    def _repeated_if_cut(self, ask: Callable[[], AnswerT]) -> AnswerT:
        """What a "control" request answers; made once more, over a new agent, where it was cut off before that."""
        try:
            return ask()
        except RequestCutError as error:
            logger.info("a request is made once more: %s", error)
            with self._lock:
                self._end_idle_agents("control")  # they may be as dead without its having been noticed
            return ask()

    def _make_agent_ready(self, purpose: Purpose) -> None:
        """Begin to make an agent, with all programs so far, that answers the next request within one round trip."""
        with self._lock:
            if self._is_closed or self._idle_agents[purpose] or not self._preparing[purpose].acquire(blocking=False):
                return
            programs = dict(self._programs) if purpose == "control" else {}

        def make() -> None:
            try:
                agent = self._new_agent(purpose)
                agent.programs.update(programs)
                give_back = functools.partial(self._give_back, purpose)
                request = {"verb": "load", "programs": programs}
                with AgentCall(agent, request, timeout_s=ANSWER_MARGIN_S, give_back=give_back) as call:
                    call.send_input(())
                    call.wait()
            except InfraError as error:
                logger.info("no agent at %s is ready before it is needed: %s", self._access.address, error)
            finally:
                self._preparing[purpose].release()

        threading.Thread(target=make, name=f"agent for {purpose}", daemon=True).start()

    def _begin(self, purpose: Purpose, agent: Agent, request: JsonObject, *, timeout_s: float | None) -> AgentCall:
        program = request.get("program")
        missing = {program: self._programs[program]} if program and program not in agent.programs else {}
        agent.programs.update(missing)
        give_back = functools.partial(self._give_back, purpose)
        return AgentCall(agent, {**request, "programs": missing}, timeout_s=timeout_s, give_back=give_back)

    def _idle_agent(self, purpose: Purpose) -> Agent | None:
        """One that waits for a request, or is about to."""
        if not self._idle_agents[purpose] and self._preparing[purpose].acquire(timeout=ANSWER_MARGIN_S):
            self._preparing[purpose].release()
        while True:
            with self._lock:
                self._check_open()
                if not self._idle_agents[purpose]:
                    return None
                since, agent = self._idle_agents[purpose].pop()
            if agent.is_alive and time.monotonic() - since < MAX_IDLE_S:
                return agent
            agent.end()

    def _end_idle_agents(self, purpose: Purpose) -> None:
        """With the lock held."""
        for _, agent in self._idle_agents[purpose]:
            agent.end()
        self._idle_agents[purpose].clear()

    def _forget_connections(self, purposes: Sequence[Purpose]) -> None:
        """Where one broke, the others may be as dead without its having been noticed."""
        with self._lock:
            for purpose in purposes:
                self._end_idle_agents(purpose)
                if connection := self._connections.pop(purpose, None):
                    connection.close()

    def _new_agent(self, purpose: Purpose) -> Agent:
        client = self._openssh(purpose)
        if client is not None:
            try:
                agent = Agent(client.open_command, self._python, self._access.address)
                agent.begin()
                return agent
            except InfraError as error:
                with self._lock:
                    self._check_open()  # else the session's end is why the client failed
                logger.warning("files take our own connection to %s: %s", self._access.address, error)
        try:
            agent = Agent(self._connection(purpose).open_command, self._python, self._access.address)
        except NodeUnreachableError:
            raise
        except TransientInfraError:  # it allows no more channels: a followed log has the only one where that is all
            if purpose != "control":
                raise
            agent = Agent(self._connection("beside").open_command, self._python, self._access.address)
        if client is not None:
            self._may_use_openssh = False  # the node is there, so it was the client that failed
        return agent

    def _openssh(self, purpose: Purpose) -> OpenSSH | None:
        """The client that is installed here, where it is faster and can log in as we do."""
        if not self._may_use_openssh or purpose == "control":
            return None
        believed = self._connection("control")
        with self._lock:
            self._check_open()
            # What a distant node sends is limited by the client's window, what it is sent by its own.
            is_slower = believed.is_far and purpose not in PIECES
            if is_slower or not believed.key_file or not openssh.is_installed():
                return None
            client, of = self._openssh_client or (None, None)
            if client is None or of is not believed:  # another address perhaps, and another key
                if client is not None:
                    client.close()
                client = OpenSSH(self._access, believed)
                self._openssh_client = client, believed
            return client

    def _give_back(self, purpose: Purpose, agent: Agent) -> None:
        with self._lock:
            idle = self._idle_agents[purpose]
            if not self._is_closed and len(idle) < MAX_IDLE_AGENTS:
                idle.append((time.monotonic(), agent))
                return
        agent.end()

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
    def _output_of(
        self, request: JsonObject, argv: Sequence[str], stdin: bytes, purpose: Purpose
    ) -> Iterator[Iterator[bytes]]:
        with self._ask(purpose, request) as call:
            if purpose == "control":  # most calls come beside a log that is followed
                self._make_agent_ready("control")
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
        if not isinstance(exit_code := answer["exit_code"], int):
            raise PermanentInfraError(f"{self._access.address} answers {str(exit_code)[:80]!r} as an exit code")
        return exit_code

    def _write(self, path: str, content: bytes) -> None:
        with self._ask("control", {"verb": "write", "path": path}) as call:
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
