"""Files in chunks, which are compared and sent one by one.

Not here: how chunks travel (session.py), where they go (push.py), what the other side has of them (receiver.py).
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

from rollouts.infra.errors import PermanentInfraError, TransientInfraError
from rollouts.infra.node_agent import DIGESTS

CHUNK_BYTES = 8 << 20
"""Each chunk of a file has this size, but for the last one; so much is sent again where a bit differs."""
DIRECT_BYTES = 256 << 20
"""A file that is this large and new is worth a login of its own, whose program reads or writes it (session.py)."""
_READ_BYTES = 256 << 10
"""So little that it is still in the processor's cache when it has been hashed."""
SHA256 = "sha256"
"""The digest that every Python has; a node says where it has a better one (`DIGESTS`)."""


def checked_digest(answer: Mapping[str, Any]) -> str:  # Any: JSON
    """What a node says that it digests by.

    Raises:
        PermanentInfraError: that is not known here.
    """
    if (algorithm := answer.get("digest")) not in DIGESTS:
        raise PermanentInfraError(f"the node digests files by {algorithm!r}, which is not known here: install it")
    return str(algorithm)


class Chunk(NamedTuple):
    """A chunk on its way."""

    name: str
    """That of its file, below the directory that it goes to."""
    number: int
    pieces: Iterable[bytes]
    """Its content, in order."""


class SourceFile:
    """A file that is copied: it may be read several times, by several threads, and has to stay the same one."""

    def __init__(self, path: Path, size: int) -> None:
        self.path = path
        self.size = size
        self._algorithm = SHA256
        self._identity: tuple[int, int, int] | None = None
        """As it was when it was first read."""
        self._digests: dict[int, str] = {}

    @property
    def num_chunks(self) -> int:
        """None of an empty file."""
        return -(-self.size // CHUNK_BYTES)

    def length_of(self, number: int) -> int:
        """Bytes of a chunk."""
        return min(CHUNK_BYTES, self.size - number * CHUNK_BYTES)

    def digest_by(self, algorithm: str) -> None:
        """Let chunks be digested by what the other side has, from here on."""
        if algorithm != self._algorithm:
            self._algorithm, self._digests = algorithm, {}

    def digest(self, number: int) -> str:
        """The digest of a chunk, which is read if it was not read before.

        Raises:
            TransientInfraError: the file changed.
        """
        if number not in self._digests:
            for _ in self.read(number):
                pass
        return self._digests[number]

    def digests(self) -> tuple[str, ...]:
        """`digest` of every chunk."""
        return tuple(self.digest(number) for number in range(self.num_chunks))

    def open(self) -> FileIO:
        """The file, for the caller to read. A link that took its place is not followed, and a FIFO is not waited for.

        Raises:
            TransientInfraError: it cannot be read any more.
        """
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError as error:
            raise TransientInfraError(f"{self.path} cannot be read any more: {error.strerror}") from error
        return os.fdopen(descriptor, "rb", buffering=0)

    def read(self, number: int) -> Iterator[bytes]:
        """The content of a chunk.

        Raises:
            TransientInfraError: the file changed since it was listed, or first read.
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
        """Return if it is still the file that was first read.

        Raises:
            TransientInfraError: it changed.
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
        return TransientInfraError(f"{self.path} changed while it was copied: copy it once it is complete")
