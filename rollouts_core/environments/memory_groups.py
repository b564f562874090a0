"""Find a cgroup in which this process can create cgroups with a memory limit, one for each program in a sandbox.

Linux permits this in two cases: the process runs as root outside of containers, or a service manager has delegated a
cgroup to its user. systemd delegates cgroups in graphical sessions, and for services with `Delegate=yes`.
"""

from __future__ import annotations

import os
import re
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

NAME = "rollouts-*"
MAX_AGE_S = 3600.0
"""Age in seconds above which a cgroup is removed as a leftover of a killed process. No program runs this long."""


@cache
def find_group_parent() -> str:
    """The folder of the nearest cgroup in which this process can create cgroups with a memory limit; "" if none."""
    try:
        mount = re.search(r"^(?:\S+ ){4}(\S+) .* - cgroup2 ", _read("/proc/self/mountinfo"), re.MULTILINE)
        own = re.search(r"^0::(/.*)$", _read("/proc/self/cgroup"), re.MULTILINE)
    except OSError:
        return ""
    if mount is None or own is None or ".." in own[1]:  # this process's cgroup is outside of the mount
        return ""
    top = Path(mount[1])
    path = top / own[1].lstrip("/")
    for folder in (path, *path.parents):
        if not folder.is_relative_to(top):
            break
        if _is_parent(folder):
            _remove_old_groups(folder)
            return str(folder)
    return ""


def _is_parent(folder: Path) -> bool:
    """True if this process can create a cgroup with a memory limit in `folder`, and move its own child processes into
    that cgroup."""
    try:
        if "memory" not in _read(folder / "cgroup.subtree_control").split():
            return False
        if not os.access(folder / "cgroup.procs", os.W_OK):
            return False
        probe = folder / f"rollouts-probe-{os.getpid()}"
        probe.mkdir()
    except OSError:
        return False
    has_limit = os.access(probe / "memory.max", os.W_OK)
    with suppress(OSError):
        probe.rmdir()
    return has_limit


def _remove_old_groups(parent: Path) -> None:
    for folder in parent.glob(NAME):
        with suppress(OSError):  # a cgroup with processes cannot be removed
            if time.time() - folder.stat().st_mtime > MAX_AGE_S:
                folder.rmdir()


def _read(path: str | Path) -> str:
    return Path(path).read_text(encoding="utf-8", errors="replace")
