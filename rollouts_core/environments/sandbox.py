"""Run an untrusted program in its own process, without network and with limits on every resource.

On Linux the program runs in its own namespaces. The program has no network and sees no other processes. It can read the
interpreter's folders, and write to a small temporary folder that is deleted at the end. It has no privileges. Memory,
processor time, processes, open files and output are limited. System calls that reach memory beyond these limits, or
rarely used parts of the kernel, are refused. When its time is over, all its processes are killed.

This protects the machine from an exploring policy. The sandbox does not protect against attacks on the kernel itself.
The child process: `sandbox_child.py`.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import site
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path

import anyio
from anyio.abc import Process

from rollouts_core.environments.memory_groups import find_group_parent
from rollouts_core.environments.protocol import Outcome
from rollouts_core.environments.system_calls import build_filter
from rollouts_core.errors import EnvironmentUnavailableError, RewardError
from rollouts_core.system.private_files import find_seen

CHILD = Path(__file__).with_name("sandbox_child.py")
SYSTEM_FOLDERS = (
    *("/usr/bin", "/usr/sbin", "/usr/lib", "/usr/lib32", "/usr/lib64", "/usr/libx32", "/usr/libexec"),
    *("/usr/local/lib", "/usr/local/lib64", "/usr/share/zoneinfo"),
    *("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc/ld.so.cache"),
)
"""Programs, libraries and time zones; not all of /usr, which may contain projects, for example in /usr/src."""
PREFIX_PARTS = ("bin", "lib", "lib64", "pyvenv.cfg")
"""Parts of an interpreter's folder that programs need."""
FORBIDDEN = (errno.EPERM, errno.EACCES, errno.ENOSYS, errno.EINVAL)
"""Error numbers of a system that does not permit or support namespaces."""
BEGUN = b"+"
"""The child process writes this mark when all preparations have succeeded, so that later failures are the program's."""
BEGIN_TIMEOUT_S = 120.0
"""Time limit for starting the sandbox, seconds; normally a fraction of a second."""
DEFAULT_SOCKET_KB = 208
"""The kernel's memory per socket if it does not report a value, kB."""
END_TIMEOUT_S = 5.0
"""Time limit for all processes of a program to end before their watching process is killed, seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLimits:
    """The resources of a program."""

    wall_s: float = 10.0
    """Time limit in seconds, from the program's first instruction to its end."""
    cpu_s: int = 5
    memory_mb: int = 512
    """Limit in MB of the address space of each process, and of the memory of all processes together."""
    file_mb: int = 16
    """Size of the temporary folder."""
    num_processes: int = 16
    output_bytes: int = 1 << 20
    """Limit per output stream; a program that writes more is killed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxResult:
    """The end of a program."""

    outcome: Outcome
    """OK for exit code 0, TIMEOUT, or TOOL_ERROR for any other end."""
    exit_code: int
    """Exit code of the program: 128 plus the signal's number if a signal ended it; negative if it exceeded its time or
    output limit."""
    stdout: str
    stderr: str


async def run_in_sandbox(code: str, *, stdin: str = "", limits: SandboxLimits | None = None) -> SandboxResult:
    """Run a Python program. Its time starts with its first instruction, not with the start of the sandbox.

    Raises:
        EnvironmentUnavailableError: the machine could not start the sandbox, or killed the program.
        RewardError: the machine does not permit a sandbox, or the program would see private files.
    """
    allowed = limits or SandboxLimits()
    if (problem := _find_too_large(code, stdin, allowed)) is not None:
        return problem
    process, read_status = await _start(allowed)
    program = json.dumps({"code": code, "stdin": stdin}).encode()
    streams = {"stdout": b"", "stderr": b""}
    status = b""
    is_too_much = False

    async def read(name: str) -> None:
        nonlocal is_too_much
        stream = process.stdout if name == "stdout" else process.stderr
        assert stream is not None
        async for chunk in stream:
            streams[name] += chunk
            if len(streams[name]) > allowed.output_bytes:
                is_too_much = True
                _end(process)
                return

    async def write() -> None:
        assert process.stdin is not None
        # The program may end before it has read all of its input; its exit code shows the reason.
        with contextlib.suppress(anyio.BrokenResourceError, anyio.ClosedResourceError, OSError):
            await process.stdin.send(program)
            await process.stdin.aclose()

    async def wait_for_begin() -> None:
        nonlocal status
        while chunk := await _read_when_ready(read_status):
            status += chunk
        time.deadline = anyio.current_time() + allowed.wall_s

    try:
        with anyio.move_on_after(BEGIN_TIMEOUT_S) as time:
            async with anyio.create_task_group() as tasks:
                for each in (wait_for_begin, partial(read, "stdout"), partial(read, "stderr"), write):
                    tasks.start_soon(each)
            await process.wait()
    finally:
        os.close(read_status)
        exit_code = await _wait_until_gone(process)
    _check_machine(status, is_late=time.cancelled_caught, stderr=streams["stderr"])
    was_stopped = time.cancelled_caught or is_too_much
    if exit_code < 0 and not was_stopped:
        raise EnvironmentUnavailableError(
            f"this machine killed a program (signal {-exit_code}), although it was within its limits: look for the "
            "out-of-memory killer in the machine's log, and use more memory or fewer programs at a time"
        )
    # Only the machine can send SIGKILL to the first process of a namespace; too much memory gives an exit code.
    is_late = time.cancelled_caught or exit_code == 128 + signal.SIGKILL
    failed = Outcome.TIMEOUT if is_late else Outcome.TOOL_ERROR
    return SandboxResult(
        outcome=Outcome.OK if exit_code == 0 and not is_too_much else failed,
        exit_code=exit_code,
        stdout=streams["stdout"][: allowed.output_bytes].decode(errors="replace"),
        stderr=streams["stderr"][: allowed.output_bytes].decode(errors="replace"),
    )


async def _start(limits: SandboxLimits) -> tuple[Process, int]:
    """Start the process that watches a program. Also returns a file with the problems of its start."""
    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
        raise RewardError(
            "this process ignores SIGCHLD (inherited from its parent), so the end of a program would go unnoticed: "
            "call signal.signal(signal.SIGCHLD, signal.SIG_DFL) first"
        )
    read_status, write_status = os.pipe()
    os.set_blocking(read_status, False)
    folders = visible_folders()
    if (seen := find_seen(folders)) is not None:
        raise RewardError(
            f"{seen[0]} lies in {seen[1]}, where programs in the sandbox can read it: move it out of the folders of "
            "programs and libraries"
        )
    settings = {**asdict(limits), "folders": folders, "executable": sys.executable, **_describe_machine()}
    try:
        process = await anyio.open_process(
            [sys.executable, "-I", "-S", str(CHILD), json.dumps(settings), str(write_status), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=(write_status,),
            start_new_session=True,
            env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": "/tmp", "OMP_NUM_THREADS": "1"},
        )
    except OSError as error:
        os.close(read_status)
        raise EnvironmentUnavailableError(f"no sandbox could be started: {error}") from error
    finally:
        os.close(write_status)
    return process, read_status


async def _read_when_ready(file: int) -> bytes:
    await anyio.wait_readable(file)
    return os.read(file, 1 << 16)


async def _wait_until_gone(process: Process) -> int:
    """End the process that watches a program; returns its exit code."""
    _end(process)
    with anyio.CancelScope(shield=True):
        with anyio.move_on_after(END_TIMEOUT_S) as ending:
            await process.wait()
        if ending.cancelled_caught:
            _kill_group(process.pid)
        exit_code = await process.wait()
        await process.aclose()
    return exit_code


def _check_machine(status: bytes, *, is_late: bool, stderr: bytes) -> None:
    """Raise an error if the program was not started."""
    problem = status.removeprefix(BEGUN).decode(errors="replace")
    if problem:
        # Missing permissions are permanent, but a reached limit or a lack of memory may be temporary.
        is_forbidden = any(os.strerror(number) in problem for number in FORBIDDEN)
        raise (RewardError if is_forbidden else EnvironmentUnavailableError)(
            f"this machine cannot start a sandbox ({problem}): run where Linux namespaces are permitted, "
            "as root or with user namespaces"
        )
    if status:
        return
    if is_late:
        raise EnvironmentUnavailableError(
            f"the sandbox did not start within {BEGIN_TIMEOUT_S:g} s: this machine is overloaded"
        )
    said = stderr.decode(errors="replace").strip().rpartition("\n")[2]
    raise EnvironmentUnavailableError(f"the sandbox ended before it started the program: {said or 'without a message'}")


@cache
def visible_folders() -> tuple[str, ...]:
    """The parts of the file system that a program can read: the files that Python needs."""
    prefixes = sorted({sys.prefix, sys.base_prefix, sys.exec_prefix})
    own = [f"{prefix}/{part}" for prefix in prefixes for part in PREFIX_PARTS]
    chosen: list[str] = []
    for path in map(Path, (*SYSTEM_FOLDERS, *own, *site.getsitepackages(), *_follow_links(Path(sys.executable)))):
        if path.exists() and not any(path.is_relative_to(other) for other in chosen):
            chosen.append(str(path))
    return tuple(chosen)


def _follow_links(path: Path) -> Iterator[str]:
    """A file and all files that its links lead to."""
    while path.is_symlink():
        yield str(path)
        path = path.parent / path.readlink()
    yield str(path)


@cache
def _describe_machine() -> dict[str, object]:
    """The sandbox settings that depend on the machine."""
    try:
        socket_kb = int(Path("/proc/sys/net/core/wmem_default").read_text(encoding="utf-8")) >> 10
    except (OSError, ValueError):
        socket_kb = DEFAULT_SOCKET_KB
    machine = os.uname().machine
    return {"filter": build_filter(machine).hex(), "group_parent": find_group_parent(), "socket_kb": socket_kb}


def _find_too_large(code: str, stdin: str, limits: SandboxLimits) -> SandboxResult | None:
    """The result of a program that does not fit into its temporary folder with its input; None if it fits."""
    num_bytes = len(code.encode(errors="replace")) + len(stdin.encode(errors="replace"))
    if num_bytes <= limits.file_mb << 20:
        return None
    said = f"MemoryError: the program and its input have {num_bytes:,} bytes, more than {limits.file_mb} MB\n"
    return SandboxResult(outcome=Outcome.TOOL_ERROR, exit_code=1, stdout="", stderr=said)


def _end(process: Process) -> None:
    """Let the watching process kill the program: a program can leave its process group, but not its namespace."""
    with contextlib.suppress(ProcessLookupError):
        process.terminate()


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
