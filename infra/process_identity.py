"""Which process a number means: numbers are given again, after a boot too, and each container counts for itself.

A number that is written to a file is written with the rest of the identity, and counts only where all of it fits.
Not here: whether a process lives, which locks tell (locks.py).
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path

from rollouts.infra.supervisor.processes import read_boot_id, read_start


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessIdentity:
    """A process among all that ever run."""

    pid: int
    started: str
    """Its start, as its system says it; empty if there is no such process."""
    boot_id: str
    """The boot of the machine."""
    namespace: str
    """The container, or other namespace, in which `pid` is counted; empty on systems without these."""
    host: str
    """The name of the machine or container, for messages alone."""

    @property
    def is_here(self) -> bool:
        """True if `pid` means this process, here and now."""
        return bool(self.started) and self == identify(self.pid, host=self.host)


def identify(pid: int, *, host: str = "") -> ProcessIdentity:
    """The identity of the process that has this number here now."""
    return ProcessIdentity(
        pid=pid,
        started=read_start(pid),
        boot_id=read_boot_id(),
        namespace=_read_namespace(),
        host=host or socket.gethostname(),
    )


def _read_namespace() -> str:
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""
