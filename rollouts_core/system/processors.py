"""Count the processors that this process can use. More threads than processors only wait for each other.

A container limited to seven processors often sees all 96 of its machine. torch's threads meet at a barrier after each
operation, so a thread paused by the container's limit delays all others: computing becomes ten times slower or worse.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def count_processors(membership: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")) -> int:
    """Processors in this process's affinity, or fewer if its control groups limit CPU time; at least one."""
    # Affinity and control groups exist only on Linux.
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([allowed, *(int(share) for share in _find_shares(membership, mount))]))


def _find_shares(membership: Path, mount: Path) -> Iterator[float]:
    """The number of processors that each control group of this process permits, if the group has a limit.

    A container often sees its own group at the root of the mount, regardless of the path in /proc.
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
    """The limit of one control group, if the group has a limit, from the files of version 2 or version 1."""
    quota, _, period = _read(directory / "cpu.max").partition(" ")
    if not quota:
        quota, period = (_read(directory / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
    with suppress(ValueError):  # the file contains "max", or does not exist
        if int(quota) > 0 and int(period) > 0:
            yield int(quota) / int(period)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
