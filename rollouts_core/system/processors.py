"""How many processors this process can keep busy: more threads than that wait for each other.

A container that may use seven processors often sees all 96 of its machine. torch's threads meet at a barrier after each
operation, so that one which has used up the container's time holds up all others: it gets slower by ten times and more.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def count_processors(membership: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")) -> int:
    """Those that this process may run on, or as many as its control groups leave it time for; at least one."""
    # Linux alone has either.
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([allowed, *(int(share) for share in _find_shares(membership, mount))]))


def _find_shares(membership: Path, mount: Path) -> Iterator[float]:
    """For how many processors each of our control groups has time, where that is limited.

    A container often sees its own group at the root of the mount, whatever the path says.
    """
    for line in _read(membership).splitlines():
        _, controllers, path = line.split(":", 2)
        tree = mount if controllers == "" else mount / "cpu"
        if controllers != "" and "cpu" not in controllers.split(","):
            continue
        group = tree / path.lstrip("/")
        for directory in (group, *group.parents):
            if directory.is_relative_to(tree):
                yield from _share_of(directory)


def _share_of(directory: Path) -> Iterator[float]:
    """The limit of one group; none where it has none. The names are those of version 2 and of version 1."""
    quota, _, period = _read(directory / "cpu.max").partition(" ")
    if not quota:
        quota, period = (_read(directory / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
    with suppress(ValueError):  # "max", or no such file
        if int(quota) > 0 and int(period) > 0:
            yield int(quota) / int(period)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
