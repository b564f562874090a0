"""Identify a process by more than its process id.

Systems reuse process ids, also after a boot, and each container has its own process ids. A process id in a file is
therefore valid only if the rest of the identity matches, too.

Not here: whether a process is alive, which its lock shows (locks.py).
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path

from rollouts.infra.supervisor.processes import read_boot_id, read_start


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessIdentity:
    """The identity of a process. No other process on any machine has the same identity."""

    pid: int
    started: str
    """Start time in the system's own format, or "" if the process does not exist."""
    boot_id: str
    namespace: str
    """The PID namespace (container) to which `pid` belongs. Empty on systems without namespaces."""
    host: str
    """Host name of the machine or container. Used only in messages."""

    @property
    def is_here(self) -> bool:
        """Whether `pid` still belongs to this process, on this machine."""
        return bool(self.started) and self == identify(self.pid, host=self.host)


def identify(pid: int, *, host: str = "") -> ProcessIdentity:
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
