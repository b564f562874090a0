"""One start of the program: its environment, its output, requests to end it, and its exit."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import errno
import math
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rollouts.infra.supervisor.files import POLL_S, READ_BYTES, granted_path, internal_path, read_stop_state
from rollouts.infra.supervisor.processes import (
    JOB_VARIABLE,
    UNKILLABLE_AFTER_S,
    count_oom_kills,
    find_processes,
    send_signal,
)
from rollouts.infra.supervisor.spec import JobSpec

if TYPE_CHECKING:
    from typing import Self  # Python 3.10, which nodes may have, lacks this name


# ── environment ──


ATTEMPT_VARIABLE = "ROLLOUTS_ATTEMPT"
_INHERITED_NAMES = """
    PATH HOME USER LOGNAME SHELL LANG LANGUAGE TZ TMPDIR XDG_CACHE_HOME
    PYTHONPATH ROLLOUTS_CODE_PATH VIRTUAL_ENV
    CONDA_PREFIX LD_LIBRARY_PATH DYLD_LIBRARY_PATH OMP_NUM_THREADS MKL_NUM_THREADS
    HF_HOME HF_HUB_CACHE HF_HUB_OFFLINE HF_ENDPOINT HF_DATASETS_OFFLINE TRANSFORMERS_OFFLINE
    SSL_CERT_FILE SSL_CERT_DIR REQUESTS_CA_BUNDLE
    http_proxy https_proxy no_proxy all_proxy HTTP_PROXY HTTPS_PROXY NO_PROXY ALL_PROXY
"""
# PIP_ and UV_ are included because some machines configure their package index only by variables.
_INHERITED_PREFIXES = ("LC_", "CUDA_", "NVIDIA_", "NCCL_", "GLOO_", "TORCH_", "TRITON_", "PIP_", "UV_")
_FOLDER_LISTS = ("PATH", "PYTHONPATH", "ROLLOUTS_CODE_PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "SSL_CERT_DIR")
_PATHS = ("TMPDIR", "XDG_CACHE_HOME", "HF_HOME", "HF_HUB_CACHE", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE")


def build_environment(inherited: Mapping[str, str], spec: JobSpec, attempt: int) -> dict[str, str]:
    """Return the program's environment: basic inherited variables, the spec's variables, and the job's identity."""
    inherited_names = set(_INHERITED_NAMES.split())
    kept = {
        name: value
        for name, value in inherited.items()
        if name in inherited_names or name.startswith(_INHERITED_PREFIXES)
    }
    return {
        "PYTHONUNBUFFERED": "1",
        "PYTHONUTF8": "1",  # programs then behave equally in every locale
        "SPT_NOENV": "1",  # keeps setproctitle, which engines use, from overwriting JOB_VARIABLE
        **kept,
        **spec.env,
        JOB_VARIABLE: spec.run_dir,
        ATTEMPT_VARIABLE: str(attempt),
    }


def with_absolute_paths(variables: Mapping[str, str], folder: Path) -> dict[str, str]:
    """Return the variables that contain paths, resolved against `folder`, for a process with another working directory.

    An empty part of PATH or PYTHONPATH means `folder` itself. Paths that begin with ~ or $ stay unchanged.
    """

    def absolute(path: str) -> str:
        return path if path.startswith(("/", "~", "$")) else str(folder / path)

    lists = {
        name: os.pathsep.join(map(absolute, variables[name].split(os.pathsep)))
        for name in _FOLDER_LISTS
        if variables.get(name)
    }
    return lists | {name: absolute(variables[name]) for name in _PATHS if variables.get(name)}


# ── output ──


_LOG_TAIL_BYTES = 64 << 10


class CappedLog:
    """The log file of a job. The log gets at most about `max_bytes` bytes; of further output, only the end is kept.

    On a full disk, output is lost, but the job does not fail.
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._max_bytes = max_bytes
        self._max_tail_bytes = min(_LOG_TAIL_BYTES, max_bytes // 4)
        self._room = max_bytes - self._max_tail_bytes
        self._tail = bytearray()
        self._num_left_out = 0
        self._is_capped = False
        self._is_at_line_start = True

    def write(self, chunk: bytes) -> None:
        """Append output of the program. Beyond the limit, only the last bytes are kept, until the log is closed."""
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


class _ProgramOutput:
    """The pipe with the program's output. The pipe's content is copied to the log."""

    def __init__(self, descriptor: int, log: CappedLog) -> None:
        self._descriptor = descriptor
        self._log = log
        self._is_open = True

    def pump(self, wait_s: float = POLL_S) -> bool:
        """Wait a moment for output and copy it to the log. Returns whether there was output."""
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
        """Copy the remaining output after the program's end, then close the pipe."""
        for _ in range(1024):  # limited, because a process that survived SIGKILL may write forever
            if not self.pump(wait_s=0):
                break
        if self._is_open:
            self._is_open = False
            os.close(self._descriptor)


# ── reasons to end the program ──


class Grant(NamedTuple):
    """The time that a program gets for saving its state."""

    pid: int
    """The process that gets SIGTERM. The program may need its other processes to save its state."""
    seconds: float


class StopRequests:
    """Watches for reasons to end a job: a cancel request, its time limit, its lease.

    Time is measured by the monotonic clock, which stops while a machine sleeps. After a laptop wakes up, its jobs
    therefore have as much time left as before.

    Before a job is ended at its time limit or without a lease, this class creates the file ending-<n>. A client that
    wants to attach renews the lease first and then looks for this file. This class creates the file first and then
    checks the lease again. A client that finds no such file has therefore renewed the lease in time.
    """

    def __init__(self, spec: JobSpec, attempt: int) -> None:
        self._cancel_path = internal_path(spec.run_dir, f"cancel-{attempt}")
        self._ending_path = internal_path(spec.run_dir, f"ending-{attempt}")
        self._deadline = time.monotonic() + spec.timeout_s if spec.timeout_s > 0 else math.inf
        self._lease_path = internal_path(spec.run_dir, "lease")
        self._lease_s = spec.lease_s if spec.lease_s > 0 else math.inf
        self._lease_stamp = 0.0
        self._renewed = time.monotonic()
        self._spec, self._attempt = spec, attempt
        self._granted: Grant | None = None

    @property
    def grace_s(self) -> float:
        """The grace time in seconds, from the cancel request or else from the spec."""
        return self._limits[0]

    @property
    def _limits(self) -> tuple[float, float]:
        """The grace time of the job, and the limit of the time that a program may request for saving, both in
        seconds."""
        with contextlib.suppress(OSError, ValueError):
            grace_s, max_grace_s = map(float, self._cancel_path.read_text().split())
            return grace_s, max_grace_s
        return self._spec.grace_s, self._spec.max_grace_s

    def grant(self) -> Grant | None:
        """Grant the time that the program requests for saving, and write the granted seconds to stop-<n>. Returns None
        if the program requests no time.

        Later calls never grant more time. A later call grants less time if another request to end the job has a lower
        limit.
        """
        said = read_stop_state(self._spec.run_dir, self._attempt)
        if self._granted is None and not isinstance(said.get("pid"), int):
            return None
        wanted = self._granted or Grant(said["pid"], float(said.get("grace_s", 0.0)))
        granted = Grant(wanted.pid, min(wanted.seconds, self._limits[1]))
        if granted != self._granted:
            with contextlib.suppress(OSError):  # on a full disk, the program assumes that it has the requested time
                granted_path(self._spec.run_dir, self._attempt).write_text(f"{granted.seconds:g}")
            self._granted = granted
        return granted

    def find(self) -> str:
        """Return why the job must end now: "cancelled", "timeout" or "lease_expired", or "" if the job may continue."""
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
        with contextlib.suppress(OSError):  # on a full disk, the job ends without this file
            self._ending_path.touch()

    def wait(self, pause_s: float) -> str:
        """Wait for `pause_s` seconds or until the job must end. Returns the reason to end the job, or an empty text."""
        until = time.monotonic() + pause_s
        while not (reason := self.find()) and time.monotonic() < until:
            time.sleep(POLL_S)
        return reason


LEFTOVER_GRACE_S = 2.0
"""Seconds between SIGTERM and SIGKILL for processes that are alive after the program has ended."""
_PR_SET_PDEATHSIG = 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    process: subprocess.Popen[bytes]
    output_fd: int
    oom_kills_before: int
    """The kernel's count of out-of-memory kills before the start."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    code: int
    """The exit code. 128 + the signal's number if a signal ended the program."""
    signal: int | None
    oom: bool
    """Whether the kernel killed the program because the node or its container was out of memory."""
    stopped_by: str
    """Reason for the end: "cancelled", "timeout" or "lease_expired", or "" if the program ended by itself."""
    leftover_processes: int
    """Number of the job's processes that were alive after the program's end and were killed."""


def spawn_program(spec: JobSpec, attempt: int, gpu_locks: Sequence[int] = ()) -> Program:
    """Start the program in a new session. On Linux, the kernel kills the program when this process dies.

    Args:
        gpu_locks: descriptors of GPU locks, which the program inherits.

    Raises:
        OSError: the executable cannot be run.
    """
    supervisor_pid = os.getpid()
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None

    def die_with_supervisor() -> None:
        if libc is not None:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != supervisor_pid:  # the supervisor died before prctl was called
            os._exit(125)

    # Do not run the program in the run directory: Python imports from its working directory, and the files may come
    # from another machine.
    work_dir = internal_path(spec.run_dir, "work")
    work_dir.mkdir(exist_ok=True)
    output_fd, program_fd = os.pipe()
    oom_kills_before = count_oom_kills()
    try:
        process = subprocess.Popen(
            spec.argv,
            cwd=work_dir,
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


def watch_program(
    program: Program, spec: JobSpec, log: CappedLog, requests: StopRequests, on_look: Callable[[], None] = lambda: None
) -> Ending:
    """Copy the program's output to the log until all processes of the program have ended. End the processes if
    `requests` finds a reason.

    Args:
        on_look: called several times per second.
    """
    output = _ProgramOutput(program.output_fd, log)
    signals = _EndSignals(requests)
    wait_status: int | None = None
    stopped_by = ""
    leftover_processes = 0
    while True:
        on_look()
        output.pump()
        if wait_status is None:
            wait_status = _reap_children(program.process)
        if wait_status is None and not stopped_by:
            stopped_by = requests.find()
        if wait_status is None and not stopped_by:
            continue
        # Check again: the program may have ended since the last check, for example while a cancel request was read.
        if (ended := _reap_children(program.process)) is not None:
            wait_status = ended
        processes = find_processes(spec.run_dir, supervisor=os.getpid(), group=program.process.pid)
        if wait_status is not None:
            leftover_processes = max(leftover_processes, len(processes))
            if not processes or signals.are_in_vain():
                break
        signals.send(processes, has_ended=wait_status is not None, is_stopped=bool(stopped_by))
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


class _EndSignals:
    """Sends SIGTERM to the processes of a program, and SIGKILL when their grace time is over.

    If the program has a grant for saving, only its main process gets SIGTERM and then ends the other processes.
    """

    def __init__(self, requests: StopRequests) -> None:
        self._requests = requests
        self._grant: Grant | None = None
        self._told_at = self._kill_at = math.inf

    def are_in_vain(self) -> bool:
        """Return whether processes are still alive long after SIGKILL."""
        return time.monotonic() > self._kill_at + UNKILLABLE_AFTER_S

    def send(self, processes: list[int], *, has_ended: bool, is_stopped: bool) -> None:
        """Send the signal that is due now, if any.

        Args:
            has_ended: whether the program has ended. `processes` are then the processes that survived the program.
            is_stopped: whether the end was requested.
        """
        now = time.monotonic()
        is_first = self._kill_at == math.inf
        if has_ended and self._grant is not None:
            self._grant, self._kill_at = None, now + LEFTOVER_GRACE_S
            send_signal(processes, signal.SIGTERM)
        elif is_first and is_stopped and (grant := self._requests.grant()) is not None:
            self._grant, self._told_at, self._kill_at = grant, now, now + grant.seconds
            send_signal([grant.pid] if grant.pid in processes else processes, signal.SIGTERM)
        elif is_first:
            self._kill_at = now + (self._requests.grace_s if is_stopped else LEFTOVER_GRACE_S)
            send_signal(processes, signal.SIGTERM)
        elif self._grant is not None and now < self._kill_at:
            self._kill_at = self._told_at + (self._requests.grant() or self._grant).seconds
        elif now >= self._kill_at:
            send_signal(processes, signal.SIGKILL)


def _reap_children(process: subprocess.Popen[bytes]) -> int | None:
    """Reap every child process that has ended, including adopted children. Returns the wait status of `process` if it
    has ended."""
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
