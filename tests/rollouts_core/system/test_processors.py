"""Pins that no more threads are started than there are processors for.

Without it a CPU's part of a run, all of it or its evaluation, takes ten times as long in a container, and nothing says
why.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rollouts_core.system.processors import count_processors

HERE = count_processors(Path(os.devnull))


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize(
    ("membership", "files", "expected"),
    [
        ("0::/\n", {"cpu.max": "100000 100000\n"}, 1),  # in a container
        ("0::/\n", {"cpu.max": "765000 100000\n"}, min(HERE, 7)),
        ("0::/\n", {"cpu.max": "max 100000\n"}, HERE),
        ("0::/pods/ours\n", {"pods/ours/cpu.max": "max 100000\n", "pods/cpu.max": "150000 100000\n"}, 1),
        ("0::/system/of the machine\n", {"cpu.max": "50000 100000\n"}, 1),  # a path that is not seen here
        (
            "1:cpu,cpuacct:/docker/ours\n0::/\n",
            {"cpu/cpu.cfs_quota_us": "199999", "cpu/cpu.cfs_period_us": "100000"},
            1,
        ),
        ("1:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, HERE),
        ("3:cpuset:/\n", {"cpu/cpu.cfs_quota_us": "100000", "cpu/cpu.cfs_period_us": "100000"}, HERE),
        ("", {}, HERE),
    ],
)
def test_the_time_of_control_groups_is_shared_by_no_more_threads(
    tmp_path: Path, membership: str, files: dict[str, str], expected: int
) -> None:
    write(tmp_path / "membership", membership)
    for name, text in files.items():
        write(tmp_path / "mount" / name, text)
    assert count_processors(tmp_path / "membership", tmp_path / "mount") == expected


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="processes are bound to processors on Linux alone")
def test_processors_that_are_not_ours_are_not_counted() -> None:
    code = """
import os
from rollouts_core.system.processors import count_processors
os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
assert count_processors() == 1
"""
    subprocess.run([sys.executable, "-c", code], check=True)
