"""Hold one conversation with an agent on a node: send a request and its input, take its output and its answer.

The client's side of node_agent.py, where the frames are described. Not here: which requests there are
(ssh_session.py), the channel itself (ssh.py).
"""

import contextlib
import json
import secrets
import shlex
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from infra import node_agent
from infra.errors import NodeUnreachableError, PermanentInfraError
from infra.node_agent import DATA, DONE, END_OF_INPUT, FRAME_HEAD, REQUEST
from infra.ssh import SSHChannel, SSHConnection

MAX_GREETING_BYTES = 64 << 10
"""Shells may print so much ahead of the agent's first word."""
CLOSE_TIMEOUT_S = 10.0
MAX_FRAME_BYTES = 256 << 10
"""Input is sent in frames of at most this size."""
_LOADER = "import sys; exec(sys.stdin.buffer.read(int(sys.argv[1])))"
_RECEIVE_BYTES = 1 << 20

# Any: requests and answers are JSON objects.
JsonObject = dict[str, Any]


class AgentCall:
    """A request under way; leaving its `with` block ends it, and the command that it runs."""

    def __init__(
        self, connection: SSHConnection, python: str, request: JsonObject, *, timeout_s: float | None = None
    ) -> None:
        """Start an agent and send it the request.

        Args:
            timeout_s: all of the answer has to be here by then; None waits as long as the peer lives.
        """
        self._address = connection.address
        self._python = python
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._nonce = secrets.token_hex(16).encode()
        self._received = bytearray()
        self._answer: JsonObject | None = None
        self.num_sent_bytes = 0
        text = Path(node_agent.__file__).read_bytes()
        loader = [python, "-I", "-c", _LOADER, str(len(text)), self._nonce.decode()]
        self._channel: SSHChannel = connection.open_command(f"exec {shlex.join(loader)}")
        self._send(text + _frame(REQUEST, json.dumps(request).encode()))

    @property
    def answer(self) -> JsonObject:
        """What the agent says at the end; known once `frames` is exhausted."""
        assert self._answer is not None, "the answer comes after the last frame"
        return self._answer

    def send_input(self, chunks: Iterable[bytes], *, in_background: bool = False) -> None:
        """Send the request's input, and that it ends there.

        Args:
            in_background: needed where the other side may wait for its output to be taken before it takes more.
        """
        if in_background:
            threading.Thread(target=self.send_input, args=(chunks,), daemon=True).start()
            return
        for chunk in chunks:
            for start in range(0, len(chunk), MAX_FRAME_BYTES):
                piece = chunk[start : start + MAX_FRAME_BYTES]
                if not self._send(_frame(DATA, piece)):
                    return
                self.num_sent_bytes += len(piece)
        self._send(_frame(END_OF_INPUT, b""))

    def frames(self) -> Iterator[tuple[bytes, bytes]]:
        """Kind and content of what the agent sends, up to its answer.

        Raises:
            NodeUnreachableError: the connection broke, or nothing came in time; what was asked for may have happened.
            PermanentInfraError: the node cannot run Python.
        """
        self._skip_greeting()
        while True:
            kind, length = FRAME_HEAD.unpack(self._take(FRAME_HEAD.size))
            content = self._take(length)
            if kind == DONE:
                self._answer = json.loads(content)
                return
            yield kind, content

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Let the agent end what it does, and wait for that where it can still be heard."""
        self._channel.end_input()
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        if self._answer is None:
            with contextlib.suppress(TimeoutError):
                while self._channel.receive(_RECEIVE_BYTES, timeout_s=max(0.0, deadline - time.monotonic())):
                    pass
        self._channel.close()

    def _send(self, content: bytes) -> bool:
        """False when nobody takes it any more: then the agent's answer, or the lack of one, says why."""
        try:
            self._channel.send(content)
        except NodeUnreachableError:
            return False
        return True

    def _skip_greeting(self) -> None:
        """Drop what shells print when they start, up to the agent's first word."""
        while (start := self._received.find(self._nonce)) < 0:
            if len(self._received) > MAX_GREETING_BYTES:
                greeting = bytes(self._received[:80])
                raise PermanentInfraError(
                    f"the shell at {self._address} prints without end, beginning with {greeting!r}: silence it"
                )
            self._receive()
        del self._received[: start + len(self._nonce)]

    def _take(self, size: int) -> bytes:
        while len(self._received) < size:
            self._receive()
        content = bytes(self._received[:size])
        del self._received[:size]
        return content

    def _receive(self) -> None:
        timeout_s = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
        try:
            chunk = self._channel.receive(_RECEIVE_BYTES, timeout_s=timeout_s)
        except TimeoutError as error:
            raise NodeUnreachableError(self._address, "it did not answer in time") from error
        if not chunk:
            self._raise_early_end()
        self._received += chunk

    def _raise_early_end(self) -> None:
        """Say why a channel ended before the answer: Python could not be run there, or the connection broke."""
        exit_code = self._channel.exit_code()
        if exit_code is None:
            raise NodeUnreachableError(self._address, "the connection broke")
        said = self._channel.receive_stderr() or bytes(self._received)
        reason = said.decode(errors="replace").strip().rpartition("\n")[2][:500]
        if exit_code in (126, 127):
            raise PermanentInfraError(
                f"{self._address} cannot run {self._python} ({reason}): install Python there, or set node.python"
            )
        # Another code than those of shells: something on the node ended the agent.
        raise NodeUnreachableError(self._address, f"its end of the request died with code {exit_code}: {reason}")


def _frame(kind: bytes, content: bytes) -> bytes:
    return FRAME_HEAD.pack(kind, len(content)) + content
