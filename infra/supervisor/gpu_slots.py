"""Locks for this machine's GPUs. Only one job, or one group of jobs, uses a GPU at a time."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import shutil
import stat
import subprocess
import time
import traceback
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from rollouts.infra.locks import locked
from rollouts.infra.supervisor.files import READ_BYTES, parse_object
from rollouts.infra.supervisor.processes import find_processes
from rollouts.infra.supervisor.spec import FIRST_GPU, JobSpec

GPU_LOCKS_VARIABLE = "ROLLOUTS_GPU_LOCKS"
"""Environment variable that names the folder of GPU locks, for example a folder that several containers share."""
GPU_FILES_NEW_S = 3600.0
"""Seconds between updates of the modification times of held lock files. Systems remove old files from /tmp, usually
after ten days."""
NVIDIA_SMI_TIMEOUT_S = 30.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GPUSlot:
    """A GPU for a single job, or a single group of jobs, at a time."""

    name: str
    """The GPU's UUID, or its number if nvidia-smi reports no UUID. All jobs of the machine use the same name."""
    label: str
    """The GPU's name for messages to users."""


def find_gpu_slots(wanted: Sequence[str], visible: str | None) -> list[GPUSlot]:
    """Return the GPUs that a spec names on this machine, sorted by name. Every job takes its GPUs in this order.

    Args:
        visible: CUDA_VISIBLE_DEVICES for a program without assigned GPUs, or None if the variable is not set.
    """
    if not wanted:
        return []
    uuids = _list_gpu_uuids()
    first = "0" if visible is None else visible.split(",")[0].strip()
    slots = {}
    for each in wanted:
        if each == FIRST_GPU and (not uuids or first in ("", "-1")):
            continue
        gpu = first if each == FIRST_GPU else each
        number = next((n for n, uuid in enumerate(uuids) if gpu == str(n) or _is_meant(uuid, gpu)), None)
        name = f"number-{gpu}" if number is None else uuids[number]
        slots[name] = GPUSlot(name=name.replace("/", "_"), label=f"GPU {gpu if number is None else number}")
    return [slots[name] for name in sorted(slots)]


def _is_meant(uuid: str, gpu: str) -> bool:
    """Return whether `gpu`, a name in CUDA_VISIBLE_DEVICES, means the GPU with this UUID. A name may be the start of a
    UUID."""
    return gpu.startswith("GPU-") and uuid.startswith(gpu)


def _list_gpu_uuids() -> list[str]:
    """Return the UUIDs of the machine's GPUs, ordered by their numbers, or an empty list if nvidia-smi does not report
    them."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, check=True, timeout=NVIDIA_SMI_TIMEOUT_S).stdout
    except (OSError, subprocess.SubprocessError):
        traceback.print_exc()
        return []
    return [line.strip() for line in answer.splitlines() if line.strip().startswith(("GPU-", "MIG-"))]


class GPUSlots:
    """The GPUs of a job. The job holds a lock on each GPU until the job's last process has ended.

    A lock is a file with flock. The supervisor locks the file, and the program and its children inherit the lock. A GPU
    therefore stays locked if the supervisor is killed while the program still uses the GPU. The kernel frees the lock
    when the last process has ended. The file's JSON names the group, and describes the holder for messages.

        shared lock      held by each job of the group that the file names
        exclusive lock   taken for a moment, to check that no job holds the file
        mutex            held while locks are checked and changed

    Every job takes its GPUs in the same order. A waiting job keeps the GPUs that it has taken. Two jobs therefore never
    wait for each other, and jobs with several GPUs get all GPUs in the end. Jobs that must run together form a
    group. Each job of a group takes the GPUs of the whole group.
    """

    def __init__(self, spec: JobSpec, slots: Sequence[GPUSlot]) -> None:
        self._spec = spec
        self._slots = slots
        self._group = spec.gpu_group or spec.run_dir
        self._held: dict[str, int] = {}
        self._touched_at = time.monotonic()

    @property
    def descriptors(self) -> tuple[int, ...]:
        return tuple(self._held.values())

    def take(self) -> str:
        """Take the job's free GPUs. Returns a sentence about the first GPU that another job holds, or "" if the job has
        all its GPUs.

        Raises:
            OSError: the folder of locks or a lock file cannot be written.
        """
        missing = [slot for slot in self._slots if slot.name not in self._held]
        if not missing:
            return ""
        folder = _open_gpu_locks_folder()
        with locked(folder / "mutex"):
            for slot in missing:
                descriptor = os.open(folder / f"{slot.name}.json", os.O_RDWR | os.O_CREAT, 0o600)
                try:
                    holder = self._find_holder(descriptor)
                    if not holder:
                        self._held[slot.name] = descriptor
                finally:
                    if slot.name not in self._held:
                        os.close(descriptor)
                if holder:
                    return f"waits for {slot.label}, {holder}"
        return ""

    def keep_files(self) -> None:
        """Update the times of the lock files once per hour, because systems remove old files from /tmp. If a lock file
        were removed, another job could lock a new file.
        """
        if time.monotonic() < self._touched_at + GPU_FILES_NEW_S:
            return
        self._touched_at = time.monotonic()
        for descriptor in self._held.values():
            with contextlib.suppress(OSError):
                os.utime(descriptor)

    def release(self) -> None:
        """Close the supervisor's own descriptors of the locks. Processes of the program that are still alive keep the
        locks."""
        for descriptor in self._held.values():
            os.close(descriptor)
        self._held.clear()

    def _find_holder(self, descriptor: int) -> str:
        """Try to lock the GPU. Returns a description of another holder; empty if this job has the lock now."""
        found = parse_object(os.pread(descriptor, READ_BYTES, 0)) or {}
        is_ours = found.get("group") == self._group
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not is_ours:
                return f"held by {_describe_gpu_holder(found)}"
            others = [job for job in found["jobs"] if job != self._spec.run_dir]
            since = found["since"]
        else:
            left = [] if is_ours else [pid for job in found.get("jobs", []) for pid in find_processes(job)]
            if left:  # processes that survived their supervisor without inheriting the lock
                processes = ", ".join(str(pid) for pid in left)
                return f"used by processes {processes}, which are left of {_describe_gpu_holder(found)}"
            others = []
            since = datetime.now(timezone.utc).isoformat(timespec="seconds")  # noqa: UP017 - Python 3.10 has no datetime.UTC
        holder = {
            "group": self._group,
            "run": self._spec.run_name,
            "jobs": [*others, self._spec.run_dir],
            "pid": os.getpid(),
            "since": since,
        }
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(holder).encode() + b"\n", 0)
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)  # safe, because other jobs check only with the mutex
        return ""


def _describe_gpu_holder(holder: Mapping[str, Any]) -> str:
    """Describe the holder that a lock file names, for the messages of waiting jobs."""
    if not holder:
        return "a job that took the GPU a moment ago"
    run = f"run {holder['run']} " if holder["run"] else ""
    return f"{run}(job {holder['jobs'][-1]}) since {holder['since']}"


def _open_gpu_locks_folder() -> Path:
    """Return the folder of GPU locks. All runs of this user on this machine share it.

    Raises:
        OSError: the folder cannot be created, or another user created it.
    """
    folder = Path(os.environ.get(GPU_LOCKS_VARIABLE) or f"/tmp/rollouts-gpus-{os.getuid()}")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise PermissionError(
            f"{folder}, the folder of GPU locks, is not a folder of yours: remove it, or name another one in "
            f"{GPU_LOCKS_VARIABLE}"
        )
    return folder
