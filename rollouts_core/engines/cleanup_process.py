"""Run beside an engine: remove its folder and its shared memory when its last process has ended.

This file runs as a program in an interpreter without packages, so it imports only the standard library.

    while the engine runs     record which files of /dev/shm its processes map, by /proc/<pid>/maps
    when it has ended         remove the recorded files that are newer than its start and that no process maps now

vLLM and SGLang leave shared memory behind when they are killed, under names that do not show their owner. A process
belongs to the engine if its TMPDIR is the folder, because each engine has its own folder.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import sys
import time
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
PREFIXES = ("psm_", "sem.mp-", "sglang_")
"""Prefixes of the names of shared memory and semaphores of multiprocessing and SGLang. Files with other names are never
removed."""
LOOK_S = 0.2
"""Seconds between two checks for new shared memory. The time is short so that an engine's last files are noticed
too."""
NUM_LOOKS = 10
"""Number of checks of the processes after a change of the files, because a process may map a file after creating it."""
END_S = 300.0
"""Seconds to wait for the engine's other processes after its first process ended. Processes that run longer keep their
files."""


def scratch_variables(folder: str) -> dict[str, str]:
    """Environment variables that mark the engine's processes and put the engine's temporary files into the folder."""
    return {
        "TMPDIR": folder,
        "SPT_NOENV": "1",  # forbids the engines' setproctitle to overwrite the environment
    }


def find_processes(folder: str) -> list[Path]:
    """The processes that have the folder as TMPDIR."""
    marker = b"\0TMPDIR=" + folder.encode() + b"\0"
    return [process for process in list_processes() if marker in b"\0" + read(process / "environ")]


def list_processes() -> list[Path]:
    """All running processes, as folders of /proc."""
    return [folder for folder in Path("/proc").iterdir() if folder.name.isdigit()]


def mapped_by(processes: list[Path]) -> set[int]:
    """Inodes of shared memory that processes map, if this user may read their maps.

    Inodes are used instead of names, because a process maps a semaphore before the semaphore gets its name.
    """
    found = set()
    for process in processes:
        for line in read(process / "maps").decode(errors="replace").splitlines():
            fields = line.split(maxsplit=5)
            if len(fields) == 6 and fields[5].startswith(f"{SHARED_MEMORY}/"):
                found.add(int(fields[4]))
    return found


def read(path: Path) -> bytes:
    """The content of a file of /proc, or empty if the process has ended, or belongs to another user."""
    try:
        return path.read_bytes()
    except OSError:
        return b""


def find_left_behind(inodes: set[int], began: float) -> list[Path]:
    """The files in shared memory with the inodes `inodes` that the engine created.

    Args:
        began: a time before the engine's start. Files that are older belong to other programs.
    """
    found = []
    for path in SHARED_MEMORY.iterdir():
        try:
            status = path.lstat()
        except OSError:
            continue
        is_its_own = status.st_ino in inodes and status.st_uid == os.getuid() and status.st_ctime >= began
        if is_its_own and path.name.startswith(PREFIXES):
            found.append(path)
    return found


def sweep(folder: str, closes_at_the_end: int, began: float) -> None:
    """Wait until the engine has ended, then remove its shared memory and its folder."""
    seen: set[int] = set()
    known: list[str] = []
    looks_left = NUM_LOOKS
    while not select.select([closes_at_the_end], [], [], LOOK_S)[0]:
        if (names := sorted(path.name for path in SHARED_MEMORY.iterdir())) != known:
            known, looks_left = names, NUM_LOOKS
        if looks_left:
            looks_left -= 1
            seen |= mapped_by(find_processes(folder))
    deadline = time.monotonic() + END_S
    while (left := find_processes(folder)) and time.monotonic() < deadline:
        seen |= mapped_by(left)
        time.sleep(0.05)
    for path in find_left_behind(seen - mapped_by(list_processes()), began):
        path.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    started = time.time() - 0.1  # slightly earlier, because file times are coarser
    if os.fork():
        os._exit(0)  # the forked process is then not a child of the engine, which ends its children early
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sweep(sys.argv[1], 0, started)
