"""Split files into chunks. Chunks are the units in which files are compared and sent.

Not here: sending chunks (session.py, push.py), comparing them with the node's files (receiver.py).
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

from rollouts.infra.errors import PermanentInfraError, TransientInfraError
from rollouts.infra.node_agent import DIGESTS

CHUNK_BYTES = 8 << 20
"""Size of every chunk except the last one of a file. If any byte differs, the whole chunk is sent again."""
DIRECT_BYTES = 256 << 20
"""A new file of at least this size in bytes is transferred over a separate SSH login, without a copy through this
process (session.py)."""
_READ_BYTES = 256 << 10
"""Size of the pieces in which chunks are read. A piece of this size is still in the CPU's cache when it is written
after hashing."""
SHA256 = "sha256"
"""The digest algorithm that every Python supports. A node may report a faster algorithm (`DIGESTS`)."""


def checked_digest(answer: Mapping[str, Any]) -> str:  # Any: JSON
    """Return the digest algorithm that a node reports.

    Raises:
        PermanentInfraError: this machine does not support the algorithm.
    """
    if (algorithm := answer.get("digest")) not in DIGESTS:
        raise PermanentInfraError(f"the node digests files by {algorithm!r}, which is not known here: install it")
    return str(algorithm)


class Chunk(NamedTuple):
    name: str
    """Path of the chunk's file, relative to the destination directory."""
    number: int
    pieces: Iterable[bytes]


class SourceFile:
    """A file to copy. Several threads may read the file, also more than once. A change of the file during the copy
    raises an error."""

    def __init__(self, path: Path, size: int) -> None:
        self.path = path
        self.size = size
        self._algorithm = SHA256
        self._identity: tuple[int, int, int] | None = None
        """The file's size, modification time and inode at the first read."""
        self._digests: dict[int, str] = {}

    @property
    def num_chunks(self) -> int:
        """Number of chunks, or 0 for an empty file."""
        return -(-self.size // CHUNK_BYTES)

    def length_of(self, number: int) -> int:
        return min(CHUNK_BYTES, self.size - number * CHUNK_BYTES)

    def digest_by(self, algorithm: str) -> None:
        """Use this digest algorithm. Drops known digests of another algorithm."""
        if algorithm != self._algorithm:
            self._algorithm, self._digests = algorithm, {}

    def digest(self, number: int) -> str:
        """Return the digest of a chunk. Reads the chunk if its digest is not known yet.

        Raises:
            TransientInfraError: the file changed.
        """
        if number not in self._digests:
            for _ in self.read(number):
                pass
        return self._digests[number]

    def digests(self) -> tuple[str, ...]:
        return tuple(self.digest(number) for number in range(self.num_chunks))

    def open(self) -> FileIO:
        """Open the file for reading. A symbolic link raises an error. Opening a FIFO does not block.

        Raises:
            TransientInfraError: the file can no longer be read.
        """
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError as error:
            raise TransientInfraError(f"{self.path} cannot be read any more: {error.strerror}") from error
        return os.fdopen(descriptor, "rb", buffering=0)

    def read(self, number: int) -> Iterator[bytes]:
        """Yield the content of a chunk.

        Raises:
            TransientInfraError: the file has changed since it was listed or first read.
        """
        digest = DIGESTS[self._algorithm]()
        num_missing_bytes = self.length_of(number)
        try:
            with self.open() as file:
                self._check_unchanged(os.fstat(file.fileno()))
                file.seek(number * CHUNK_BYTES)
                while num_missing_bytes and (piece := file.read(min(_READ_BYTES, num_missing_bytes))):
                    num_missing_bytes -= len(piece)
                    digest.update(piece)
                    yield piece
                self._check_unchanged(os.fstat(file.fileno()))
        except OSError as error:
            raise TransientInfraError(f"{self.path} cannot be read any more: {error.strerror}") from error
        if num_missing_bytes or self._digests.setdefault(number, digest.hexdigest()) != digest.hexdigest():
            raise self._changed()

    def check(self) -> None:
        """Check that the file has not changed since its first read.

        Raises:
            TransientInfraError: the file changed.
        """
        try:
            self._check_unchanged(self.path.lstat())
        except OSError as error:
            raise TransientInfraError(f"{self.path} cannot be read any more: {error.strerror}") from error

    def _check_unchanged(self, status: os.stat_result) -> None:
        identity = (status.st_size, status.st_mtime_ns, status.st_ino)
        self._identity = self._identity or identity
        if identity != self._identity or status.st_size != self.size:
            raise self._changed()

    def _changed(self) -> TransientInfraError:
        return TransientInfraError(f"{self.path} changed during the copy: copy it when it is complete")
