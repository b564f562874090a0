"""Find a job's processes by their parents and by an environment variable, and end them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollouts.infra.supervisor.files import POLL_S, internal_path, latest_attempt, read_json, read_text
from rollouts.infra.supervisor.spec import JobError

JOB_VARIABLE = "ROLLOUTS_JOB"
UNKILLABLE_AFTER_S = 10.0
"""Seconds after SIGKILL after which the supervisor no longer waits for a process to end."""
_PR_SET_CHILD_SUBREAPER = 36


def find_processes(
    run_dir: str, *, supervisor: int | None = None, group: int | None = None, group_started: str = ""
) -> list[int]:
    """Return all live processes of the job except this process.

    Args:
        supervisor: process id of the supervisor. On systems with /proc, the supervisor's descendants are included even
            if they changed their environment.
        group: the process group of the job, for systems without /proc.
        group_started: start time of the group's leader; empty if unknown.
    """
    if not Path("/proc/self/environ").exists():
        return find_group(group, started=group_started)
    cookie = os.fsencode(f"{JOB_VARIABLE}={run_dir}")
    parents: dict[int, int] = {}
    marked: set[int] = set()
    for directory in Path("/proc").glob("[0-9]*"):
        pid = int(directory.name)
        try:
            state, parent = (directory / "stat").read_bytes().rsplit(b")", 1)[1].split()[:2]
            if state in (b"Z", b"X"):
                continue
            parents[pid] = int(parent)
            if cookie in (directory / "environ").read_bytes().split(b"\0"):
                marked.add(pid)
        except OSError:  # the process has ended meanwhile, or belongs to another user
            continue
    if supervisor is not None:
        marked |= {pid for pid in parents if _descends_from(pid, supervisor, parents)}
    return sorted(marked - {os.getpid()})


def _descends_from(pid: int, ancestor: int, parents: Mapping[int, int]) -> bool:
    current = parents.get(pid)
    for _ in range(len(parents)):
        if current == ancestor:
            return True
        if current is None:
            return False
        current = parents.get(current)
    return False


def find_group(group: int | None, *, started: str = "") -> list[int]:
    """Return the live processes of a process group, from the output of `ps`.

    Empty if the leader's start time differs from `started`, because the leader's process id then belongs to another
    process.
    """
    if group is None or (started and read_start(group) not in ("", started)):
        return []
    table = subprocess.run(
        ["ps", "-A", "-o", "pid=,pgid=,stat="], capture_output=True, text=True, check=True, timeout=10
    ).stdout
    rows = [line.split() for line in table.splitlines()]
    return [int(pid) for pid, pgid, state in rows if int(pgid) == group and not state.startswith("Z")]


def read_start(pid: int) -> str:
    """Return the start time of a process in the system's own format, or "" if the process does not exist."""
    if Path("/proc/self/stat").exists():
        try:
            return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19].decode()
        except OSError:
            return ""
    query = ["ps", "-o", "lstart=", "-p", str(pid)]
    return subprocess.run(query, capture_output=True, text=True, check=False, timeout=10).stdout.strip()


def find_recorded(run_dir: str, meta: Mapping[str, Any]) -> list[int]:
    """Return the live processes of an attempt whose supervisor has died. The caller checks that `meta`, the content of
    meta-<n>.json, was written since the last boot."""
    return find_processes(run_dir, group=meta.get("pid"), group_started=meta.get("pid_started", ""))


def send_signal(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def end_orphans(run_dir: str, grace_s: float) -> None:
    """End the remaining processes of a job whose supervisor has died: SIGTERM, then SIGKILL after `grace_s` seconds."""
    meta = read_json(internal_path(run_dir, f"meta-{latest_attempt(run_dir)}.json")) or {}
    if meta.get("boot_id") != read_boot_id():
        return
    kill_at = time.monotonic() + grace_s
    send_signal(find_recorded(run_dir, meta), signal.SIGTERM)
    while orphans := find_recorded(run_dir, meta):
        if time.monotonic() >= kill_at + UNKILLABLE_AFTER_S:
            raise JobError(f"processes {orphans} of an earlier attempt cannot be killed: reboot the node")
        if time.monotonic() >= kill_at:
            send_signal(orphans, signal.SIGKILL)
        time.sleep(POLL_S)


def become_subreaper() -> None:
    """On Linux, become the parent of orphaned descendants, to find and reap them."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def read_boot_id() -> str:
    """Return the id of the machine's current boot, or "" if the system does not report it."""
    if sys.platform == "linux":
        return read_text(Path("/proc/sys/kernel/random/boot_id")).strip()
    else:  # noqa: RET505 - the type checker knows only one of the two systems at a time
        query = ["sysctl", "-n", "kern.bootsessionuuid"]
        return subprocess.run(query, capture_output=True, text=True, check=False, timeout=10).stdout.strip()


def count_oom_kills(membership: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")) -> int:
    """Return how many processes of this control group the kernel has killed for lack of memory, or 0 if unknown.

    In a container, the control group is often at the root of the mount, although the membership file names another
    path.
    """
    for line in read_text(membership).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        tree, name = (mount, "memory.events") if controllers == "" else (mount / "memory", "memory.oom_control")
        for directory in (tree / path.lstrip("/"), tree):
            counts = dict(row.split() for row in read_text(directory / name).splitlines())
            if "oom_kill" in counts:
                return int(counts["oom_kill"])
    return 0
