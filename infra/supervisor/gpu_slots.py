"""The GPUs of this machine, each of which one job, or one group of jobs, has at a time."""

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
"""Another folder for the locks of GPUs, for instance one that containers share."""
GPU_FILES_NEW_S = 3600.0
"""So often the files of locks that are held are touched: what is old is removed from /tmp, usually after ten days."""
NVIDIA_SMI_TIMEOUT_S = 30.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GPUSlot:
    """A GPU that one job, or one group of jobs, has at a time."""

    name: str
    """The same for every job of the machine: its UUID, or its number where nvidia-smi tells none."""
    label: str
    """What people call it."""


def find_gpu_slots(wanted: Sequence[str], visible: str | None) -> list[GPUSlot]:
    """The GPUs that a spec means on this machine, in the order in which every job takes them.

    Args:
        visible: CUDA_VISIBLE_DEVICES of a program that is told of no GPUs; None where it is not set.
    """
    if not wanted:
        return []
    uuids = list_gpu_uuids()
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
    """Whether a GPU is called so in CUDA_VISIBLE_DEVICES, which takes the beginning of a UUID, too."""
    return gpu.startswith("GPU-") and uuid.startswith(gpu)


def list_gpu_uuids() -> list[str]:
    """The UUIDs of the machine's GPUs, by number; none where nvidia-smi does not tell them."""
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
    """The GPUs of a job, each with a lock that it holds until the last of its processes is gone.

    A lock is the flock of a file. It is taken for ever by the supervisor and handed down to the program and what that
    forks, so it stays when the supervisor is killed and the GPU is still in use, and the kernel gives it up whatever
    happens. What the file says, in JSON, is for people, and names the group.

        shared lock      held by each job of the group that the file names
        exclusive lock   taken for a moment, to see that nobody holds it
        mutex            held while all of that is looked at and changed

    Every job takes its GPUs in the same order and keeps those that it has while it waits for the next one, so a job
    that wants several gets them, and two never wait for each other. Jobs that need each other are one group, each of
    which takes the GPUs of all.
    """

    def __init__(self, spec: JobSpec, slots: Sequence[GPUSlot]) -> None:
        self._spec = spec
        self._slots = slots
        self._group = spec.gpu_group or spec.run_dir
        self._held: dict[str, int] = {}
        self._touched_at = time.monotonic()

    @property
    def descriptors(self) -> tuple[int, ...]:
        """The open files that hold the locks."""
        return tuple(self._held.values())

    def take(self) -> str:
        """Take what can be had; returns a sentence about the first GPU that another job has, empty when all are ours.

        Raises:
            OSError: the folder of locks, or a file there, cannot be written.
        """
        missing = [slot for slot in self._slots if slot.name not in self._held]
        if not missing:
            return ""
        folder = open_gpu_locks_folder()
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
        """Let nobody take the files of the locks for old ones, now and then: beside one that has no name another job
        would make its own."""
        if time.monotonic() < self._touched_at + GPU_FILES_NEW_S:
            return
        self._touched_at = time.monotonic()
        for descriptor in self._held.values():
            with contextlib.suppress(OSError):
                os.utime(descriptor)

    def release(self) -> None:
        """Give up the supervisor's own hold."""
        for descriptor in self._held.values():
            os.close(descriptor)
        self._held.clear()

    def _find_holder(self, descriptor: int) -> str:
        """Who else has the GPU; empty when it is ours from now on."""
        found = parse_object(os.pread(descriptor, READ_BYTES, 0)) or {}
        is_ours = found.get("group") == self._group
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not is_ours:
                return f"held by {describe_gpu_holder(found)}"
            others = [job for job in found["jobs"] if job != self._spec.run_dir]
            since = found["since"]
        else:
            left = [] if is_ours else [pid for job in found.get("jobs", []) for pid in find_processes(job)]
            if left:  # a killed supervisor leaves processes that did not inherit its lock
                processes = ", ".join(str(pid) for pid in left)
                return f"used by processes {processes}, which are left of {describe_gpu_holder(found)}"
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
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)  # others take the mutex before they look
        return ""


def describe_gpu_holder(holder: Mapping[str, Any]) -> str:
    """For people who wait: what the file of a GPU's lock says."""
    if not holder:
        return "a job that is just taking it"
    run = f"run {holder['run']} " if holder["run"] else ""
    return f"{run}(job {holder['jobs'][-1]}) since {holder['since']}"


def open_gpu_locks_folder() -> Path:
    """The folder with the locks of this machine's GPUs for all runs of this user.

    Raises:
        OSError: it cannot be made, or somebody else made it.
    """
    folder = Path(os.environ.get(GPU_LOCKS_VARIABLE) or f"/tmp/rollouts-gpus-{os.getuid()}")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise PermissionError(
            f"{folder}, where locks of GPUs are kept, is not a folder of yours: remove it, or name another one in "
            f"{GPU_LOCKS_VARIABLE}"
        )
    return folder
