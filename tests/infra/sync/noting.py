"""Sessions that count by which way files go, and may change what is said of them meanwhile: here, and over SSH.

Not here: the fixture that gives a test one of each (conftest.py).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any

from rollouts.infra.chunks import SHA256, Chunk
from rollouts.infra.session import LocalSession
from rollouts.infra.ssh.ssh_session import SSHSession
from tests.infra.ssh_server import SSHServer

Said = Iterator[dict[str, Any]]
"""What is said of a file that is poured."""


class _Noting:
    num_poured = 0
    num_streamed_bytes = 0
    num_fed = 0
    num_chunks = 0
    change_poured: Callable[[Said, FileIO], Said] | None = None
    """May change what is said, or the file."""
    change_fed: Callable[[Iterator[bytes]], Iterator[bytes]] | None = None

    @contextmanager
    def pipe_program(self, source: Path, arguments: Sequence[str], *, stdin: bytes = b"") -> Iterator[Iterator[bytes]]:
        with super().pipe_program(source, arguments, stdin=stdin) as chunks:  # type: ignore[misc]
            yield map(self._counted, chunks)

    def _counted(self, chunk: bytes) -> bytes:
        self.num_streamed_bytes += len(chunk)
        return chunk

    @contextmanager
    def pour_program(
        self, source: Path, arguments: Sequence[str], *, stdin: bytes, into: FileIO, max_bytes: int
    ) -> Iterator[Iterator[dict[str, Any]]]:
        pour = super().pour_program  # type: ignore[misc]
        with pour(source, arguments, stdin=stdin, into=into, max_bytes=max_bytes) as said:
            self.num_poured += 1
            yield self.change_poured(said, into) if self.change_poured else said

    def write_chunks(
        self, directory: str, chunks: Sequence[Chunk], *, digest: str = SHA256
    ) -> dict[tuple[str, int], str]:
        self.num_chunks += len(chunks)
        return super().write_chunks(directory, chunks, digest=digest)  # type: ignore[misc]

    @contextmanager
    def feed_program(self, source: Path, arguments: Sequence[str], *, stdin: FileIO) -> Iterator[Iterator[bytes]]:
        with super().feed_program(source, arguments, stdin=stdin) as lines:  # type: ignore[misc]
            self.num_fed += 1
            yield self.change_fed(lines) if self.change_fed else lines


class NotingLocalSession(_Noting, LocalSession):
    """On this machine."""


class NotingSSHSession(_Noting, SSHSession):
    """Over SSH."""


NotingSession = NotingLocalSession | NotingSSHSession


def session_on(server: SSHServer, tmp_path: Path) -> NotingSSHSession:
    """A session on the server, closed by leaving its `with` block."""
    return NotingSSHSession(server.access, python=sys.executable, programs_dir=str(tmp_path / "programs"))
