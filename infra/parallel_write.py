"""Write one large file to a distant node over several connections at once.

Over a long way a connection carries one window per round trip, and the window of an OpenSSH server is 2 MiB: 35 MB/s at
50 ms, however fast the line. Not here: the connections (ssh_session.py), the node's side (node_agent.py).

    chunks ── read once, in order ── pieces with their offsets ──> queue ──> sender 0 ──> .<name>.<random> on the node
                                                                        └──> sender 1 ──> ...
    when all have answered                                                               renamed
"""

import queue
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import PurePosixPath

from infra.agent_call import MAX_FRAME_BYTES, AgentCall, JsonObject
from infra.errors import InfraError
from infra.node_agent import OFFSET_BYTES

MAX_SENDERS = 6
BYTES_PER_SENDER = 8 << 20
"""Another connection is made when so much more has been read: making one takes some round trips."""
_QUEUED_PIECES = MAX_SENDERS * BYTES_PER_SENDER // MAX_FRAME_BYTES
"""So much is read while the first one logs in that the others begin at once."""

Ask = Callable[[int, JsonObject], AgentCall]
"""Begins a request over the connection of this number."""


class ParallelWrite:
    """A file that grows piece by piece beside its place."""

    def __init__(self, ask: Ask, path: str) -> None:
        place = PurePosixPath(path)
        self._ask = ask
        self._path = path
        self._part = str(place.with_name(f".{place.name[:50]}.{secrets.token_hex(16)}"))
        self._pieces: queue.Queue[bytes | None] = queue.Queue(_QUEUED_PIECES)
        self._senders: list[threading.Thread] = []
        self._failures: list[Exception] = []
        self._problems: list[JsonObject] = []
        self.num_sent_bytes = 0

    def run(self, chunks: Iterable[bytes]) -> JsonObject:
        """Send everything and let the file appear; returns the node's answer, with its problem if it had one.

        Raises:
            NodeUnreachableError: a connection broke; nothing of the file is there, as far as the node can be reached.
        """
        is_there = False
        try:
            try:
                for piece in _split(chunks):
                    if self._failures or self._problems:
                        break
                    self._start_sender_if_worth_it()
                    self._pieces.put(piece)
                    self.num_sent_bytes += len(piece) - OFFSET_BYTES
            finally:
                self._end_senders()
            if self._failures:
                raise self._failures[0]
            answer = self._problems[0] if self._problems else self._tell({"verb": "move", "to": self._path})
            is_there = "problem" not in answer
            return answer
        finally:
            if not is_there:
                self._remove_part()

    def _start_sender_if_worth_it(self) -> None:
        num_senders = len(self._senders)
        if num_senders < MAX_SENDERS and self.num_sent_bytes >= num_senders * BYTES_PER_SENDER:
            sender = threading.Thread(target=self._send, args=(num_senders,), daemon=True)
            self._senders.append(sender)
            sender.start()

    def _end_senders(self) -> None:
        if not self._senders:  # an empty file is a file, too
            self._start_sender_if_worth_it()
        for _ in self._senders:
            self._pieces.put(None)
        for sender in self._senders:
            sender.join()

    def _send(self, number: int) -> None:
        pieces = iter(self._pieces.get, None)
        try:
            with self._ask(number, {"verb": "write_pieces", "path": self._part}) as call:
                call.send_input(pieces)
                list(call.frames())
            if "problem" in call.answer:
                self._problems.append(call.answer)
        except Exception as error:  # noqa: BLE001 - else it would end this thread, and nobody take the pieces
            self._failures.append(error)
        if self._failures or self._problems:
            for _ in pieces:  # else who reads the chunks would wait for room; the end is for this sender, too
                pass

    def _tell(self, request: JsonObject) -> JsonObject:
        with self._ask(0, {**request, "path": self._part}) as call:
            call.send_input(())
            list(call.frames())
        return call.answer

    def _remove_part(self) -> None:
        try:
            self._tell({"verb": "remove"})
        except InfraError:
            return  # who copies a directory discards all of it; else one hidden file is left


def _split(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """The chunks in pieces of one frame, each after its offset."""
    offset = 0
    for chunk in chunks:
        for start in range(0, len(chunk), MAX_FRAME_BYTES - OFFSET_BYTES):
            piece = chunk[start : start + MAX_FRAME_BYTES - OFFSET_BYTES]
            yield offset.to_bytes(OFFSET_BYTES, "big") + piece
            offset += len(piece)
