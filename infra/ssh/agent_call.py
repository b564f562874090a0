"""The client side of node_agent.py: start an agent on a node and send it requests, one at a time.

node_agent.py describes the format of the frames. Not here: the requests (ssh_session.py), the channel (connection.py).
"""

import contextlib
import functools
import json
import secrets
import shlex
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

from rollouts.infra import node_agent
from rollouts.infra.chunks import CHUNK_BYTES, Chunk
from rollouts.infra.errors import LoginShellError, NodeUnreachableError, PermanentInfraError, RequestCutError
from rollouts.infra.foreign_text import shown_lines
from rollouts.infra.node_agent import (
    ALIVE,
    DATA,
    DONE,
    END_OF_INPUT,
    FRAME_HEAD,
    ISOLATED,
    NAME,
    OFFSET_BYTES,
    REQUEST,
    STDERR,
    STDOUT,
)
from rollouts.infra.session import MAX_GREETING_BYTES, Answer
from rollouts.infra.ssh.connection import Channel
from rollouts.infra.supervisor.files import parse_object

CLOSE_TIMEOUT_S = 10.0
MAX_ANSWER_BYTES = 64 << 20
"""Largest size of an agent's answer in bytes. The digests of all chunks of 1 TB of files take a fifth of this size."""
_MAX_FRAME_BYTES = 256 << 10
"""Largest size of a frame of input."""
_FIRST_BYTES = b"# rollouts agent"
_EATEN_CODE = 65
_LOADER = (
    "import io, sys; stream = io.BufferedReader(io.FileIO(0, closefd=False), 1); "
    f"stream.read({len(_FIRST_BYTES)}) == {_FIRST_BYTES!r} or sys.exit({_EATEN_CODE}); "
    "exec(stream.read(int(sys.argv[1])))"
)
"""Code that Python runs on the node to load the agent's program text from standard input.

If another program has consumed the start of the input, the code exits with _EATEN_CODE.
"""
_RECEIVE_BYTES = 1 << 20
_NOT_STARTED = "Python did not start there in time; a .bashrc that reads all of standard input has this effect, too"

# Any: requests and answers are JSON objects.
JsonObject = dict[str, Any]


class Agent:
    """A process on the node that answers requests one after another. The process ends when its channel ends."""

    def __init__(self, open_command: Callable[[str], Channel], python: str, address: str) -> None:
        """Start the agent. If the start fails, the error is raised when the first answer is received.

        Args:
            open_command: opens a channel on which the node's shell runs a command line.
        """
        self.address = address
        self._python = python
        self._nonce = secrets.token_hex(16)
        self._received = b""
        self._has_greeted = False
        text = _agent_text()
        loader = [python, ISOLATED, "-c", _LOADER, str(len(text)), self._nonce[::-1]]
        self._channel = open_command(f"exec {shlex.join(loader)}")
        self.programs: set[str] = set()
        """Names of the programs that the agent has loaded."""
        self._unsent = _FIRST_BYTES + text  # this text is sent with the first request to save a round trip

    @property
    def is_alive(self) -> bool:
        """False once this side has noticed that the channel ended."""
        return not self._channel.has_ended

    def begin(self) -> None:
        """Wait until the agent runs.

        Raises:
            NodeUnreachableError, PermanentInfraError: see `receive`.
        """
        self.send()
        self._skip_greeting(None)

    def send(self, *parts: bytes | memoryview) -> bool:
        """Send bytes. Returns False if the channel is broken. The next `receive` then raises an error with the
        reason."""
        unsent, self._unsent = self._unsent, b""
        try:
            self._channel.send(*([unsent] if unsent else []), *parts)
        except NodeUnreachableError:
            return False
        return True

    def receive_frame_head(self, deadline: float | None) -> tuple[bytes, int]:
        """Return the kind and the length of the next frame. The caller reads the frame's content with `receive`."""
        self._skip_greeting(deadline)
        head = b"".join(self.receive(FRAME_HEAD.size, deadline))
        kind, length = FRAME_HEAD.unpack(head)
        return kind, length

    def receive(self, num_bytes: int, deadline: float | None) -> Iterator[bytes]:
        """Yield the next bytes as they arrive.

        Raises:
            RequestCutError: the connection broke. The node may have executed the request.
            NodeUnreachableError: no byte came in time. The node may have executed the request.
            PermanentInfraError: the node cannot run Python.
        """
        while num_bytes:
            if not self._received:
                self._received = self._receive(min(num_bytes, _RECEIVE_BYTES), deadline)
            piece, self._received = self._received[:num_bytes], self._received[num_bytes:]
            num_bytes -= len(piece)
            yield piece

    def end_input(self) -> None:
        """Tell the agent that no further request will come."""
        self._channel.end_input()

    def end(self) -> None:
        self._channel.close()

    def end_in_peace(self) -> None:
        """Let the agent finish its work. Wait at most CLOSE_TIMEOUT_S for the agent's end."""
        self.end_input()
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        with contextlib.suppress(TimeoutError):
            # Check the time after each piece: a peer that never stops sending must not block this thread.
            while (left_s := deadline - time.monotonic()) > 0 and self._channel.receive(
                _RECEIVE_BYTES, timeout_s=left_s
            ):
                pass
        self._channel.close()

    def _skip_greeting(self, deadline: float | None) -> None:
        """Skip everything that the login shell prints before the nonce, which the agent sends first."""
        while not self._has_greeted:
            before, nonce, after = self._received.partition(self._nonce.encode())
            if nonce:
                self._received = after
                self._has_greeted = True
            elif len(before) > MAX_GREETING_BYTES:
                raise PermanentInfraError(
                    f"the shell at {self.address} prints too much at a login, beginning with {before[:80]!r}: "
                    "silence it"
                )
            else:
                self._received += self._receive(_RECEIVE_BYTES, deadline)

    def _receive(self, max_bytes: int, deadline: float | None) -> bytes:
        timeout_s = None if deadline is None else deadline - time.monotonic()
        try:
            if timeout_s is not None and timeout_s <= 0:  # a deadline also ends an answer that never stops
                raise TimeoutError
            chunk = self._channel.receive(max_bytes, timeout_s=timeout_s)
        except TimeoutError as error:
            reason = "it did not answer in time" if self._has_greeted else _NOT_STARTED
            raise NodeUnreachableError(self.address, reason) from error
        if not chunk:
            self._raise_early_end()
        return chunk

    def _raise_early_end(self) -> None:
        """Raise the error for a channel that ended before the answer was complete."""
        exit_code = self._channel.exit_code()
        if exit_code is None:
            raise RequestCutError(self.address, "the connection broke")
        said = self._channel.receive_stderr() or self._received
        reason = shown_lines(said.decode(errors="replace")).strip().rpartition("\n")[2][:500]
        if exit_code in (126, 127):
            raise PermanentInfraError(
                f"{self.address} cannot run {self._python} ({reason}): install Python there, or set node.python"
            )
        if exit_code == _EATEN_CODE and not self._has_greeted:
            raise PermanentInfraError(
                f"{self.address}: a file that its shell runs at each login, such as .bashrc, reads the input of our "
                "command: put `[[ $- == *i* ]] || return` at its beginning, so that only interactive shells run the "
                "rest"
            )
        if not self._has_greeted:
            raise LoginShellError(self.address, f"code {exit_code}: {reason or 'it printed nothing'}", self._python)
        # The agent had started, so the agent itself died or was killed on the node.
        raise RequestCutError(self.address, f"its end of the request died with code {exit_code}: {reason}")


class AgentCall:
    """A running request. Leaving the `with` block of a request ends the request and its command."""

    def __init__(
        self,
        agent: Agent,
        request: JsonObject,
        *,
        timeout_s: float | None = None,
        give_back: Callable[[Agent], None] = Agent.end,
    ) -> None:
        """Send the request to an agent.

        Args:
            timeout_s: time limit of the whole answer in seconds; None means to wait as long as the peer is alive.
            give_back: called with the agent if it can answer another request.
        """
        self._agent = agent
        self._give_back = give_back
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._answer: JsonObject | None = None
        self._is_reusable = False
        agent.send(*_frame(REQUEST, json.dumps(request).encode()))

    @property
    def answer(self) -> JsonObject:
        """The agent's final answer. The answer is known only after the last item of `frames`."""
        assert self._answer is not None, "the answer comes after the last frame"
        return self._answer

    def send_input(self, chunks: Iterable[bytes], *, in_background: bool = False) -> None:
        """Send the request's input, then the end of input.

        Args:
            in_background: whether to send in a thread. A thread is needed if the command stops reading until its output
                is read.
        """
        if in_background:
            threading.Thread(target=self.send_input, args=(chunks,), daemon=True).start()
            return
        for chunk in chunks:
            view = memoryview(chunk)
            for start in range(0, len(view), _MAX_FRAME_BYTES):
                piece = view[start : start + _MAX_FRAME_BYTES]
                if not self._agent.send(*_frame(DATA, piece)):
                    return
        self._agent.send(*_frame(END_OF_INPUT, b""))

    def send_pieces(self, pieces: Iterable[tuple[str, int, bytes]]) -> None:
        """Send pieces of files with their offsets as the request's input, then the end of input."""
        last_name = None
        for name, offset, piece in pieces:
            head = FRAME_HEAD.pack(DATA, OFFSET_BYTES + len(piece)) + offset.to_bytes(OFFSET_BYTES, "big")
            named = _frame(NAME, name.encode()) if name != last_name else ()
            if not self._agent.send(*named, head, piece):
                return
            last_name = name
        self._agent.send(*_frame(END_OF_INPUT, b""))

    def frames(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield the kind and the content of the agent's frames in pieces as they arrive, up to the final answer.

        Raises:
            RequestCutError, NodeUnreachableError: see `Agent.receive`.
            PermanentInfraError: the node cannot run Python, or another program than the agent answers.
        """
        while True:
            kind, length = self._agent.receive_frame_head(self._deadline)
            if (kind, length) == (ALIVE, 0):
                continue
            if kind not in (STDOUT, STDERR, DONE) or (kind == DONE and length > MAX_ANSWER_BYTES):
                raise self._nonsense(f"a frame {kind!r} of {length} bytes")
            content = self._agent.receive(length, self._deadline)
            if kind == DONE:
                text = b"".join(content)
                if (answer := parse_object(text)) is None:
                    raise self._nonsense(f"the answer {text[:80]!r}")
                self._is_reusable = bool(answer.pop("is_reusable", False))
                self._answer = Answer(answer)
                return
            for piece in content:
                yield kind, piece

    def wait(self) -> JsonObject:
        """Return the answer to a request that has no output.

        Raises:
            InfraError: see `frames`.
        """
        for kind, piece in self.frames():
            raise self._nonsense(f"unexpected output {kind!r} {piece[:80]!r}")
        return self.answer

    def _nonsense(self, what: str) -> PermanentInfraError:
        return PermanentInfraError(f"{self._agent.address} sends {what}: another program than ours answers there")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Return the agent for reuse if it can answer another request; otherwise end it."""
        if self._answer is None:
            self._agent.end_in_peace()
        elif self._is_reusable:
            self._give_back(self._agent)
        else:
            self._agent.end()


@functools.cache
def _agent_text() -> bytes:
    return Path(node_agent.__file__).read_bytes()


def _frame(kind: bytes, content: bytes | memoryview) -> tuple[bytes, bytes | memoryview]:
    return FRAME_HEAD.pack(kind, len(content)), content


# ── several senders ──


MAX_SENDERS = 6

Ask = Callable[[int, JsonObject], AgentCall]
"""Starts a request over the sender's connection; senders are numbered from 0."""


class ParallelWrite:
    """Writes chunks into the files of one directory of a node, over several connections in parallel."""

    def __init__(self, ask: Ask, directory: str, chunks: Sequence[Chunk], *, digest: str, max_senders: int) -> None:
        self._ask = ask
        request = {"verb": "write_chunks", "directory": directory, "chunk_bytes": CHUNK_BYTES, "digest": digest}
        self._request = request
        self._num_senders = min(max_senders, len(chunks))
        self._chunks = iter(chunks)
        self._lock = threading.Lock()
        self._failures: list[BaseException] = []
        self._is_over = threading.Event()
        self._digests: dict[tuple[str, int], str] = {}
        self.problem: JsonObject | None = None
        """The node's answer if the node could not write the chunks. `run` sets this field."""
        self.num_sent_bytes = 0

    def run(self) -> dict[tuple[str, int], str]:
        """Send all chunks. Returns the digest of each written and synced chunk by file name and chunk number.

        Raises:
            NodeUnreachableError: a connection broke. The node may have written some chunks wholly or partly.
        """
        if self._num_senders == 1:
            self._send(0)
        elif self._num_senders > 1:
            with ThreadPoolExecutor(self._num_senders, thread_name_prefix="chunks") as pool:
                try:
                    list(pool.map(self._send, range(self._num_senders)))
                finally:
                    self._is_over.set()  # stop the other senders, also after an interrupt
        if self._failures:
            raise self._failures[0]
        return self._digests

    def _send(self, number: int) -> None:
        try:
            with self._ask(number, self._request) as call:
                call.send_pieces(self._pieces())
                call.wait()
            if "problem" in call.answer:
                self.problem = call.answer
                self._is_over.set()
            try:
                self._digests |= {(name, number): digest for name, number, digest in call.answer.get("digests", ())}
            except (TypeError, ValueError) as error:
                raise PermanentInfraError(f"the node sent invalid digests of chunks ({error})") from error
        except BaseException as error:  # noqa: BLE001 - `run` raises the first error when all senders have ended
            self._failures.append(error)
            self._is_over.set()

    def _pieces(self) -> Iterator[tuple[str, int, bytes]]:
        """Yield the pieces of the remaining chunks, one chunk after another, with file names and offsets."""
        while not self._is_over.is_set():
            with self._lock:
                chunk = next(self._chunks, None)
            if chunk is None:
                return
            offset = chunk.number * CHUNK_BYTES
            for piece in chunk.pieces:
                if self._is_over.is_set():
                    return
                yield chunk.name, offset, piece
                offset += len(piece)
                self.num_sent_bytes += len(piece)
