"""Count the processors that this process can use, to choose the number of compute threads.

A container with a limit of seven processors often sees all 96 processors of its machine. If a process in the container
starts 96 threads, the limit pauses some threads. torch's threads wait for each other after each operation, so computing
becomes ten times slower.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def count_processors(membership: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")) -> int:
    """The number of processors that this process may use, by its CPU affinity and its control groups; at least 1."""
    # CPU affinity and control groups exist only on Linux.
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([allowed, *(int(share) for share in _find_shares(membership, mount))]))


def _find_shares(membership: Path, mount: Path) -> Iterator[float]:
    """Yield the CPU limit of each control group of this process that has a limit, as a number of processors.

    A container often sees its own group at the root of the mount, although /proc shows another path.
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
    """Yield the CPU limit of one control group, if it has a limit. Reads the files of cgroup version 2 or 1."""
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
