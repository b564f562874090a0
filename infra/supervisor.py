"""Keep one program running on a node, detached from whoever asked for it, and write down how it ended.

The node's side of jobs.py. Runs as `supervisor.py VERB RUN_DIR ...`; standard library only and one file,
because it is sent to nodes by content. Not here: what the program does, how a node is reached (session.py).

    start RUN_DIR (spec on stdin) ── finished? alive? ── no: fork ── supervisor ── the program, its own session
    status RUN_DIR                                                    │ holds .job/lock for its whole life, so the
    follow RUN_DIR LOG METRICS EVENTS (offsets) [STORE]               │ kernel tells if it lives, even after kill -9
    cancel RUN_DIR GRACE_S [STORE]                                    └ writes exit-<n>.json for attempt n, last
    renew RUN_DIR
    finish RUN_DIR ASKED_BY
    tail RUN_DIR MAX_BYTES

Each verb but `follow` prints one JSON object, `{"error": sentence}` with exit code 1 when it refuses. In RUN_DIR:

    job.json      what is to be done; written by start for each attempt, because ports and other placements that are
                  no part of the job's identity may change between attempts; never touched while the job lives
    log.txt       what the program wrote to stdout and stderr, raw, over all attempts
    exit-<n>.json how attempt n ended
    finish-<n>    who asks the program of attempt n to end by itself, with what it has; programs need not heed it
    result.json   written by the program, last: the job is finished
    .job/         lock, start.lock, lease, meta-<n>.json, cancel-<n>, spare-<n> (becomes that where the disk takes no
                  more files), ending-<n> (a limit of attempt n is reached), supervisor-<n>.txt (our own failures),
                  followed-<store> (locked by each process that follows the job for a run of that store)

The program's processes are found as descendants of the supervisor and, when that is gone, by the variable
ROLLOUTS_JOB=<run directory> in their environment. Where there is no /proc (macOS), by the program's process group.
The run directory has to be on a disk whose flock() works between the processes of the node.

A job that was given GPUs begins when no other has them: see GPUSlots. While it waits it is RUNNING, without a pid.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import dataclasses
import errno
import fcntl
import json
import math
import os
import select
import shutil
import signal
import stat
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing import Self  # Python 3.10, which a node may begin with, does not have it, nor datetime.UTC

# Any: JSON objects, and the parts of /proc, have no better type at this edge.
JsonObject = dict[str, Any]

INTERNAL_DIR = ".job"
JOB_VARIABLE = "ROLLOUTS_JOB"
ATTEMPT_VARIABLE = "ROLLOUTS_ATTEMPT"
GPU_LOCKS_VARIABLE = "ROLLOUTS_GPU_LOCKS"
"""Another folder for the locks of GPUs, for instance one that containers share."""
FIRST_GPU = "first"
"""Stands for the GPU that a program takes that is told of none; for nothing where there is no GPU."""

POLL_S = 0.1
LEFTOVER_GRACE_S = 2.0
"""What outlives the program itself gets this long between SIGTERM and SIGKILL."""
FOLLOWER_END_S = 3.0
"""Who stops following a job at the moment at which another one cancels it is gone within this time."""
UNKILLABLE_AFTER_S = 10.0
"""Leftovers that SIGKILL has not ended by then are counted and left to the kernel."""
CANCEL_MARGIN_S = 15.0
ENDING_WAIT_S = 60.0
"""So long a start waits for the end of an attempt that is being ended."""
GPU_POLL_S = 0.5
GPU_FILES_NEW_S = 3600.0
"""So often the files of locks that are held are touched: what is old is removed from /tmp, usually after ten days."""
NVIDIA_SMI_TIMEOUT_S = 30.0
CANNOT_START_CODE = 127
"""Of a program that could not be started when its GPUs were free; what a shell says of a missing command."""
MAX_BACKOFF_S = 30.0
NO_LOG = -1
"""In place of an offset in the log, from which on it is followed."""
LOG_TAIL_BYTES = 64 << 10
READ_BYTES = 256 << 10
MAX_LINE_BYTES = 4 << 20
EXIT_RECORD_BYTES = 4096

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

_INHERITED_NAMES = """
    PATH HOME USER LOGNAME SHELL LANG LANGUAGE TZ TMPDIR XDG_CACHE_HOME
    PYTHONPATH VIRTUAL_ENV CONDA_PREFIX LD_LIBRARY_PATH DYLD_LIBRARY_PATH OMP_NUM_THREADS MKL_NUM_THREADS
    HF_HOME HF_HUB_CACHE HF_HUB_OFFLINE HF_ENDPOINT HF_DATASETS_OFFLINE TRANSFORMERS_OFFLINE
    SSL_CERT_FILE SSL_CERT_DIR REQUESTS_CA_BUNDLE
    http_proxy https_proxy no_proxy all_proxy HTTP_PROXY HTTPS_PROXY NO_PROXY ALL_PROXY
"""
# PIP_ and UV_: a machine may tell both of them by variables alone where packages are.
_INHERITED_PREFIXES = ("LC_", "CUDA_", "NVIDIA_", "NCCL_", "GLOO_", "TORCH_", "TRITON_", "PIP_", "UV_")
_FOLDER_LISTS = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "SSL_CERT_DIR")
_PATHS = ("TMPDIR", "XDG_CACHE_HOME", "HF_HOME", "HF_HUB_CACHE", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE")


class JobError(Exception):
    """A verb cannot be carried out; its one sentence reaches the caller."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """What is to be run, where, and within which limits."""

    run_dir: str
    """Absolute path of the run directory: the identity of the job and its working directory."""
    argv: tuple[str, ...]
    job: Mapping[str, Any]
    """The content of job.json; holds no secrets."""
    env: Mapping[str, str] = dataclasses.field(default_factory=dict, repr=False)
    """Added to a minimal inherited environment; the only way for secrets, never written to disk."""
    timeout_s: float = 0.0
    """The whole attempt ends after this time; 0 is no limit."""
    grace_s: float = 30.0
    """Between SIGTERM and SIGKILL when the job is ended from outside."""
    max_restarts: int = 0
    """How often, within an attempt, a program that ended with another code than 0 is started again in a row."""
    healthy_s: float = 3600.0
    """A program that ran for so long before it ended is one that was not restarted yet: its restarts begin anew."""
    restart_backoff_s: float = 1.0
    """Pause before the first restart in a row; doubles with each, up to half a minute."""
    lease_s: float = 0.0
    """The job ends when nobody has renewed its lease for this time; 0 is no lease."""
    max_log_bytes: int = 256 << 20
    """What one attempt may add to log.txt; above it only the end of the output is kept."""
    gpus: tuple[str, ...] = ()
    """What it was given, by number as nvidia-smi counts, or FIRST_GPU; the job begins when no other has any of them."""
    gpu_group: str = ""
    """Jobs with the same name here have their GPUs together; empty for one that shares with nobody."""
    run_name: str = ""
    """Who asked for it, for people whose jobs wait."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How one start of the program ended."""

    code: int
    """The exit code; 128 + the signal's number when a signal ended it."""
    signal: int | None
    oom: bool
    """The kernel killed it because the node, or its container, was out of memory."""
    stopped_by: str
    """"cancelled", "timeout", "lease_expired", or "" when it ended by itself."""
    leftover_processes: int
    """Processes of the job that were still alive when the program had ended, and were killed."""


def main(argv: list[str]) -> int:
    """Carry out one verb; see the head of this file."""
    verb, run_dir, parameters = argv[1], os.path.realpath(argv[2]), argv[3:]
    if verb == "follow":
        with contextlib.suppress(BrokenPipeError), marked_as_followed(run_dir, *parameters[3:]):
            follow_job(run_dir, *(int(offset) for offset in parameters[:3]))
        return 0
    verbs: dict[str, Callable[[], JsonObject]] = {
        "start": lambda: start_job(dataclasses.replace(parse_spec(sys.stdin.buffer.read()), run_dir=run_dir)),
        "status": lambda: read_status(run_dir),
        "cancel": lambda: cancel_job(run_dir, float(parameters[0]), *parameters[1:]),
        "renew": lambda: renew_lease(run_dir),
        "finish": lambda: ask_to_finish(run_dir, parameters[0]),
        "tail": lambda: read_log_tail(run_dir, int(parameters[0])),
    }
    try:
        answer, exit_code = verbs[verb](), 0
    except (JobError, OSError) as error:
        answer, exit_code = {"error": f"{verb} of {run_dir}: {error}"}, 1
    sys.stdout.write(json.dumps(answer) + "\n")
    return exit_code


def parse_spec(text: bytes) -> JobSpec:
    """The spec that a client sent, as `dataclasses.asdict` and JSON made it."""
    try:
        document = json.loads(text)
        spec = JobSpec(**{**document, "argv": tuple(document["argv"]), "gpus": tuple(document["gpus"])})
    except (ValueError, TypeError, KeyError) as error:
        raise JobError(f"the spec on standard input is not one of this version: {error}") from error
    if not spec.argv or spec.max_log_bytes <= 0:
        raise JobError("a job needs a command and room for its log: argv and max_log_bytes must not be empty")
    return spec


# ── files ──


def internal_path(run_dir: str, name: str) -> Path:
    """A file that only this program reads and writes."""
    return Path(run_dir, INTERNAL_DIR, name)


def exit_path(run_dir: str, attempt: int) -> Path:
    """Where the record of an attempt's end appears."""
    return Path(run_dir, f"exit-{attempt}.json")


def read_json(path: Path) -> JsonObject | None:
    """The JSON object in a file; None when it is absent, half-written or something else."""
    try:
        return parse_object(path.read_bytes())
    except OSError:
        return None


def write_json(run_dir: str, name: str, document: Mapping[str, Any]) -> None:
    """Write a JSON object atomically and durably to a file of the run directory."""
    part = internal_path(run_dir, f"{Path(name).name}.{os.getpid()}.part")
    try:
        with part.open("w") as file:
            file.write(json.dumps(document, indent=2) + "\n")
            file.flush()
            os.fsync(file.fileno())
        part.rename(Path(run_dir, name))
    finally:
        part.unlink(missing_ok=True)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[int]:
    """Hold a file's exclusive lock; yields its descriptor."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
    finally:
        os.close(descriptor)


def is_supervised(run_dir: str) -> bool:
    """True while a supervisor of this job lives (or one is just being started)."""
    # Shared: looking never disturbs another look.
    return is_locked(internal_path(run_dir, "lock"), fcntl.LOCK_SH)


def is_locked(path: Path, probe: int) -> bool:
    """Whether a process holds a lock of the file that excludes `probe`, LOCK_SH or LOCK_EX; no file has none."""
    try:
        # NFS wants a file to be open for writing where its lock is exclusive; a look at a job needs no such right.
        descriptor = os.open(path, os.O_RDONLY if probe == fcntl.LOCK_SH else os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, probe | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def latest_attempt(run_dir: str) -> int:
    """The number of the last attempt; 0 before the first."""
    numbers = [int(path.stem.removeprefix("meta-")) for path in Path(run_dir, INTERNAL_DIR).glob("meta-*.json")]
    return max(numbers, default=0)


def read_boot_id() -> str:
    """Changes with every boot of the machine; empty where the system does not say."""
    if sys.platform == "linux":
        return _read_text(Path("/proc/sys/kernel/random/boot_id")).strip()
    else:  # noqa: RET505 - the type checker knows only one of the two systems at a time
        query = ["sysctl", "-n", "kern.bootsessionuuid"]
        return subprocess.run(query, capture_output=True, text=True, check=False, timeout=10).stdout.strip()


# ── status ──


def read_status(run_dir: str) -> JsonObject:
    """What is known about the job now; changes nothing."""
    is_alive = is_supervised(run_dir)  # asked first: once it is gone, nothing below changes any more
    attempt = latest_attempt(run_dir)
    meta = read_json(internal_path(run_dir, f"meta-{attempt}.json")) or {}
    exit_record = None if is_alive else read_json(exit_path(run_dir, attempt))
    status: JsonObject = {
        "run_dir": run_dir,
        "attempt": attempt,
        "attached": False,
        "pid": meta.get("pid") if is_alive else None,
        "restarts": meta.get("restarts", 0),
        "waits_for": meta.get("waits_for", "") if is_alive else "",
        "log_size": file_size(Path(run_dir, "log.txt")),
        "exit": exit_record,
        "reason": "",
        "orphans": [],
    }
    if is_alive:
        return {**status, "state": "RUNNING"}
    if read_json(Path(run_dir, "result.json")) is not None:
        return {**status, "state": "FINISHED"}
    if exit_record is not None:
        return {**status, "state": "EXITED"}
    if attempt == 0:
        return {**status, "state": "ABSENT"}
    if meta.get("boot_id") != read_boot_id():
        return {**status, "state": "LOST", "reason": "the node was rebooted"}
    orphans = find_processes(run_dir, group=meta.get("pid"))
    return {**status, "state": "LOST", "reason": "its supervisor was killed", "orphans": orphans}


def file_size(path: Path) -> int:
    """The size in bytes; 0 when there is no such file."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def renew_lease(run_dir: str) -> JsonObject:
    """Tell the supervisor that somebody still wants the job. Touching the file .job/lease does the same."""
    with contextlib.suppress(FileNotFoundError):
        os.utime(internal_path(run_dir, "lease"))
    return read_status(run_dir)


def read_log_tail(run_dir: str, max_bytes: int) -> JsonObject:
    """The last bytes of the log, in base64."""
    path = Path(run_dir, "log.txt")
    content = read_from(path, max(0, file_size(path) - max_bytes), max_bytes)
    return {"log": base64.b64encode(content).decode()}


def read_from(path: Path, offset: int, max_bytes: int) -> bytes:
    """The bytes of a file from an offset on; empty when there are none, or no file."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(max_bytes)
    except FileNotFoundError:
        return b""


# ── processes ──


def find_processes(run_dir: str, *, supervisor: int | None = None, group: int | None = None) -> list[int]:
    """All live processes of the job except this one.

    Args:
        supervisor: where /proc exists, its descendants are found too, whatever they did to their environment.
        group: where there is no /proc, the process group that stands for the job.
    """
    if not Path("/proc/self/environ").exists():
        return find_group(group)
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
        except OSError:  # ended while we looked, or somebody else's
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


def find_group(group: int | None) -> list[int]:
    """The live processes of a process group, by the table that every system prints."""
    if group is None:
        return []
    table = subprocess.run(
        ["ps", "-A", "-o", "pid=,pgid=,stat="], capture_output=True, text=True, check=True, timeout=10
    ).stdout
    rows = [line.split() for line in table.splitlines()]
    return [int(pid) for pid, pgid, state in rows if int(pgid) == group and not state.startswith("Z")]


def send_signal(pids: list[int], number: signal.Signals) -> None:
    """Send a signal to those of the processes that still exist."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def end_orphans(run_dir: str, grace_s: float) -> None:
    """End what is left of a job whose supervisor is gone: SIGTERM, and SIGKILL after `grace_s`."""
    meta = read_json(internal_path(run_dir, f"meta-{latest_attempt(run_dir)}.json")) or {}
    if meta.get("boot_id") != read_boot_id():
        return
    kill_at = time.monotonic() + grace_s
    send_signal(find_processes(run_dir, group=meta.get("pid")), signal.SIGTERM)
    while orphans := find_processes(run_dir, group=meta.get("pid")):
        if time.monotonic() >= kill_at + UNKILLABLE_AFTER_S:
            raise JobError(f"processes {orphans} of an earlier attempt cannot be killed: reboot the node")
        if time.monotonic() >= kill_at:
            send_signal(orphans, signal.SIGKILL)
        time.sleep(POLL_S)


def count_oom_kills(membership: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")) -> int:
    """How many processes the kernel has killed in our control group for want of memory; 0 where it does not count.

    A container often sees its own group at the root of the mount, whatever the path says.
    """
    for line in _read_text(membership).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        tree, name = (mount, "memory.events") if controllers == "" else (mount / "memory", "memory.oom_control")
        for directory in (tree / path.lstrip("/"), tree):
            counts = dict(row.split() for row in _read_text(directory / name).splitlines())
            if "oom_kill" in counts:
                return int(counts["oom_kill"])
    return 0


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


# ── start ──


def start_job(spec: JobSpec) -> JsonObject:
    """Start the next attempt, unless the job is finished or running; safe to call from many sides at once.

    An attempt that is being ended is waited for, not attached to. One that has a lease keeps it by this.
    """
    run_dir = spec.run_dir
    Path(run_dir).mkdir(parents=True, exist_ok=True)
    Path(run_dir, INTERNAL_DIR).mkdir(mode=0o700, exist_ok=True)
    deadline = time.monotonic() + ENDING_WAIT_S
    while True:
        with locked(internal_path(run_dir, "start.lock")) as start_lock:
            status = renew_lease(run_dir)  # before the look below, see StopRequests
            if not is_being_ended(status):
                return start_or_find(spec, status, start_lock)
        # Outside the lock, which a second request to cancel needs: else that would end what is started here.
        if time.monotonic() >= deadline:
            raise JobError(
                f"attempt {status['attempt']} is being ended, and did not end within {ENDING_WAIT_S:g} s: "
                "look at its processes"
            )
        time.sleep(POLL_S / 2)


def is_being_ended(status: JsonObject) -> bool:
    """Whether the end of an attempt that still runs has been asked for, or one of its limits is reached."""
    names = [f"{reason}-{status['attempt']}" for reason in ("cancel", "ending")]
    return status["state"] == "RUNNING" and any(internal_path(status["run_dir"], name).exists() for name in names)


def start_or_find(spec: JobSpec, status: JsonObject, start_lock: int) -> JsonObject:
    """The status of the next attempt, or the given one of a job that is finished or running.

    Args:
        start_lock: open file whose lock is held.
    """
    run_dir = spec.run_dir
    if status["state"] in ("RUNNING", "FINISHED"):
        return {**status, "attached": True}
    write_json(run_dir, "job.json", spec.job)
    end_orphans(run_dir, LEFTOVER_GRACE_S)
    # Taken before the fork, which shares it: there is no moment in which the job lives and nobody holds it.
    with locked(internal_path(run_dir, "lock")):
        answer = detach(spec, status["attempt"] + 1, start_lock)
    if "error" in answer:
        raise JobError(answer["error"])
    return read_status(run_dir)


def detach(spec: JobSpec, attempt: int, start_lock: int) -> JsonObject:
    """Fork the supervisor and return what it reports once the program is spawned (empty), or why it is not."""
    report_read, report_write = os.pipe()
    middle = os.fork()
    if middle == 0:
        os.setsid()
        if os.fork() == 0:
            os.close(report_read)
            os.close(start_lock)  # shared with the starter, which must be able to give it up
            _run_detached(spec, attempt, report_write)
        os._exit(0)
    os.close(report_write)
    os.waitpid(middle, 0)
    with os.fdopen(report_read, "rb") as pipe:
        text = pipe.read()
    if not text:
        reason = _read_text(internal_path(spec.run_dir, f"supervisor-{attempt}.txt")).strip()
        return {"error": f"the supervisor ended before the program was started: {reason[-500:]}"}
    answer: JsonObject = json.loads(text)
    return answer


def _run_detached(spec: JobSpec, attempt: int, report_fd: int) -> None:
    """Be the supervisor until the job has ended, and never return."""
    exit_code = 1
    try:
        for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT):
            # At a shutdown we outlive the program for the moment that it takes to write down its end.
            # A function, not SIG_IGN, because that would be passed on to the program.
            signal.signal(number, lambda *_: None)
        with contextlib.suppress(FileNotFoundError):  # a folder that was removed: nothing is found there either
            os.environ.update(with_absolute_paths(os.environ, Path.cwd()))
        os.chdir("/")
        own_output = internal_path(spec.run_dir, f"supervisor-{attempt}.txt")
        null = os.open(os.devnull, os.O_RDONLY)
        output = os.open(own_output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(null, 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        become_subreaper()
        supervise(spec, attempt, report_fd)
        exit_code = 0
    except BaseException:  # noqa: BLE001 - the last frame of the process: what it does not write down is lost
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(exit_code)


def with_absolute_paths(variables: Mapping[str, str], folder: Path) -> dict[str, str]:
    """The variables that name paths of this process in `folder`, as a process in another folder needs them.

    A part of PYTHONPATH or PATH that is empty means the folder itself; what begins with ~ or $ its readers expand.
    """

    def absolute(path: str) -> str:
        return path if path.startswith(("/", "~", "$")) else str(folder / path)

    lists = {
        name: os.pathsep.join(map(absolute, variables[name].split(os.pathsep)))
        for name in _FOLDER_LISTS
        if variables.get(name)
    }
    return lists | {name: absolute(variables[name]) for name in _PATHS if variables.get(name)}


def become_subreaper() -> None:
    """Make orphans among our descendants our children, so that they can be found and waited for (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


# ── GPUs ──


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
        number = next((n for n, uuid in enumerate(uuids) if gpu in (str(n), uuid)), None)
        name = f"number-{gpu}" if number is None else uuids[number]
        slots[name] = GPUSlot(name=name.replace("/", "_"), label=f"GPU {gpu if number is None else number}")
    return [slots[name] for name in sorted(slots)]


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
            since = datetime.now(timezone.utc).isoformat(timespec="seconds")  # noqa: UP017 - see the head
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


def append_event(run_dir: str, attempt: int, event: str, **details: Any) -> None:  # Any: JSON
    """Append an event, as the program will; on a full disk it is left out."""
    path = Path(run_dir, "events.jsonl")
    line = {"event": event, "attempt": attempt, "time": round(time.time(), 3), **details}
    with contextlib.suppress(OSError), path.open("a+b") as file:
        file.seek(0)
        content = file.read()
        file.truncate(content.rfind(b"\n") + 1)  # an attempt that was killed may have torn its last line
        file.write(json.dumps(line).encode() + b"\n")


# ── what a supervisor holds ──


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """One start of the program."""

    process: subprocess.Popen[bytes]
    output_fd: int
    """The reading end of the pipe to which it writes."""
    oom_kills_before: int
    """The kernel's count of out-of-memory kills when it was started."""


class StopRequests:
    """What can end a job from outside: a cancel request, its time limit, its lease.

    Time is counted on the monotonic clock, which stands still while a machine sleeps: a laptop that wakes up finds
    its jobs with the time they had left.

    That a limit is reached is noted in a file, so that no start attaches to a job that is about to end. A start renews
    the lease, and then looks for the note; here the note is made, and then the lease is looked at once more. So a start
    that does not find the note has kept the lease.
    """

    def __init__(self, spec: JobSpec, attempt: int) -> None:
        self._cancel_path = internal_path(spec.run_dir, f"cancel-{attempt}")
        self._ending_path = internal_path(spec.run_dir, f"ending-{attempt}")
        self._deadline = time.monotonic() + spec.timeout_s if spec.timeout_s > 0 else math.inf
        self._lease_path = internal_path(spec.run_dir, "lease")
        self._lease_s = spec.lease_s if spec.lease_s > 0 else math.inf
        self._lease_stamp = 0.0
        self._renewed = time.monotonic()
        self._spec_grace_s = spec.grace_s

    @property
    def grace_s(self) -> float:
        """What the cancel request asks for, or else the spec."""
        with contextlib.suppress(OSError, ValueError):
            return float(self._cancel_path.read_text())
        return self._spec_grace_s

    def find(self) -> str:
        """Why the job has to end now; empty when it has not."""
        if self._cancel_path.exists():
            return "cancelled"
        if time.monotonic() >= self._deadline:
            self._note_ending()
            return "timeout"
        if not self._has_lapsed():
            return ""
        self._note_ending()
        if self._has_lapsed():
            return "lease_expired"
        self._ending_path.unlink(missing_ok=True)
        return ""

    def _has_lapsed(self) -> bool:
        with contextlib.suppress(FileNotFoundError):
            stamp = self._lease_path.stat().st_mtime
            if stamp != self._lease_stamp:
                self._lease_stamp, self._renewed = stamp, time.monotonic()
        return time.monotonic() >= self._renewed + self._lease_s

    def _note_ending(self) -> None:
        with contextlib.suppress(OSError):  # a full disk keeps no job alive
            self._ending_path.touch()

    def wait(self, pause_s: float) -> str:
        """Wait for a while, or until the job has to end; returns why, or empty."""
        until = time.monotonic() + pause_s
        while not (reason := self.find()) and time.monotonic() < until:
            time.sleep(POLL_S)
        return reason


class CappedLog:
    """The log file of a job: takes up to a number of bytes, then keeps only the end of what follows.

    A disk without room loses log, and is no reason for anything else to fail.
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._max_bytes = max_bytes
        self._max_tail_bytes = min(LOG_TAIL_BYTES, max_bytes // 4)
        self._room = max_bytes - self._max_tail_bytes
        self._tail = bytearray()
        self._num_left_out = 0
        self._is_capped = False
        self._is_at_line_start = True

    def write(self, chunk: bytes) -> None:
        """Append what the program wrote, or what of it there is room for."""
        head, rest = chunk[: self._room], chunk[self._room :]
        self._room -= len(head)
        self._append(head)
        if rest and not self._is_capped:
            self._is_capped = True
            self.note(f"the log has reached {self._max_bytes} bytes: from here on only its end is kept")
        self._tail += rest
        num_too_many = max(0, len(self._tail) - self._max_tail_bytes)
        self._num_left_out += num_too_many
        del self._tail[:num_too_many]

    def note(self, sentence: str) -> None:
        """Append a line of our own."""
        line_break = b"" if self._is_at_line_start else b"\n"
        self._append(line_break + f"[supervisor] {sentence}\n".encode())

    def _append(self, content: bytes) -> None:
        rest = content
        while rest:
            try:
                rest = rest[os.write(self._descriptor, rest) :]
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                    raise
                return
        if content:
            self._is_at_line_start = content.endswith(b"\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._num_left_out:
            self.note(f"{self._num_left_out} bytes are left out here")
        self._append(bytes(self._tail))
        os.close(self._descriptor)


class ProgramOutput:
    """The pipe to which the program writes, emptied into the log."""

    def __init__(self, descriptor: int, log: CappedLog) -> None:
        self._descriptor = descriptor
        self._log = log
        self._is_open = True

    def pump(self, wait_s: float = POLL_S) -> bool:
        """Wait a moment for output and move it to the log; true if there was some."""
        if not self._is_open:
            time.sleep(wait_s)
            return False
        if not select.select([self._descriptor], [], [], wait_s)[0]:
            return False
        chunk = os.read(self._descriptor, READ_BYTES)
        self._log.write(chunk)
        if not chunk:
            self._is_open = False
            os.close(self._descriptor)
        return bool(chunk)

    def drain(self) -> None:
        """Move what is left, once the program has ended, and close the pipe."""
        for _ in range(1024):  # a process that could not be killed may write for ever
            if not self.pump(wait_s=0):
                break
        if self._is_open:
            self._is_open = False
            os.close(self._descriptor)


# ── supervise ──


def supervise(spec: JobSpec, attempt: int, report_fd: int) -> None:
    """Run the program, again where it may be restarted, and write exit-<n>.json when it has ended for good."""
    started_at, started = datetime.now(timezone.utc), time.monotonic()  # noqa: UP017 - see the head
    log_path = Path(spec.run_dir, "log.txt")
    meta: JsonObject = {
        "attempt": attempt,
        "supervisor_pid": os.getpid(),
        "boot_id": read_boot_id(),
        "started_at": started_at.isoformat(),
        "log_offset": file_size(log_path),
        "pid": None,
        "restarts": 0,
        "waits_for": "",
    }
    try:
        exit_fd = preallocate_exit_record(spec.run_dir, attempt)
        for name in ("lease", f"spare-{attempt}"):
            internal_path(spec.run_dir, name).touch()
        write_meta(spec.run_dir, meta)
        opened_log = CappedLog(log_path, spec.max_log_bytes)  # before anybody hears of the start, and looks for it
        slots = GPUSlots(spec, find_gpu_slots(spec.gpus, os.environ.get("CUDA_VISIBLE_DEVICES")))
        waits_for = slots.take()
        program = None if waits_for else spawn_program(spec, attempt, slots.descriptors)
    except (OSError, ValueError, subprocess.SubprocessError) as error:  # ValueError: a zero byte in an argument
        for name in (f"meta-{attempt}.json", f"exit-{attempt}.json"):
            internal_path(spec.run_dir, name).unlink(missing_ok=True)
        report(report_fd, {"error": f"{spec.argv[0]} cannot be started: {error}"})
        return
    update_meta(spec.run_dir, {**meta, "pid": program and program.process.pid, "waits_for": waits_for})
    report(report_fd, {})
    with opened_log as log:
        started_program = program or wait_and_spawn(spec, meta, slots, waits_for, log)
        if isinstance(started_program, Program):
            ending, restarts = run_with_restarts(started_program, spec, meta, log, slots)
        else:
            ending, restarts = started_program, 0
    slots.release()  # before anybody hears of the end: the next job may want them at once
    record = {
        "attempt": attempt,
        "code": ending.code,
        "signal": ending.signal,
        "cancelled": ending.stopped_by == "cancelled",
        "timeout": ending.stopped_by == "timeout",
        "lease_expired": ending.stopped_by == "lease_expired",
        "oom": ending.oom,
        "leftover_processes": ending.leftover_processes,
        "restarts": restarts,
        "seconds": round(time.monotonic() - started, 3),
        "started_at": started_at.isoformat(),
        "ended_at": datetime.now(timezone.utc).isoformat(),  # noqa: UP017 - see the head
    }
    write_exit_record(spec.run_dir, attempt, exit_fd, record)


def report(report_fd: int, answer: JsonObject) -> None:
    """Tell the starter, who waits, that the program is spawned, or why it is not."""
    with contextlib.suppress(BrokenPipeError), os.fdopen(report_fd, "w") as pipe:
        pipe.write(json.dumps(answer))


def write_meta(run_dir: str, meta: JsonObject) -> None:
    """Write down what a later look needs to know about a running attempt."""
    write_json(run_dir, f"{INTERNAL_DIR}/meta-{meta['attempt']}.json", meta)


def update_meta(run_dir: str, meta: JsonObject) -> None:
    """Write it down if that is possible: a full disk is no reason to end a healthy program."""
    try:
        write_meta(run_dir, meta)
    except OSError:
        traceback.print_exc()


def preallocate_exit_record(run_dir: str, attempt: int) -> int:
    """Reserve the room of exit-<n>.json now, so that it can be written on a full disk; returns the open file."""
    path = internal_path(run_dir, f"exit-{attempt}.json")
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
    os.write(descriptor, b" " * EXIT_RECORD_BYTES)
    os.fsync(descriptor)
    return descriptor


def write_exit_record(run_dir: str, attempt: int, descriptor: int, record: JsonObject) -> None:
    """Fill the reserved record and let it appear, complete, under its public name."""
    text = json.dumps(record, indent=2).encode() + b"\n"
    assert len(text) <= EXIT_RECORD_BYTES, f"{len(text)} bytes, {EXIT_RECORD_BYTES} are reserved"
    os.pwrite(descriptor, text, 0)
    os.ftruncate(descriptor, len(text))
    os.fsync(descriptor)
    os.close(descriptor)
    internal_path(run_dir, f"exit-{attempt}.json").rename(exit_path(run_dir, attempt))


def wait_and_spawn(
    spec: JobSpec, meta: JsonObject, slots: GPUSlots, waits_for: str, log: CappedLog
) -> Program | Ending:
    """Start the program when the job's GPUs are free; how the job ended, when it was ended before that.

    The time limit does not count here. The lease does: nobody who is gone waits for a GPU.
    """
    began = time.monotonic()
    requests = StopRequests(dataclasses.replace(spec, timeout_s=0.0), meta["attempt"])
    said, current = "", waits_for
    try:
        while current:
            if current != said:
                said = current
                log.note(current)
                update_meta(spec.run_dir, {**meta, "waits_for": current})
                append_event(spec.run_dir, meta["attempt"], "waits_for_gpus", message=current)
            if stopped_by := requests.wait(GPU_POLL_S):
                log.note(f"{stopped_by} before its GPUs were free")
                return _ending_without_program(128 + signal.SIGTERM, stopped_by)
            slots.keep_files()
            current = slots.take()
        # Before the program is there, which appends to the same file.
        append_event(spec.run_dir, meta["attempt"], "has_gpus", waited_s=round(time.monotonic() - began, 1))
        program = spawn_program(spec, meta["attempt"], slots.descriptors)
    except OSError as error:
        log.note(f"{spec.argv[0]} cannot be started: {error}")
        return _ending_without_program(CANNOT_START_CODE)
    update_meta(spec.run_dir, {**meta, "pid": program.process.pid})
    return program


def _ending_without_program(code: int, stopped_by: str = "") -> Ending:
    is_stopped = signal.SIGTERM if stopped_by else None
    return Ending(code=code, signal=is_stopped, oom=False, stopped_by=stopped_by, leftover_processes=0)


def run_with_restarts(
    program: Program, spec: JobSpec, meta: JsonObject, log: CappedLog, slots: GPUSlots
) -> tuple[Ending, int]:
    """Watch the program to its final end; returns that end and the number of restarts before it."""
    requests = StopRequests(spec, meta["attempt"])
    restarts = in_a_row = 0
    while True:
        began = time.monotonic()
        ending = watch_program(program, spec, log, requests, slots.keep_files)
        if time.monotonic() - began >= spec.healthy_s:
            in_a_row = 0
        if ending.code == 0 or ending.stopped_by or in_a_row >= spec.max_restarts:
            return ending, restarts
        pause_s = min(spec.restart_backoff_s * 2.0**in_a_row, MAX_BACKOFF_S)
        log.note(f"the program ended with code {ending.code}: restart {restarts + 1} in {pause_s:g} s")
        if stopped_by := requests.wait(pause_s):
            return dataclasses.replace(ending, stopped_by=stopped_by), restarts
        try:
            program = spawn_program(spec, meta["attempt"], slots.descriptors)
        except OSError as error:
            log.note(f"the program cannot be started again: {error}")
            return ending, restarts
        restarts += 1
        in_a_row += 1
        update_meta(spec.run_dir, {**meta, "pid": program.process.pid, "restarts": restarts})


def spawn_program(spec: JobSpec, attempt: int, gpu_locks: Sequence[int] = ()) -> Program:
    """Start the program in a session of its own; on Linux the kernel kills it when this process dies.

    Args:
        gpu_locks: open files that it inherits.

    Raises:
        OSError: its executable cannot be run.
    """
    supervisor_pid = os.getpid()
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None

    def die_with_supervisor() -> None:
        if libc is not None:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != supervisor_pid:  # it died before the line above
            os._exit(125)

    output_fd, program_fd = os.pipe()
    oom_kills_before = count_oom_kills()
    try:
        process = subprocess.Popen(
            spec.argv,
            cwd=spec.run_dir,
            env=build_environment(os.environ, spec, attempt),
            stdin=subprocess.DEVNULL,
            stdout=program_fd,
            stderr=program_fd,
            start_new_session=True,
            pass_fds=gpu_locks,
            preexec_fn=die_with_supervisor,
        )
    except OSError:
        os.close(output_fd)
        raise
    finally:
        os.close(program_fd)
    return Program(process=process, output_fd=output_fd, oom_kills_before=oom_kills_before)


def build_environment(inherited: Mapping[str, str], spec: JobSpec, attempt: int) -> dict[str, str]:
    """The program's environment: what is needed to run anything at all, what the spec adds, and who it is."""
    inherited_names = set(_INHERITED_NAMES.split())
    kept = {
        name: value
        for name, value in inherited.items()
        if name in inherited_names or name.startswith(_INHERITED_PREFIXES)
    }
    return {
        "PYTHONUNBUFFERED": "1",
        "PYTHONUTF8": "1",  # what a job does is the same whatever the node's locale
        "SPT_NOENV": "1",  # setproctitle, which engines use, would overwrite the variable that marks our processes
        **kept,
        **spec.env,
        JOB_VARIABLE: spec.run_dir,
        ATTEMPT_VARIABLE: str(attempt),
    }


def watch_program(
    program: Program, spec: JobSpec, log: CappedLog, requests: StopRequests, on_look: Callable[[], None] = lambda: None
) -> Ending:
    """Collect the program's output until it and all its processes have ended; end them when that is requested.

    Args:
        on_look: called several times a second.
    """
    output = ProgramOutput(program.output_fd, log)
    wait_status: int | None = None
    stopped_by = ""
    kill_at = math.inf
    leftover_processes = 0
    while True:
        on_look()
        output.pump()
        if wait_status is None:
            wait_status = reap_children(program.process)
        if wait_status is None and not stopped_by:
            stopped_by = requests.find()
        if wait_status is None and not stopped_by:
            continue
        # The program may have ended since it was looked for above, for instance while a cancel request was read.
        if (ended := reap_children(program.process)) is not None:
            wait_status = ended
        processes = find_processes(spec.run_dir, supervisor=os.getpid(), group=program.process.pid)
        now = time.monotonic()
        if wait_status is not None:
            leftover_processes = max(leftover_processes, len(processes))
            if not processes or now > kill_at + UNKILLABLE_AFTER_S:
                break
        if kill_at == math.inf:
            kill_at = now + (requests.grace_s if stopped_by else LEFTOVER_GRACE_S)
            send_signal(processes, signal.SIGTERM)
        elif now >= kill_at:
            send_signal(processes, signal.SIGKILL)
    output.drain()
    exit_code = os.waitstatus_to_exitcode(wait_status)
    was_killed_by_kernel = exit_code == -signal.SIGKILL and not stopped_by
    return Ending(
        code=exit_code if exit_code >= 0 else 128 - exit_code,
        signal=-exit_code if exit_code < 0 else None,
        oom=was_killed_by_kernel and count_oom_kills() > program.oom_kills_before,
        stopped_by=stopped_by,
        leftover_processes=leftover_processes,
    )


def reap_children(process: subprocess.Popen[bytes]) -> int | None:
    """Take note of every ended child, adopted ones too; returns the wait status of `process` if it was among them."""
    found: int | None = None
    while True:
        try:
            pid, wait_status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if pid == 0:
            return found
        if pid == process.pid:
            found = wait_status
            process.returncode = os.waitstatus_to_exitcode(wait_status)


# ── cancel ──


def cancel_job(run_dir: str, grace_s: float, store: str = "") -> JsonObject:
    """End the job and return once its end is recorded: SIGTERM to all its processes, SIGKILL after `grace_s`.

    Args:
        store: on whose behalf; a job that runs of other stores follow is left RUNNING. Empty ends it all the same.
    """
    if not Path(run_dir, INTERNAL_DIR).is_dir() or (store and is_followed_elsewhere(run_dir, store)):
        return read_status(run_dir)
    with locked(internal_path(run_dir, "start.lock")):  # a start under way becomes either running or nothing
        status = read_status(run_dir)
        if status["state"] == "LOST":
            end_orphans(run_dir, grace_s)
        if status["state"] != "RUNNING":
            return read_status(run_dir)
        request_cancel(run_dir, status["attempt"], grace_s)
    deadline = time.monotonic() + grace_s + CANCEL_MARGIN_S
    while is_supervised(run_dir) and latest_attempt(run_dir) == status["attempt"]:
        if time.monotonic() >= deadline:
            raise JobError(f"the job did not end within {grace_s + CANCEL_MARGIN_S:g} s: look at its processes")
        time.sleep(POLL_S / 2)
    ended = read_status(run_dir)
    if ended["attempt"] == status["attempt"] and ended["state"] != "RUNNING":
        return ended
    # Somebody waited for the end, and starts the next attempt, which is none of ours.
    record = read_json(exit_path(run_dir, status["attempt"]))
    return {**status, "state": "EXITED", "pid": None, "waits_for": "", "exit": record}


def request_cancel(run_dir: str, attempt: int, grace_s: float) -> None:
    """Let the file appear that asks for the end of an attempt; where it stays empty the spec's grace holds."""
    request = internal_path(run_dir, f"cancel-{attempt}")
    try:
        request.touch()
    except OSError:  # the disk takes no more files
        internal_path(run_dir, f"spare-{attempt}").rename(request)
    with contextlib.suppress(OSError):  # it is full
        request.write_text(str(grace_s))


def ask_to_finish(run_dir: str, asked_by: str) -> JsonObject:
    """Ask the program to end by itself, with what it has, and return at once; a job that does not run is left alone."""
    if not Path(run_dir, INTERNAL_DIR).is_dir():
        return read_status(run_dir)
    with locked(internal_path(run_dir, "start.lock")):
        status = read_status(run_dir)
        if status["state"] == "RUNNING":
            partial = internal_path(run_dir, f"finish-{os.getpid()}")
            partial.write_text(asked_by)
            partial.replace(Path(run_dir, f"finish-{status['attempt']}"))
    return status


# ── follow ──


@contextlib.contextmanager
def marked_as_followed(run_dir: str, store: str = "") -> Iterator[None]:
    """Let other stores see that a run of this one follows the job: a lock, which the kernel frees with this process.

    Where the mark cannot be made, as on a full disk or before there is a job, the job is followed without it.
    """
    descriptor = None
    if store:
        with contextlib.suppress(OSError):
            descriptor = os.open(internal_path(run_dir, f"followed-{store}"), os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(descriptor, fcntl.LOCK_SH)  # waits for who looks, which takes a moment
    try:
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def is_followed_elsewhere(run_dir: str, store: str) -> bool:
    """Whether runs of other stores follow the job, and do not stop at this moment."""
    own = internal_path(run_dir, f"followed-{store}")
    marks = [path for path in Path(run_dir, INTERNAL_DIR).glob("followed-*") if path != own]
    # Of two runs that are cancelled at once each would leave the job to the other one, and nobody would end it.
    deadline = time.monotonic() + FOLLOWER_END_S
    while is_followed := any(is_locked(path, fcntl.LOCK_EX) for path in marks):
        if time.monotonic() >= deadline:
            break
        time.sleep(POLL_S)
    return is_followed


def follow_job(run_dir: str, log_offset: int, metrics_offset: int, events_offset: int) -> None:
    """Print what the job writes as it appears, one JSON object per line, and its status when it has ended.

    Ends early when standard input ends or nobody reads the output: the client is gone. Of the log nothing is printed
    from the offset NO_LOG on.

        {"log": base64, "offset": n}      {"metrics": {...}, "offset": n}      {"event": {...}, "offset": n}
        {"skipped": "metrics.jsonl", "offset": n}: a line that is no JSON object      {"status": {...}}

    Each offset is the position behind what the line delivers: where to go on after a broken connection.
    """
    while True:
        is_running = is_supervised(run_dir)  # asked before reading: whatever it wrote is there when it is gone
        before = (log_offset, metrics_offset, events_offset)
        if log_offset != NO_LOG:
            log_offset = emit_log(Path(run_dir, "log.txt"), log_offset)
        metrics_offset = emit_records("metrics", Path(run_dir, "metrics.jsonl"), metrics_offset)
        events_offset = emit_records("event", Path(run_dir, "events.jsonl"), events_offset)
        sys.stdout.flush()
        if before != (log_offset, metrics_offset, events_offset):
            continue
        if not is_running:
            emit({"status": read_status(run_dir)})
            sys.stdout.flush()
            return
        is_readable = select.select([0], [], [], POLL_S)[0]
        if is_readable and not os.read(0, READ_BYTES):
            return


def emit(message: JsonObject) -> None:
    """Print one message of `follow`."""
    sys.stdout.write(json.dumps(message) + "\n")


def emit_log(path: Path, offset: int) -> int:
    """Print the next piece of the log; returns the offset behind it."""
    content = read_from(path, offset, READ_BYTES) if file_size(path) > offset else b""
    if content:
        emit({"log": base64.b64encode(content).decode(), "offset": offset + len(content)})
    return offset + len(content)


def emit_records(kind: str, path: Path, offset: int) -> int:
    """Print the complete lines of a JSONL file from an offset on; returns the offset behind the last of them."""
    content = read_from(path, offset, MAX_LINE_BYTES) if file_size(path) > offset else b""
    complete_bytes = content.rfind(b"\n") + 1
    if complete_bytes == 0 and len(content) == MAX_LINE_BYTES:
        emit({"skipped": path.name, "offset": offset + len(content)})  # no line of ours is that long
        return offset + len(content)
    position = offset
    for line in content[:complete_bytes].split(b"\n")[:-1]:
        position += len(line) + 1
        record = parse_object(line)
        emit({"skipped": path.name, "offset": position} if record is None else {kind: record, "offset": position})
    return position


def parse_object(text: bytes) -> JsonObject | None:
    """The JSON object in a text, or None."""
    try:
        document = json.loads(text)
    except ValueError:
        return None
    return document if isinstance(document, dict) else None


if __name__ == "__main__":
    sys.exit(main(sys.argv))
