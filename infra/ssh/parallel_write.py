"""Write chunks of files on a node over several connections at once.

A connection carries one window per round trip. The window of an OpenSSH server is 2 MiB, which limits a connection with
a round trip of 50 ms to 35 MB/s. Not here: the connections (agents.py), the node's side (node_agent.py).

    chunks ──> any idle sender ── pieces with their offsets ──> sender 0 ──> the files, each piece at its offset
                                                            └──> sender 1 ──> ...
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from rollouts.infra.chunks import CHUNK_BYTES, Chunk
from rollouts.infra.errors import PermanentInfraError
from rollouts.infra.ssh.agent_call import AgentCall, JsonObject

MAX_SENDERS = 6

Ask = Callable[[int, JsonObject], AgentCall]
"""Starts a request over the connection with this number."""


class ParallelWrite:
    """Writes chunks into the files of one directory."""

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
        """The node's answer if it could not write; set when `run` has returned."""
        self.num_sent_bytes = 0

    def run(self) -> dict[tuple[str, int], str]:
        """Send all chunks; returns the digest of each chunk as written and synced by the node, by file and number.

        Raises:
            NodeUnreachableError: a connection broke; some chunks may be written, completely or partly.
        """
        if self._num_senders == 1:
            self._send(0)
        elif self._num_senders > 1:
            with ThreadPoolExecutor(self._num_senders, thread_name_prefix="chunks") as pool:
                try:
                    list(pool.map(self._send, range(self._num_senders)))
                finally:
                    self._is_over.set()  # also after an interrupt
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
        """Yield the pieces of one remaining chunk after the other, with their files and offsets."""
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
