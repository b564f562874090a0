"""Identify a process beyond its number: numbers are reused, also after a boot, and each container counts its own.

A process number in a file counts only if the rest of the identity matches as well. Not here: whether a process still
lives, which its lock shows (locks.py).
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path

from rollouts.infra.supervisor.processes import read_boot_id, read_start


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessIdentity:
    """A process, distinct from all others on any machine."""

    pid: int
    started: str
    """Start time as the system reports it; empty if the process does not exist."""
    boot_id: str
    """Id of the machine's boot."""
    namespace: str
    """The PID namespace (container) in which `pid` counts; empty on systems without namespaces."""
    host: str
    """Host name of the machine or container, only for messages."""

    @property
    def is_here(self) -> bool:
        """Return whether `pid` still means this process on this machine."""
        return bool(self.started) and self == identify(self.pid, host=self.host)


def identify(pid: int, *, host: str = "") -> ProcessIdentity:
    """Return the identity of the process that has this number now."""
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
