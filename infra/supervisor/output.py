"""Move a program's output from its pipe to a log of limited size."""

from __future__ import annotations

import errno
import os
import select
import time
from pathlib import Path
from typing import TYPE_CHECKING

from rollouts.infra.supervisor.files import POLL_S, READ_BYTES

if TYPE_CHECKING:
    from typing import Self  # missing in Python 3.10, which nodes may have

LOG_TAIL_BYTES = 64 << 10


class CappedLog:
    """The log file of a job. It takes up to a number of bytes; of further output it keeps only the end.

    A full disk loses log, but no job fails because of it.
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._max_bytes = max_bytes
        self._max_tail_bytes = min(LOG_TAIL_BYTES, max_bytes // 4)
        self._room = max_bytes - self._max_tail_bytes
        self._tail = bytearray()
        self._num_left_out = 0
        self._is_capped = False
        self._is_at_line_start = True

    def write(self, chunk: bytes) -> None:
        """Append the program's output, up to the limit."""
        head, rest = chunk[: self._room], chunk[self._room :]
        self._room -= len(head)
        self._append(head)
        if rest and not self._is_capped:
            self._is_capped = True
            self.note(f"the log has reached {self._max_bytes} bytes: from here on only its end is kept")
        self._tail += rest
        num_too_many = max(0, len(self._tail) - self._max_tail_bytes)
        self._num_left_out += num_too_many
        del self._tail[:num_too_many]

    def note(self, sentence: str) -> None:
        """Append a line of the supervisor."""
        line_break = b"" if self._is_at_line_start else b"\n"
        self._append(line_break + f"[supervisor] {sentence}\n".encode())

    def _append(self, content: bytes) -> None:
        rest = content
        while rest:
            try:
                rest = rest[os.write(self._descriptor, rest) :]
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                    raise
                return
        if content:
            self._is_at_line_start = content.endswith(b"\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._num_left_out:
            self.note(f"{self._num_left_out} bytes are left out here")
        self._append(bytes(self._tail))
        os.close(self._descriptor)


class ProgramOutput:
    """The pipe with the program's output, which is copied to the log."""

    def __init__(self, descriptor: int, log: CappedLog) -> None:
        self._descriptor = descriptor
        self._log = log
        self._is_open = True

    def pump(self, wait_s: float = POLL_S) -> bool:
        """Wait a moment for output and move it to the log; returns whether there was any."""
        if not self._is_open:
            time.sleep(wait_s)
            return False
        if not select.select([self._descriptor], [], [], wait_s)[0]:
            return False
        chunk = os.read(self._descriptor, READ_BYTES)
        self._log.write(chunk)
        if not chunk:
            self._is_open = False
            os.close(self._descriptor)
        return bool(chunk)

    def drain(self) -> None:
        """Move the rest of the output after the program's end, and close the pipe."""
        for _ in range(1024):  # a process that survived SIGKILL may write forever
            if not self.pump(wait_s=0):
                break
        if self._is_open:
            self._is_open = False
            os.close(self._descriptor)
