"""Run beside an engine: remove its folder and its shared memory when its last process has ended.

Not here: who starts it (launch.py). Run as a file, by an interpreter without packages: it imports nothing of ours.

    while the engine runs     which files of /dev/shm its processes map, by /proc/<pid>/maps, whenever there are others
    when it has ended         those that were made after its start, and that no process maps any more, are removed

vLLM and SGLang leave shared memory behind when they are killed, under names that say nothing of who made it. The
engine's processes are those with the folder as TMPDIR, which is no other engine's.
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
"""Shared memory and semaphores of multiprocessing, and SGLang's own. What else a process maps may be another's."""
LOOK_S = 0.2
"""How often it is looked whether there is new shared memory: what an engine makes as its last is known so soon."""
NUM_LOOKS = 10
"""So often the processes are looked at after that: a file may be there before it is mapped."""
END_S = 300.0
"""Processes that outlive the first one of the engine by more are no longer waited for, and keep what they map."""


def scratch_variables(folder: str) -> dict[str, str]:
    """What an engine has to have in its environment so that its processes are found, and leave their files there."""
    return {
        "TMPDIR": folder,
        "SPT_NOENV": "1",  # setproctitle, by which engines name their processes, would write over the environment
    }


def find_processes(folder: str) -> list[Path]:
    """The processes that have the folder as TMPDIR."""
    marker = b"\0TMPDIR=" + folder.encode() + b"\0"
    return [process for process in list_processes() if marker in b"\0" + read(process / "environ")]


def list_processes() -> list[Path]:
    """All that run, as folders of /proc."""
    return [folder for folder in Path("/proc").iterdir() if folder.name.isdigit()]


def mapped_by(processes: list[Path]) -> set[int]:
    """Inodes of shared memory that processes map, as far as this user may know.

    Not names: a semaphore is mapped before it gets its own.
    """
    found = set()
    for process in processes:
        for line in read(process / "maps").decode(errors="replace").splitlines():
            fields = line.split(maxsplit=5)
            if len(fields) == 6 and fields[5].startswith(f"{SHARED_MEMORY}/"):
                found.add(int(fields[4]))
    return found


def read(path: Path) -> bytes:
    """What a file of /proc says; nothing where the process has ended, or is another user's."""
    try:
        return path.read_bytes()
    except OSError:
        return b""


def find_left_behind(inodes: set[int], began: float) -> list[Path]:
    """The files that the engine made, of those that it mapped.

    Args:
        began: when it was not there yet; what is older is another's.
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
    """Return when the engine has ended and nothing of it is left."""
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
    started = time.time() - 0.1  # file systems have a coarser clock
    if os.fork():
        os._exit(0)  # so that it is no child of the engine, which ends its children first
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sweep(sys.argv[1], 0, started)
